"""Every family, by the same tests: `tests/families/` says which models there are.

What is checked for all variants elsewhere: logits and hidden states (test_hf_parity), bit-exact
round trips of tensors and configs (test_conversion), folders on disk (test_loading).
"""

import dataclasses
import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import encoders
import pytest
import tiny
import torch
from test_hf_parity import (
    TOLERANCE,
    assert_close,
    context_for,
    greedy,
    hf_greedy,
    hf_in,
    hf_run,
    left_padded,
    load,
    seen_inside,
)
from torch import Tensor, nn

from transformer_lens_lite import HookedTransformer, KeyValueCache
from transformer_lens_lite.components.rotary import inverse_frequencies
from weights_conversion import architecture_for, differences
from weights_conversion.fields import COSMETIC

FAMILIES = tiny.FIRST_VARIANTS
# Their frequencies depend on how long the text is, so that cached and uncached differ, in HF too.
LENGTH_DEPENDENT = {"llama_dynamic"} | {name for name in tiny.VARIANTS if "longrope" in name}
# Where a wrong cache or mask would show only as text goes on, and where tensors come and go.
_POSITIONS = ("window", "chunk", "alibi", "rope", "yarn", "llama3", "linear", "dynamic", "nope")


def among(*words: str) -> list[str]:
    """The first variant of every family, and those with one of these words in their names."""
    firsts = set(FAMILIES.values())
    return [n for n in tiny.VARIANTS if n in firsts or any(word in n for word in words)]


FIXED = [name for name in tiny.VARIANTS if name not in LENGTH_DEPENDENT]


def room(name: str) -> dict[str, Any]:
    """Changes of a config that leave room for a prompt of 9 and 40 new tokens."""
    length = {"n_positions": 64} if "n_positions" in tiny.SIZES[tiny.VARIANTS[name][0]] else {}
    # a tied random model soon repeats one token
    return {**length, **({"tie_word_embeddings": False} if name.startswith("gpt2") else {})}


# --- fused = in chunks = padded -------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXED)
@torch.no_grad()
def test_chunks_and_padded_rows_give_the_logits_of_the_whole(name: str) -> None:
    model = load(tiny.build(name))
    tokens = tiny.tokens(tiny.config(name), batch=2, length=23)
    whole = model(tokens)
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    parts = [model(part, past_kv_cache=cache) for part in tokens.split([7, 1, 11, 4], 1)]
    assert_close(torch.cat(parts, 1), whole, atol=2e-5)
    short = tokens[1, 8:]
    padded, mask = left_padded([tokens[0], short])
    logits = model(padded, attention_mask=mask)
    assert_close(logits[0], whole[0], atol=2e-5)
    assert_close(logits[1, 8:], model(short[None])[0], atol=2e-5)


@torch.no_grad()
def test_phimoe_scales_long_texts_by_a_number_of_their_own() -> None:
    """Hugging Face's keeps the divisors for short texts, so here both lists are the same."""
    scaling = tiny.config("phimoe_longrope_two_scales").rope_parameters
    scaling["long_factor"] = scaling["short_factor"]
    hf_model = tiny.build("phimoe_longrope_two_scales", rope_parameters=scaling)
    model = load(hf_model, n_ctx=128)
    tokens = tiny.tokens(hf_model.config, length=70)
    for length in (64, 65, 70):
        part = tokens[:, :length]
        assert_close(model(part), hf_run(hf_model, part).logits)
    padded, mask = left_padded([tokens[0], tokens[1, :20]])  # each row by its own length
    assert_close(model(padded, attention_mask=mask)[1, 50:], model(tokens[1:, :20])[0], atol=2e-5)


# --- greedy continuations -------------------------------------------------------------------------


@pytest.mark.parametrize("name", among(*_POSITIONS))
def test_40_greedy_tokens_equal_hugging_faces(name: str) -> None:
    hf_model = tiny.build(name, **room(name))
    tokens = tiny.tokens(hf_model.config, batch=2, length=9)
    theirs = hf_greedy(hf_model, tokens, use_cache=name != "llama_longrope")  # see the next test
    model = load(hf_model, **context_for(name))
    assert torch.equal(greedy(model, tokens), theirs)
    if "longrope" in name or (name not in LENGTH_DEPENDENT and name in FAMILIES.values()):
        assert torch.equal(greedy(model, tokens, use_past_kv_cache=False), theirs)


