"""Chats through the tokenizer's template, and streamed text that never has to be taken back."""

import itertools
from typing import Any

import loud
import pytest
import torch
from tokenizers_for_tests import (
    CharTokenizer,
    byte_level,
    gpt2_like,
    llama3_like,
    llama_like,
    with_own_pad,
)
from torch import Tensor

from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.model import HookedTransformer
from transformer_lens_lite.prefixes import PrefixCache

GREEDY: dict[str, Any] = {"do_sample": False, "stop_at_eos": False}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] the{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + TEMPLATE
CHAT = [{"role": "user", "content": "The cat?"}]
LONGER = [*CHAT, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "Mary?"}]
TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [gpt2_like, with_own_pad, llama3_like, llama_like]
)


def talking(make: Any, template: str = WITH_BOS, **kwargs: Any) -> HookedTransformer:
    tokenizer = make(**kwargs)
    tokenizer.chat_template = template
    return loud.build("rotary", tokenizer)


# --- chats ----------------------------------------------------------------------------------------


@TOKENIZERS
@pytest.mark.parametrize("template", [TEMPLATE, WITH_BOS])
def test_a_chat_is_what_the_template_says_and_has_no_second_bos(
    tokenizer: Any, template: str
) -> None:
    model = talking(tokenizer, template)
    out = model.generate(CHAT, 4, return_type="tokens", **GREEDY)
    theirs = model.text.original.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    assert torch.equal(out[:, :-4], theirs)
    bos = model.text.bos_token_id
    assert out[0].tolist().count(bos) - out[0, -4:].tolist().count(bos) == (template == WITH_BOS)
    again = model.generate(theirs, 4, attention_mask=torch.ones_like(theirs), **GREEDY)
    assert torch.equal(out, again)
    text = model.generate(CHAT, 4, **GREEDY)
    assert text == model.text.to_string(out[0], skip_special_tokens=True)
    assert "[user] The cat?\n[assistant] the" in text
    both = model.generate(CHAT, 4, prepend_bos=True, return_type="tokens", **GREEDY)
    assert both[0].tolist()[:2].count(bos) == 1


def test_a_tokenizer_that_adds_eos_adds_none_to_a_chat() -> None:
    model = talking(llama_like, auto_eos=True)
    out = model.generate(CHAT, 1, return_type="tokens", **GREEDY)
    assert model.text.eos_token_id not in out[0, :-1].tolist()


@TOKENIZERS
def test_several_chats_continue_as_one_by_one(tokenizer: Any) -> None:
    model = talking(tokenizer)
    how: dict[str, Any] = {"max_new_tokens": 5, **GREEDY}
    texts = model.generate([CHAT, LONGER], **how)
    assert texts == [model.generate(CHAT, **how), model.generate(LONGER, **how)]
    assert model.generate([CHAT], **how) == texts[:1]
    assert model.generate(tuple(CHAT), **how) == texts[0]
    copies = model.generate(CHAT, n=2, **how)
    assert copies == [texts[0]] * 2
    beams = model.generate(CHAT, num_beams=2, **how)
    assert beams.startswith(model.generate(CHAT, max_new_tokens=0))
    chunks = list(model.generate_stream([CHAT, LONGER], 5, 1, "str", **GREEDY))
    assert list(map("".join, zip(*chunks, strict=True))) == texts
    assert "".join(model.generate_stream(CHAT, 5, 1, "str", **GREEDY)) == texts[0]


def test_a_chat_goes_on_behind_a_prefix() -> None:
    model = talking(gpt2_like, TEMPLATE)
    cache = KeyValueCache.init_cache(model.cfg, "cpu")
    start = model.to_tokens("Hello")
    with torch.no_grad():
        model(start, past_kv_cache=cache)
    cache.freeze()
    out = model.generate(CHAT, 4, past_kv_cache=cache, return_type="tokens", **GREEDY)
    whole = model.generate(torch.cat((start, out[:, :-4]), 1), 4, **GREEDY)
    assert torch.equal(out, whole[:, start.shape[1] :])


