"""Loaded checkpoints against the whole Hugging Face model, eager attention, on loud weights.

Sizes are awkward, eps is 1e-3 and inputs are longer than every original context length, so that
what is wrong shows: see `user_reports.md`, section 0.
"""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from transformer_lens_lite import HookedTransformer

TOLERANCE = 1e-4


def load(hf_model: nn.Module, **arguments: Any) -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing(
        hf_model=hf_model, device="cpu", **arguments
    )


def context_for(name: str) -> dict[str, int]:
    """Dynamic scaling only shows beyond the checkpoint's own context length."""
    return {"n_ctx": 64} if name == "llama_dynamic" else {}


@torch.no_grad()
def hf_run(hf_model: nn.Module, tokens: Tensor, mask: Tensor | None = None, **arguments: Any):
    """A Hugging Face forward whose positions follow the mask, as they do in its `generate`."""
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        arguments |= {"attention_mask": mask, "position_ids": positions}
    return hf_model(tokens, **arguments)


def assert_close(ours: Tensor, theirs: Tensor, atol: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one batch, and its mask. The pad is a token like others."""
    width = max(len(row) for row in rows)
    pads = [row.new_full((width - len(row),), 7) for row in rows]
    tokens = torch.stack([torch.cat(pair) for pair in zip(pads, rows, strict=True)])
    return tokens, torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()


# --- logits and everything on the way -------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.VARIANTS)
@torch.no_grad()
def test_report_098_logits_and_every_hidden_state_equal_hugging_face(name: str) -> None:
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    theirs = hf_run(hf_model, tokens, output_hidden_states=True)
    assert theirs.logits.std() > 0.5
    model = load(hf_model, **context_for(name))
    assert_close(model(tokens), theirs.logits)  # the fused path
    logits, cache = model.run_with_cache(tokens)
    assert_close(logits, theirs.logits)
    assert_close(cache["resid_pre", 0], theirs.hidden_states[0])
    for layer in range(2):
        assert_close(cache["resid_post", layer], theirs.hidden_states[layer + 1])
    final = model.ln_final(cache["resid_post", 2])  # HF's last entry is after the final norm
    if model.cfg.d_embed is not None:  # and where embeddings are narrow, as narrow as they are
        final = model.unembed.transform(final)
    assert_close(final, theirs.hidden_states[3])


def seen_inside(hf_model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """What HF's submodules take ("name.in") and return ("name"), by their name in a layer."""
    seen = {}

    def keep(name: str):
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            seen[name] = out[0] if isinstance(out, tuple) else out
            if args and isinstance(args[0], Tensor):
                seen[f"{name}.in"] = args[0]

        return hook

    for name, module in hf_model.named_modules():
        if match := re.search(r"(?:h|layers)\.1\.(.+)", name):
            module.register_forward_hook(keep(match[1]))
    out = hf_run(hf_model, tokens, output_attentions=True)
    return {**seen, "pattern": out.attentions[1]}


@torch.no_grad()
def test_report_108_hooks_of_a_gpt2_are_the_values_of_its_modules() -> None:
    hf_model = tiny.build("gpt2")
    tokens = tiny.tokens(hf_model.config, length=11)
    _, cache = load(hf_model).run_with_cache(tokens)
    theirs = seen_inside(hf_model, tokens)
    heads = [part.unflatten(-1, (3, 8)) for part in theirs["attn.c_attn"].split(24, -1)]
    for name, part in zip("qkv", heads, strict=True):
        assert_close(cache[name, 1], part)
    assert_close(cache["pattern", 1], theirs["pattern"])
    assert_close(cache["z", 1].flatten(2), theirs["attn.c_proj.in"])
    assert_close(cache["attn_out", 1], theirs["attn.c_proj"])
    assert_close(cache["resid_mid", 1], theirs["ln_2.in"])
    assert_close(cache["pre", 1], theirs["mlp.c_fc"])
    assert_close(cache["post", 1], theirs["mlp.c_proj.in"])
    assert_close(cache["mlp_out", 1], theirs["mlp.c_proj"])
    for ours, name in (("ln1", "ln_1"), ("ln2", "ln_2")):
        norm = dict(hf_model.named_modules())[f"transformer.h.1.{name}"]
        normalized = cache["normalized", 1, ours]
        assert_close(normalized * norm.weight + norm.bias, theirs[name])


@torch.no_grad()
def test_report_108_hooks_of_a_llama_are_the_values_of_its_modules() -> None:
    hf_model = tiny.build("llama_biases")
    tokens = tiny.tokens(hf_model.config, length=11)
    _, cache = load(hf_model).run_with_cache(tokens)
    theirs = seen_inside(hf_model, tokens)
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):  # before rotation, one head per KV head
        projected = theirs[f"self_attn.{name}_proj"]
        assert_close(cache[name, 1], projected.unflatten(-1, (heads, 8)))
    assert_close(cache["pattern", 1], theirs["pattern"])
    assert_close(cache["z", 1].flatten(2), theirs["self_attn.o_proj.in"])
    assert_close(cache["attn_out", 1], theirs["self_attn"])
    assert_close(cache["resid_mid", 1], theirs["post_attention_layernorm.in"])
    assert_close(cache["pre", 1], theirs["mlp.gate_proj"])
    assert_close(cache["pre_linear", 1], theirs["mlp.up_proj"])
    assert_close(cache["post", 1], theirs["mlp.down_proj.in"])
    assert_close(cache["mlp_out", 1], theirs["mlp"])