@pytest.mark.parametrize("name", [name for name in tiny.VARIANTS if "longrope" in name])
def test_a_generation_that_becomes_long_is_as_if_it_were_run_anew(name: str) -> None:
    """Past the original length (16) every key turns in another way, those of the start too: Phi-3
    and Phi-3.5-MoE run the text again there, in Hugging Face too. Its Llama does not, and then is
    not what it is without a cache."""
    hf_model = tiny.build(name)
    model = load(hf_model, **context_for(name))
    rows = [tiny.tokens(hf_model.config, batch=1, length=n)[0] for n in (15, 9, 12)]
    tokens, mask = left_padded(rows)
    for case in ({}, {"num_return_sequences": 2}, {"num_beams": 2}):
        batched = greedy(model, tokens, 12, attention_mask=mask, **case)
        n_each = len(batched) // len(rows)
        for i, row in enumerate(rows):
            alone = greedy(model, row[None], 12, use_past_kv_cache=False, **case)
            assert torch.equal(batched[i * n_each : (i + 1) * n_each, -12:], alone[:, -12:])
    sequences, cache = greedy(model, tokens, 12, attention_mask=mask, return_cache="resid_post")
    for row, n_pad in enumerate(15 - len(row) for row in rows):
        whole, seen = sequences[row : row + 1, n_pad:], cache["resid_post", 1][row, n_pad:]
        _, short = model.run_with_cache(whole[:, :16])
        _, long = model.run_with_cache(whole)
        # each column as it was when its token was new
        assert_close(seen[:16], short["resid_post", 1][0])
        assert_close(seen[16:], long["resid_post", 1][0, 16:])


# --- the published table --------------------------------------------------------------------------


@pytest.mark.parametrize(("title", "made_by"), [("family", tiny), ("encoder", encoders)])
def test_report_002_the_parity_table_has_every_family_with_all_its_variants(
    title: str, made_by: Any, project_root: Path
) -> None:
    """After a new variant: python scripts/write_parity.py FAMILY."""
    page = (project_root / "docs" / "parity.md").read_text()
    table = page.partition(f"| {title} | fp32 |")[2].partition("\n\n")[0]
    published = {name: int(n) for name, n in re.findall(r"\n\| (\S+) \| \S+ \((\d+)\)", table)}
    tested = Counter(model_type for model_type, _ in made_by.VARIANTS.values())
    assert published == dict(tested)


