"""Checkpoints on disk and in memory: same logits as Hugging Face, no copies, clear refusals."""

import copy
import dataclasses
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from transformer_lens_lite import loading, saving
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.loading import load_pretrained
from transformer_lens_lite.model import HookedTransformer
from transformer_lens_lite.saving import save_pretrained, to_hf_state_dict

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(source: Any = None, **kwargs: Any) -> HookedTransformer:
    if isinstance(source, torch.nn.Module):
        source, kwargs = None, {"hf_model": source, **kwargs}
    return load_pretrained(HookedTransformer, source, device="cpu", **kwargs)


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def needs_n_ctx(name: str) -> dict[str, int]:
    """Dynamic scaling only shows beyond the checkpoint's own context length."""
    return {"n_ctx": 64} if name == "llama_dynamic" else {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama saved by Hugging Face."""
    tiny.build("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny.build("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    return tmp_path / "sharded"


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- the same numbers ---------------------------------------------------------------------------


# of every family the first, of the two that are the parents of all, each
SOME = [
    name
    for name, (family, _) in tiny.VARIANTS.items()
    if family in ("gpt2", "llama") or tiny.FIRST_VARIANTS[family] == name
]


@pytest.mark.parametrize("name", SOME)
def test_logits_equal_hugging_face(name: str, tmp_path: Path) -> None:
    """From memory, written to disk, and back: in our class and in Hugging Face's."""
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    wanted = logits(hf_model, tokens)
    assert wanted.std() > 0.5
    model = load(hf_model, **needs_n_ctx(name))
    assert_close(logits(model, tokens), wanted)
    exported = to_hf_state_dict(model)
    in_files = tiny.file_state(hf_model)
    assert set(exported) == set(in_files)
    assert all(torch.equal(exported[n], t) for n, t in in_files.items())
    save_pretrained(model, tmp_path)
    assert torch.equal(logits(tiny.read(tmp_path), tokens), wanted)
    again = load(tmp_path, **needs_n_ctx(name))
    # memory from a file is aligned differently, and so rounded differently by some kernels
    torch.testing.assert_close(logits(again, tokens), logits(model, tokens), atol=1e-5, rtol=0)


# Every behavioural field of our config that these families set, with another value.
MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"eps": 1e-5}),
    ("gpt2", {"act_fn": "gelu"}),
    ("gpt2", {"act_fn": "gelu_fast", "eps": 1e-5}),
    ("gpt2", {"use_attn_scale": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"parallel_attn_mlp": True}),
    ("gpt2", {"attention_dir": "bidirectional"}),
    ("llama", {"eps": 1e-6}),
    ("llama", {"act_fn": "gelu"}),
    ("llama", {"rotary_base": 500.0}),
    ("llama", {"rotary_dim": 4}),
    ("llama", {"rotary_adjacent_pairs": True}),
    ("llama", {"attn_scale": 2.0}),
    ("llama_linear", {"rotary_scaling": None}),
    ("llama_linear", {"rotary_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("llama_llama3", {"rotary_scaling": None}),
    ("llama_llama3", {"rotary_scaling": {
        "rope_type": "llama3", **tiny.LLAMA3, "factor": 32.0, **tiny.ORIGINAL}}),
    ("llama_llama3", {"rotary_scaling": {
        "rope_type": "llama3", **tiny.LLAMA3, "original_max_position_embeddings": 64}}),
    ("llama_dynamic", {"rotary_scaling": None}),
    ("llama_dynamic", {"rotary_scaling": {
        "rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}}),
    ("llama_yarn", {"rotary_scaling": None}),
    ("llama_yarn", {"rotary_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                                       **tiny.ORIGINAL}}),
    ("llama_yarn", {"rotary_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0,
                                       **tiny.ORIGINAL}}),
    ("llama_yarn_all", {"rotary_scaling": {"rope_type": "yarn", "factor": 4.0, **tiny.ORIGINAL}}),
    ("llama_longrope", {"rotary_scaling": None}),
    ("llama_longrope", {"rotary_scaling": {
        "rope_type": "longrope", **tiny.LONG, "factor": 1.0, **tiny.ORIGINAL}}),
    ("llama_longrope", {"rotary_scaling": {
        "rope_type": "longrope", **tiny.LONG, "factor": 4.0,
        "original_max_position_embeddings": 64}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), MUTATIONS)
def test_every_config_field_shows_in_the_logits(name: str, change: dict[str, Any]) -> None:
    """The parity test above would see each of these mistakes: they are above its tolerance."""
    hf_model = tiny.build(name)
    model = load(hf_model, **needs_n_ctx(name))
    mutant = HookedTransformer(dataclasses.replace(model.cfg, **change))
    mutant.load_state_dict(model.state_dict())
    tokens = tiny.tokens(hf_model.config)
    difference = (logits(mutant, tokens) - logits(hf_model, tokens)).abs().max()
    assert difference > 3 * TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "gpt2_untied", "llama_biases", "llama_tied"])
def test_every_tensor_shows_in_the_logits(name: str) -> None:
    hf_model = tiny.build(name)
    model = load(hf_model)
    tokens = tiny.tokens(hf_model.config, batch=1, length=9)
    wanted = logits(hf_model, tokens)
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    kinds = {name.split(".", 2)[-1] for name in kept}
    if name.startswith("gpt2"):
        kinds.remove("attn.b_K")  # without rotation softmax does not see a key bias
    for kind in sorted(kinds):
        for parameter_name in kept:
            parameter = model.get_parameter(parameter_name)
            with torch.no_grad():
                parameter.copy_(kept[parameter_name])
                if parameter_name.split(".", 2)[-1] == kind:
                    parameter.zero_()
        assert (logits(model, tokens) - wanted).abs().max() > 3 * TOLERANCE, kind


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["mingpt-nano-sort", "slm4096-gpt2-char", "stories260K"])
def test_trained_models(name: str, shared_dir: Path) -> None:
    folder = shared_dir / "models" / name
    model, hf_model = load(folder), tiny.read(folder)
    tokens = tiny.tokens(hf_model.config, length=min(model.cfg.n_ctx, 100))
    assert_close(logits(model, tokens), logits(hf_model, tokens))
    exported = to_hf_state_dict(model)
    assert all(torch.equal(exported[n], t) for n, t in hf_model.state_dict().items())


def test_the_model_in_the_box() -> None:
    if not (loading.BOXED["tiny-lens"] / "config.json").is_file():
        pytest.skip("tiny-lens has not been trained yet")
    model = load("tiny-lens")
    assert model.cfg.model_name == "tiny-lens"
    assert model.tokenizer is not None
    tokens = tiny.tokens(tiny.read(loading.BOXED["tiny-lens"]).config)
    assert_close(logits(model, tokens), logits(tiny.read(loading.BOXED["tiny-lens"]), tokens))


# --- what the model looks like ------------------------------------------------------------------


def test_the_config_of_a_loaded_model(folder: Path) -> None:
    cfg = load(folder).cfg
    assert (cfg.n_layers, cfg.d_model, cfg.d_head, cfg.n_heads, cfg.d_mlp) == (3, 24, 8, 4, 38)
    assert (cfg.d_vocab, cfg.n_ctx, cfg.n_key_value_heads, cfg.eps) == (59, 64, None, 1e-3)
    assert (cfg.original_architecture, cfg.model_name) == ("LlamaForCausalLM", str(folder))
    assert (cfg.init_weights, cfg.dtype, cfg.default_prepend_bos) == (False, torch.float32, True)
    assert load(folder, default_prepend_bos=False).cfg.default_prepend_bos is False


def test_biases_that_are_not_in_the_checkpoint_are_zero_and_fixed() -> None:
    model = load(tiny.build("llama_attention_bias"))
    fixed = {n.rsplit(".")[-1] for n, p in model.named_parameters() if not p.requires_grad}
    assert fixed == {"b_in", "b_out", "b_U"}
    assert model.blocks[0].attn.b_Q.any()
    assert not model.blocks[0].mlp.b_out.any()


def test_a_tied_model_shares_one_tensor() -> None:
    for source in (tiny.build("llama_tied"), tiny.build("gpt2")):
        model = load(source)
        assert model.W_U.data_ptr() == model.W_E.data_ptr()
        n_weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert n_weights == sum(p.numel() for p in source.parameters())


def test_parameters_keep_the_checkpoints_layout(folder: Path) -> None:
    for model in (load(folder), load(folder, dtype="bfloat16"), load(tiny.build("llama"))):
        assert model.blocks[0].attn.W_Q.stride(1) == 1
        assert model.blocks[0].mlp.W_in.stride(0) == 1
        assert model.embed.W_E.is_contiguous()


def test_a_model_in_memory_stays_its_own() -> None:
    for name in ("gpt2", "llama_tied"):
        hf_model = tiny.build(name)
        before = copy.deepcopy(hf_model.state_dict())
        model = load(hf_model)
        theirs = {t.untyped_storage().data_ptr() for t in hf_model.state_dict().values()}
        assert not theirs & {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert all(torch.equal(t, before[n]) for n, t in hf_model.state_dict().items())


def test_editing_a_mapped_model_leaves_the_file_alone(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder)
    with torch.no_grad():
        model.W_E.add_(1)
    loss = model(tiny.tokens(tiny.config("llama")), return_type="loss")
    loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    assert (folder / "model.safetensors").read_bytes() == before


def test_dtypes(folder: Path, tmp_path: Path) -> None:
    tokens = tiny.tokens(tiny.config("llama"))
    half = load(folder, dtype="bf16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    cast = load(folder)
    cast.to(torch.bfloat16)
    assert torch.equal(logits(half, tokens), logits(cast, tokens))
    save_pretrained(half, tmp_path / "half")
    assert json.loads((tmp_path / "half/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert tiny.read(tmp_path / "half").dtype == torch.bfloat16
    wide = load(tmp_path / "half")  # a half-precision file in fp32
    assert wide.W_E.dtype == torch.float32
    assert torch.equal(wide.W_E, half.W_E.float())
    with pytest.raises(ValueError, match="unknown dtype"):
        load(folder, dtype="int3")


def test_report_133_a_context_of_another_length(folder: Path, tmp_path: Path) -> None:
    tokens = tiny.tokens(tiny.config("llama"), length=100)
    longer = load(folder, n_ctx=128)
    assert_close(logits(longer, tokens), logits(tiny.read(folder), tokens))
    save_pretrained(longer, tmp_path / "longer")
    assert load(tmp_path / "longer").cfg.n_ctx == 128
    hf_model = tiny.build("gpt2")
    shorter = load(hf_model, n_ctx=17)
    tokens = tiny.tokens(hf_model.config, length=17)
    assert_close(logits(shorter, tokens), logits(hf_model, tokens))
    assert shorter.W_pos.shape == (17, 24)
    save_pretrained(shorter, tmp_path / "shorter")
    assert_close(logits(tiny.read(tmp_path / "shorter"), tokens), logits(hf_model, tokens))
    with pytest.raises(ValueError, match="n_ctx=41, but the checkpoint has learned positions"):
        load(hf_model, n_ctx=41)
    with pytest.raises(ValueError, match="n_ctx must be a positive integer"):
        load(hf_model, n_ctx=0)


@pytest.mark.parametrize("name", ["gpt2", "llama_yarn"])
def test_first_layers(name: str, tmp_path: Path) -> None:
    hf_model = tiny.build(name)
    model = load(hf_model, first_n_layers=2)
    tokens = tiny.tokens(hf_model.config)
    base = hf_model.transformer if name == "gpt2" else hf_model.model
    layers = "h" if name == "gpt2" else "layers"
    setattr(base, layers, getattr(base, layers)[:2])
    assert_close(logits(model, tokens), logits(hf_model, tokens))
    save_pretrained(model, tmp_path)
    assert_close(logits(tiny.read(tmp_path), tokens), logits(hf_model, tokens))
    with pytest.raises(ValueError, match="first_n_layers=4, but the model has 3 layers"):
        load(tiny.build(name), first_n_layers=4)


def test_only_the_first_layers_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = loading.FolderCheckpoint.read
    monkeypatch.setattr(
        loading.FolderCheckpoint,
        "read",
        lambda self, name: (read.append(name), original(self, name))[1],
    )
    load(folder, first_n_layers=1)
    assert len(read) == len(set(read)) == 12
    assert not [name for name in read if "layers.1" in name]


# --- files --------------------------------------------------------------------------------------


def test_shards(sharded: Path, tmp_path: Path) -> None:
    tokens = tiny.tokens(tiny.config("llama"))
    wanted = logits(tiny.build("llama"), tokens)
    model = load(sharded)
    assert_close(logits(model, tokens), wanted)
    save_pretrained(model, tmp_path / "out", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(tiny.read(tmp_path / "out"), tokens), wanted)
    save_pretrained(model, tmp_path / "out")  # a whole file over shards: none of them is left
    weights = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert weights == ["config.json", "model.safetensors"]


def as_bin(folder: Path, **kwargs: Any) -> Path:
    """Replace the safetensors file by what older transformers wrote."""
    state = dict(tiny.read(folder).state_dict())
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin", **kwargs)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_pickled_weights(name: str, zipped: bool, tmp_path: Path) -> None:
    hf_model = tiny.build(name)
    hf_model.save_pretrained(tmp_path)
    as_bin(tmp_path, _use_new_zipfile_serialization=zipped)
    tokens = tiny.tokens(hf_model.config)
    assert_close(logits(load(tmp_path), tokens), logits(hf_model, tokens))


def test_pickled_shards(folder: Path) -> None:
    state = dict(tiny.read(folder).state_dict())
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    shards = {"pytorch_model-1.bin": names[:7], "pytorch_model-2.bin": names[7:]}
    for file, inside in shards.items():
        torch.save({name: state[name] for name in inside}, folder / file)
    weight_map = {name: file for file, inside in shards.items() for name in inside}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = load(folder)
    assert torch.equal(model.W_E, state["model.embed_tokens.weight"])


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch EXPLODED",)


def test_a_pickle_bomb_does_not_go_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").unlink()
    for write in (
        lambda file: torch.save({"model.norm.weight": Bomb()}, file),
        lambda file: file.write_bytes(pickle.dumps({"model.norm.weight": Bomb()})),
    ):
        write(folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin .* no code in it was run"):
            load(folder)
    assert not (folder / "EXPLODED").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_a_tensor_named_twice_is_refused(folder: Path) -> None:
    """JSON allows it, and every reader takes one of the two."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].decode().rstrip()
    name, place = next(iter(json.loads(header).items()))
    if name == "__metadata__":
        name, place = list(json.loads(header).items())[1]
    header = f'{{"{name}": {json.dumps(place)}, {header[1:]}'
    header += " " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data[8 + length :])
    with pytest.raises(ValueError, match=rf"model\.safetensors: its header has '{name}' twice"):
        load(folder)


def test_damaged_files_are_named(folder: Path, sharded: Path) -> None:
    truncate(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load(folder)
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    truncate(shard)
    with pytest.raises(ValueError, match=f"{shard.name} is not a whole safetensors file"):
        load(sharded)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"is in {shard.name}: no such file"):
        load(sharded)


def test_a_truncated_bin_file_is_named(folder: Path) -> None:
    truncate(as_bin(folder) / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a file of plain tensors"):
        load(folder)
    torch.save([torch.ones(2)], folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin holds a list"):
        load(folder)
    torch.save(dict.fromkeys(tiny.build("llama").state_dict(), 3), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: cannot read .* is a int"):
        load(folder)


def test_an_index_that_lies(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    true = json.loads(index.read_text())
    files = sorted(set(true["weight_map"].values()))
    name = next(name for name, file in true["weight_map"].items() if file == files[0])
    for wrong, message in (
        ({**true["weight_map"], name: files[1]}, f"disagree: {name} is in the"),
        ({**true["weight_map"], "extra": files[0]}, "extra is in the index only"),
        (
            {n: f for n, f in true["weight_map"].items() if n != name},
            f"{name} is in the shard only",
        ),
        ({**true["weight_map"], name: "../model.safetensors"}, "not a file name"),
        ({**true["weight_map"], name: 3}, "not a file name"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ValueError, match=message):
            load(sharded)


def test_a_tensor_that_two_shards_hold_is_named(sharded: Path) -> None:
    from safetensors.torch import load_file, save_file

    first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{second.name} disagree: {name} is in the shard only"):
        load(sharded)


def test_a_config_that_lies(folder: Path) -> None:
    config = folder / "config.json"
    true = config.read_text()
    for change, message in (
        ({"hidden_size": 28}, r"model\.safetensors: .* has shape"),
        ({"num_hidden_layers": 2}, r"no place for model\.layers\.2"),
        ({"num_hidden_layers": 4}, r"missing model\.layers\.3"),
        ({"num_hidden_layers": 10**12}, "speaks of 1000000000000 layers"),
        ({"intermediate_size": 10**15}, r"gate_proj.* has shape"),
        ({"tie_word_embeddings": True}, "lm_head.weight .* differs from model.embed_tokens.weight"),
        ({"rms_norm_eps": float("nan")}, r"config\.json: 'rms_norm_eps' must be a finite number"),
        ({"model_type": "gpt2"}, r"config\.json"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "factor must be positive"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "angles that are no numb"),
        ({"attention_bias": True}, r"missing model\.layers\.0\.self_attn\.q_proj\.bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ):
        config.write_text(true)
        edit_json(config, **change)
        with pytest.raises(ValueError, match=message):
            load(folder)
    for text, message in (
        ("{", r"config\.json is not valid JSON"),
        ("", r"config\.json is not valid JSON"),
        ("[1]", r"config\.json holds a list"),
        ("[" * 100_000, r"config\.json is not valid JSON"),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=message):
            load(folder)
    config.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load(folder)
    config.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load(folder)


def rewrite(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_tensors_that_are_wrong(folder: Path) -> None:
    from safetensors.torch import load_file

    whole = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    for change, message in (
        (lambda t: t.pop(name), f"missing {name}"),
        (lambda t: t.update({name: t[name].T.contiguous()[:5]}), rf"safetensors: {name} has shape"),
        (lambda t: t.update({name: t[name].to(torch.int8)}), f"{name} is torch.int8; quantised"),
        (lambda t: t.update(extra=torch.ones(1)), "no place for extra"),
    ):
        shutil.copy(folder / "model.safetensors", folder / "kept")
        rewrite(folder, change)
        with pytest.raises(ValueError, match=message):
            load(folder)
        os.replace(folder / "kept", folder / "model.safetensors")
    assert torch.equal(
        load(folder).blocks[1].attn.W_V.flatten(), whole[name].view(4, 8, 24).mT.flatten()
    )


def test_folders_that_are_not_models(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"\./nowhere does not exist"):
        load("./nowhere")
    with pytest.raises(FileNotFoundError, match="is a file; give its folder"):
        load(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has none of model\.safetensors"):
        load(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="PEFT adapter"):
        load(folder)
    with pytest.raises(ValueError, match="give the name or the folder"):
        load()


def test_a_corrected_config_can_be_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "weights_conversion.fields.hf_class_defaults", lambda model_type: {"harmless_field": 0}
    )
    edit_json(folder / "config.json", harmless_field=3)
    with pytest.raises(ValueError, match=r"harmless_field=3.*pass hf_config="):
        load(folder)
    tokens = tiny.tokens(tiny.config("llama"))
    right = tiny.config("llama")
    for hf_config in (right, right.to_dict()):
        model = load(folder, hf_config=hf_config)
        assert_close(logits(model, tokens), logits(tiny.build("llama"), tokens))


VISION = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
SEEING = {
    "gemma3": ("gemma3_linear", "siglip_vision_model", {"mm_tokens_per_image": 4}),
    "mistral3": ("ministral3", "pixtral", {"spatial_merge_size": 1}),
}


def seeing(kind: str) -> Any:
    """A model that sees images, around a language model of another family."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    name, vision, more = SEEING[kind]
    hf_config = CONFIG_MAPPING[kind](
        text_config=tiny.config(name).to_dict(),
        vision_config={"model_type": vision, **VISION},
        image_token_index=58,
        **more,
    )
    return tiny.loud(AutoModelForImageTextToText.from_config(hf_config))


@pytest.mark.parametrize("kind", SEEING)
def test_the_language_model_inside_one_that_sees(kind: str, tmp_path: Path) -> None:
    hf_model = seeing(kind)
    tokens = tiny.tokens(tiny.config("llama")) % 50
    wanted = logits(hf_model, tokens)
    assert_close(logits(load(hf_model), tokens), wanted)
    hf_model.save_pretrained(tmp_path / "whole")
    model = load(tmp_path / "whole")
    assert_close(logits(model, tokens), wanted)
    save_pretrained(model, tmp_path / "text")  # as the family that the language model is
    written = tiny.read(tmp_path / "text")
    assert written.config.model_type == tiny.VARIANTS[SEEING[kind][0]][0]
    assert_close(logits(written, tokens), wanted)
    rewrite(tmp_path / "whole", lambda t: t.update({"language_model.extra": torch.ones(1)}))
    with pytest.raises(ValueError, match="no place for extra"):
        load(tmp_path / "whole")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_report_136_quantised_weights_are_refused_by_name(dtype: torch.dtype) -> None:
    """By their dtype: not every library that quantises writes so into the config."""
    hf_model = tiny.build("llama")
    layer = hf_model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(torch.zeros(layer.weight.shape, dtype=dtype), False)
    message = rf"layers.1.mlp.up_proj.weight is {dtype}; quantised weights are not supported"
    with pytest.raises(ValueError, match=message):
        load(hf_model)
    hf_model = tiny.build("llama")
    hf_model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ValueError, match="quantization_config.*quantised weights are not supp"):
        load(hf_model)


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        hf_model = LlamaForCausalLM(tiny.config("llama"))
    with pytest.raises(ValueError, match="meta device"):
        load(hf_model)


# --- the hub ------------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket can be made, and no file asked for by name."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)


@pytest.mark.parametrize("named", [None, "somebody/what the hub has never seen"])
def test_report_127_a_model_in_memory_asks_nobody(named: str | None, no_network: None) -> None:
    """Neither its config, nor a tokenizer, nor a name from a list."""
    hf_model = tiny.build("llama_gqa")
    hf_model.config._name_or_path = named or ""
    model = HookedTransformer.from_pretrained(hf_model=hf_model, device="cpu")
    assert model.tokenizer is None
    tokens = tiny.tokens(hf_model.config)
    assert_close(logits(model, tokens).log_softmax(-1), logits(hf_model, tokens).log_softmax(-1))
    tokenizer = word_tokenizer()
    with_one = load(hf_model, tokenizer=tokenizer)
    assert with_one.to_tokens("a b", prepend_bos=False).tolist() == [[1, 2]]


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_report_127_a_folder_asks_nobody(
    with_tokenizer: bool, tmp_path: Path, no_network: None
) -> None:
    hf_model = tiny.build("llama_gqa")
    hf_model.save_pretrained(tmp_path / "of my own")
    if with_tokenizer:
        word_tokenizer().save_pretrained(tmp_path / "of my own")
    model = HookedTransformer.from_pretrained_no_processing(tmp_path / "of my own", device="cpu")
    tokens = tiny.tokens(hf_model.config)
    assert_close(logits(model, tokens), logits(hf_model, tokens))
    assert (model.tokenizer is not None) == with_tokenizer
    if with_tokenizer:
        assert model.to_tokens("a b", prepend_bos=False).tolist() == [[1, 2]]


def test_offline_names_say_so() -> None:
    with pytest.raises(FileNotFoundError) as error:
        load("somebody/some-model")
    message = str(error.value)
    assert "'somebody/some-model' is no folder here" in message
    assert "HF_HUB_OFFLINE is set, and it is not in the local cache" in message
    assert "tiny-lens" in message
    with pytest.raises(FileNotFoundError, match="the hub says"):
        load("not a valid name!")
    with pytest.raises(FileNotFoundError, match="local_files_only is set, and it is not in the"):
        HookedTransformer.from_pretrained("somebody/some-model", local_files_only=True)


def test_what_the_hub_answers_is_on_the_page_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, errors

    page = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()
    answers = [
        kind.__new__(kind)  # what they are made of differs between versions of the hub's package
        for kind in (
            errors.RepositoryNotFoundError,
            errors.GatedRepoError,
            errors.LocalEntryNotFoundError,
        )
    ]
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        for answer in answers:

            def refuse(*args: Any, answer: Exception = answer, **kwargs: Any) -> None:
                raise answer

            monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
            with pytest.raises(FileNotFoundError) as raised:
                load("some/model")
            assert f"| FileNotFoundError: {raised.value} |\n" in page
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(FileNotFoundError, match="Did you mean 'gpt2-small'"):
        load("gpt2-smal")
    with pytest.raises(FileNotFoundError) as raised:
        load("gpt2-small")  # a name that is right is not answered with others
    assert "Did you mean" not in str(raised.value)


@pytest.mark.parametrize("kind", ["whole", "shards", "bin"])
def test_only_the_needed_files_are_downloaded(
    kind: str, folder: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import EntryNotFoundError

    hub = sharded if kind == "shards" else as_bin(folder) if kind == "bin" else folder
    (hub / "README.md").write_text("not needed")
    cache = tmp_path / "cache"
    cache.mkdir()
    revisions = set()

    def fake_download(name: str, file: str, revision: str | None = None, **how: Any) -> str:
        assert name == "somebody/llama"
        assert how == {"token": "secret", "cache_dir": cache, "local_files_only": False}
        revisions.add(revision)
        if not (hub / file).is_file():
            raise EntryNotFoundError(f"404 {file}")
        return shutil.copy(hub / file, cache / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fake_download)
    asked: list[Any] = []

    class NoTokenizer:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> None:
            asked.append(options)

    monkeypatch.setattr("transformers.AutoTokenizer", NoTokenizer)
    how: dict[str, Any] = {"revision": "v2", "token": "secret", "cache_dir": cache}
    how |= {"device": "cpu", "attn_implementation": "eager"}
    load = HookedTransformer.from_pretrained_no_processing
    model = load("somebody/llama", **how)
    (options,) = asked
    assert options.pop("trust_remote_code") is False
    assert options == {
        "revision": "v2", "token": "secret", "cache_dir": cache, "local_files_only": False,
    }  # fmt: skip
    assert model.cfg.model_name == "somebody/llama"
    assert revisions == {"v2"}
    assert {p.name for p in cache.iterdir()} == {p.name for p in hub.iterdir()} - {
        "README.md",
        "generation_config.json",
    }
    for weights in (*hub.glob("*.safetensors"), *hub.glob("*.bin")):
        weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"the shard model-00001|has none of model\.safe"):
        load("somebody/llama", **how)


@pytest.mark.parametrize("name", ["GatedRepoError", "RepositoryNotFoundError"])
def test_what_the_hub_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    class Refusal(getattr(errors, name)):
        def __init__(self) -> None:
            Exception.__init__(self, "no")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise Refusal

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    wanted = {"GatedRepoError": "is gated: accept", "RepositoryNotFoundError": "no such model"}
    with pytest.raises(FileNotFoundError, match=wanted[name]):
        load("somebody/llama")


# --- tokenizers ---------------------------------------------------------------------------------


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<eos>")


def test_a_saved_tokenizer_still_adds_its_bos(folder: Path, tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import AutoTokenizer

    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 0)]
    )
    model = load(folder, tokenizer=tokenizer)
    save_pretrained(model, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("a") == [0, 1]
    assert tokenizer.encode("a") == [0, 1]


def test_a_bar_for_large_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(folder)
    assert not capsys.readouterr().err
    monkeypatch.setattr(loading, "_BAR_FROM_BYTES", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for processing in (None, {"fold_ln": True}):
        load(folder, processing=processing)
        bar = capsys.readouterr().err
        assert "loading weights" in bar
        assert "kB/" in bar or "B/s" in bar


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("processing", [None, {"fold_ln": True}])
def test_the_bar_ends_at_its_total(
    dtype: str, processing: dict[str, bool] | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the file, however they are delivered; the file's header is not one of them."""
    bars = []

    class Bar:
        def __init__(self, total: int) -> None:
            self.total, self.n = total, 0
            bars.append(self)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, n: int) -> None:
            self.n += n

    monkeypatch.setattr(loading, "_bar", Bar)
    load(folder, processing=processing, dtype=dtype)
    (bar,) = bars
    # processing counts the biases that a file leaves out, too
    assert 0.85 * bar.total < bar.n < 1.05 * bar.total


def test_tokenizers(folder: Path, tmp_path: Path) -> None:
    assert load(folder).tokenizer is None
    assert load(tiny.build("llama")).tokenizer is None
    assert load("no/such-tokenizer", hf_model=tiny.build("llama")).tokenizer is None
    word_tokenizer().save_pretrained(folder)
    model = load(folder)
    assert model.to_tokens("a b", prepend_bos=False).tolist() == [[1, 2]]
    assert load(folder, hf_model=tiny.build("llama")).tokenizer is not None
    given = load(tiny.build("llama"), tokenizer=word_tokenizer(), default_padding_side="left")
    assert given.tokenizer.padding_side == "left"
    save_pretrained(given, tmp_path / "out")
    assert load(tmp_path / "out").to_tokens("b", prepend_bos=False).tolist() == [[2]]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer files in .* cannot be read"):
        load(folder)
    assert load(folder, tokenizer=word_tokenizer()).tokenizer is not None


# --- saving -------------------------------------------------------------------------------------


def test_saving_over_the_files_the_weights_are_mapped_from(folder: Path) -> None:
    model = load(folder)
    with torch.no_grad():
        model.W_E.mul_(2)
    tokens = tiny.tokens(tiny.config("llama"))
    wanted = logits(model, tokens)
    save_pretrained(model, folder)
    assert torch.equal(logits(model, tokens), wanted)
    assert torch.equal(logits(load(folder), tokens), wanted)


def test_a_failed_save_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = load(folder)

    def full_disk(path: Path, value: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(saving, "_write_json", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_config_is_written_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "config.json", task_specific_params={"a": 1}, bos_token_id=7)
    save_pretrained(load(folder), tmp_path / "out")
    before = json.loads((folder / "config.json").read_text())
    after = json.loads((tmp_path / "out/config.json").read_text())
    del before["dtype"]
    assert after == {**before, "torch_dtype": "float32"}


def native(**changes: Any) -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 12, "d_head": 6, "n_ctx": 40, "d_vocab": 31, "d_mlp": 20}
    fields = {"act_fn": "gelu_new", "device": "cpu", "seed": 0, **sizes, **changes}
    model = HookedTransformer(HookedTransformerConfig(**fields))
    for name, parameter in model.named_parameters():
        if not name.endswith("b_U"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


LLAMA_LIKE = {
    "normalization_type": "RMS",
    "positional_embedding_type": "rotary",
    "gated_mlp": True,
    "act_fn": "silu",
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": True, "scale_attn_by_inverse_layer_idx": True}),
        ("llama", LLAMA_LIKE),
        ("llama", {**LLAMA_LIKE, "n_key_value_heads": 1, "gated_mlp_biases": True}),
        ("llama", {**LLAMA_LIKE, "n_key_value_heads": 2, "rotary_scaling_factor": 2.0}),
    ],
)
def test_a_model_made_here_becomes_a_hugging_face_model(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = native(**changes)
    if family == "llama":  # biases llama has no name for
        for block in model.blocks:
            torch.nn.init.zeros_(block.mlp.b_in)
            if not model.cfg.gated_mlp_biases:
                torch.nn.init.zeros_(block.mlp.b_out)
    save_pretrained(model, tmp_path)
    hf_model = tiny.read(tmp_path)
    assert hf_model.config.model_type == family
    tokens = tiny.tokens(hf_model.config)
    assert_close(logits(model, tokens), logits(hf_model, tokens))
    assert_close(logits(load(tmp_path), tokens), logits(hf_model, tokens))


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model = native()
    with torch.no_grad():
        model.b_U.add_(1)
    with pytest.raises(ValueError, match=r"unembed\.b_U has no place in a gpt2 checkpoint"):
        save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=r"softcap=5\.0"):
        save_pretrained(native(attn_scores_soft_cap=5.0), tmp_path)
    with pytest.raises(ValueError, match="fold_ln"):
        to_hf_state_dict(native(normalization_type="LNPre"))
    assert not list(tmp_path.iterdir())


def test_an_untied_model_is_saved_untied(tmp_path: Path) -> None:
    model = load(tiny.build("gpt2"))
    model.untie()
    with torch.no_grad():
        model.W_U.mul_(2)
    save_pretrained(model, tmp_path)
    hf_model = tiny.read(tmp_path)
    assert hf_model.config.tie_word_embeddings is False
    tokens = tiny.tokens(hf_model.config)
    assert_close(logits(hf_model, tokens), logits(model, tokens))


# --- around it ----------------------------------------------------------------------------------


def test_another_package_called_weights_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weights_conversion", type(sys)("weights_conversion"))
    with pytest.raises(ImportError, match="Another distribution or a local file of that name"):
        load(tiny.build("llama"))


MEMORY_SCRIPT = """
import gc, sys
import torch
torch.set_num_threads(1)
from transformer_lens_lite.model import HookedTransformer
from transformer_lens_lite.loading import load_pretrained

def megabytes(field):
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) for l in status if l.startswith(field + ":")) / 1024

def load(**kwargs):
    gc.collect()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # forget the peak so far
    before, anonymous = megabytes("VmRSS"), megabytes("RssAnon")
    model = load_pretrained(HookedTransformer, sys.argv[1], device="cpu", **kwargs)
    print(megabytes("VmHWM") - before, megabytes("RssAnon") - anonymous)
    return model

small = load(first_n_layers=0)  # imports what loading imports
if sys.argv[2:] == ["in memory"]:
    from transformers import AutoModelForCausalLM
    hf_model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    for parameter in hf_model.parameters():
        parameter.data = parameter.data.clone()  # its own, and not the file's
    for dtype in ("float32", "bfloat16"):
        model = load(hf_model=hf_model, dtype=dtype)
        del model
    sys.exit()
if len(sys.argv) > 2:
    load(processing={"fold_ln": True, "fold_value_biases": True}, dtype=sys.argv[2])
    sys.exit()
model = load()
with torch.no_grad():
    model(torch.zeros(1, 8, dtype=torch.long))
print(0, megabytes("RssAnon"))
del model
model = load(dtype="bfloat16")
del model
for _ in range(10):
    model = load()
    del model
gc.collect()
print(0, megabytes("RssAnon"))
model = load(processing={"fold_ln": True, "fold_value_biases": True})
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc"
)
def test_report_129_loading_holds_nothing_twice(tmp_path: Path) -> None:
    """200 MB of weights: mapped, not copied; converted one tensor at a time; nothing is kept."""
    from safetensors.torch import save_file

    wide = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 5, "head_dim": 64,
            "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 5000}  # fmt: skip
    config = tiny.config("llama", **wide)
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        shapes = LlamaForCausalLM(config).state_dict()
    weights = {name: torch.zeros(tensor.shape) for name, tensor in shapes.items()}
    size = sum(tensor.nbytes for tensor in weights.values()) / 2**20
    assert size > 190
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(tmp_path)

    def measured(*arguments: str, **environment: str) -> list[tuple[float, ...]]:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), *arguments],
            cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [tuple(map(float, line.split())) for line in done.stdout.splitlines()]

    rows = measured()
    *loads, (_, at_the_end), (folded_peak, _) = rows
    _, (peak, anonymous), (_, after_forward), (half_peak, half), *ten = loads
    assert half_peak < 1.15 * size / 2, rows
    assert folded_peak < 1.15 * size, rows
    assert peak < 20, rows
    assert anonymous < 5, rows
    assert half < size / 2 + 20, rows
    assert len(ten) == 10
    assert at_the_end < after_forward + 10, rows
    # Never the whole in its first form: beside the result there are some matrices of one layer in
    # fp32, of five here. What malloc keeps for later is not held: large blocks are given back.
    _, (both_peak, _) = measured("bfloat16", MALLOC_MMAP_THRESHOLD_="1000000")
    assert both_peak < size / 2 + 0.7 * size / 5, (size, both_peak)
    # A live model's tensors stay its own: there is one copy of each, and none in fp32 on the way.
    _, (copied_peak, copied), (half_peak, half) = measured("in memory")
    assert size <= copied <= copied_peak < 1.15 * size, (size, copied_peak)
    assert half <= half_peak < 1.15 * size / 2, (size, half_peak)


@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "gpt2_untied"])
def test_single_steps_of_processing_at_loading(name: str) -> None:
    """A tied model whose embedding no step changed stays tied."""
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    wanted = logits(hf_model, tokens).log_softmax(-1)
    off = dict.fromkeys(
        ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False
    )
    for step in off:
        flags = {**off, step: True}
        model = HookedTransformer.from_pretrained(hf_model=hf_model, device="cpu", **flags)
        torch.testing.assert_close(
            logits(model, tokens).log_softmax(-1), wanted, atol=TOLERANCE, rtol=0
        )
        if step == "fold_value_biases":
            assert model.cfg.tie_word_embeddings == hf_model.config.tie_word_embeddings


def test_the_config_follows_every_way_of_converting() -> None:
    for convert in (
        lambda model: model.half(),
        lambda model: model.bfloat16(),
        lambda model: torch.nn.Sequential(model).to(torch.float64),
    ):
        model = load("tiny-lens")
        convert(model)
        assert model.cfg.dtype == model.W_E.dtype != torch.float32
        assert len(model.generate("Mary", max_new_tokens=2, verbose=False)) > 4


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "qwen3_moe_some_dense"])
def test_first_layers_without_experts_are_exported(name: str, tmp_path: Path) -> None:
    hf_model = tiny.build(name)
    model = load(hf_model, first_n_layers=1)
    save_pretrained(model, tmp_path)
    tokens = tiny.tokens(hf_model.config, length=9)
    assert_close(logits(tiny.read(tmp_path), tokens), logits(model, tokens))


@pytest.mark.parametrize("field", ["norm_topk_prob", "rope_interleave"])
def test_null_is_false_where_hugging_face_reads_it_so(field: str) -> None:
    hf_model = tiny.build("deepseek_v3", **{field: None})
    tokens = tiny.tokens(hf_model.config)
    assert_close(logits(load(hf_model), tokens), logits(hf_model, tokens))
