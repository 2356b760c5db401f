"""The tables: every tensor and every config field, both ways, or a refusal that names it."""

import copy
import dataclasses
import json
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

import weights_conversion
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.rope_scaling import scaling_from_dict
from weights_conversion import (
    Architecture,
    Map,
    Reading,
    Table,
    Tied,
    Zeros,
    architecture_for,
    differences,
    export_config,
    first_layers,
    register_architecture,
)
from weights_conversion.families import llama
from weights_conversion.fields import COSMETIC, rope
from weights_conversion.table import override, shape_of, without


class Source:
    """Tensors by Hugging Face name, from a dict."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def same(self, name: str, other: str) -> bool:
        return torch.equal(self.tensors[name], self.tensors[other])

    def describe(self, name: str) -> str:
        return "memory"


def understand(hf_config: dict[str, Any]) -> tuple[HookedTransformerConfig, Table]:
    architecture = architecture_for(hf_config)
    reading = architecture.reading(hf_config, "config.json")
    cfg = architecture.read(reading, device="cpu")
    return cfg, Table(architecture, cfg, reading)


def to_native(table: Table, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    state = dict(table.to_native(Source(tensors)))
    return {**state, **{name: torch.zeros(shape) for name, shape in table.zeros.items()}}


def converted(name: str, **overrides: Any) -> tuple[dict[str, Tensor], Table, dict[str, Tensor]]:
    hf_model = tiny.build(name, **overrides)
    _, table = understand(hf_model.config.to_dict())
    hf_state = tiny.file_state(hf_model)
    return hf_state, table, to_native(table, hf_state)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].is_contiguous(), name
        assert torch.equal(ours[name], tensor), name


# --- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_report_153_round_trip_is_bit_exact(name: str) -> None:
    hf_state, table, state = converted(name)
    assert_same(table.to_hf(state), hf_state)


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_native_tensors_are_views_of_the_checkpoint(name: str) -> None:
    hf_state, table, state = converted(name)
    theirs = {tensor.untyped_storage().data_ptr() for tensor in hf_state.values()}
    # one tensor for two parameters, which may not share memory; several tensors for one; and heads
    # that lie in groups, from one of which no stride leads to the next
    made = {n for placed in table.maps if placed.row.copies for n in placed.native[1:]}
    for placed in table.maps:
        if len(placed.hf) > 1 or placed.row.pieces:
            made |= set(placed.native)
    for native, tensor in state.items():
        if native not in table.zeros and native not in made:
            assert tensor.untyped_storage().data_ptr() in theirs, native


def test_shapes_are_the_classic_ones_and_memory_is_the_checkpoints() -> None:
    _, _, state = converted("llama_gqa")  # n=4 k=2 h=10 m=24 f=38
    shapes = {name.removeprefix("blocks.0."): tuple(t.shape) for name, t in state.items()}
    assert shapes["attn.W_Q"] == (4, 24, 10)
    assert shapes["attn._W_K"] == shapes["attn._W_V"] == (2, 24, 10)
    assert shapes["attn.W_O"] == (4, 10, 24)
    assert shapes["attn.b_Q"] == (4, 10)
    assert shapes["attn._b_K"] == (2, 10)
    assert shapes["mlp.W_gate"] == shapes["mlp.W_in"] == (24, 38)
    assert shapes["mlp.W_out"] == (38, 24)
    assert shapes["unembed.W_U"] == (24, 59)
    assert state["blocks.0.attn.W_Q"].stride(1) == 1
    assert state["blocks.0.mlp.W_in"].stride(0) == 1
    assert state["blocks.0.attn.W_O"].permute(2, 0, 1).is_contiguous()


def test_fused_gpt2_is_cut_without_a_copy() -> None:
    _, _, state = converted("gpt2")
    q, k = state["blocks.1.attn.W_Q"], state["blocks.1.attn.W_K"]
    assert q.shape == (3, 24, 8)
    assert k.data_ptr() - q.data_ptr() == 24 * q.element_size()


def test_a_projection_goes_to_the_parameter_it_is_named_for() -> None:
    hf_state, _, state = converted("llama_biases")
    mlp, attn = "model.layers.1.mlp.", "model.layers.1.self_attn."
    assert torch.equal(state["blocks.1.mlp.W_gate"], hf_state[f"{mlp}gate_proj.weight"].T)
    assert torch.equal(state["blocks.1.mlp.W_in"], hf_state[f"{mlp}up_proj.weight"].T)
    assert torch.equal(state["blocks.1.mlp.b_up"], hf_state[f"{mlp}up_proj.bias"])
    assert torch.equal(state["blocks.1.mlp.b_out"], hf_state[f"{mlp}down_proj.bias"])
    assert torch.equal(state["blocks.1.attn.W_Q"][1], hf_state[f"{attn}q_proj.weight"][8:16].T)
    assert torch.equal(state["blocks.1.attn._b_V"][1], hf_state[f"{attn}v_proj.bias"][8:16])


def test_missing_and_leftover_tensors_are_named() -> None:
    hf_state, table, _ = converted("llama")
    hf_state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    del hf_state["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"missing model\.layers\.2\.mlp\.up_proj") as error:
        to_native(table, hf_state)
    assert "no place for model.layers.0.self_attn.q_norm.weight" in str(error.value)


def test_an_adapter_is_recognised() -> None:
    hf_state, table, _ = converted("llama")
    hf_state["base_model.model.layers.0.q_proj.lora_A.weight"] = torch.ones(2, 8)
    with pytest.raises(ValueError, match="merge_and_unload"):
        to_native(table, hf_state)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("gpt2", "transformer.h.1.attn.c_attn.weight"),
        ("llama", "model.layers.1.self_attn.k_proj.weight"),
        ("llama", "model.norm.weight"),
    ],
)
def test_a_wrong_shape_is_named(variant: str, name: str) -> None:
    hf_state, table, _ = converted(variant)
    hf_state[name] = hf_state[name][:-1]
    with pytest.raises(ValueError, match=f"memory: {name} has shape"):
        to_native(table, hf_state)


def test_a_transposed_matrix_is_a_wrong_shape() -> None:
    hf_state, table, _ = converted("gpt2")
    name = "transformer.h.0.mlp.c_fc.weight"
    hf_state[name] = hf_state[name].T
    with pytest.raises(ValueError, match="c_fc"):
        to_native(table, hf_state)


def test_checkpoints_without_the_optional_prefix() -> None:
    hf_state, table, _ = converted("gpt2")
    bare = {k.removeprefix("transformer."): v for k, v in hf_state.items() if k != "lm_head.weight"}
    assert_same(table.to_hf(to_native(table, bare)), hf_state)
    bare["transformer.wte.weight"] = bare["wte.weight"]  # now one tensor is there twice
    with pytest.raises(ValueError, match=r"no place for wte\.weight"):
        to_native(table, bare)


def test_buffers_of_old_checkpoints_are_ignored() -> None:
    hf_state, table, state = converted("gpt2")
    old = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 40, 40),
        "h.2.attn.masked_bias": torch.ones(()),
    }
    assert set(to_native(table, {**hf_state, **old})) == set(state)
    with pytest.raises(ValueError, match=r"no place for transformer\.h\.3\.attn\.bias"):
        to_native(table, {**hf_state, "transformer.h.3.attn.bias": torch.ones(1)})
    hf_state, table, state = converted("llama")
    old = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert set(to_native(table, {**hf_state, **old})) == set(state)


@pytest.mark.parametrize("variant", ["gpt2", "llama_tied"])
def test_tied_heads(variant: str) -> None:
    hf_state, table, state = converted(variant)
    (row,) = table.tied
    assert "unembed.W_U" not in state
    exported = table.to_hf(state)
    assert exported["lm_head.weight"] is exported[row.source]
    without_head = {k: v for k, v in hf_state.items() if k != "lm_head.weight"}
    assert_same(table.to_hf(to_native(table, without_head)), hf_state)
    only_head = {k: v for k, v in hf_state.items() if k != row.source}
    assert_same(table.to_hf(to_native(table, only_head)), hf_state)
    with pytest.raises(ValueError, match=f"lm_head.weight .* differs from {row.source}"):
        to_native(table, {**hf_state, "lm_head.weight": hf_state["lm_head.weight"] + 1})


def test_an_untied_head_must_be_there() -> None:
    hf_state, table, _ = converted("gpt2_untied")
    del hf_state["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        to_native(table, hf_state)


def test_native_parameters_without_a_place_are_named() -> None:
    _, table, state = converted("llama")
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.sinks has no place in a llama"):
        table.to_hf({**state, "blocks.0.attn.sinks": torch.ones(4)})
    with pytest.raises(ValueError, match=r"blocks\.2\.attn\.b_O has no place in a llama"):
        table.to_hf({**state, "blocks.2.attn.b_O": torch.ones(24)})
    del state["blocks.1.ln1.w"]
    with pytest.raises(ValueError, match=r"lacks what a llama .* blocks\.1\.ln1\.w"):
        table.to_hf(state)


def test_biases_a_family_lacks_are_listed_with_their_shapes() -> None:
    _, table, _ = converted("llama_gqa")
    zeros = {n.removeprefix("blocks.0."): s for n, s in table.zeros.items() if "blocks.0" in n}
    assert zeros == {
        "attn.b_Q": (4, 10),
        "attn._b_K": (2, 10),
        "attn._b_V": (2, 10),
        "attn.b_O": (24,),
        "mlp.b_in": (38,),
        "mlp.b_out": (24,),
    }
    assert table.zeros["unembed.b_U"] == (59,)


def test_first_layers_know_the_others_and_skip_them() -> None:
    hf_model = tiny.build("llama")
    architecture = architecture_for(hf_model.config.to_dict())
    reading = architecture.reading(hf_model.config.to_dict())
    whole = architecture.read(reading, device="cpu")
    table = Table(architecture, first_layers(whole, 1), reading, whole.n_layers)
    source = Source(dict(hf_model.state_dict()))
    read = set()
    source.read = lambda name: (read.add(name), source.tensors[name])[1]  # type: ignore[method-assign]
    state = dict(table.to_native(source))
    assert {name.split(".")[1] for name in state if name.startswith("blocks")} == {"0"}
    assert not [name for name in read if "layers.1" in name or "layers.2" in name]
    source.tensors["model.layers.3.input_layernorm.weight"] = torch.ones(24)
    with pytest.raises(ValueError, match=r"layers\.3"):
        dict(table.to_native(source))
    with pytest.raises(ValueError, match="first_n_layers=4"):
        first_layers(whole, 4)


def test_first_layers_cuts_what_is_listed_per_layer() -> None:
    sizes = {"n_layers": 3, "d_model": 8, "d_head": 4, "n_ctx": 8, "d_vocab": 5, "device": "cpu"}
    local = {"use_local_attn": True, "window_size": 2, "attn_types": ["global", "local", "global"]}
    cfg = HookedTransformerConfig(**sizes, **local, positional_embedding_type="rotary",
                                  rotary_layers=[True, False, True])  # fmt: skip
    two = first_layers(cfg, 2)
    assert (two.n_layers, two.attn_types, two.rotary_layers) == (
        2,
        ["global", "local"],
        [True, False],
    )
    one = first_layers(cfg, 1)
    assert (one.use_local_attn, one.attn_types, one.window_size) == (False, None, None)


# --- other layouts: rows of families that are not here yet --------------------------------------


def table_of(rows: list[Any], **changes: Any) -> Table:
    sizes = {"n_layers": 2, "d_model": 12, "d_head": 5, "n_heads": 4, "d_mlp": 7, "d_vocab": 11}
    cfg = HookedTransformerConfig(**{**sizes, "n_ctx": 9, "device": "cpu", **changes})
    toy = Architecture("toy", "ToyForCausalLM", lambda r: {}, lambda c, n: {}, lambda c, r: rows)
    return Table(toy, cfg, Reading({}))


QKV = tuple(f"blocks.{{i}}.attn.{name}" for name in ("W_Q", "_W_K", "_W_V"))
LAYOUTS = {
    # name -> (row, sizes, shape of the Hugging Face tensor)
    "neox": (Map("l.{i}.qkv", QKV, "(n s h) m -> s n m h"), {}, (60, 12)),
    "phi3": (
        Map("l.{i}.qkv", QKV, "(a h) m -> a m h", cut=("n", "k", "k")),
        {"n_key_value_heads": 2},
        (40, 12),
    ),
    "falcon": (
        Map("l.{i}.qkv", QKV, "(k a h) m -> a k m h", cut=("g", "1", "1"),
            pieces=("g k m h -> (k g) m h", "1 k m h -> k m h", "1 k m h -> k m h")),
        {"n_key_value_heads": 2},
        (40, 12),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_layouts(layout: str) -> None:
    row, sizes, shape = LAYOUTS[layout]
    table = table_of([row], **sizes)
    hf_state = {f"l.{i}.qkv": torch.randn(shape) for i in range(2)}
    state = dict(table.to_native(Source(hf_state)))
    assert {tuple(state[n.replace("{i}", "0")].shape) for n in QKV[1:]} == {
        (sizes.get("n_key_value_heads", 4), 12, 5)
    }
    assert state["blocks.1.attn.W_Q"].shape == (4, 12, 5)
    assert_same(table.to_hf(state), hf_state)
    fused = hf_state["l.0.qkv"].view(-1, 5, 12)  # rows of heads, in the order of the file
    second_query = {"neox": 3, "phi3": 1, "falcon": 1}[layout]
    first_key = {"neox": 1, "phi3": 4, "falcon": 2}[layout]
    assert torch.equal(state["blocks.0.attn.W_Q"][1], fused[second_query].T)
    assert torch.equal(state["blocks.0.attn._W_K"][0], fused[first_key].T)


def test_experts_are_stacked_or_kept_apart() -> None:
    rows = [
        Map("l.{i}.experts.{e}.w1", "blocks.{i}.mlp.W_gate", "e f m -> e m f"),
        Map("l.{i}.experts.{e}.w2", "blocks.{i}.mlp.experts.{e}.W_out", "m f -> f m"),
    ]
    table = table_of([])
    table.sizes["e"] = 3
    table.maps = list(table._placed(rows, range(2)))
    hf_state = {f"l.{i}.experts.{e}.w1": torch.randn(7, 12) for i in range(2) for e in range(3)}
    hf_state |= {f"l.{i}.experts.{e}.w2": torch.randn(12, 7) for i in range(2) for e in range(3)}
    state = dict(table.to_native(Source(hf_state)))
    assert state["blocks.1.mlp.W_gate"].shape == (3, 12, 7)
    assert torch.equal(state["blocks.1.mlp.W_gate"][2], hf_state["l.1.experts.2.w1"].T)
    assert torch.equal(state["blocks.0.mlp.experts.1.W_out"], hf_state["l.0.experts.1.w2"].T)
    assert_same(table.to_hf(state), hf_state)


def test_one_tensor_for_two_parameters() -> None:
    natives = ("blocks.{i}.ln1.w", "blocks.{i}.ln2.w")
    table = table_of([Map("l.{i}.ln", natives, "m", copies=True)])
    hf_state = {f"l.{i}.ln": torch.randn(12) for i in range(2)}
    state = dict(table.to_native(Source(hf_state)))
    first, second = state["blocks.0.ln1.w"], state["blocks.0.ln2.w"]
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    assert_same(table.to_hf(state), hf_state)
    second += 1
    with pytest.raises(ValueError, match=r"blocks\.0\.ln1\.w and blocks\.0\.ln2\.w are one tensor"):
        table.to_hf(state)


def test_shapes_from_patterns() -> None:
    sizes = {"n": 2, "h": 3, "m": 5}
    assert shape_of("(n h) m", sizes) == (6, 5)
    assert shape_of("n 1 (1 m)", sizes) == (2, 1, 5)


def test_a_family_inherits_by_replacing_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2 = Llama with biases on three projections: what a later family file looks like."""
    attn = "model.layers.{i}.self_attn."

    def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Any]:
        return override(
            llama.rows(cfg, reading),
            Map(f"{attn}q_proj.bias", "blocks.{i}.attn.b_Q", "(n h) -> n h"),
            Map(f"{attn}k_proj.bias", "blocks.{i}.attn._b_K", "(k h) -> k h"),
            Map(f"{attn}v_proj.bias", "blocks.{i}.attn._b_V", "(k h) -> k h"),
        )

    cosmetic = dict.fromkeys(("use_sliding_window", "max_window_layers", "layer_types"), "a toy")
    qwen2 = dataclasses.replace(
        llama.LLAMA, model_type="qwen2", hf_class="Qwen2ForCausalLM", rows=rows, cosmetic=cosmetic
    )
    monkeypatch.setattr(weights_conversion, "_REGISTRY", {"llama": llama.LLAMA})
    with pytest.raises(ValueError, match="'qwen2' is not supported"):
        architecture_for({"model_type": "qwen2"})
    register_architecture("qwen2", qwen2)
    from transformers import Qwen2Config

    sizes = {k: v for k, v in tiny.LLAMA.items() if k != "head_dim"}
    hf_model = tiny.from_config(Qwen2Config(**{**sizes, "num_key_value_heads": 2}))
    cfg, table = understand(hf_model.config.to_dict())
    assert cfg.original_architecture == "Qwen2ForCausalLM"
    hf_state = dict(hf_model.state_dict())
    state = to_native(table, hf_state)
    assert state["blocks.0.attn.b_Q"].any()
    assert_same(table.to_hf(state), hf_state)


