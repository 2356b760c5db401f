"""Encoders, which look both ways: BERT and its descendants against Hugging Face's models."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import encoders
import native
import pytest
import torch
from test_families import NOT_BEHAVIOUR, changed
from test_hf_parity import assert_close, load
from tokenizers_for_tests import byte_level
from torch import Tensor, nn

import weights_conversion
from transformer_lens_lite import HookedTransformer, KeyValueCache, verify
from weights_conversion import architecture_for, differences
from weights_conversion.families import bert
from weights_conversion.fields import COSMETIC

every_variant = pytest.mark.parametrize("name", encoders.VARIANTS)
every_family = pytest.mark.parametrize("name", encoders.FAMILIES.values())
with_and_without_head = pytest.mark.parametrize("headless", [False, True], ids=["head", "headless"])


def masks() -> dict[str, Tensor]:
    """Padding on the right, on the left, and (as no tokenizer does) in the middle."""
    right = torch.ones(3, 31, dtype=torch.long)
    right[1, 20:] = 0
    right[2, 1:] = 0
    middle = torch.ones_like(right)
    middle[0, 4:9] = 0
    middle[2, 30] = 0
    return {"right": right, "left": right.flip(1), "middle": middle}


# --- equal to Hugging Face ------------------------------------------------------------------------


def assert_same(model: HookedTransformer, theirs: Any, ids: Tensor, **arguments: Any) -> None:
    """Every hidden state, pattern and logit, fused and explicit, where the mask shows a token."""
    mask = arguments.get("attention_mask")
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    out = "logits" if model.cfg.unembedding else "residual"
    expected = theirs.logits if model.cfg.unembedding else theirs.last_hidden_state
    assert expected[real].std() > 0.5
    fused = model(ids, return_type=out, **arguments)
    explicit, cache = model.run_with_cache(ids, return_type=out, **arguments)
    assert_close(fused[real], expected[real])
    assert_close(explicit[real], expected[real])
    assert_close(cache["resid_pre", 0][real], theirs.hidden_states[0][real])
    for layer in range(model.cfg.n_layers):
        stream = cache["resid_post", layer]
        if layer == model.cfg.n_layers - 1:
            stream = model.ln_final(stream)  # HF's last entry is behind a final norm
        assert_close(stream[real], theirs.hidden_states[layer + 1][real])
        by_query = cache["pattern", layer].transpose(1, 2)[real]
        assert_close(by_query, theirs.attentions[layer].transpose(1, 2)[real])


@every_variant
@with_and_without_head
@torch.no_grad()
def test_logits_hidden_states_and_patterns_equal_hugging_faces(name: str, headless: bool) -> None:
    hf_model = encoders.build(name, headless)
    ids = encoders.tokens()
    assert_same(load(hf_model), encoders.run(hf_model, ids), ids)


@every_family
@pytest.mark.parametrize("side", masks())
@torch.no_grad()
def test_padded_batches_equal_hugging_faces_and_each_row_alone(name: str, side: str) -> None:
    if name in ("modernbert", "gemma3") and side == "middle":
        name = f"{name}_global"  # Hugging Face's windows count slots, ours real positions
    hf_model = encoders.build(name)
    model = load(hf_model)
    ids, mask = encoders.tokens(batch=3), masks()[side]
    assert_same(model, encoders.run(hf_model, ids, mask), ids, attention_mask=mask)
    padded = model(ids, attention_mask=mask)
    for row, seen, logits in zip(ids, mask.bool(), padded, strict=True):
        assert_close(logits[seen], model(row[seen][None])[0], atol=2e-5)


@torch.no_grad()
def test_without_position_ids_hugging_face_pads_a_roberta_as_we_do() -> None:
    """It counts positions by the ids that are not padding; BERT's counts every slot."""
    hf_model = encoders.build("roberta")
    ids, mask = encoders.tokens(batch=3), masks()["left"]
    ids = ids.masked_fill(mask == 0, hf_model.config.pad_token_id)
    theirs = hf_model(ids, attention_mask=mask).logits
    real = mask.bool()
    assert_close(load(hf_model)(ids, attention_mask=mask)[real], theirs[real])