@pytest.mark.parametrize(
    ("input", "message"),
    [
        ([{"role": "user"}], r'a message must be a dict with "role" and "content", got .*user'),
        ([*CHAT, "Hello"], "a message must be a dict"),
        ([CHAT, []], r"chat 1 must be a list of messages, got \[\]"),
        ([CHAT, "Hello"], "chat 1 must be a list of messages, got 'Hello'"),
    ],
)
def test_what_is_no_chat_is_refused(input: Any, message: str) -> None:
    model = talking(gpt2_like)
    model.add_hook("hook_embed", lambda x, hook: pytest.fail("a forward was run"))
    for method in (model.generate, model.generate_stream):
        with pytest.raises(ValueError, match=message):
            method(input, **GREEDY)


def test_without_a_template_or_a_tokenizer_the_error_says_so() -> None:
    tokenizer = gpt2_like()
    tokenizer.name_or_path = "some/base-model"
    model = loud.build("standard", tokenizer)
    with pytest.raises(
        ValueError, match=r"the tokenizer 'some/base-model' has none: set model.tok"
    ):
        model.generate(CHAT, **GREEDY)
    model.tokenizer.chat_template = TEMPLATE
    assert model.generate(CHAT, 1, **GREEDY).startswith("[user] The cat?")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        loud.build().generate(CHAT, **GREEDY)


@pytest.mark.parametrize("chats", [CHAT, [CHAT, LONGER]])
@pytest.mark.parametrize("return_type", ["input", "tokens"])
def test_a_prefix_cache_takes_chats_as_generate_does(chats: Any, return_type: str) -> None:
    model = talking(gpt2_like)
    prefixes = PrefixCache(model, 2**24)
    expected = model.generate(chats, 4, return_type=return_type, **GREEDY)
    for _ in range(2):
        found = prefixes.generate(chats, 4, return_type=return_type, **GREEDY)
        same = (
            torch.equal if return_type == "tokens" else str.__eq__ if chats is CHAT else list.__eq__
        )
        assert same(found, expected)
    assert prefixes.hits > 0


# --- streams --------------------------------------------------------------------------------------


def scripted(model: HookedTransformer, rows: list[list[int]]) -> Any:
    """While this lasts, row i of a batch continues with rows[i]."""
    steps = itertools.count()

    def script(logits: Tensor, hook: Any) -> Tensor:
        step = next(steps)
        forced = torch.zeros_like(logits)
        for row, wanted in enumerate(rows):
            forced[row, -1, wanted[step]] = 100.0
        return forced

    return model.hooks(fwd_hooks=[("unembed.hook_out", script)])


def utf8(model: HookedTransformer, data: bytes) -> list[int]:
    """One token for each byte."""
    vocabulary = model.tokenizer.get_vocab()
    if "<0x00>" in vocabulary:
        return [vocabulary[f"<0x{byte:02X}>"] for byte in data]
    # GPT-2's alphabet: printable bytes stand for themselves, the others come after all of Latin-1
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [
        vocabulary[chr(byte if byte in printable else 256 + others.index(byte))] for byte in data
    ]


EURO, FACE = "€".encode(), "😀".encode()
SCRIPTS = [
    [b"a" + EURO, b"xy" + EURO[:2]],  # complete, and cut off at the end
    [EURO[:1] + b"b" + EURO, EURO + FACE],  # broken off and begun anew; one after the other
    [FACE + EURO[:1], EURO[:2] + FACE[:2]],  # what was complete, then half a character
    [b"\xff" + EURO, "é".encode() + b"\x80\x80 "],  # bytes that are never right
    [FACE[:3] + b"c" + FACE[3:], b"\n" + EURO + b"\n"],
]