def test_rows_can_be_dropped() -> None:
    cfg, table = understand(tiny.config("llama").to_dict())
    rows = llama.rows(cfg, Reading({}))
    fewer = without(rows, "blocks.{i}.ln1.w", "blocks.{i}.ln2.w")
    assert len(rows) - len(fewer) == 2


# --- config fields ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_configs_round_trip(name: str) -> None:
    hf_config = tiny.config(name).to_dict()
    cfg, table = understand(hf_config)
    state = {n: torch.ones(1) for placed in table.maps for n in placed.native}

    def needs(native: str) -> bool:
        return native.replace("{i}", "0") in state

    assert export_config(cfg, needs, hf_config)[1] == hf_config  # unchanged: the original
    # from our config alone; which family writes it is its class, as several can say the same
    architecture, written = export_config(cfg, needs)
    assert architecture.model_type == hf_config["model_type"]
    again, table_again = understand(json.loads(json.dumps(written)))
    assert not differences(cfg, again)
    assert not differences(again, cfg)
    assert table_again.zeros == table.zeros
    from transformers import CONFIG_MAPPING  # and Hugging Face's class reads it too

    theirs = CONFIG_MAPPING[hf_config["model_type"]](**written).to_dict()
    assert not differences(understand(theirs)[0], cfg)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_field_of_the_hf_config_is_accounted_for(name: str) -> None:
    """Read, or listed as cosmetic with a reason: none passes by being a default."""
    hf_config = tiny.config(name).to_dict()
    architecture = architecture_for(hf_config)
    reading = architecture.reading(hf_config)
    architecture.read(reading)
    unread = set(hf_config) - reading.was_read - set(COSMETIC) - set(architecture.cosmetic)
    assert unread == {"is_encoder_decoder"} - reading.was_read


