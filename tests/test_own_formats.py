"""Checkpoints that are not Hugging Face's: this library's own, nanoGPT's and minGPT's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import native
import pytest
import tiny
import torch
from torch import Tensor

from transformer_lens_lite import HookedTransformer
from weights_conversion import architecture_for


def load(place: Any, **arguments: Any) -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing(place, device="cpu", **arguments)


# --- our own names --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", native.VARIANTS)
@torch.no_grad()
def test_any_model_is_written_and_read_in_our_own_names(name: str, tmp_path: Path) -> None:
    model, tokens = native.build(name), native.tokens()
    model.save_pretrained(tmp_path, native=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["d_model"] == model.cfg.d_model
    assert "model_type" not in config
    again = load(tmp_path)
    torch.testing.assert_close(again(tokens), model(tokens), atol=1e-5, rtol=0)
    own, theirs = model.state_dict(), again.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[n], theirs[n]) for n in own)
    changes = {"model_name": model.cfg.model_name, "init_weights": True, "device": "cpu"}
    assert dataclasses.replace(again.cfg, **changes) == dataclasses.replace(model.cfg, **changes)


@torch.no_grad()
def test_a_processed_model_remembers_what_was_done_to_it(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained("tiny-lens", device="cpu")
    with pytest.raises(ValueError, match="were processed"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, native=True)
    again = load(tmp_path)
    tokens = model.to_tokens("When Mary and John went to the store,")
    torch.testing.assert_close(again(tokens), model(tokens), atol=1e-5, rtol=0)
    assert torch.equal(again.to_tokens("When Mary and John went to the store,"), tokens)
    assert again.processed == model.processed
    assert again.cfg.normalization_type == "RMSPre"
    with pytest.raises(ValueError, match="were processed"):
        again.save_pretrained(tmp_path / "hf")
    assert load(tmp_path, dtype="bf16").W_E.dtype == torch.bfloat16
    few = load(tmp_path, first_n_layers=1)
    assert torch.equal(few(tokens, stop_at_layer=1), again(tokens, stop_at_layer=1))


def test_what_is_wrong_with_a_native_folder_is_named(tmp_path: Path) -> None:
    native.build().save_pretrained(tmp_path, native=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "d_modle": 3}))
    with pytest.raises(ValueError, match=r"config.json: .*no field 'd_modle'.*'d_model'"):
        load(tmp_path)
    path.write_text(json.dumps({**config, "gated_mlp": True}))
    with pytest.raises(ValueError, match="no row fills .*W_gate"):
        load(tmp_path)
    path.write_text(json.dumps({**config, "d_head": 5}))
    with pytest.raises(ValueError, match=r"(?s)config.json and its weights .*size mismatch"):
        load(tmp_path)
    path.write_text(json.dumps({**config, "n_layers": 1}))
    with pytest.raises(ValueError, match=r"safetensors holds blocks.1.* speaks of 1 layers"):
        load(tmp_path)


def test_zero_biases_stay_without_gradient(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained_no_processing("tiny-lens", device="cpu")
    model.save_pretrained(tmp_path, native=True)
    fixed = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert "blocks.0.mlp.b_in" in fixed
    assert fixed == {n for n, p in load(tmp_path).named_parameters() if not p.requires_grad}


# --- nanoGPT and minGPT ---------------------------------------------------------------------------

OUT_IN = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
ARGS = {"n_layer": 3, "n_head": 3, "n_embd": 24, "block_size": 40, "vocab_size": 61}


def as_linear(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-2's weights as nn.Linear keeps them."""
    return {n: t.T.contiguous() if n.endswith(OUT_IN) else t for n, t in state.items()}


@torch.no_grad()
def test_a_checkpoint_of_nanogpt(tmp_path: Path) -> None:
    hf_model = tiny.build("gpt2", n_inner=None, activation_function="gelu", layer_norm_epsilon=1e-5)
    state = as_linear(dict(hf_model.state_dict()))
    held = {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
        "model_args": {**ARGS, "bias": True, "dropout": 0.1},
        "optimizer": {"state": {}},
        "iter_num": 5,
    }
    torch.save(held, tmp_path / "ckpt.pt")
    tokens = tiny.tokens(hf_model.config)
    for place in (tmp_path, tmp_path / "ckpt.pt"):
        model = load(place)
        torch.testing.assert_close(model(tokens), hf_model(tokens).logits, atol=1e-4, rtol=0)
    exported = model.to_hf_state_dict()
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[n], t) for n, t in state.items())
    model.save_pretrained(tmp_path / "folder")
    assert torch.equal(load(tmp_path / "folder").W_E, model.W_E)


@torch.no_grad()
def test_a_checkpoint_of_nanogpt_without_biases(tmp_path: Path) -> None:
    hf_model = tiny.build("gpt2", n_inner=None, activation_function="gelu", layer_norm_epsilon=1e-5)
    for name, parameter in hf_model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
    state = {n: t for n, t in as_linear(dict(hf_model.state_dict())).items() if "bias" not in n}
    torch.save({"model": state, "model_args": {**ARGS, "bias": False}}, tmp_path / "ckpt.pt")
    model, tokens = load(tmp_path), tiny.tokens(hf_model.config)
    torch.testing.assert_close(model(tokens), hf_model(tokens).logits, atol=1e-4, rtol=0)
    assert model.to_hf_state_dict().keys() == state.keys()
    assert not model.blocks[0].attn.b_Q.requires_grad


@torch.no_grad()
def test_a_state_dict_of_mingpt_needs_its_sizes(tmp_path: Path) -> None:
    sizes = {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False}
    hf_model = tiny.build("gpt2", **sizes)
    state = as_linear(dict(hf_model.state_dict()))
    for layer in range(3):
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 40, 40).tril()
    path = tmp_path / "model.pt"
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"model.pt does not say what model .*'mingpt'"):
        load(path)
    model = load(path, hf_config={"model_type": "mingpt", **ARGS})
    tokens = tiny.tokens(hf_model.config)
    torch.testing.assert_close(model(tokens), hf_model(tokens).logits, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="n_head=5"):
        load(path, hf_config={"model_type": "mingpt", **ARGS, "n_head": 5})


def test_code_in_a_training_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (tmp_path / "went off",))  # type: ignore[return-value]

    torch.save({"model": {"x": Bomb()}, "model_args": ARGS}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="no code in it was run"):
        load(tmp_path / "ckpt.pt")
    assert not (tmp_path / "went off").exists()


# --- what cannot be represented -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported: it has state-space layers"),
        ({"model_type": "qwen3_next"}, "linear-attention layers .* nearest .* 'qwen3_moe'"),
        ({"model_type": "t5"}, "'t5' is not supported: it is an encoder-decoder"),
        ({"model_type": "made_up", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "chatglm"}, "it needs remote code. The nearest .* 'glm'"),
        ({"model_type": "own", "auto_map": {"AutoModel": "m.M"}}, "needs remote code"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantised .* dequantise"),
        ({"model_type": "qwen4"}, "'qwen4' is not supported. Did you mean 'qwen"),
    ],
)
def test_models_that_cannot_be_represented_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        architecture_for(config)