@torch.no_grad()
def test_report_017_errors_of_the_residual_stream_grow_at_most_linearly() -> None:
    hf_model = tiny.build("llama_gqa", num_hidden_layers=8)
    tokens = tiny.tokens(hf_model.config)
    theirs = hf_run(hf_model, tokens, output_hidden_states=True).hidden_states
    _, cache = load(hf_model).run_with_cache(tokens)
    for layer in range(7):
        assert_close(cache["resid_post", layer], theirs[layer + 1], atol=1e-5 * (layer + 1))


@pytest.mark.parametrize(("name", "heads"), [("gpt2", 3), ("llama_gqa", 4)])
@torch.no_grad()
def test_report_103_removing_a_head_equals_removing_its_columns(name: str, heads: int) -> None:
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config, length=14)
    model = load(hf_model)
    before = model(tokens)

    def remove(z: Tensor, hook: Any) -> None:
        z[:, :, head] = 0

    for head in range(heads):
        theirs = copy.deepcopy(hf_model)
        rows = slice(head * model.cfg.d_head, (head + 1) * model.cfg.d_head)
        if name == "gpt2":
            theirs.transformer.h[1].attn.c_proj.weight[rows] = 0
        else:
            theirs.model.layers[1].self_attn.o_proj.weight[:, rows] = 0
        without = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", remove)])
        assert_close(without, hf_run(theirs, tokens).logits)
        assert (without - before).abs().max() > 0.01


# --- mistakes would show --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "change"), tiny.FIELDS)
def test_report_022_and_023_and_137_a_config_field_changes_our_logits_as_theirs(
    name: str, change: dict[str, Any]
) -> None:
    """And rule 4: a converter that ignored the field would fail here."""
    hf_model, changed = tiny.build(name), tiny.build(name, **change)
    changed.load_state_dict(hf_model.state_dict())
    tokens = tiny.tokens(hf_model.config)
    theirs = hf_run(changed, tokens).logits
    assert (theirs - hf_run(hf_model, tokens).logits).abs().max() > 3 * TOLERANCE
    assert_close(load(changed)(tokens), theirs)


DROPPED = [
    ("gpt2", r"ln.*\.b"),
    ("gpt2", r"ln.*\.w"),
    ("gpt2", r"attn\.b_[QVO]"),
    ("gpt2", r"mlp\.b_.*"),
    ("llama_biases", r"attn\._?b_[QK]"),
    ("llama_biases", r"attn\._?b_V"),
    ("llama_biases", r"attn\.b_O"),
    ("llama_biases", r"mlp\.b_(gate|up|out)"),
    ("llama_biases", r"ln.*\.w"),
]