@pytest.mark.parametrize("name", ["bert", "roberta_pad_0"])
@torch.no_grad()
def test_token_types(name: str) -> None:
    hf_model = encoders.build(name)
    model = load(hf_model)
    ids = encoders.tokens()
    types = torch.arange(31).expand(2, -1) % hf_model.config.type_vocab_size
    theirs = encoders.run(hf_model, ids, token_type_ids=types)
    assert_same(model, theirs, ids, token_type_ids=types)
    without = model(ids)
    assert (without - theirs.logits).abs().max() > 1
    assert torch.equal(without, model(ids, token_type_ids=torch.zeros_like(ids)))
    assert_close(model(ids[0], token_type_ids=types[:1])[0], theirs.logits[0])
    _, cache = model.run_with_cache(ids, token_type_ids=types)
    assert torch.equal(cache["token_type_embed"], model.token_type_embed.W_token_type[types])
    before = cache["embed"] + cache["token_type_embed"] + cache["pos_embed"]
    assert_close(model.ln_embed(before), cache["resid_pre", 0], atol=1e-6)
    residual = model.input_to_embed(ids, token_type_ids=types)[0]
    assert_close(residual, cache["resid_pre", 0], atol=1e-6)
    assert_close(model(residual, start_at_layer=0), theirs.logits)


@pytest.mark.parametrize(
    ("name", "types", "message"),
    [
        ("plain", torch.zeros(2, 13, dtype=torch.long), "has no token types"),
        ("token_types", torch.zeros(2, 12, dtype=torch.long), r"must be \[2, 13\]"),
        ("token_types", torch.full((2, 13), 3), "less than n_token_types=3"),
        ("token_types", torch.full((2, 13), -1), "less than n_token_types=3"),
    ],
)
def test_token_types_that_do_not_fit_are_refused(name: str, types: Tensor, message: str) -> None:
    model = native.build(name)
    for run in (model, model.input_to_embed):
        with pytest.raises(ValueError, match=message):
            run(native.tokens(), token_type_ids=types)
    with pytest.raises(ValueError, match="start_at_layer"):
        model(torch.randn(2, 13, 14), start_at_layer=1, token_type_ids=types)


@pytest.mark.parametrize(("name", "change"), encoders.FIELDS)
@torch.no_grad()
def test_a_config_field_changes_our_logits_as_it_changes_theirs(
    name: str, change: dict[str, Any]
) -> None:
    hf_model, other = encoders.build(name), encoders.build(name, **change)
    other.load_state_dict(hf_model.state_dict())
    ids = encoders.tokens()
    theirs = other(ids).logits
    assert (theirs - hf_model(ids).logits).abs().max() > 3e-4
    assert_close(load(other)(ids), theirs)


@every_variant
@torch.no_grad()
def test_every_field_the_table_sets_shows_in_the_logits_or_is_refused(name: str) -> None:
    hf_model = encoders.build(name)
    model, ids = load(hf_model), encoders.tokens()
    wanted, state = hf_model(ids).logits, model.state_dict()
    hf_config = {**hf_model.config.to_dict(), "architectures": [type(hf_model).__name__]}
    architecture = architecture_for(hf_config)
    silent = []
    for field, value in architecture.read_config(architecture.reading(hf_config)).items():
        # the eps of 1e-12 that DistilBERT cannot change is far below these numbers
        if field in NOT_BEHAVIOUR or value is None or (field == "eps" and value == 1e-12):
            continue
        others = {"unembed_act_fn": "solu", "attention_dir": "causal"}
        other = others.get(field) or changed(field, value, model.cfg)
        try:
            mutant = HookedTransformer(dataclasses.replace(model.cfg, **{field: other}))
            mutant.load_state_dict(state)
        except (ValueError, RuntimeError):
            continue  # refused
        if (mutant(ids) - wanted).abs().max() < 3e-4:
            silent.append(f"{field}={other!r}")
    assert silent == []


@every_variant
@torch.no_grad()
def test_every_tensor_shows_in_the_logits(name: str) -> None:
    model, ids = load(encoders.build(name)), encoders.tokens()
    wanted = model(ids)
    silent = set()
    for parameter_name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter.add_(0.5 * torch.randn(parameter.shape))
        if (model(ids) - wanted).abs().max() < 1e-5:
            silent.add(parameter_name.split(".")[-1])
        parameter.copy_(kept)
    assert silent <= {"b_K", "W_reserved"}  # softmax does not see what all keys share