@pytest.mark.parametrize("tokenizer", [gpt2_like, llama_like])
@pytest.mark.parametrize("at_least", [1, 3])
@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_pieces_of_characters_wait_until_they_are_whole(
    tokenizer: Any, at_least: int, script: list[bytes]
) -> None:
    model = loud.build("standard", tokenizer())
    letter = model.to_tokens("a", prepend_bos=False)[0, -1].item()
    rows = [utf8(model, data) for data in script]
    length = max(map(len, rows)) + 1
    ragged = [row + [letter] * (length - len(row)) for row in rows]  # one ends in letters
    for wanted in (ragged, [row[: min(map(len, rows))] for row in rows]):  # and the other in bytes
        texts, n = ["Hello", "The cat"], len(wanted[0])
        with scripted(model, wanted):
            chunks = list(model.generate_stream(texts, n, at_least, "str", **GREEDY))
        with scripted(model, wanted):
            whole = model.generate(texts, n, **GREEDY)
        assert list(map("".join, zip(*chunks, strict=True))) == whole
        # half a character is shown at most where the text really has one
        for row, text in enumerate(whole):
            shown = sum(chunk[row].count("\N{REPLACEMENT CHARACTER}") for chunk in chunks)
            assert shown == text.count("\N{REPLACEMENT CHARACTER}")


def test_byte_fallback_streams_what_can_no_longer_change() -> None:
    model = loud.build("standard", llama_like())
    letter = model.to_tokens("a", prepend_bos=False)[0, -1].item()
    wanted = [*utf8(model, "é€".encode()), letter, letter]
    with scripted(model, [wanted]):
        chunks = list(model.generate_stream("Hello", len(wanted), 1, "str", **GREEDY))
    assert [chunk for chunk in chunks if chunk] == ["Hello", "é€ a", " a"]


def test_special_tokens_between_bytes_do_not_split_them() -> None:
    model = loud.build("standard", llama_like())
    eos = model.text.eos_token_id
    for data in (EURO, "éa".encode(), "é".encode() + EURO[:1]):
        wanted = list(itertools.chain.from_iterable((byte, eos) for byte in utf8(model, data)))
        with scripted(model, [wanted]):
            chunks = list(model.generate_stream("Hello", len(wanted), 1, "str", **GREEDY))
        with scripted(model, [wanted]):
            assert "".join(chunks) == model.generate("Hello", len(wanted), **GREEDY)


@pytest.mark.parametrize(
    "tokenizer", [gpt2_like, llama_like, with_own_pad, llama3_like, byte_level, CharTokenizer]
)
def test_whatever_is_drawn_joined_chunks_are_the_text(tokenizer: Any) -> None:
    """Loud models draw bytes, special tokens and words alike, and rows end at different times."""
    model = loud.build("rotary", tokenizer())
    texts = ["bad cat", "a"]
    how: dict[str, Any] = {"temperature": 3.0, "eos_token_id": list(range(40, 60)), "n": 3}
    if tokenizer is CharTokenizer:
        how["eos_token_id"] = 3
    whole = model.generate(texts, 12, generator=torch.Generator().manual_seed(1), **how)
    for at_least in (1, 4):
        chunks = model.generate_stream(
            texts, 12, at_least, "str", generator=torch.Generator().manual_seed(1), **how
        )
        assert list(map("".join, zip(*chunks, strict=True))) == whole


def test_text_is_a_str_for_a_str_and_a_list_for_a_list() -> None:
    model = loud.build("standard", gpt2_like())
    for input in ("Hello", ["Hello"], model.to_tokens("Hello"), ["Hello", "a"]):
        kinds = {type(chunk) for chunk in model.generate_stream(input, 3, 1, "str", **GREEDY)}
        assert kinds == {type(model.generate(input, 3, return_type="str", **GREEDY))}


@pytest.mark.parametrize("return_type", ["str", "tokens"])
def test_a_closed_stream_leaves_model_and_modes_as_they_were(return_type: str) -> None:
    model = loud.build("rotary_gqa", gpt2_like())
    whole = model.generate("Hello world", 6, **GREEDY)
    for n_chunks in range(5):
        stream = model.generate_stream("Hello world", 6, 1, return_type, **GREEDY)
        for _ in range(n_chunks):
            next(stream)
        stream.close()
        assert next(stream, None) is None
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert model.list_hooks() == {}
        assert model.generate("Hello world", 6, **GREEDY) == whole