# Fields that are read but say nothing by themselves.
NAMES_ONLY = {"architectures", "model_type"}
FLIPPED: dict[str, Any] = {
    "activation_function": "relu",
    "hidden_act": "relu",
    "add_cross_attention": True,
    "pruned_heads": {"0": [1]},
    "rope_interleaved": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    "rope_scaling": {"type": "linear", "factor": 3.0},
    "rope_theta": 7.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 7,
}


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_yarn"])
def test_flipping_a_field_changes_the_model_or_is_refused(name: str) -> None:
    hf_config = tiny.config(name).to_dict()
    cfg, table = understand(hf_config)
    architecture = architecture_for(hf_config)
    reading = architecture.reading(hf_config)
    architecture.read(reading)
    for field in sorted(reading.was_read - NAMES_ONLY):
        value = reading.config.get(field)
        changed = dict(hf_config)
        if field in ("rope_theta", "partial_rotary_factor"):  # only where the dict is silent
            changed["rope_parameters"] = {"rope_type": "default"}
        if field == "original_max_position_embeddings" and name != "llama_yarn":
            continue
        if field == "n_ctx":  # the fallback for a config without n_positions
            del changed["n_positions"]
        flipped = FLIPPED.get(field)
        if flipped is None:
            flipped = (not value) if isinstance(value, bool) else 2 * (value or 8)
        changed[field] = flipped
        try:
            new_cfg, new_table = understand(changed)
        except ValueError as refusal:
            said = str(refusal)
            if field in said or "n_head" in said or "n_key_value_heads" in said:
                continue
            raise
        assert (
            differences(cfg, new_cfg)
            or new_table.zeros != table.zeros
            or cfg.n_ctx != new_cfg.n_ctx
        ), field