@torch.no_grad()
def test_report_002_a_row_of_the_parity_table_measured_again(
    project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published is what `make parity` measures, up to another machine's rounding."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts its own in front
    spec = importlib.util.spec_from_file_location(
        "write_parity", project_root / "scripts" / "write_parity.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = script.rows_of((project_root / "docs" / "parity.md").read_text())

    def errors(row: str) -> list[float]:
        return [float(number) for number in re.findall(r"\de-\d\d|\d\.\de-\d\d", row)]

    for row in rows.values():
        fp32, folded, *half = errors(row)
        assert max(fp32, folded) <= 1e-4
        assert len(half) >= 6
    published = errors(rows["decoders", "gpt2"])
    measured = errors(script.Family("decoders", "gpt2", tiny).row())
    assert len(published) == len(measured) == 8
    for ours, theirs in zip(measured, published, strict=True):
        assert theirs / 3 < ours < 3 * theirs


# --- mistakes would show --------------------------------------------------------------------------

# sizes are held against the tensors' shapes
NOT_BEHAVIOUR = {
    "d_mlp",
    "original_architecture",
    "tie_word_embeddings",
    "n_ctx",
    "d_vocab",
    "d_vocab_out",
}
OTHER: dict[str, Any] = {
    "normalization_type": "LN",
    "act_fn": "relu",
    "positional_embedding_type": "none",
    "norm_place": "post",
    "attention_dir": "bidirectional",
    "rotary_scaling": None,
    "qk_norm_type": "LN",
    "qk_norm_over": "all_heads",
    "router_type": "sigmoid",
    "query_growth": None,
}


def changed(name: str, value: Any, cfg: Any) -> Any:
    """Another value of a field of our config."""
    if name in OTHER:
        other = OTHER[name]
        if other == value:
            other = {"LN": "RMS", "relu": "gelu", "none": "alibi", "post": "pre"}.get(value, value)
            other = "head" if value == "all_heads" else other
            other = "softmax" if value == "sigmoid" else other
        return other
    if isinstance(value, bool):
        return not value
    if isinstance(value, (list, tuple)):
        swapped = {"local": "global", "global": "local", True: False, False: True}
        flipped = [swapped.get(v, v) for v in value]
        return flipped if flipped != list(value) else [1.5 * v for v in value]
    if isinstance(value, int) and name in ("rotary_dim",):
        return value // 2 if value % 4 == 0 else value - 2
    if isinstance(value, int):
        return value + 1
    return 1.7 * value if name != "eps" else 0.05


@pytest.mark.parametrize("name", among("window", "norm", "yarn", "bias", "alibi", "moe"))
@torch.no_grad()
def test_every_field_the_table_sets_shows_in_the_logits_or_is_refused(name: str) -> None:
    hf_model = tiny.build(name)
    model = load(hf_model, **context_for(name))
    tokens = tiny.tokens(hf_model.config)
    wanted = hf_run(hf_model, tokens).logits
    hf_config = hf_model.config.to_dict()
    architecture = architecture_for(hf_config)
    fields = architecture.read_config(architecture.reading(hf_config))
    defaults = {f.name: f.default for f in dataclasses.fields(model.cfg)}
    state = model.state_dict()
    silent = []
    for field, value in fields.items():
        if field in NOT_BEHAVIOUR or value is None:
            continue
        nothing_turns = not any(fields.get("rotary_layers") or [True])
        if nothing_turns and field.startswith("rotary_") and field != "rotary_layers":
            continue
        other = changed(field, value, model.cfg)
        if (
            not isinstance(value, bool)
            and value == defaults.get(field)
            and value in (-1.0, 1.0, 0.0)
        ):
            continue  # the feature is off in this variant
        try:
            mutant = HookedTransformer(dataclasses.replace(model.cfg, **{field: other}))
            mutant.load_state_dict(state)
        except (ValueError, RuntimeError):
            continue  # refused
        if (mutant(tokens) - wanted).abs().max() < 3 * TOLERANCE:
            silent.append(f"{field}={other!r}")
    assert silent == []


@pytest.mark.parametrize("name", among("bias", "norm", "untied", "dense"))
@torch.no_grad()
def test_every_tensor_shows_in_the_logits(name: str) -> None:
    """A parameter that is there, is not zero by nature and changes nothing was not converted."""
    model = load(tiny.build(name), **context_for(name))
    tokens = tiny.tokens(tiny.config(name))
    wanted, cache = model(tokens), model.run_with_cache(tokens, names_filter="*hook_resid_pre")[1]

    def logits_with(group: str) -> Tensor:
        """What lies before a parameter's layer does not change with it: only the rest is run."""
        layer = re.match(r"blocks\.(\d+)\.", group)
        if layer is None:
            return model(tokens)
        return model(cache["resid_pre", int(layer[1])], start_at_layer=int(layer[1]))

    for layer in range(model.cfg.n_layers):
        assert_close(logits_with(f"blocks.{layer}."), wanted, atol=1e-6)
    groups: dict[str, list[Tensor]] = {}
    for parameter_name, parameter in model.named_parameters():
        # a single expert may be chosen for no token: all of a layer together
        name_of_all = re.sub(r"experts\.\d+", "experts.*", parameter_name)
        groups.setdefault(name_of_all, []).append(parameter)
    silent = []
    for group, parameters in groups.items():
        kept = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.add_(0.5 * torch.randn(parameter.shape))
        if (logits_with(group) - wanted).abs().max() < 1e-5:
            silent.append(group)
        for parameter, before in zip(parameters, kept, strict=True):
            parameter.copy_(before)
    # softmax does not see what all keys share; without positions on top, that is the key bias.
    # W_reserved: the rows of a position matrix that belong to no position
    assert [n for n in silent if not re.search("b_K|W_reserved", n)] == []


@pytest.mark.parametrize("name", FAMILIES.values())
def test_every_field_of_the_hf_config_is_accounted_for(name: str) -> None:
    """Read, or listed as cosmetic with a reason: none passes by being a default."""
    hf_config = tiny.config(name).to_dict()
    architecture = architecture_for(hf_config)
    reading = architecture.reading(hf_config)
    architecture.read(reading)
    unread = set(reading.config) - reading.was_read - set(COSMETIC) - set(architecture.cosmetic)
    assert unread == {"is_encoder_decoder"} - reading.was_read


@pytest.mark.parametrize("model_type", tiny.SIZES)
def test_fields_a_file_leaves_out_hold_the_default_of_the_hf_class(model_type: str) -> None:
    """Only what the conversion insists on is given, with the class's own values."""
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


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("name", among("window", "nope", "dense"))
@torch.no_grad()
def test_the_first_layers_are_a_checkpoint_of_their_own(
    name: str, n_layers: int, tmp_path: Path
) -> None:
    """The config is written anew, and Hugging Face computes by it what we do."""
    model = load(tiny.build(name), first_n_layers=n_layers)
    model.save_pretrained(tmp_path)
    tokens = tiny.tokens(tiny.config(name))[:, : model.cfg.n_ctx]
    assert_close(hf_run(tiny.read(tmp_path), tokens).logits, model(tokens))


# --- processing, half precision -------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES.values())
@pytest.mark.filterwarnings("ignore:.*is left out")
@torch.no_grad()
def test_processing_leaves_log_probabilities_alone(name: str) -> None:
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    theirs = hf_run(hf_model, tokens).logits
    ours = HookedTransformer.from_pretrained(hf_model=hf_model, device="cpu")(tokens)
    assert_close(ours.log_softmax(-1), theirs.log_softmax(-1))


@pytest.mark.parametrize("name", FAMILIES.values())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_no_further_from_fp32_than_hugging_face(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The median over several weights of (our distance / theirs): each is one sample of rounding.

    Of ten weights the median is at most .98, but for gemma2, gpt_oss, codegen and gpt_neo, where it
    is at most 1.005 of forty. One weight's deviation is .05, that of a median of five .03. Where a
    token that rounding sends to another expert is far off, in either library, it is .3.
    """
    n_experts = load(tiny.build(name)).cfg.num_experts
    size = torch.mean if n_experts is None else torch.median
    ratios = []
    for seed in range(5 if n_experts is None else 11):
        hf_half: nn.Module = hf_in(dtype, tiny.build(name, seed), tmp_path / "half")
        hf_wide = hf_in(torch.float32, hf_half, tmp_path / "wide")  # the same, rounded weights
        tokens = tiny.tokens(hf_half.config)
        exact = hf_run(hf_wide, tokens).logits
        logits = load(hf_half, dtype=dtype)(tokens)
        assert logits.dtype == dtype
        theirs = hf_run(hf_half, tokens).logits
        errors = [size((x.float() - exact).abs()) for x in (logits, theirs)]
        ratios.append(float(errors[0] / errors[1]))
    assert median(ratios) <= 1.05


@pytest.mark.parametrize("name", among(*_POSITIONS))
@torch.no_grad()
def test_report_021_loaded_in_half_precision_is_loaded_and_cast(name: str) -> None:
    """What is no weight (frequencies, slopes, multipliers) is made in fp32 either way."""
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    for dtype in (torch.bfloat16, torch.float16):
        loaded = load(hf_model, dtype=dtype, **context_for(name))
        cast = load(hf_model, **context_for(name)).to(dtype)
        assert loaded(tokens).dtype == dtype
        assert torch.equal(loaded(tokens), cast(tokens))


# --- every field of Hugging Face's config, flipped ------------------------------------------------

FLIPPED: dict[str, Any] = {
    "layer_types": lambda types: [
        "full_attention" if kind != "full_attention" else "sliding_attention" for kind in types
    ],
    "rope_parameters": lambda rope: {**rope, "rope_theta": 7.0},
    "attn_config": lambda attn: {**attn, "clip_qkv": 0.3},
}
# They say nothing about the forward pass by themselves, or would stop Hugging Face's from running.
UNTOUCHED = {"model_type", "architectures", "is_encoder_decoder", "use_cache"} | set(COSMETIC)


def flipped(field: str, value: Any) -> Any:
    """Another value of the same kind; the value itself where there is no obvious one."""
    if field in FLIPPED and value is not None:
        try:
            return FLIPPED[field](value)
        except (TypeError, AttributeError):
            return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 2 * value or 1
    if isinstance(value, str) and "act" in field:
        return "relu" if value != "relu" else "gelu"
    return value


def with_the_weights_of(hf_model: nn.Module, field: str, value: Any) -> nn.Module | None:
    """The model with one field changed and the same weights; None where that is not possible."""
    kept = {key: old for key, old in hf_model.config.to_dict().items() if key != "model_type"}
    try:
        config = type(hf_model.config)(**{**kept, field: value})
        config.pad_token_id = None
        changed = tiny.from_config(config)
        changed.load_state_dict(hf_model.state_dict())
        hf_run(changed, tiny.tokens(hf_model.config, length=23))
    except Exception:  # whatever Hugging Face has against it
        return None
    return changed


@pytest.mark.parametrize("name", FAMILIES.values())
@torch.no_grad()
def test_a_flipped_field_changes_our_logits_as_it_changes_theirs_or_is_refused(name: str) -> None:
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config, length=23)
    wrong, n_compared = [], 0
    for field, value in hf_model.config.to_dict().items():
        other = flipped(field, value)
        if field in UNTOUCHED or other is value or other == value:
            continue
        changed = with_the_weights_of(hf_model, field, other)
        if changed is None:
            continue
        try:
            ours = load(changed)(tokens)
        except ValueError:
            continue
        n_compared += 1
        error = (ours - hf_run(changed, tokens).logits).abs().max()
        if not error < TOLERANCE:
            wrong.append(f"{field}={other!r}: {float(error):.1e}")
    assert wrong == []
    assert n_compared > 1


# --- the paths of Hugging Face's modules ----------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES.values())
@torch.no_grad()
def test_the_paths_of_modules_mean_what_those_modules_return(name: str) -> None:
    hf_model = tiny.build(name)
    model, ids = load(hf_model), tiny.tokens(hf_model.config)
    modules, seen = dict(hf_model.named_modules()), {}
    paths = [path for path in model.outputs_by_module() if path in modules]

    def look(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            seen[path] = value.clone()  # some go on adding to it in place

        return hook

    for path in paths:
        modules[path].register_forward_hook(look(path))
    hf_model(ids)
    _, cache = model.run_with_cache(ids)
    n_layers = model.cfg.n_layers
    assert sum("resid_post" in model.point_at(path) for path in seen) == n_layers
    for path, value in seen.items():
        ours = cache[path]
        rows = value.reshape(-1, *ours.shape[1:])  # positions are those of every row
        assert_close(ours, rows.expand_as(ours))


# --- what users reported of single families -------------------------------------------------------


def apart(ours: HookedTransformer, theirs: nn.Module) -> float:
    """The largest difference of logits over 40 tokens."""
    tokens = tiny.tokens(theirs.config)
    return float((ours(tokens) - hf_run(theirs, tokens).logits).abs().max())


def with_same_weights(hf_model: nn.Module, name: str, **changes: Any) -> nn.Module:
    """The variant with changes, and the weights of another model of that variant."""
    changed = tiny.build(name, **changes)
    changed.load_state_dict(hf_model.state_dict())
    return changed


@pytest.mark.parametrize("name", ["gemma2_final_cap", "gemma3"])
@pytest.mark.parametrize("scalar", [2, 32])  # a head has 8 channels
@torch.no_grad()
def test_report_007_scores_are_scaled_by_the_scalar_and_not_by_the_width_of_heads(
    name: str, scalar: int
) -> None:
    hf_model = tiny.build(name, query_pre_attn_scalar=scalar)
    model = load(hf_model)
    assert (model.cfg.d_head, model.cfg.attn_scale) == (8, pytest.approx(scalar**0.5))
    assert apart(model, hf_model) < TOLERANCE
    by_width = with_same_weights(hf_model, name, query_pre_attn_scalar=8)
    assert apart(load(by_width), hf_model) > 0.3


@torch.no_grad()
def test_report_008_low_caps_bite_and_the_scores_that_are_seen_are_capped() -> None:
    caps = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
    hf_model = tiny.build("gemma2", **caps)  # four norms, every other layer local, grouped queries
    model = load(hf_model)
    assert apart(model, hf_model) < TOLERANCE
    logits, cache = model.run_with_cache(tiny.tokens(hf_model.config))
    for layer in range(3):
        scores = cache["attn_scores", layer]
        assert 0.9 < scores[scores.isfinite()].abs().max() <= 1.0
        assert torch.equal(scores.softmax(-1), cache["pattern", layer])
    assert cache["unembed.hook_out"].abs().max() > 2  # logits are seen before their cap
    assert_close(2 * torch.tanh(cache["unembed.hook_out"] / 2), logits)
    for cap in caps:
        assert apart(load(with_same_weights(hf_model, "gemma2", **{cap: None})), hf_model) > 0.05


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_report_009_embeddings_and_norms_of_gemma_are_hugging_faces_to_the_last_bit(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The multiplier, sqrt(24), is rounded to the model's dtype; a norm's 1 + w is not."""
    hf_model = hf_in(dtype, tiny.build(name), tmp_path)
    model = load(hf_model, dtype=dtype)
    tokens = tiny.tokens(hf_model.config)
    _, cache = model.run_with_cache(tokens, names_filter="hook_embed")
    scaled = hf_run(hf_model, tokens, output_hidden_states=True).hidden_states[0]
    assert torch.equal(cache["hook_embed"], scaled)
    exact = model.W_E[tokens].float() * 24**0.5
    assert torch.equal(scaled, exact.to(dtype)) == (dtype == torch.float32)
    theirs = hf_model.model.layers[1].input_layernorm
    assert torch.equal(model.blocks[1].ln1(scaled), theirs(scaled))
    if dtype == torch.bfloat16:  # so that a norm in half precision would show
        in_half = (
            scaled * (scaled**2).mean(-1, keepdim=True).add(1e-3).rsqrt() * (1 + theirs.weight)
        )
        assert not torch.equal(in_half, theirs(scaled))


@torch.no_grad()
def test_report_013_queries_and_keys_are_seen_before_their_norm() -> None:
    hf_model = tiny.build("qwen3")
    tokens = tiny.tokens(hf_model.config)
    model = load(hf_model)
    assert apart(model, hf_model) < TOLERANCE
    seen = seen_inside(hf_model, tokens)
    _, cache = model.run_with_cache(tokens)
    for letter in ("q", "k"):
        assert_close(cache[letter, 1], seen[f"self_attn.{letter}_norm.in"])
        weight = getattr(hf_model.model.layers[1].self_attn, f"{letter}_norm").weight
        normalized = cache[f"blocks.1.attn.{letter}_norm.hook_normalized"]
        assert_close(normalized * weight, seen[f"self_attn.{letter}_norm"])
    for block in model.blocks:  # a norm whose weight was ignored
        block.attn.q_norm.w.fill_(1.0)
        block.attn.k_norm.w.fill_(1.0)
    assert apart(model, hf_model) > 0.3


@pytest.mark.parametrize(
    ("name", "adjacent"), [("gptj", True), ("gpt_neox", False), ("llama", False)]
)
@torch.no_grad()
def test_report_014_pairs_of_channels_are_neighbours_in_gptj_and_halves_elsewhere(
    name: str, adjacent: bool
) -> None:
    hf_model = tiny.build(name)
    model = load(hf_model)
    assert model.cfg.rotary_adjacent_pairs is adjacent
    assert apart(model, hf_model) < TOLERANCE
    other = HookedTransformer(
        dataclasses.replace(model.cfg, rotary_adjacent_pairs=not adjacent, init_weights=False)
    )
    other.load_state_dict(model.state_dict())
    assert apart(other, hf_model) > 0.3


@pytest.mark.parametrize(
    ("name", "partial", "turned"),
    [  # of 8 channels
        ("phi", {"partial_rotary_factor": 0.5}, 4),
        ("stablelm", {"partial_rotary_factor": 0.25}, 2),
        ("gpt_neox", {"rotary_pct": 0.25}, 2),
        ("gpt_neox", {"rotary_pct": 1.0}, 8),
        ("gptj", {"rotary_dim": 4}, 4),
    ],
)
@torch.no_grad()
def test_report_015_there_is_a_frequency_for_every_pair_that_is_turned_and_no_more(
    name: str, partial: dict[str, Any], turned: int
) -> None:
    hf_model = tiny.build(name, **partial)
    model = load(hf_model)
    assert model.cfg.d_head == 8
    assert apart(model, hf_model) < TOLERANCE
    rotary = model.blocks[1].attn.spec.rotary
    frequencies = inverse_frequencies(rotary, torch.tensor([40]), torch.device("cpu"))
    assert frequencies.shape == (turned // 2,)
    _, cache = model.run_with_cache(tiny.tokens(hf_model.config))
    for letter in ("q", "k"):
        before, after = cache[letter, 1], cache[f"rot_{letter}", 1]
        changed = (before != after)[:, 1:].flatten(0, -2).any(0)
        if f"{letter}_norm" not in dict(model.blocks[1].attn.named_children()):
            assert changed.tolist() == [channel < turned for channel in range(8)]


@pytest.mark.parametrize("name", [n for n in tiny.VARIANTS if n.startswith("mixtral")])
@torch.no_grad()
def test_report_018_every_token_goes_to_the_experts_hugging_face_sends_it_to(name: str) -> None:
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    model = load(hf_model)
    theirs = hf_run(hf_model, tokens, output_router_logits=True)
    assert_close(model(tokens), theirs.logits)
    _, cache = model.run_with_cache(tokens)
    used = set()
    for layer, router_logits in enumerate(theirs.router_logits):
        ours = cache[f"blocks.{layer}.mlp.hook_expert_indices"].flatten(0, 1)
        experts = router_logits.topk(hf_model.config.num_experts_per_tok).indices
        assert torch.equal(ours.sort(-1).values, experts.sort(-1).values)
        scores = cache[f"blocks.{layer}.mlp.hook_expert_weights"].flatten(0, 1)
        assert_close(scores, router_logits.softmax(-1))
        used |= set(experts.flatten().tolist())
    assert used == set(range(5))


PARALLEL = [
    *[(name, 1) for name in ("phi", "gptj", "falcon")],
    *[(name, 2) for name in ("gpt_neox", "falcon_new")],
]


@pytest.mark.parametrize(("name", "n_norms"), PARALLEL)
@torch.no_grad()
def test_report_025_parallel_blocks_with_one_norm_or_two(name: str, n_norms: int) -> None:
    hf_model = tiny.build(name)
    model = load(hf_model)
    assert apart(model, hf_model) < TOLERANCE
    assert model.cfg.parallel_attn_mlp
    _, cache = model.run_with_cache(tiny.tokens(hf_model.config))
    assert ("resid_mid", 1) not in cache
    assert torch.equal(cache["normalized", 1, "ln1"], cache["normalized", 1, "ln2"])  # one stream
    ln1, ln2 = model.blocks[1].ln1, model.blocks[1].ln2
    assert torch.equal(ln1.w, ln2.w) == torch.equal(ln1.b, ln2.b) == (n_norms == 1)
    if name == "gpt_neox":
        sequential = with_same_weights(hf_model, name, use_parallel_residual=False)
        assert apart(load(sequential), hf_model) > 0.3
        assert apart(load(sequential), sequential) < TOLERANCE


@pytest.mark.parametrize("name", ["phi3", "phi3_mqa"])
@torch.no_grad()
def test_report_025_fused_matrices_are_cut_by_the_number_of_their_heads(name: str) -> None:
    hf_model = tiny.build(name)
    model = load(hf_model)
    assert apart(model, hf_model) < TOLERANCE
    n_kv = hf_model.config.num_key_value_heads
    assert n_kv < model.cfg.n_heads
    fused = hf_model.model.layers[1].self_attn.qkv_proj.weight
    parts = fused.split([4 * 8, n_kv * 8, n_kv * 8])
    attn = model.blocks[1].attn
    for weight, part in zip((attn.W_Q, attn._W_K, attn._W_V), parts, strict=True):
        assert torch.equal(weight.transpose(1, 2).flatten(0, 1), part)
    gate, linear = hf_model.model.layers[1].mlp.gate_up_proj.weight.chunk(2)
    assert torch.equal(model.blocks[1].mlp.W_gate.T, gate)
    assert torch.equal(model.blocks[1].mlp.W_in.T, linear)


@pytest.mark.parametrize("name", [n for n in tiny.VARIANTS if n.startswith("gpt_oss")])
@torch.no_grad()
def test_report_026_the_stream_of_a_gpt_oss_is_hugging_faces_in_every_layer(name: str) -> None:
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    model = load(hf_model)
    theirs = hf_run(hf_model, tokens, output_hidden_states=True).hidden_states
    _, cache = model.run_with_cache(tokens)
    for layer in range(2):
        assert_close(cache["resid_post", layer], theirs[layer + 1])
    assert_close(model.ln_final(cache["resid_post", 2]), theirs[3])
    for block in model.blocks:  # sinks that were not wired
        block.attn.sinks.fill_(-1e9)
    assert apart(model, hf_model) > 0.3
