"""Text to ids and back: one BOS, padding that shows, and a tokenizer nobody touches."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.tokenizers_for_tests import (
    END,
    CharTokenizer,
    byte_level,
    gpt2_like,
    llama3_like,
    llama_like,
    with_own_pad,
)
from transformer_lens_lite.tokens import (
    Tokens,
    as_texts,
    get_attention_mask,
    get_input_with_manually_prepended_bos,
    get_tokens_with_bos_removed,
)

MAKERS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2_like,
    "own pad": with_own_pad,
    "llama3": llama3_like,
    "llama": llama_like,
    "llama without auto-BOS": lambda: llama_like(auto_bos=False),
    "llama with auto-EOS": lambda: llama_like(auto_eos=True),
    "llama with an unnamed BOS": lambda: llama_like(named=False),
    "python": CharTokenizer,
    "python, stubborn": lambda: CharTokenizer(stubborn=True),
}
ADDS_BOS = {
    "llama3", "llama", "llama with auto-EOS", "llama with an unnamed BOS", "python",
    "python, stubborn",
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", MAKERS)


def state(tokenizer: Any) -> dict[str, Any]:
    """Everything a tokenizer is, to compare before and after."""
    values = copy.deepcopy({k: v for k, v in vars(tokenizer).items() if k != "_tokenizer"})
    if "tokens_trie" in values:
        values["tokens_trie"] = values["tokens_trie"].data
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return values | {"backend": backend.to_str() if backend is not None else None}


# --- BOS ----------------------------------------------------------------------------------------


@every_kind
def test_report_138_exactly_one_bos(kind: str) -> None:
    tokens = Tokens(MAKERS[kind](), default_prepend_bos=True, n_ctx=64)
    bos = tokens.bos_token_id
    assert bos is not None
    with_bos = tokens.to_tokens("a cat", prepend_bos=True)[0].tolist()
    without = tokens.to_tokens("a cat", prepend_bos=False)[0].tolist()
    assert with_bos == [bos, *without]
    assert bos not in without
    assert tokens.to_tokens("a cat")[0].tolist() == with_bos
    tokens.default_prepend_bos = False
    assert tokens.to_tokens("a cat")[0].tolist() == without


@every_kind
def test_report_138_a_chat_template_that_writes_bos_gets_no_second(kind: str) -> None:
    original = MAKERS[kind]()
    tokens = Tokens(original, n_ctx=64)
    tokens.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    chat = tokens.tokenizer.apply_chat_template([{"content": "a cat"}], tokenize=False)
    assert chat == tokens.tokenizer.bos_token + "a cat"
    expected = tokens.to_tokens("a cat", prepend_bos=True).tolist()
    assert tokens.to_tokens(chat, prepend_bos=True).tolist() == expected
    # prepend_bos=False adds none of ours; the one in the text is the user's.
    assert tokens.to_tokens(chat, prepend_bos=False).tolist() == expected


@every_kind
def test_ids_are_those_of_hugging_face(kind: str) -> None:
    """With BOS where the tokenizer adds it, without where it does not: its own ids."""
    for text in ("a cat", "", "the  dog.\n"):
        own = MAKERS[kind]()(text)["input_ids"]
        if own:
            ours = Tokens(MAKERS[kind]()).to_tokens(text, prepend_bos=kind in ADDS_BOS)
            assert ours[0].tolist() == own


# The stubborn one adds it in its own code; only to_tokens can drop that.
@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "python, stubborn"])
def test_the_copy_adds_no_bos_by_itself(kind: str) -> None:
    tokens = Tokens(MAKERS[kind]())
    assert tokens.tokenizer_prepends_bos == (kind in ADDS_BOS)
    for ids in (
        tokens.tokenizer("a cat")["input_ids"],
        tokens.tokenizer(["a cat"])["input_ids"][0],
        tokens.tokenizer.encode("a cat"),
        tokens.tokenizer("a cat", "a dog")["input_ids"],
    ):
        assert tokens.bos_token_id not in ids
    assert not getattr(tokens.tokenizer, "add_bos_token", False)


def test_switching_bos_off_keeps_the_eos_a_tokenizer_adds_and_other_processors() -> None:
    tokens = Tokens(llama_like(auto_eos=True))
    assert tokens.tokenizer("the cat")["input_ids"][-1] == tokens.eos_token_id
    assert tokens.to_tokens("the cat")[0, -1] == tokens.eos_token_id
    original, copied = llama3_like(), Tokens(llama3_like()).tokenizer
    offsets = original("the cat", return_offsets_mapping=True)["offset_mapping"]
    assert copied("the cat", return_offsets_mapping=True)["offset_mapping"] == offsets[1:]


def test_a_flag_that_switches_bos_on_is_switched_off() -> None:
    from transformers import LlamaTokenizer

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "▁a": 5}
    original = LlamaTokenizer(vocab=vocab, merges=[("▁", "a")], add_bos_token=True)
    assert original("a")["input_ids"] == [1, 5]
    tokens = Tokens(original)
    assert tokens.tokenizer("a")["input_ids"] == [5]
    tokens.tokenizer.add_eos_token = True  # rebuilds the post-processor from the flags
    assert tokens.tokenizer("a")["input_ids"] == [5, 2]
    assert tokens.to_tokens("a").tolist() == [[1, 5, 2]]


def test_a_tokenizer_of_few_letters_and_no_unk() -> None:
    """Nothing can be asked of it with an English letter; its BOS is found all the same."""
    backend = Tokenizer(BPE(vocab={"A": 0, "C": 1, "G": 2, "T": 3}, merges=[]))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 4)]
    )
    genome = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokens = Tokens(genome)
    assert tokens.tokenizer_prepends_bos
    assert tokens.to_tokens("GATC").tolist() == [[4, 2, 0, 3, 1]]
    assert tokens.tokenizer("GATC")["input_ids"] == [2, 0, 3, 1]
    assert tokens.to_str_tokens("GATC") == ["<s>", *"GATC"]


# --- the tokenizer passed in ----------------------------------------------------------------------


@every_kind
def test_report_141_the_tokenizer_passed_in_is_never_mutated(kind: str) -> None:
    original = MAKERS[kind]()
    if hasattr(original, "backend_tokenizer"):  # settings that encoding alone would reset
        original.backend_tokenizer.enable_truncation(3)
        original.backend_tokenizer.enable_padding(length=7)
    before = state(original)
    tokens = Tokens(original, padding_side="left", n_ctx=8)
    rows = tokens.to_tokens(["a cat", "the dog sat"], padding_side="right")
    tokens.encode_batch("a cat", prepend_bos=False)
    tokens.attention_mask(rows)
    tokens.to_string(rows)
    tokens.to_str_tokens("a cat")
    tokens.to_single_str_token(tokens.to_single_token("a"))
    tokens.get_token_position("a", "a a", mode="last")
    tokens.tokenizer.pad_token = tokens.tokenizer.bos_token
    assert tokens.d_vocab > 0
    assert state(original) == before
    assert tokens.original is original
    assert tokens.tokenizer is not original


def test_report_141_padding_side_explicit_then_the_tokenizers_own_then_right() -> None:
    left = gpt2_like()
    left.padding_side = "left"
    assert Tokens(left).tokenizer.padding_side == "left"
    assert Tokens(left, padding_side="right").tokenizer.padding_side == "right"
    assert Tokens(gpt2_like()).tokenizer.padding_side == "right"
    tokens = Tokens(gpt2_like())
    right = tokens.to_tokens(["Hello", "the cat"])
    assert right[0, -1] == tokens.pad_token_id
    tokens.tokenizer.padding_side = "left"  # set by a user later: obeyed
    assert tokens.to_tokens(["Hello", "the cat"])[0, 0] == tokens.pad_token_id
    with pytest.raises(ValueError, match="padding_side must be"):
        Tokens(gpt2_like(), padding_side="top")
    with pytest.raises(ValueError, match="padding_side must be"):
        tokens.to_tokens("Hello", padding_side="middle")


def test_missing_special_tokens_are_filled_in() -> None:
    assert Tokens(byte_level()).tokenizer.special_tokens_map == {
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
    }
    named = Tokens(with_own_pad()).tokenizer
    assert (named.bos_token, named.eos_token, named.pad_token) == ("<bos>", END, "<pad>")
    nothing = Tokens(byte_level(end_of_text=False))
    assert nothing.tokenizer.special_tokens_map == {}
    assert (nothing.bos_token_id, nothing.eos_token_id, nothing.pad_token_id) == (None,) * 3


def test_a_tokenizer_without_bos_or_pad() -> None:
    tokens = Tokens(byte_level(end_of_text=False), default_prepend_bos=True)
    assert tokens.to_string(tokens.to_tokens("Hello")) == ["Hello"]  # the default steps back
    with pytest.raises(ValueError, match="the tokenizer has no BOS"):
        tokens.to_tokens("Hello", prepend_bos=True)
    with pytest.raises(ValueError, match="need a pad token"):
        tokens.to_tokens(["Hello", "the cat"])
    assert tokens.to_tokens(["Hello", "Hello"]).shape == (2, 1)
    mask = tokens.attention_mask(torch.zeros(1, 3, dtype=torch.long))
    assert mask.tolist() == [[1, 1, 1]]
    tokens.tokenizer.pad_token = "!"  # what the message says
    ids, mask = tokens.encode_batch(["!", "! cat"])
    assert mask.tolist() == [[1, 0], [1, 1]]
    assert ids[0, 0] == ids[0, 1]


def test_something_else_than_a_tokenizer_is_refused() -> None:
    for wrong in ("gpt2", gpt2_like().backend_tokenizer, 3):
        with pytest.raises(TypeError, match=type(wrong).__name__):
            Tokens(wrong)


def test_report_145_no_tokenizer_at_all() -> None:
    tokens = Tokens(None, n_ctx=8)
    for call in (
        lambda: tokens.to_tokens("Hello"),
        lambda: tokens.encode_batch(["Hello"]),
        lambda: tokens.to_string([1, 2]),
        lambda: tokens.to_str_tokens("Hello"),
        lambda: tokens.to_str_tokens([1, 2]),
        lambda: tokens.to_single_token("a"),
        lambda: tokens.to_single_str_token(1),
        lambda: tokens.get_token_position("a", [1, 2]),
        lambda: tokens.get_token_position(1, "a"),
        lambda: tokens.d_vocab,
    ):
        with pytest.raises(ValueError, match="text needs a tokenizer.*tokenizer=.*set_tokenizer"):
            call()
    assert tokens.attention_mask(torch.tensor([[5, 0]])).tolist() == [[1, 1]]
    assert tokens.get_token_position(2, [1, 2, 2]) == 1
    assert (tokens.bos_token_id, tokens.tokenizer_prepends_bos) == (None, False)


def test_importing_does_not_import_transformers() -> None:
    code = "import sys, transformer_lens_lite.tokens as t; t.Tokens(); print(sorted(sys.modules))"
    root = Path(__file__).resolve().parent.parent
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert "'transformer_lens_lite.tokens'" in ran.stdout, ran.stderr
    assert "'transformers'" not in ran.stdout
    assert "'tokenizers'" not in ran.stdout


@every_kind
def test_d_vocab_is_the_largest_id_plus_one(kind: str) -> None:
    tokens = Tokens(MAKERS[kind]())
    assert tokens.d_vocab == len(tokens.tokenizer)
    holes = byte_level(end_of_text=False)
    vocab = holes.get_vocab() | {"far away": 1000}
    holes.get_vocab = lambda: vocab  # an id far above the number of tokens
    assert Tokens(holes).d_vocab == 1001


# --- batches, padding, truncation -----------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("prepend_bos", [True, False])
def test_report_037_the_mask_comes_from_lengths_not_from_ids(
    kind: str, side: str, prepend_bos: bool
) -> None:
    """BOS = EOS = pad as in GPT-2: BOS in front and EOS inside or at the end stay visible."""
    tokens = Tokens(MAKERS[kind](), n_ctx=64)
    eos = tokens.tokenizer.eos_token
    texts = ["a cat" + eos, "a" + eos + "b" + eos + eos, "the dog sat on a mat"]
    ids, mask = tokens.encode_batch(texts, prepend_bos, side)
    assert ids.shape == mask.shape
    assert ids.dtype == mask.dtype == torch.long
    for text, row, visible in zip(texts, ids, mask, strict=True):
        alone, all_ones = tokens.encode_batch(text, prepend_bos, side)
        assert row[visible.bool()].tolist() == alone[0].tolist()
        assert all_ones.all()
        assert (row[~visible.bool()] == tokens.pad_token_id).all()
        steps = visible.diff()
        assert (steps >= 0).all() if side == "left" else (steps <= 0).all()
    assert torch.equal(tokens.to_tokens(texts, prepend_bos, side), ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_the_left_part_and_bos(side: str) -> None:
    tokens = Tokens(gpt2_like(), n_ctx=4)
    long, short = "the cat sat on the mat and the dog", "cat"
    full = tokens.to_tokens(long, truncate=False)[0]
    assert len(full) > 4
    cut, mask = tokens.encode_batch([long, short], padding_side=side)
    assert cut.shape == (2, 4)
    assert cut[0].tolist() == full[:4].tolist()
    assert cut[0, 0] == tokens.bos_token_id
    assert mask[0].all()
    assert len(tokens.to_str_tokens(long)) == 4
    tokens.n_ctx = 3
    assert tokens.to_tokens(long, prepend_bos=False)[0].tolist() == full[1:4].tolist()


def test_empty_input() -> None:
    tokens = Tokens(gpt2_like())
    pad = tokens.pad_token_id
    with pytest.raises(ValueError, match="list of texts is empty"):
        tokens.to_tokens([])
    for nothing in ("", [""], ["", ""]):
        with pytest.raises(ValueError, match="gives no tokens"):
            tokens.to_tokens(nothing, prepend_bos=False)
    assert tokens.to_tokens("", prepend_bos=True).tolist() == [[tokens.bos_token_id]]
    ids, mask = tokens.encode_batch(["", " cat cat"], prepend_bos=False)
    assert ids[0].tolist() == [pad, pad]
    assert mask.tolist() == [[0, 0], [1, 1]]


def test_input_that_is_not_text_is_named() -> None:
    # as_texts is what to_tokens asks; here without beartype's own check in front of it
    for wrong, name in ((5, "int"), (torch.ones(2), "Tensor"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"got {name}"):
            as_texts(wrong)
    with pytest.raises(TypeError, match="entry 1 is a float"):
        as_texts(["a", 2.0])
    with pytest.raises(TypeError, match="float"):
        Tokens(gpt2_like()).to_str_tokens(["a", 2.0])
    with pytest.raises(TypeError):
        Tokens(gpt2_like()).to_tokens([1, 2])  # type: ignore[list-item]


# --- masks of tokens padded elsewhere -------------------------------------------------------------


@pytest.mark.parametrize("prepend_bos", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("maker", [gpt2_like, with_own_pad])
def test_attention_mask_finds_the_padding_that_encode_batch_put(
    maker: Callable[[], Any], side: str, prepend_bos: bool
) -> None:
    tokens = Tokens(maker(), padding_side=side, n_ctx=64)
    ids, mask = tokens.encode_batch(["Hello", "the cat sat on", "", "Hello dog"], prepend_bos)
    assert torch.equal(tokens.attention_mask(ids, prepend_bos=prepend_bos), mask)
    tokens.default_prepend_bos = prepend_bos
    assert torch.equal(tokens.attention_mask(ids), mask)
    assert torch.equal(tokens.attention_mask(ids.int()), mask)
    assert torch.equal(tokens.attention_mask(ids, padding_side=side), mask)
    assert torch.equal(get_attention_mask(tokens.tokenizer, ids, prepend_bos), mask)


def test_attention_mask_masks_only_the_outer_run() -> None:
    tokens = Tokens(gpt2_like(), default_prepend_bos=False)
    pad = tokens.pad_token_id
    row = torch.tensor([[pad, pad, 5, pad, 6, pad]])
    assert tokens.attention_mask(row, "left").tolist() == [[0, 0, 1, 1, 1, 1]]
    assert tokens.attention_mask(row, "right").tolist() == [[1, 1, 1, 1, 1, 0]]
    assert tokens.attention_mask(row, "left", prepend_bos=True).tolist() == [[0, 1, 1, 1, 1, 1]]
    assert tokens.attention_mask(row, "right", prepend_bos=True).tolist() == [[1] * 5 + [0]]
    no_pad_in_front = torch.tensor([[5, pad, 6]])
    assert tokens.attention_mask(no_pad_in_front, "left", True).tolist() == [[1, 1, 1]]
    own = Tokens(with_own_pad())  # BOS is another token: every pad goes
    row = torch.tensor([[own.pad_token_id] * 2 + [own.bos_token_id, 5]])
    assert own.attention_mask(row, "left", True).tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("maker", [gpt2_like, with_own_pad, llama_like])
def test_bos_removed(maker: Callable[[], Any], side: str) -> None:
    tokens = Tokens(maker(), padding_side=side)
    texts = ["Hello", "the cat sat on", "Hello dog"]
    with_bos, without = tokens.to_tokens(texts), tokens.to_tokens(texts, prepend_bos=False)
    assert torch.equal(get_tokens_with_bos_removed(tokens.tokenizer, with_bos), without)
    assert torch.equal(get_tokens_with_bos_removed(tokens.tokenizer, with_bos[1]), without[1])
    with pytest.raises(ValueError, match="not every row starts with BOS"):
        get_tokens_with_bos_removed(tokens.tokenizer, without)


def test_bos_prepended_as_text() -> None:
    tokenizer = with_own_pad()
    assert get_input_with_manually_prepended_bos(tokenizer, "a") == "<bos>a"
    assert get_input_with_manually_prepended_bos(tokenizer, ["a", ""]) == ["<bos>a", "<bos>"]
    with pytest.raises(ValueError, match="no BOS"):
        get_input_with_manually_prepended_bos(byte_level(), "a")


# --- ids to text ----------------------------------------------------------------------------------

ROUND_TRIP = {kind: Tokens(MAKERS[kind]()) for kind in ("gpt2", "llama3", "llama")}


@pytest.mark.parametrize("kind", ROUND_TRIP)
@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_report_140_round_trip(kind: str, text: str) -> None:
    tokens = ROUND_TRIP[kind]
    assume(not any(special in text for special in tokens.tokenizer.all_special_tokens))
    with_bos = tokens.to_tokens(text)[0]
    assert tokens.to_string(with_bos[1:]) == text
    if len(with_bos) > 1:
        assert tokens.to_string(tokens.to_tokens(text, prepend_bos=False)) == [text]


@pytest.mark.parametrize("kind", ROUND_TRIP)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="ascii"), min_size=1))
def test_report_140_str_tokens_join_to_the_text(kind: str, text: str) -> None:
    tokens = ROUND_TRIP[kind]
    assert "".join(tokens.to_str_tokens(text, prepend_bos=False)) == text
    with_bos = tokens.to_tokens(text)[0]
    assert "".join(tokens.to_str_tokens(text)) == tokens.to_string(with_bos)


def test_report_140_words_of_a_metaspace_tokenizer_keep_their_spaces() -> None:
    tokens = Tokens(llama_like())
    assert tokens.to_str_tokens("the cat", prepend_bos=False) == ["the", " cat"]
    assert tokens.to_str_tokens("the cat") == ["<s>", " the", " cat"]
    # " cat" is one token inside a text, although the text " cat" is two
    assert tokens.to_tokens(" cat", prepend_bos=False).shape == (1, 2)
    cat = tokens.to_tokens("the cat")[0, -1].item()
    assert tokens.to_single_token(" cat") == tokens.to_single_token("cat") == cat


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_characters_split_over_tokens_do_not_crash(kind: str) -> None:
    tokens = Tokens(MAKERS[kind]())
    text = "the 猫 and 🐈‍⬛é"
    pieces = tokens.to_str_tokens(text)
    assert len(pieces) == tokens.to_tokens(text).shape[1]
    assert "\N{REPLACEMENT CHARACTER}" in pieces
    for ids in tokens.to_tokens(text)[0].split(1):
        assert isinstance(tokens.to_string(ids), str)


def test_a_token_that_would_join_up_with_itself_is_shown_alone() -> None:
    """Its bytes end one character and begin another: twice in a row they make "é"."""
    vocab = {"©": 0, "Ã": 1, "©Ã": 2}  # bytes A9, C3 in byte-level BPE's spelling
    backend = Tokenizer(BPE(vocab=vocab, merges=[("©", "Ã")]))
    backend.decoder = decoders.ByteLevel()
    tokens = Tokens(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert "é" in str(tokens.to_string([2, 2]))
    assert tokens.to_str_tokens([2, 2]) == ["\N{REPLACEMENT CHARACTER}" * 2] * 2


def test_decoding_never_tidies_spaces_up() -> None:
    tokens = Tokens(CharTokenizer(clean_up_tokenization_spaces=True))
    text = "a , b ."
    assert tokens.to_string(tokens.to_tokens(text, prepend_bos=False)) == [text]
    assert tokens.to_str_tokens(text, prepend_bos=False) == list(text)


def test_to_string_takes_every_kind_of_tokens() -> None:
    tokens = Tokens(gpt2_like())
    ids = tokens.to_tokens("the cat", prepend_bos=False)[0].tolist()
    row = torch.tensor(ids)
    frozen = np.array(ids, dtype=np.uint16)
    frozen.flags.writeable = False
    for one in (ids, row, row.int(), np.array(ids), frozen, list(row), list(frozen), tuple(ids)):
        assert tokens.to_string(one) == "the cat"
    for several in ([ids, ids], row.expand(2, -1), np.array([ids, ids]), [row, row]):
        assert tokens.to_string(several) == ["the cat", "the cat"]
    assert tokens.to_string([row, row[:1]]) == ["the cat", tokens.to_string(ids[0])]
    assert tokens.to_string(row[None]) == ["the cat"]
    assert tokens.to_string(row[-1]) == tokens.to_string(ids[-1]) == " cat"
    assert tokens.to_string(frozen[-1]) == " cat"
    assert tokens.to_string([]) == tokens.to_string(row[:0]) == ""
    assert tokens.to_string([tokens.eos_token_id, *ids], skip_special_tokens=True) == "the cat"
    with pytest.raises(TypeError, match="must be integers"):
        tokens.to_string(row.float())
    with pytest.raises(ValueError, match="one sequence"):
        tokens.to_string(row.expand(2, 2, -1))


def test_to_str_tokens_takes_text_lists_and_tokens() -> None:
    tokens = Tokens(gpt2_like())
    expected = [END, *tokens.to_str_tokens("the", prepend_bos=False), " cat"]
    assert tokens.to_str_tokens("the cat") == expected
    assert tokens.to_str_tokens("the cat", prepend_bos=False) == expected[1:]
    assert tokens.to_str_tokens(["the cat", "cat"]) == [expected, tokens.to_str_tokens("cat")]
    ids = tokens.to_tokens("the cat")
    for one in (
        ids,
        ids[0],
        ids.tolist(),
        ids[0].tolist(),
        ids.numpy(),
        ids[0].numpy(),
        list(ids[0]),
    ):
        assert tokens.to_str_tokens(one) == expected
    assert tokens.to_str_tokens(ids[0, -1]) == [" cat"]
    assert tokens.to_str_tokens([]) == []
    with pytest.raises(ValueError, match=r"one sequence of tokens, got shape \(2, \d\)"):
        tokens.to_str_tokens(ids.expand(2, -1))


@every_kind
def test_single_tokens(kind: str) -> None:
    tokens = Tokens(MAKERS[kind](), default_prepend_bos=True)
    token = tokens.to_single_token("a")
    assert isinstance(token, int)
    assert tokens.to_single_str_token(token) == "a"
    assert tokens.to_single_str_token(torch.tensor([token])) == "a"
    assert tokens.to_single_token(tokens.tokenizer.eos_token) == tokens.eos_token_id
    for several in ("a cat", " xyzzy", ""):
        with pytest.raises(
            AssertionError, match=f"^Input string: {several} is not a single token! It is "
        ):
            tokens.to_single_token(several)
    with pytest.raises(ValueError, match="expected one token, got 2"):
        tokens.to_single_str_token([token, token])
    with pytest.raises(TypeError, match="must be integers"):
        tokens.to_single_str_token(1.5)


def test_token_position() -> None:
    tokens = Tokens(gpt2_like())
    text = "cat cat dog cat dog"
    names = tokens.to_str_tokens(text)
    first, last = names.index(" cat"), len(names) - 1 - names[::-1].index(" cat")
    assert last > first
    token = tokens.to_single_token(" cat")
    for one in (" cat", token, torch.tensor(token), torch.tensor([[token]])):
        assert tokens.get_token_position(one, text) == first
        assert tokens.get_token_position(one, text, mode="last") == last
        assert tokens.get_token_position(one, text, prepend_bos=False) == first - 1
    ids = tokens.to_tokens(text)
    for where in (ids, ids[0], ids[0].tolist(), ids.numpy()):
        assert tokens.get_token_position(" cat", where, "last") == last
    with pytest.raises(AssertionError, match="^The token does not occur in the prompt$"):
        tokens.get_token_position(" girl", text)
    with pytest.raises(ValueError, match="mode must be 'first' or 'last'"):
        tokens.get_token_position(" cat", text, mode="middle")
    with pytest.raises(ValueError, match="one sequence"):
        tokens.get_token_position(" cat", ids.expand(2, -1))


# --- tokenizers of trained models -----------------------------------------------------------------


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["stories260K", "slm4096-gpt2-char", "mingpt-nano-sort"])
def test_tokenizers_of_trained_models(shared_dir: Path, name: str) -> None:
    from transformers import AutoTokenizer

    original = AutoTokenizer.from_pretrained(shared_dir / "models" / name)
    before = state(original)
    tokens = Tokens(original, n_ctx=64)
    text = {"mingpt-nano-sort": "CABBAC"}.get(name, "Once there was a cat.\n")
    assert tokens.tokenizer_prepends_bos == (name == "stories260K")
    without = tokens.to_tokens(text, prepend_bos=False)[0]
    assert tokens.to_string(without) == text
    assert "".join(tokens.to_str_tokens(text, prepend_bos=False)) == text
    assert tokens.tokenizer(text)["input_ids"] == without.tolist()
    ours = tokens.to_tokens(text)[0].tolist()
    assert state(original) == before
    assert ours == original(text)["input_ids"]