@pytest.mark.parametrize(("name", "pattern"), DROPPED)
@torch.no_grad()
def test_a_kind_of_vector_that_was_not_converted_would_show(name: str, pattern: str) -> None:
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    model = load(hf_model)
    for parameter_name, parameter in model.named_parameters():
        if re.search(pattern + "$", parameter_name):
            parameter.fill_(1.0 if parameter_name.endswith(".w") else 0.0)
    assert (model(tokens) - hf_run(hf_model, tokens).logits).abs().max() > 0.1


@torch.no_grad()
def test_report_004_llama3_factors_come_from_the_config() -> None:
    values = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = {"original_max_position_embeddings": 32}
    sizes = {"head_dim": 16, "max_position_embeddings": 128}
    hf_model = tiny.build(
        "llama", **sizes, **tiny.rope("llama3", factor=32.0, **values, **original)
    )
    tokens = tiny.tokens(hf_model.config, length=100)
    theirs = hf_run(hf_model, tokens).logits
    model = load(hf_model)
    assert_close(model(tokens), theirs)
    hard_coded = tiny.build(
        "llama", **sizes, **tiny.rope("llama3", factor=8.0, **values, **original)
    )
    assert (load(hard_coded)(tokens) - theirs).abs().max() > 1


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "llama_tied"])
@torch.no_grad()
def test_report_001_and_028_processing_moves_logits_by_a_constant_per_position(name: str) -> None:
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    theirs = hf_run(hf_model, tokens).logits
    ours = HookedTransformer.from_pretrained(hf_model=hf_model, device="cpu")(tokens)
    assert_close(ours.log_softmax(-1), theirs.log_softmax(-1))
    difference = ours - theirs
    assert difference.std(-1).max() < TOLERANCE
    assert difference.abs().max() > 0.01  # so the default load does process


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gpt2", "llama_gqa", "llama_linear", "llama_llama3", "llama_yarn"]
)
@torch.no_grad()
def test_report_030_left_padding_changes_nothing(name: str) -> None:
    hf_model = tiny.build(name)
    model = load(hf_model)
    row = tiny.tokens(hf_model.config, batch=1, length=20)[0]
    alone = hf_run(hf_model, row[None]).logits[0]
    for n_pad in range(6):
        tokens, mask = left_padded([row, row.new_zeros(20 + n_pad)])
        padded = model(tokens, attention_mask=mask)
        assert_close(padded[0, n_pad:], alone)
        assert_close(padded[:, n_pad:], hf_run(hf_model, tokens, mask).logits[:, n_pad:])


@pytest.mark.parametrize("name", ["llama_dynamic", "llama_longrope"])
@torch.no_grad()
def test_rotary_schemes_that_depend_on_length_take_each_rows_own(name: str) -> None:
    """HF takes the longest row's for all: its solo run is the reference here."""
    hf_model = tiny.build(name)
    model = load(hf_model, **context_for(name))
    rows = [tiny.tokens(hf_model.config, batch=1, length=n)[0] for n in (12, 16, 17, 31)]
    tokens, mask = left_padded(rows)
    padded = model(tokens, attention_mask=mask)
    for row, logits in zip(rows, padded, strict=True):
        assert_close(logits[-len(row) :], hf_run(hf_model, row[None]).logits[0])


# --- greedy continuations -------------------------------------------------------------------------


def hf_greedy(hf_model: nn.Module, tokens: Tensor, n: int = 40, **arguments: Any) -> Tensor:
    """n greedy tokens by HF's own generate, which nothing stops early."""
    ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    hf_model.generation_config.update(**ids)
    arguments.setdefault("attention_mask", torch.ones_like(tokens))
    return hf_model.generate(tokens, max_new_tokens=n, do_sample=False, **arguments)


def greedy(model: HookedTransformer, tokens: Tensor, n: int = 40, **arguments: Any) -> Any:
    return model.generate(
        tokens, max_new_tokens=n, do_sample=False, stop_at_eos=False, verbose=False, **arguments
    )