@every_family
@pytest.mark.filterwarnings("ignore:.*is left out")
@torch.no_grad()
def test_processing_leaves_log_probabilities_alone(name: str) -> None:
    hf_model = encoders.build(name)
    ids = encoders.tokens()
    theirs = hf_model(ids).logits
    model = HookedTransformer.from_pretrained(hf_model=hf_model, device="cpu")
    assert_close(model(ids).log_softmax(-1), theirs.log_softmax(-1))
    assert (model(ids) - theirs).abs().max() > 0.01  # so something was done
    held = model.cfg.norm_place == "stream"
    kind = "RMS" if name == "gemma3" else "LN"
    assert model.cfg.normalization_type == (kind if held else f"{kind}Pre")
    assert not model.b_V.any()
    headless = encoders.build(name, headless=True)
    model = HookedTransformer.from_pretrained(hf_model=headless, device="cpu")
    assert_close(model(ids, return_type="residual"), headless(ids).last_hidden_state)


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_no_further_from_fp32_than_hugging_face(
    name: str, dtype: torch.dtype
) -> None:
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    for seed in range(3):
        hf_half = encoders.build(name, seed=seed).to(dtype)
        hf_wide = encoders.build(name, seed=seed)
        hf_wide.load_state_dict({n: t.float() for n, t in hf_half.state_dict().items()})
        ids = encoders.tokens()
        exact = hf_wide(ids).logits
        logits = load(hf_half, dtype=dtype)(ids)
        assert logits.dtype == dtype
        ours.append((logits.float() - exact).abs().mean())
        theirs.append((hf_half(ids).logits.float() - exact).abs().mean())
    assert sum(ours) <= 1.1 * sum(theirs)


@every_family
@with_and_without_head
def test_verify_finds_every_family_equal_at_every_place(
    name: str, headless: bool, tmp_path: Path
) -> None:
    hf_model = encoders.build(name, headless)
    result = verify(hf_model, tokens=encoders.tokens())
    assert result.passed, str(result)
    assert max(result.errors.values()) < 1e-4
    assert (result.loss, result.of_greedy) == (None, 0)
    assert "greedy" not in str(result)
    points = {key.rsplit(".", 1)[-1] for key in result.errors}
    fused = name == "modernbert"  # one matrix for queries, keys and values has no row of its own
    assert points >= ({"hook_z"} if fused else {"hook_z", "hook_q"})
    assert points >= {"hook_resid_pre", "hook_resid_mid", "hook_resid_post"}
    assert points >= ({"hook_post"} if fused else {"hook_pre", "hook_post"})
    bare_tie = name == "gemma3"  # a tied head without a bias has no row of its own
    assert ("unembed.hook_in" in result.errors) is not (headless or bare_tie)
    hf_model.save_pretrained(tmp_path)
    of_folder = verify(tmp_path, tokens=encoders.tokens())
    assert of_folder.passed
    assert of_folder.errors.keys() == result.errors.keys()
    assert verify(load(hf_model), tokens=encoders.tokens()).passed


def test_verify_finds_a_mistake_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_config(reading: Any) -> dict[str, Any]:
        return {**bert.read_config(reading), "act_fn": "gelu_new"}

    wrong = dataclasses.replace(bert.BERT, read_config=read_config)
    monkeypatch.setitem(weights_conversion._REGISTRY, "bert", wrong)
    hf_model = encoders.build("bert")
    result = verify(hf_model, tokens=encoders.tokens(), tolerance=1e-5)
    assert result.first_difference == "blocks.0.mlp.hook_post"


# --- there and back -------------------------------------------------------------------------------


def pooler_of(names: Any) -> set[str]:
    return {name for name in names if "pooler." in name}