def test_a_field_that_transformers_has_not_either_is_ignored_and_said() -> None:
    hf_config = tiny.config("llama").to_dict()
    for name, value in {"attention_multiplier": 0.1, "blub": ["x"]}.items():
        with pytest.warns(UserWarning, match=f"config.json has fields that neither .*{name}="):
            understand({**hf_config, name: value})
    understand({**hf_config, "use_qk_norm": False, "sliding_window": None, "extra": []})


def test_an_unknown_field_of_a_type_transformers_has_not_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hf_config = tiny.config("llama").to_dict()
    monkeypatch.setattr("transformers.CONFIG_MAPPING", {})
    with pytest.raises(ValueError, match=r"config.json has fields .*new_field=3.*pass hf_config="):
        understand({**hf_config, "new_field": 3})


def test_a_field_of_the_hf_class_may_hold_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_config = {**tiny.config("llama").to_dict(), "new_field": 3}
    monkeypatch.setattr("weights_conversion.fields.hf_class_defaults", lambda t: {"new_field": 3})
    understand(hf_config)
    with pytest.raises(ValueError, match="new_field=None"):
        understand({**hf_config, "new_field": None})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True .*no cross-attention"),
    ("gpt2", {"activation_function": "gelu_nwe"}, "gelu_nwe.*Did you mean 'gelu_new'"),
    ("gpt2", {"activation_function": "tanh"}, "activation_function='tanh'"),
    ("gpt2", {"n_head": 5}, "n_embd=24 is not a multiple of n_head=5"),
    ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ("gpt2", {"layer_norm_epsilon": float("nan")}, "'layer_norm_epsilon' must be a finite number"),
    ("gpt2", {"layer_norm_epsilon": "1e-5"}, "'layer_norm_epsilon' must be a finite number"),
    ("gpt2", {"layer_norm_epsilon": -1.0}, "eps must be a positive number"),
    ("gpt2", {"vocab_size": -1}, "'vocab_size' must be a positive integer"),
    ("gpt2", {"n_layer": 2.5}, "'n_layer' must be a positive integer, got 2.5"),
    ("gpt2", {"n_layer": True}, "'n_layer' must be a positive integer"),
    ("gpt2", {"scale_attn_weights": "false"}, "'scale_attn_weights' must be true or false"),
    ("llama", {"hidden_size": None}, "has no 'hidden_size'"),
    ("llama", {"rms_norm_eps": float("inf")}, "'rms_norm_eps' must be a finite number"),
    ("llama", {"num_key_value_heads": 3}, "n_key_value_heads=3"),
    ("llama", {"hidden_act": 3}, "'hidden_act' must be a string"),
    ("llama", {"is_encoder_decoder": True}, "encoder-decoder"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
    ("llama", {"model_type": "lama"}, r"'lama' is not supported. Did you mean 'llama'.*'gpt2', "),
    ("llama", {"model_type": None}, "no model_type"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
    ("llama", {"architectures": 3}, "'architectures' must be a list of strings"),
    ("llama", {"rope_parameters": {"rope_type": [1]}}, r"unknown type \[1\]"),
    ("gpt_neox", {"num_attention_heads": 5}, "hidden_size=24 is not a multiple of num_attention_"),
    ("gptj", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gptj", {"rotary_dim": 10}, "rotary_dim=10 must be even and at most d_head=8"),
    ("codegen", {"n_head": 6}, "n_head=6 is not a multiple of 4"),
    ("gpt_neo", {"attention_types": [["global"]]}, "attention_types"),
    ("gpt_neo", {"attention_types": [[["global"], 2]], "attention_layers": None}, "2 entries for"),
    ("gpt_neo", {"attention_layers": ["local"] * 3}, "attention_layers=.* contradicts"),
    ("bloom", {"slow_but_exact": True}, "forgets two biases"),
    ("stablelm", {"head_dim": 5}, "head_dim=5"),
    ("persimmon", {"num_key_value_heads": 1}, "num_key_value_heads=1"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
    ("falcon_new", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn=3"),
    ("falcon_new", {"parallel_attn": False}, "parallel_attn=False"),
    ("falcon_multi_head", {"num_kv_heads": 2}, "num_kv_heads=2 needs new_decoder_architecture"),
    ("mpt", {"no_bias": False}, "no_bias=False"),
    ("mpt", {"expansion_ratio": 2}, "expansion_ratio=2"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type='rmsnorm'"),
    ("mpt", {"logit_scale": 0.5}, "logit_scale=0.5"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi=False"),
    ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "attn_config: alibi_bias_max=16"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln=True"),
    ("mpt", {"attn_config": {"sliding_window_size": 3}}, "attn_config has fields .*sliding_window"),
    ("ministral", {"layer_types": ["full_attention"] * 2}, "2 entries for 3 layers"),
    ("ministral", {"layer_types": ["chunked_attention"] * 3}, "may hold .*chunked_attention"),
    ("mistral", {"attention_bias": True}, "does not choose its biases"),
    ("gemma", {"use_bidirectional_attention": True}, "the mask of Hugging Face's class stays"),
    (
        "phimoe_longrope",
        {"rope_parameters": {"rope_type": "longrope", **tiny.LONG, "short_mscale": 1.3}},
        "short_mscale=1.3 and long_mscale=None go together",
    ),
    ("gemma2", {"use_bidirectional_attention": True}, "the mask of Hugging Face's class stays"),
    ("gemma", {"hidden_activation": "relu"}, "looks at hidden_act"),
    ("gemma3", {"attn_logit_softcapping": 5.0}, "does not apply it"),
    (
        "gemma3",
        {"rope_parameters": {"rope_type": "default"}},
        r"unknown layer types \['rope_type'\]",
    ),
    (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "scaled by other rules",
    ),
    ("gemma3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "overlooks .* 'rope_type'"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling must be a positive number"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is none of Phi-3's"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "some do not"),
    ("exaone4", {"layer_types": None, "sliding_window": None}, "which layers slide"),
    ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLG"}, "which layers slide"),
    ("helium", {"head_dim": 4}, r"must be hidden_size=24"),
    (
        "hunyuan_alpha",
        {"rope_scaling": {"type": "dynamic", "alpha": -1}},
        "alpha must be a positive",
    ),
    ("ministral3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "llama_4_scaling_beta"),
    (
        "ministral3",
        {"rope_scaling": {"type": "default", "llama_4_scaling_beta": 0.1}},
        "original_max_position_embeddings missing",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_configs_that_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        understand({**tiny.config(name).to_dict(), **change})


def test_the_smallest_raw_configs() -> None:
    """A config.json may leave out whatever has a default in Hugging Face's class."""
    cfg, _ = understand({"model_type": "gpt2", "n_layer": 2, "n_embd": 36, "n_head": 3})
    assert (cfg.d_mlp, cfg.d_vocab, cfg.n_ctx, cfg.act_fn) == (144, 50257, 1024, "gelu_new")
    assert cfg.tie_word_embeddings
    assert cfg.original_architecture == "GPT2LMHeadModel"
    raw = {name: value for name, value in tiny.LLAMA.items() if name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    )}  # fmt: skip
    cfg, _ = understand({"model_type": "llama", **raw})
    assert (cfg.eps, cfg.n_ctx, cfg.d_head, cfg.n_key_value_heads) == (1e-6, 2048, 6, None)
    assert (cfg.rotary_base, cfg.rotary_scaling, cfg.tie_word_embeddings) == (10000.0, None, False)
    from transformers import GPT2Config, LlamaConfig

    for theirs in (GPT2Config(), LlamaConfig()):
        assert not differences(
            understand({"model_type": theirs.model_type, **({} if theirs.model_type == "gpt2" else {
                "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
                "num_hidden_layers": 32, "num_attention_heads": 32})})[0],
            understand(theirs.to_dict())[0],
        )  # fmt: skip


def test_general_names_are_understood_in_gpt2() -> None:
    general = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3}
    cfg, _ = understand({"model_type": "gpt2", **general, "max_position_embeddings": 50})
    assert (cfg.d_model, cfg.n_layers, cfg.n_heads, cfg.n_ctx) == (36, 2, 3, 50)
    cfg, _ = understand({"model_type": "gpt2", "n_ctx": 99})
    assert cfg.n_ctx == 99
    cfg, _ = understand({"model_type": "gpt2", "n_ctx": 99, "n_positions": 50})
    assert cfg.n_ctx == 50


# --- rotary positions ---------------------------------------------------------------------------

LLAMA3 = {**tiny.LLAMA3, **tiny.ORIGINAL}
# transformers 4's spelling, with everything it may leave out left out
SCALINGS: list[dict[str, Any]] = [
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2},
    {"type": "dynamic", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 7},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **tiny.LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, **tiny.ORIGINAL},
    {"rope_type": "yarn", "factor": None, **tiny.ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": 2, **tiny.ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, **tiny.ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 0.9, **tiny.ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8, **tiny.ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, **tiny.YARN},
    {"rope_type": "yarn", "factor": 4.0, "truncate": None, **tiny.YARN},
    {"rope_type": "yarn", "factor": 4.0, "truncate": 1, **tiny.YARN},
    {"rope_type": "longrope", **tiny.LONG, **tiny.ORIGINAL},
    {"rope_type": "longrope", **tiny.LONG, "factor": 3.0},
    {"rope_type": "longrope", **tiny.LONG, **tiny.ORIGINAL, "attention_factor": 1.2},
]


@pytest.mark.parametrize("outer", [{}, {"original_max_position_embeddings": 12}])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_frequencies_are_hugging_faces(
    scaling: dict[str, Any], outer: dict[str, Any]
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = {**tiny.LLAMA, "rope_theta": 500.0, "rope_scaling": scaling, **outer}
    hf_config = LlamaConfig(**copy.deepcopy(raw))
    kind = hf_config.rope_parameters["rope_type"]
    cfg, _ = understand({"model_type": "llama", **raw})
    assert not differences(cfg, understand(hf_config.to_dict())[0])  # both spellings agree
    ours = cfg.rotary_spec("global")
    for length in (8, 100):
        theirs, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, "cpu", seq_len=length)
        lengths = torch.tensor([length]) if ours.scaling.varies_with_length else None
        found = ours.scaling.inverse_frequencies(ours.base, ours.dim, lengths)
        torch.testing.assert_close(found.reshape(-1), theirs, rtol=1e-6, atol=0)
        assert ours.scaling.attention_factor == pytest.approx(factor)


def test_the_two_spellings_of_the_base() -> None:
    cases = {
        "inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        "outside": {"rope_theta": 7.0},
        "both": {"rope_theta": 9.0, "rope_parameters": {"rope_theta": 7.0}},
        "old scaling": {"rope_theta": 7.0, "rope_scaling": {"type": "default"}},
        "empty": {"rope_theta": 7.0, "rope_scaling": None, "rope_parameters": None},
    }
    for name, fields in cases.items():
        found = rope(Reading(fields), d_head=8, max_positions=64)
        assert (found["rotary_base"], found["rotary_scaling"]) == (7.0, None), name


ROPE_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"rope_type": "yran", "factor": 2.0}}, "'yran'. Did you mean 'yarn'"),
    ({"rope_scaling": {"rope_type": "linear"}}, r"\['factor'\] missing"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    (
        {"rope_scaling": {"rope_type": "linear", "factr": 2.0, "factor": 1.0}},
        "Did you mean 'factor'",
    ),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
    ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor must be a finite"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor must be a finite number"),
    ({"rope_scaling": "linear"}, "'rope_scaling' must be a JSON object"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ({"rope_theta": float("nan")}, "'rope_theta' must be a finite number"),
    ({"rope_theta": 0}, "rotary_base must be a positive number"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor has 1 entries",
    ),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}},
        "short_factor must be a list",
    ),
    (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1.5}},
        "original_max_position_embeddings must be a positive integer",
    ),
]