# prompts of 9 pass the original length of 16 on the way; those of 20 are past it from the start
GREEDY = [
    *[(name, 9) for name in ("gpt2_untied", "gpt2_by_layer", "gpt2_gelu", "llama_tied")],
    *[(name, 9) for name in ("llama_gqa", "llama_mqa", "llama_biases", "llama_linear")],
    *[(name, 9) for name in ("llama_llama3", "llama_yarn", "llama_yarn_all", "llama_dynamic")],
    *[(name, 20) for name in ("gpt2_reordered", "llama", "llama_longrope", "llama_dynamic")],
]


@pytest.mark.parametrize(("name", "length"), GREEDY)
def test_report_006_40_greedy_tokens_equal_hugging_faces(name: str, length: int) -> None:
    # a tied random GPT-2 soon repeats one token
    changes = {"n_positions": 64, "tie_word_embeddings": False} if "gpt2" in name else {}
    hf_model = tiny.build(name, **changes)
    model = load(hf_model, **context_for(name))
    tokens = tiny.tokens(hf_model.config, batch=2, length=length)
    theirs = hf_greedy(hf_model, tokens)
    assert theirs[:, length:].unique().numel() > 2
    assert torch.equal(greedy(model, tokens), theirs)
    if name != "llama_dynamic":  # there a cached key keeps its angle
        assert torch.equal(greedy(model, tokens, use_past_kv_cache=False), theirs)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_report_029_each_row_of_a_padded_batch_continues_as_alone(name: str) -> None:
    hf_model = tiny.build(name, **({"n_positions": 64} if name == "gpt2" else {}))
    model = load(hf_model)
    rows = [tiny.tokens(hf_model.config, batch=1, length=n)[0] for n in (5, 14, 9)]
    tokens, mask = left_padded(rows)
    batched = greedy(model, tokens, attention_mask=mask, output_logits=True)
    assert torch.equal(batched.sequences, hf_greedy(hf_model, tokens, attention_mask=mask))
    for i, row in enumerate(rows):
        alone = greedy(model, row[None], output_logits=True)
        assert torch.equal(batched.sequences[i, 14:], alone.sequences[0, len(row) :])
        assert_close(torch.stack(batched.logits)[:, i], torch.stack(alone.logits)[:, 0], atol=1e-5)


# --- half precision -------------------------------------------------------------------------------


def hf_in(dtype: torch.dtype, hf_model: nn.Module, folder: Path) -> nn.Module:
    """Loaded in that dtype: `.to()` would round the rotary frequencies as well."""
    hf_model.save_pretrained(folder)
    return tiny.read(folder, dtype)


HALF = [(name, dtype) for name in ("gpt2", "llama_gqa", "llama_yarn") for dtype in ("bf16", "fp16")]


@pytest.mark.parametrize(("name", "dtype"), HALF)
@pytest.mark.parametrize("listening", [False, True])
@torch.no_grad()
def test_report_019_half_precision_is_no_further_from_fp32_than_hugging_face(
    name: str, dtype: str, listening: bool, tmp_path: Path
) -> None:
    """Mean distances over several weights: one run's largest is a matter of luck."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    ours, theirs = [], []
    for seed in range(3):
        hf_half = hf_in(half, tiny.build(name, seed), tmp_path / "half")
        hf_wide = hf_in(torch.float32, hf_half, tmp_path / "wide")  # the same, rounded weights
        tokens = tiny.tokens(hf_half.config)
        exact = hf_run(hf_wide, tokens).logits
        model = load(hf_half, dtype=half)
        logits = model.run_with_cache(tokens)[0] if listening else model(tokens)
        assert logits.dtype == half
        ours.append((logits.float() - exact).abs().mean())
        theirs.append((hf_run(hf_half, tokens).logits.float() - exact).abs().mean())
    assert sum(ours) <= sum(theirs)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_report_019_large_activations_stay_finite_in_half_precision(name: str) -> None:
    """Statistics in fp32: squares of thousands do not fit into fp16."""
    model = load(tiny.build(name), dtype="fp16")
    tokens = tiny.tokens(tiny.config(name))
    model.W_E.mul_(2000)
    for run in (model, lambda x: model.run_with_cache(x)[0]):
        assert run(tokens).isfinite().all()