@every_variant
@with_and_without_head
def test_exports_are_bit_exact_and_hugging_face_loads_them(
    name: str, headless: bool, tmp_path: Path
) -> None:
    hf_model = encoders.build(name, headless)
    model = load(hf_model)
    state, exported = hf_model.state_dict(), model.to_hf_state_dict()
    assert exported.keys() == state.keys() - pooler_of(state)
    # of an untied model Hugging Face reads the bias by the name of its matrix alone
    unread = {
        n for n in ("cls.predictions.bias", "lm_head.bias") if "untied" in name or "4" in name
    }
    for key in exported.keys() - unread:
        assert torch.equal(exported[key], state[key]), key
    model.save_pretrained(tmp_path)
    again = encoders.read(tmp_path, headless)
    ids = encoders.tokens()
    out = "last_hidden_state" if headless else "logits"
    with torch.no_grad():
        assert torch.equal(again(ids)[out], hf_model(ids)[out])
    ours = HookedTransformer.from_pretrained_no_processing(tmp_path, device="cpu")
    assert ours.cfg == dataclasses.replace(model.cfg, model_name=str(tmp_path))
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), model.parameters(), strict=True)
    )


@every_family
@with_and_without_head
def test_folders_load_like_models_in_memory(name: str, headless: bool, tmp_path: Path) -> None:
    hf_model = encoders.build(name, headless)
    hf_model.save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained_no_processing(tmp_path, device="cpu")
    out = "residual" if headless else "logits"
    ids = encoders.tokens()
    assert_close(model(ids, return_type=out), load(hf_model)(ids, return_type=out), atol=1e-6)
    assert model.cfg.unembedding is not headless


@every_family
@with_and_without_head
@torch.no_grad()
def test_the_first_layers_are_a_checkpoint_of_their_own(
    name: str, headless: bool, tmp_path: Path
) -> None:
    model = load(encoders.build(name, headless), first_n_layers=2)
    model.save_pretrained(tmp_path)
    ids = encoders.tokens()
    theirs = encoders.read(tmp_path, headless)(ids)
    if headless:
        assert_close(model(ids, return_type="residual"), theirs.last_hidden_state)
    else:
        assert_close(model(ids), theirs.logits)


@torch.no_grad()
def test_an_untied_encoder_keeps_its_head(tmp_path: Path) -> None:
    model, ids = load(encoders.build("bert")), encoders.tokens()
    points, before = list(model.hook_dict), model(ids)
    model.untie()
    assert sorted(model.hook_dict) == sorted(points)
    assert torch.equal(model(ids), before)
    model.unembed.W_U.mul_(2)
    model.save_pretrained(tmp_path)
    assert_close(encoders.read(tmp_path)(ids).logits, model(ids))
    assert (model(ids) - before).abs().max() > 1


def test_a_model_made_here_becomes_a_bert(tmp_path: Path) -> None:
    model = native.build("bidirectional_encoder", n_heads=7, d_head=2)
    model.save_pretrained(tmp_path)
    hf_model = encoders.read(tmp_path)
    assert type(hf_model).__name__ == "BertForMaskedLM"
    ids = native.tokens()
    assert_close(model(ids), hf_model(ids).logits)
    with pytest.raises(ValueError, match="no Hugging Face config"):
        native.build("bidirectional_encoder").save_pretrained(tmp_path)  # heads do not fill it


class Renamed(nn.Module):
    """A Hugging Face model whose tensors go by other names."""

    def __init__(self, hf_model: Any, state: dict[str, Tensor], **config: Any) -> None:
        super().__init__()
        self.config = type(hf_model.config)(**{**hf_model.config.to_dict(), **config})
        self.state = state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return self.state


OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
@with_and_without_head
@pytest.mark.parametrize("prefixed", [False, True])
@torch.no_grad()
def test_names_with_and_without_the_prefix(name: str, headless: bool, prefixed: bool) -> None:
    hf_model = encoders.build(name, headless)
    prefix = f"{name}."
    state = {}
    for key, tensor in hf_model.state_dict().items():
        inside = headless or key.startswith(prefix)
        bare = key.removeprefix(prefix)
        state[prefix + bare if inside and prefixed else bare] = tensor
    model, wanted = load(Renamed(hf_model, state)), load(hf_model)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True)
    )
    assert model.cfg.unembedding is not headless