@pytest.mark.parametrize(("change", "message"), ROPE_REFUSED)
def test_rotary_parameters_that_are_refused(change: dict[str, Any], message: str) -> None:
    raw = {"model_type": "llama", **tiny.LLAMA}
    with pytest.raises(ValueError, match=message):
        understand({**raw, **change})


def test_partial_rotation_for_families_that_have_it() -> None:
    for fields in (
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
    ):
        assert rope(Reading(fields), 8, 64, partial=1.0)["rotary_dim"] == 4


# --- writing configs ----------------------------------------------------------------------------


def no_biases(name: str) -> bool:
    return False


def test_a_changed_context_keeps_every_angle() -> None:
    for name in ("llama_dynamic", "llama_llama3", "llama_yarn", "llama_longrope"):
        hf_config = tiny.config(name).to_dict()
        cfg, _ = understand(hf_config)
        cfg.n_ctx = 300
        _, written = export_config(cfg, no_biases, hf_config)
        again, _ = understand(written)
        assert not differences(cfg, again)
        assert again.n_ctx == (16 if name == "llama_dynamic" else 300)
        assert written["rms_norm_eps"] == hf_config["rms_norm_eps"]
        assert written["eos_token_id"] == hf_config["eos_token_id"]  # the rest stays


def test_defaults_of_the_original_length_survive_a_changed_context() -> None:
    raw = {"model_type": "llama", **tiny.LLAMA, "rope_scaling": {"type": "yarn", "factor": None}}
    cfg, _ = understand(raw)
    scaling = scaling_from_dict(cfg.rotary_scaling, 8)
    cfg.n_ctx = 500
    again, _ = understand(export_config(cfg, no_biases, raw)[1])
    assert again.rotary_spec("global").scaling == scaling
    assert again.n_ctx == 500


