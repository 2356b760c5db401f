"""The InternLMs that transformers has no class of: Llamas under other names, checked as such."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_hf_parity import assert_close, greedy, hf_greedy, hf_run
from torch import Tensor

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig
from transformer_lens_lite.loading import load_pretrained

CODE = {
    name: {"AutoConfig": f"configuration_{name}.C", "AutoModelForCausalLM": f"modeling_{name}.M"}
    for name in ("internlm", "internlm2", "internlm3")
}
SIZES = {
    "vocab_size": 59,
    "hidden_size": 24,
    "intermediate_size": 38,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}


def llama(bias: bool, **changes: Any) -> Any:
    """The same model as Hugging Face's Llama, whose heads are a quarter of the width here."""
    return tiny.build("llama", attention_bias=bias, head_dim=6, **changes)


def folder_of(kind: str, folder: Path, state: dict[str, Tensor], **config: Any) -> Path:
    """What is on the hub: a config that names code of its own, and tensors."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    full = {"model_type": kind, **SIZES, "auto_map": CODE[kind], **config}
    (folder / "config.json").write_text(json.dumps(full))
    return folder


def loaded(folder: Path, **arguments: Any) -> HookedTransformer:
    return load_pretrained(HookedTransformer, folder, device="cpu", **arguments)


def fused(state: dict[str, Tensor], n_kv: int, d_head: int = 6) -> dict[str, Tensor]:
    """Llama's tensors as InternLM 2 has them: for each key head its queries, then k, then v."""
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            parts = []
            q, k, v = (state[name.replace("q_proj", f"{x}_proj")] for x in "qkv")
            size = len(q) // n_kv
            for group in range(n_kv):
                parts.append(q[group * size : (group + 1) * size])
                parts += [x[group * d_head : (group + 1) * d_head] for x in (k, v)]
            result[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(parts)
            continue
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        result[name] = tensor
    return result


def check(folder: Path, hf_model: Any, tmp_path: Path, **arguments: Any) -> HookedTransformer:
    """Llama's logits and continuation; and written back, the same file to the last bit."""
    model, tokens = loaded(folder, **arguments), tiny.tokens(hf_model.config)
    assert_close(model(tokens), hf_run(hf_model, tokens).logits)
    if not arguments:
        assert torch.equal(greedy(model, tokens[:, :9]), hf_greedy(hf_model, tokens[:, :9]))
    model = loaded(folder)
    model.save_pretrained(tmp_path / "again")
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # the config written from ours alone, without the one it came from, says the same
    model.checkpoint_config = None
    model.save_pretrained(tmp_path / "anew")
    again = loaded(tmp_path / "anew", **arguments)
    assert again.cfg.original_architecture == model.cfg.original_architecture
    assert_close(again(tokens), hf_run(hf_model, tokens).logits)
    return model


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_internlm(bias: bool, tmp_path: Path) -> None:
    hf_model = llama(bias, max_position_embeddings=64)
    folder = folder_of("internlm", tmp_path / "hub", hf_model.state_dict(), bias=bias)
    model = check(folder, hf_model, tmp_path)
    assert bool(model.b_O.any()) is bias


@torch.no_grad()
def test_the_rotary_field_of_internlm(tmp_path: Path) -> None:
    length = {"max_position_embeddings": 16}
    dynamic = tiny.rope("dynamic", factor=1.5)
    hf_model = llama(True, **length, **dynamic)
    rotary = {"base": 500.0, "type": "dynamic", "scaling_factor": 1.5}
    state = hf_model.state_dict()
    folder = folder_of("internlm", tmp_path / "hub", state, rotary=rotary, **length)
    check(folder, hf_model, tmp_path, n_ctx=64)
    plain = llama(True, **tiny.rope("default"))
    rotary = {"base": 500.0, "type": "origin"}
    folder = folder_of("internlm", tmp_path / "plain", plain.state_dict(), rotary=rotary)
    check(folder, plain, tmp_path / "plain")
    for wrong in ({"type": "yarn"}, {"typ": "origin"}):
        config = {"model_type": "internlm", **SIZES, "rotary": wrong}
        with pytest.raises(ValueError, match="rotary may hold base, type"):
            loaded(folder, hf_config=config)


@pytest.mark.parametrize(("n_kv", "bias"), [(2, False), (2, True), (4, True), (1, False)])
@torch.no_grad()
def test_internlm2(n_kv: int, bias: bool, tmp_path: Path) -> None:
    changes = {"num_key_value_heads": n_kv}
    hf_model = llama(bias, **changes, **tiny.rope("linear", factor=2.5))
    scaling = {"type": "linear", "factor": 2.5}
    folder = folder_of(
        "internlm2", tmp_path / "hub", fused(hf_model.state_dict(), n_kv), bias=bias,
        rope_theta=500.0, rope_scaling=scaling, **changes,
    )  # fmt: skip
    model = check(folder, hf_model, tmp_path)
    assert model.cfg.n_key_value_heads == (None if n_kv == 4 else n_kv)


@pytest.mark.parametrize(("qkv_bias", "bias"), [(True, False), (False, True), (True, True)])
@torch.no_grad()
def test_internlm3_has_two_kinds_of_biases(qkv_bias: bool, bias: bool, tmp_path: Path) -> None:
    """Transformers' class refuses one without the other, so a Llama with zeros stands in."""
    hf_model = llama(True, mlp_bias=bias, num_key_value_heads=2)
    state = dict(hf_model.state_dict())
    for name, tensor in hf_model.state_dict().items():
        of_qkv, of_o = name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")), "o_proj.b"
        if (of_qkv and not qkv_bias) or (of_o in name and not bias):
            tensor.zero_()
            del state[name]
    kinds = {"qkv_bias": qkv_bias, "bias": bias, "num_key_value_heads": 2, "head_dim": 6}
    folder = folder_of("internlm3", tmp_path / "hub", state, **kinds,
                       architectures=["InternLM3ForCausalLM"], auto_map={
                           "AutoConfig": "configuration_internlm3.InternLM3Config",
                           "AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM",
                       })  # fmt: skip
    check(folder, hf_model, tmp_path)


def test_what_an_internlm_cannot_say_is_not_written(tmp_path: Path) -> None:
    cfg = {
        "n_layers": 1, "d_model": 12, "n_ctx": 16, "d_head": 6, "n_heads": 2, "d_mlp": 10,
        "d_vocab": 11, "act_fn": "silu", "gated_mlp": True, "normalization_type": "RMS",
        "positional_embedding_type": "rotary", "device": "cpu",
    }  # fmt: skip
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("InternLMForCausalLM", {"n_key_value_heads": 1}, "heads share nothing here"),
        (
            "InternLMForCausalLM",
            {"rotary_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope may be 'dynamic' or plain",
        ),
        ("InternLM2ForCausalLM", {"gated_mlp_biases": True}, "MLPs of this family have no biases"),
    ]
    for name, change, message in wrong:
        model = HookedTransformer(
            HookedTransformerConfig(**{**cfg, "original_architecture": name, **change})
        )
        with pytest.raises(ValueError, match=message):
            model.save_pretrained(tmp_path)