@torch.no_grad()
def test_first_files_of_bert() -> None:
    """google-bert/bert-base-uncased: names of TensorFlow, and the other task of pretraining."""
    from transformers import BertForPreTraining

    hf_model = BertForPreTraining(encoders.config("bert"))
    native_state = {}
    for key, tensor in hf_model.state_dict().items():
        for new, old in OLD.items():
            key = re.sub(f"{new}$", old, key)
        native_state[key] = tensor
    native_state["bert.embeddings.position_ids"] = torch.arange(48)[None]
    del native_state["cls.predictions.decoder.weight"], native_state["cls.predictions.decoder.bias"]
    first = {"gradient_checkpointing": False, "position_embedding_type": "absolute"}
    model = load(Renamed(hf_model, native_state, **first))
    ids = encoders.tokens()
    assert_close(model(ids), hf_model.eval()(ids).prediction_logits)
    assert model.cfg.original_architecture == "BertForMaskedLM"


@torch.no_grad()
def test_first_files_of_modernbert() -> None:
    """answerdotai/ModernBERT-base, written by transformers 4: rates and layers have other names."""
    hf_model = encoders.build("modernbert")
    first = {
        **hf_model.config.to_dict(),
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 500.0,
        "local_rope_theta": 50.0,
        "layer_norm_eps": 1e-5,
        "position_embedding_type": "absolute",
        "gradient_checkpointing": False,
    }
    for name in ("layer_types", "rope_parameters"):
        del first[name]
    ids = encoders.tokens()
    assert_close(load(hf_model, hf_config=first)(ids), hf_model(ids).logits)


def test_what_is_no_part_of_the_model_is_refused() -> None:
    from transformers import BertForSequenceClassification, BertLMHeadModel

    cfg = encoders.config("bert")
    with pytest.raises(ValueError, match=r"no place for classifier\.bias, classifier\.weight"):
        load(BertForSequenceClassification(cfg))
    inner = BertForSequenceClassification(cfg).bert
    assert not load(inner).cfg.unembedding
    decoder = BertLMHeadModel(encoders.config("bert", is_decoder=True))
    with pytest.raises(ValueError, match="is_decoder=True is not supported"):
        load(decoder)
    hf_model = encoders.build("bert")
    relative = hf_model.config.to_dict() | {"position_embedding_type": "relative_key"}
    with pytest.raises(ValueError, match="position_embedding_type='relative_key'"):
        load(hf_model, hf_config=relative)


def test_a_bias_of_two_names_must_be_one() -> None:
    hf_model = encoders.build("bert")
    state = dict(hf_model.state_dict())
    state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"] + 1
    with pytest.raises(ValueError, match=r"cls\.predictions\.decoder\.bias .* differs"):
        load(Renamed(hf_model, state))


@every_family
@with_and_without_head
def test_every_field_of_the_hf_config_is_accounted_for(name: str, headless: bool) -> None:
    hf_model = encoders.build(name, headless)
    hf_config = {**hf_model.config.to_dict(), "architectures": [type(hf_model).__name__]}
    architecture = architecture_for(hf_config)
    reading = architecture.reading(hf_config)
    architecture.read(reading)
    unread = set(reading.config) - reading.was_read - set(COSMETIC) - set(architecture.cosmetic)
    assert unread <= {"is_encoder_decoder"}