def test_fewer_layers_are_written_down() -> None:
    hf_config = tiny.config("gpt2").to_dict()
    cfg, _ = understand(hf_config)
    _, written = export_config(first_layers(cfg, 2), no_biases, hf_config)
    assert {k: v for k, v in written.items() if hf_config.get(k) != v} == {"n_layer": 2}


def test_an_attention_bias_that_was_there_stays() -> None:
    hf_config = tiny.config("llama_attention_bias").to_dict()
    cfg, _ = understand(hf_config)
    _, written = export_config(first_layers(cfg, 2), no_biases, hf_config)
    assert written["attention_bias"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_scores_soft_cap": 5.0}, r"softcap=5\.0"),
        ({"parallel_attn_mlp": True}, "parallel=True"),
        ({"act_fn": "solu"}, "act_fn='solu'"),
        ({"positional_embedding_type": "alibi"}, "alibi"),
        ({"attn_only": True}, "attn_only"),
        ({"normalization_type": "RMS"}, "norm"),
        ({"attn_scale": 3.0}, "scale"),
        ({"d_vocab_out": 7}, "d_vocab_out=7"),
        ({"logit_scale": 2.0}, r"logit_scale=2\.0"),
        ({"n_heads": 3}, "n_embd=8 is not a multiple of n_head=3"),
    ],
)
def test_what_no_hf_config_can_say_is_refused(change: dict[str, Any], message: str) -> None:
    sizes = {"n_layers": 1, "d_model": 8, "d_head": 4, "n_ctx": 8, "d_vocab": 5, "device": "cpu"}
    plain = HookedTransformerConfig(**{**sizes, "act_fn": "gelu_new"})
    assert export_config(plain, no_biases)[0].model_type == "gpt2"
    with pytest.raises(ValueError, match="no Hugging Face config describes .*") as error:
        export_config(dataclasses.replace(plain, **change), no_biases)
    assert message.replace("\\", "") in str(error.value)


def test_classic_rope_flags_are_exported() -> None:
    sizes = {"n_layers": 1, "d_model": 8, "d_head": 4, "n_ctx": 8, "d_vocab": 5, "device": "cpu"}
    kinds = {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu", "n_heads": 2,
             "n_key_value_heads": 2, "positional_embedding_type": "rotary"}  # fmt: skip
    flags = {"use_NTK_by_parts_rope": True, "NTK_by_parts_factor": 32.0, "NTK_original_ctx_len": 4}
    architecture, written = export_config(
        HookedTransformerConfig(**sizes, **kinds, **flags), no_biases
    )
    assert architecture.hf_class == "LlamaForCausalLM"
    assert written["rope_scaling"]["rope_type"] == "llama3"
    assert written["rope_scaling"]["factor"] == 32.0


def test_tied_rows_are_part_of_the_public_names() -> None:
    public = [getattr(weights_conversion, name) for name in weights_conversion.__all__]
    assert all(any(row is each for each in public) for row in (Map, Tied, Zeros))