@pytest.mark.parametrize("model_type", encoders.SIZES)
def test_fields_a_file_leaves_out_hold_the_default_of_the_hf_class(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    full = CONFIG_MAPPING[model_type]().to_dict()
    architecture = architecture_for(full)
    given = {"model_type": model_type}
    while True:
        try:
            cfg = architecture.read(architecture.reading(given))
            break
        except ValueError as error:
            missing = re.search(r"has no '(\w+)'", str(error))
            if missing is None:
                raise
            given[missing[1]] = full[architecture.aliases.get(missing[1], missing[1])]
    whole = architecture.read(architecture.reading(full))
    assert differences(cfg, whole) == []
    assert cfg.n_ctx == whole.n_ctx


def test_positions_of_a_roberta_start_behind_its_padding_token() -> None:
    model = load(encoders.build("roberta_pad_4"))
    assert (model.cfg.n_ctx, model.cfg.reserved_positions) == (43, 5)
    model(encoders.tokens(1, 43))
    with pytest.raises(ValueError, match="n_ctx=43"):
        model(encoders.tokens(1, 44))
    hf_model = encoders.build("roberta")
    for changes, message in (
        ({"pad_token_id": -1}, "'pad_token_id' must be"),
        ({"max_position_embeddings": 2}, "leaves no position"),
    ):
        with pytest.raises(ValueError, match=message):
            load(hf_model, hf_config=hf_model.config.to_dict() | changes)


# --- models that end with their stream ------------------------------------------------------------


@torch.no_grad()
def test_a_model_without_a_head_ends_with_its_stream() -> None:
    hf_model = encoders.build("bert", headless=True)
    model, ids = load(hf_model), encoders.tokens()
    theirs = hf_model(ids).last_hidden_state
    assert not [name for name in model.state_dict() if name.startswith(("unembed", "ln_final"))]
    assert_close(model(ids, return_type="residual"), theirs)
    nothing, cache = model.run_with_cache(ids, return_type=None)
    assert nothing is None
    assert_close(cache["resid_post", -1], theirs)
    assert_close(model(ids, stop_at_layer=3), theirs)
    assert model(ids, stop_at_layer=0).shape == (2, 31, 24)


@pytest.mark.parametrize("return_type", ["logits", "loss", "both"])
def test_its_logits_are_refused_before_anything_is_run(return_type: str) -> None:
    model = native.build(unembedding=False)
    ran: list[str] = []
    with (
        model.hooks(fwd_hooks=[("hook_embed", lambda value, hook: ran.append(hook.name))]),
        pytest.raises(ValueError, match="has no unembedding.*return_type='residual'"),
    ):
        model(native.tokens(), return_type=return_type)
    assert ran == []
    for access in ("W_U", "b_U"):
        with pytest.raises(AttributeError):
            getattr(model, access)


# --- text -----------------------------------------------------------------------------------------

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat dog sat on a mat hello world ##s ##ing , ."
TEXTS = ["The cats sat on a mat.", "hello", "a dog, a cat, the world"]


@pytest.fixture(params=["bert", "roberta"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Words and their parts in [CLS] … [SEP]; bytes in <s> … </s>."""
    from tokenizers import Tokenizer, processors
    from transformers import BertTokenizer, PreTrainedTokenizerFast

    if request.param == "bert":
        (tmp_path / "vocab.txt").write_text("\n".join(WORDS.split()))
        return BertTokenizer.from_pretrained(tmp_path)
    backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>", "<pad>", "</s>"])
    ids = [(token, backend.token_to_id(token)) for token in ("</s>", "<s>")]
    backend.post_processor = processors.RobertaProcessing(*ids)
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", **names)


def reader(tokenizer: Any) -> tuple[Any, HookedTransformer]:
    """A BERT of the tokenizer's vocabulary, theirs and ours."""
    hf_model = encoders.build("bert", vocab_size=len(tokenizer), pad_token_id=0)
    return hf_model, load(hf_model, tokenizer=tokenizer)


def test_texts_become_the_tokens_of_hugging_faces_tokenizer(tokenizer: Any) -> None:
    hf_model, model = reader(tokenizer)
    for text in TEXTS:
        assert model.to_tokens(text)[0].tolist() == tokenizer(text).input_ids
    for side in ("right", "left"):
        tokenizer.padding_side = side
        theirs = tokenizer(TEXTS, padding=True, return_tensors="pt")
        tokens, mask = model.text.encode_batch(TEXTS, padding_side=side)
        assert torch.equal(tokens, theirs.input_ids)
        assert torch.equal(mask, theirs.attention_mask)
    whole = tokenizer(TEXTS[0]).input_ids
    assert model.to_tokens(TEXTS[0], prepend_bos=False)[0].tolist() == whole[1:]
    for n in (2, 3, 5):
        model = load(
            encoders.build("bert", vocab_size=len(tokenizer)), n_ctx=n, tokenizer=tokenizer
        )
        cut = tokenizer(TEXTS[0], truncation=True, max_length=n).input_ids
        assert model.to_tokens(TEXTS[0])[0].tolist() == cut
        assert model.tokenizer.decode(cut[-1]) in ("[SEP]", "</s>")
        assert len(model.to_str_tokens(TEXTS[0])) == n


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_padded_texts_equal_hugging_faces_batch_and_each_text_alone(
    tokenizer: Any, side: str
) -> None:
    hf_model, model = reader(tokenizer)
    logits = model(TEXTS, padding_side=side)
    tokenizer.padding_side = side
    theirs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    real = theirs.attention_mask.bool()
    expected = encoders.run(hf_model, theirs.input_ids, theirs.attention_mask).logits
    assert_close(logits[real], expected[real])
    for text, row, seen in zip(TEXTS, logits, real, strict=True):
        assert_close(row[seen], model(text)[0], atol=2e-5)
    # ids alone: both sides of a text are seen, so padding is found on either
    tokens = model.to_tokens(TEXTS, padding_side=side)
    assert_close(model(tokens, padding_side=side)[real], logits[real], atol=1e-6)


def test_a_saved_encoder_keeps_its_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    _, model = reader(tokenizer)
    model.save_pretrained(tmp_path / "saved")
    again = HookedTransformer.from_pretrained_no_processing(tmp_path / "saved", device="cpu")
    assert torch.equal(again.to_tokens(TEXTS), model.to_tokens(TEXTS))


# --- what makes no sense both ways ----------------------------------------------------------------


def both_ways() -> HookedTransformer:
    return native.build("bidirectional")


@pytest.mark.parametrize("name", ["bidirectional", "bidirectional_encoder", "bidirectional_window"])
@torch.no_grad()
def test_report_041_any_mask_is_a_hook_on_the_scores(name: str) -> None:
    """[batch, head, query, key]: the argument `attention_mask` is of tokens only, and says so."""
    model, ids = native.build(name), native.tokens()
    model.set_use_attn_result(False)
    everything = torch.ones(2, 4, 13, 13, dtype=torch.bool)
    some = torch.rand(everything.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    some |= torch.eye(13, dtype=torch.bool)
    unmasked, plain = model.run_with_cache(ids)
    for mask in (everything, some):

        def apply(scores: Tensor, hook: Any, mask: Tensor = mask) -> Tensor:
            return scores.masked_fill(~mask, -torch.inf)

        with model.hooks([("blocks.1.attn.hook_attn_scores", apply)]):
            logits, cache = model.run_with_cache(ids)
        assert ((logits - unmasked).abs().max() < 1e-5) == (mask is everything)
        q, k, v = (plain[letter, 1].transpose(1, 2) for letter in "qkv")
        scores = q @ k.transpose(2, 3) / model.cfg.d_head**0.5
        pattern = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        assert_close(cache["pattern", 1], pattern, atol=1e-5)
        assert_close(cache["z", 1], (pattern @ v).transpose(1, 2), atol=1e-5)
    for wrong in (some, some[:, :1]):
        with pytest.raises(ValueError, match=r"attention_mask must be \[2, 13\] \(0 for padding\)"):
            model(ids, attention_mask=wrong)


def test_generation_is_refused_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = both_ways()
    monkeypatch.setattr(HookedTransformer, "next_logits", None)  # would fail otherwise
    for cached in (True, False):
        with pytest.raises(ValueError, match="generation with attention_dir='bidirectional'"):
            model.generate(native.tokens(), 3, use_past_kv_cache=cached, verbose=False)
        with pytest.raises(ValueError, match="generation with attention_dir='bidirectional'"):
            list(model.generate_stream(native.tokens(), 3, use_past_kv_cache=cached))


def test_caches_are_refused_before_anything_is_run() -> None:
    model = both_ways()
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    ran: list[str] = []
    with model.hooks(fwd_hooks=[("hook_embed", lambda value, hook: ran.append(hook.name))]):
        for run in (model, model.next_logits, model.run_with_cache, model.input_to_embed):
            with pytest.raises(ValueError, match="past_kv_cache with attention_dir='bidirect"):
                run(native.tokens(), past_kv_cache=cache)
        stream = torch.randn(2, 13, 14)
        with pytest.raises(ValueError, match="past_kv_cache with attention_dir='bidirect"):
            model(stream, start_at_layer=1, past_kv_cache=cache)
    assert ran == []
    assert cache.length == 0


@pytest.mark.parametrize("return_type", ["loss", "both"])
def test_the_loss_of_a_next_token_that_is_seen_is_refused(return_type: str) -> None:
    with pytest.raises(ValueError, match="such a model sees"):
        both_ways()(native.tokens(), return_type=return_type)


def test_causal_models_are_as_they_were() -> None:
    model = native.build()
    assert model.is_causal
    assert model.generate(native.tokens(), 2, stop_at_eos=False, verbose=False).shape == (2, 15)
    residual = model(native.tokens(), return_type="residual")
    assert_close(model.unembed(residual), model(native.tokens()))
