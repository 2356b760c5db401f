"""Classic names in their classic places, and the library under the name transformer_lens."""

import importlib
import importlib.metadata
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import native
import pytest
import torch

import transformer_lens_lite
from transformer_lens_lite import HookedTransformer, HookedTransformerConfig
from transformer_lens_lite.compat import install_as_transformer_lens, uninstall
from transformer_lens_lite.compat.configs import get_pretrained_model_config
from transformer_lens_lite.compat.modules import OWN_FILES
from transformer_lens_lite.compat.names import HOME, MODULES, NOT_OFFERED, TOP
from transformer_lens_lite.loading import on_the_hub
from transformer_lens_lite.model_names import (
    MODEL_ALIASES,
    OFFICIAL_MODEL_NAMES,
    get_checkpoint_labels,
    get_official_model_name,
    hub_name,
)

# files of ours have their own contents; the classic names they lack are in other modules too
NOT_IN_OUR_FILES = {("config", "TransformerLensConfig")} | {
    ("loading", name) for name in MODULES["loading"].split()
}
CLASSES = ("HookedTransformer", "HookedTransformerConfig", "ActivationCache", "FactoredMatrix")


@pytest.fixture
def installed() -> Iterator[None]:
    install_as_transformer_lens()
    yield
    uninstall()


def offered() -> list[tuple[str, str]]:
    return [(module, name) for module, names in MODULES.items() for name in names.split()]


# --- our own name ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name"), offered())
def test_classic_modules_have_their_names(module: str, name: str, installed: None) -> None:
    theirs = importlib.import_module(f"transformer_lens.{module}")
    if name == "*":
        assert "get_act_name" in dir(theirs) or "generic_activation_patch" in dir(theirs)
        return
    classic = getattr(theirs, name)
    if (module, name) not in NOT_IN_OUR_FILES:
        ours = importlib.import_module(f"transformer_lens_lite.{module}")
        own = getattr(ours, name)
        # the files of components hold the classes as a model builds them
        assert own is classic or (module in OWN_FILES and own in classic.__bases__)
    assert name in dir(theirs)
    assert name in theirs.__all__


def test_classic_modules_lie_somewhere(installed: None) -> None:
    for name in ("transformer_lens", "transformer_lens.utils"):
        assert Path(importlib.import_module(name).__file__ or "").is_file()


@pytest.mark.parametrize("name", sorted(HOME))
def test_every_classic_name_is_in_the_package(name: str) -> None:
    assert getattr(transformer_lens_lite, name) is not None or name == "USE_DEFAULT_VALUE"


def test_every_name_of_the_table_has_a_home() -> None:
    named = {name for _, name in offered()} - {"*"} | set(TOP.split())
    assert named <= set(HOME)


@pytest.mark.parametrize("package", ["transformer_lens", "transformer_lens_lite"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_and_a_module_of_one_name(package: str, name: str, installed: None) -> None:
    source = f"""
import {package}
before = {package}.{name}
import {package}.{name}
from {package}.{name} import {name}
assert {package}.{name} is before is {name}, {package}.{name}
assert isinstance({name}, type)
"""
    exec(source, {})
    module = importlib.import_module(f"{package}.{name}")
    assert getattr(module, name) is getattr(transformer_lens_lite, name)


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'HookedTransformer'"):
        transformer_lens_lite.HookedTransformr  # noqa: B018
    with pytest.raises(AttributeError, match=r"HookedEncoder is not offered.*from_pretrained"):
        transformer_lens_lite.HookedEncoder  # noqa: B018
    assert not hasattr(transformer_lens_lite, "TransformerBridge")


# --- as transformer_lens --------------------------------------------------------------------------


def test_imports_resolve_to_ours(installed: None) -> None:
    import transformer_lens  # type: ignore[import-not-found]
    import transformer_lens.utils as utils
    from transformer_lens import HookedTransformer as Classic
    from transformer_lens import patching
    from transformer_lens.hook_points import HookPoint

    assert Classic is HookedTransformer
    assert HookPoint is transformer_lens_lite.HookPoint
    assert utils.get_act_name("q", 1) == "blocks.1.attn.hook_q"
    assert transformer_lens.utils is utils
    assert transformer_lens.CaptureSpec is transformer_lens_lite.CaptureSpec  # ours come along
    assert patching.get_act_patch_resid_pre
    space: dict[str, object] = {}
    exec("from transformer_lens.utils import *", space)
    assert space["get_corner"] is transformer_lens_lite.get_corner


def test_the_version_is_one_of_the_interface(installed: None) -> None:
    import transformer_lens

    assert transformer_lens.__version__ == "3.9.0+lite"
    for spelled in ("transformer-lens", "transformer_lens", "Transformer_Lens"):
        assert importlib.metadata.version(spelled) == "3.9.0+lite"
    assert importlib.metadata.metadata("transformer-lens")["Name"] == "transformer-lens"
    assert importlib.metadata.version("torch")  # and of others nothing is said


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_what_is_not_offered_is_named(name: str, installed: None) -> None:
    with pytest.raises(ImportError, match=name) as raised:
        importlib.import_module(f"transformer_lens.{name}")
    assert NOT_OFFERED[name] in str(raised.value)


def test_a_class_that_is_not_offered_is_named_in_from_imports(installed: None) -> None:
    for source in (
        "from transformer_lens import HookedEncoder",
        "from transformer_lens.model_bridge import TransformerBridge",
        "from transformer_lens.components import T5Block",
        "import transformer_lens.lit.model",
    ):
        with pytest.raises(ImportError, match="is not offered"):
            exec(source, {})
    with pytest.raises(ImportError, match="Did you mean 'hook_points'"):
        exec("import transformer_lens.hook_point", {})


def test_uninstall_puts_everything_back() -> None:
    path, modules = list(sys.meta_path), set(sys.modules)
    install_as_transformer_lens()
    install_as_transformer_lens()  # twice is once
    assert "transformer_lens.hook_points" in sys.modules
    uninstall()
    uninstall()
    assert sys.meta_path == path
    assert {m for m in sys.modules if m.startswith("transformer_lens.")} <= modules
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("transformer-lens")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_lens")


def run(source: str, folder: Path, root: Path) -> str:
    command = [sys.executable, "-c", source]
    env = {"PYTHONPATH": f"{root}:{folder}", "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_real_one_is_hidden_and_comes_back(tmp_path: Path, project_root: Path) -> None:
    """Whether it is only installed or imported already."""
    real = tmp_path / "transformer_lens"
    real.mkdir()
    (real / "__init__.py").write_text("from . import hook_points\nREAL = 1\n")
    (real / "hook_points.py").write_text("REAL = 2\n")
    info = tmp_path / "transformer_lens-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-lens\nVersion: 2.0\n")
    source = """
import warnings
from importlib.metadata import version
from transformer_lens_lite import install_as_transformer_lens, uninstall
for imported in (False, True):
    if imported:
        import transformer_lens.hook_points
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        install_as_transformer_lens()
    assert [str(w.message).split(":")[0] for w in said] == (
        ["transformer_lens was imported before"] if imported else []
    )
    import transformer_lens.hook_points
    from transformer_lens.hook_points import HookPoint
    assert not hasattr(transformer_lens, "REAL") and version("transformer_lens") == "3.9.0+lite"
    uninstall()
    import transformer_lens.hook_points
    assert transformer_lens.REAL == 1 and transformer_lens.hook_points.REAL == 2
    assert version("transformer_lens") == "2.0"
    import sys
    for name in [name for name in sys.modules if name.startswith("transformer_lens.")]:
        del sys.modules[name]
    del sys.modules["transformer_lens"]
print("done")
"""
    assert run(source, tmp_path, project_root) == "done\n"


def test_importing_the_module_installs(tmp_path: Path, project_root: Path) -> None:
    source = """
import transformer_lens_lite.as_transformer_lens
import transformer_lens, transformer_lens_lite
print(transformer_lens.HookedTransformer is transformer_lens_lite.HookedTransformer)
"""
    assert run(source, tmp_path, project_root) == "True\n"


def test_old_pickles_find_their_classes(installed: None) -> None:
    """What was pickled under a classic path is read as ours."""
    cfg = native.config()
    theirs = b"transformer_lens.HookedTransformerConfig"
    ours = pickle.dumps(cfg, protocol=0).replace(b"transformer_lens_lite.config", theirs)
    assert theirs in ours
    assert pickle.loads(ours) == cfg


def test_modules_that_were_forgotten_are_found_again(installed: None) -> None:
    del sys.modules["transformer_lens.hook_points"]
    module = importlib.import_module("transformer_lens.hook_points")
    assert module.HookPoint is transformer_lens_lite.HookPoint
    assert importlib.reload(module).HookPoint is transformer_lens_lite.HookPoint
    assert importlib.util.find_spec("transformer_lens.cache.key_value_cache") is not None


# --- names of models ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("gpt2-small", "gpt2"),
        ("GPT2-XL", "gpt2-xl"),
        ("pythia-70m", "EleutherAI/pythia-70m"),
        ("gemma-2b", "google/gemma-2b"),
        ("llama-7b", "huggyllama/llama-7b"),
        ("llama-7b-hf", "huggyllama/llama-7b"),
        ("solu-1l", "NeelNanda/SoLU_1L512W_C4_Code"),
        ("somebody/their-model", "somebody/their-model"),
        ("Their-Model", "Their-Model"),
    ],
)
def test_short_names(short: str, name: str) -> None:
    assert hub_name(short) == name == on_the_hub(short)


def test_short_names_mean_one_model_each() -> None:
    names = [name.lower() for each in MODEL_ALIASES.values() for name in each]
    short = {name: o for o, each in MODEL_ALIASES.items() for name in (o, *each)}
    assert len(OFFICIAL_MODEL_NAMES) == 249
    assert len({get_official_model_name(name) for name in names}) <= 249
    assert all(get_official_model_name(name) == official for name, official in short.items())
    with pytest.raises(ValueError, match="Did you mean 'gpt2"):
        get_official_model_name("gpt2-smal")


def test_a_folder_with_a_short_name_is_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = native.build()
    model.save_pretrained("gpt2-small", native=True)
    loaded = HookedTransformer.from_pretrained_no_processing("gpt2-small", device="cpu")
    assert torch.equal(loaded.W_E, model.W_E)
    assert on_the_hub("tiny-lens") == "tiny-lens"


def test_from_pretrained_asks_the_hub_for_the_long_name() -> None:
    with pytest.raises(FileNotFoundError, match="EleutherAI/pythia-70m"):
        HookedTransformer.from_pretrained("pythia-70m")


def test_a_config_without_weights(tmp_path: Path) -> None:
    whole = HookedTransformer.from_pretrained_no_processing("tiny-lens", device="cpu").cfg
    cfg = get_pretrained_model_config("tiny-lens", device="cpu")
    assert cfg.to_dict() | {"init_weights": False} == whole.to_dict() | {
        "tokenizer_name": cfg.tokenizer_name,
        "tokenizer_prepends_bos": cfg.tokenizer_prepends_bos,
    }
    assert get_pretrained_model_config("tiny-lens", first_n_layers=1, n_ctx=7).n_layers == 1
    native.build("grouped").save_pretrained(tmp_path, native=True)
    assert get_pretrained_model_config(tmp_path).n_key_value_heads == 2
    with pytest.raises(FileNotFoundError, match="EleutherAI/pythia-70m"):
        get_pretrained_model_config("pythia-70m")


def test_checkpoints_of_pythia() -> None:
    steps, kind = get_checkpoint_labels("pythia-70m")
    assert kind == "step"
    assert len(steps) == 154
    assert steps[:13] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000]
    assert len(get_checkpoint_labels("pythia-70m-v0")[0]) == 143
    with pytest.raises(ValueError, match="revision="):
        get_checkpoint_labels("gpt2")


def test_a_checkpoint_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def download(name: str, file: str, revision: str | None = None, **how: Any) -> str:
        asked.append(revision)
        raise ValueError("no network in tests")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for index in (12, -1):
        with pytest.raises(FileNotFoundError, match="no network in tests"):
            HookedTransformer.from_pretrained("pythia-70m", checkpoint_index=index)
    assert asked == ["step2000", "step143000"]
    with pytest.raises(IndexError, match="checkpoint_index=154 is outside of 154"):
        HookedTransformer.from_pretrained("pythia-70m", checkpoint_index=154)
    with pytest.raises(ValueError, match="only one of revision, checkpoint_index"):
        HookedTransformer.from_pretrained("pythia-70m", checkpoint_index=1, checkpoint_value=1)


def test_processing_flags_by_their_place() -> None:
    """Both loaders take them in the classic order."""
    load = HookedTransformer.from_pretrained_no_processing
    assert not load("tiny-lens", False, False, False, device="cpu").processed
    assert load("tiny-lens", True, device="cpu").processed == {"fold_ln"}
    assert not HookedTransformer.from_pretrained(
        "tiny-lens", False, False, False, device="cpu", fold_value_biases=False
    ).processed


# --- components by themselves ---------------------------------------------------------------------

ALONE = {
    "n_layers": 2, "d_model": 16, "n_ctx": 12, "d_head": 4, "n_heads": 4, "d_mlp": 32,
    "d_vocab": 11, "act_fn": "gelu_new", "device": "cpu", "window_size": 3,
    "use_local_attn": True, "attn_types": ["global", "local"],
}  # fmt: skip
# the sums of absolute values that TransformerLens 3.9.0 has for the same weights and input
EXPECTED = {
    "Embed": 80.415,
    "Unembed": 256.125,
    "PosEmbed": 92.201,
    "PosEmbed behind 3": 84.836,
    "LayerNorm": 117.905,
    "LayerNorm of 8": 66.213,
    "LayerNormPre": 181.634,
    "RMSNorm": 65.309,
    "RMSNormPre": 181.468,
    "Attention": 844.176,
    "local Attention": 833.276,
    "MLP": 764.789,
    "GatedMLP": 1563.862,
    "TransformerBlock": 523.615,
    "GroupedQueryAttention": 600.001,
}


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(module.named_parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return module


@pytest.mark.parametrize("as_dict", [False, True])
@torch.no_grad()
def test_components_are_made_from_a_config_alone(as_dict: bool) -> None:
    c = importlib.import_module("transformer_lens_lite.components")
    cfg: Any = ALONE if as_dict else HookedTransformerConfig(**ALONE)
    grouped: Any = {**ALONE, "n_key_value_heads": 2}
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(2))
    made = {
        "Embed": (c.Embed(cfg), (ids,)),
        "Unembed": (c.Unembed(cfg), (x,)),
        "PosEmbed": (c.PosEmbed(cfg), (ids,)),
        "PosEmbed behind 3": (c.PosEmbed(cfg), (ids, 3)),
        "LayerNorm": (c.LayerNorm(cfg), (x,)),
        "LayerNorm of 8": (c.LayerNorm(cfg, 8), (x[..., :8],)),
        "LayerNormPre": (c.LayerNormPre(cfg), (x,)),
        "RMSNorm": (c.RMSNorm(cfg), (x,)),
        "RMSNormPre": (c.RMSNormPre(cfg), (x,)),
        "Attention": (c.Attention(cfg), (x, x, x)),
        "local Attention": (c.Attention(cfg, "local", layer_id=1), (x, x, x)),
        "MLP": (c.MLP(cfg), (x,)),
        "GatedMLP": (c.GatedMLP(cfg), (x,)),
        "TransformerBlock": (c.TransformerBlock(cfg, 1), (x,)),
        "GroupedQueryAttention": (c.GroupedQueryAttention(grouped), (x, x, x)),
    }
    sums = {name: float(drawn(m)(*args).abs().sum()) for name, (m, args) in made.items()}
    assert sums == pytest.approx(EXPECTED, rel=1e-5)


def test_a_models_own_parts_count_as_classic_ones() -> None:
    c = importlib.import_module("transformer_lens_lite.components")
    cfg = HookedTransformerConfig(**ALONE)
    model = HookedTransformer(cfg)
    block = model.blocks[0]
    assert isinstance(block, c.TransformerBlock)
    assert isinstance(block.mlp, c.MLP)
    assert not isinstance(block.mlp, c.GatedMLP)
    assert isinstance(block.attn, c.Attention)
    assert isinstance(model.ln_final, c.LayerNorm)
    assert not isinstance(model.ln_final, c.LayerNormPre)  # clients ask whether it was folded
    model.process_weights_()
    assert isinstance(model.ln_final, c.LayerNormPre)
    assert not isinstance(model.ln_final, c.LayerNorm)
    model = HookedTransformer(cfg)
    block = model.blocks[0]
    assert not isinstance(model.ln_final, c.RMSNorm)

    class Mine(c.MLP):
        def forward(self, x: Any) -> Any:
            return 3 * super().forward(x)

    assert not isinstance(block.mlp, Mine)
    assert issubclass(Mine, c.MLP)
    before = model(torch.arange(5)[None])
    mine = Mine(cfg)
    mine.load_state_dict(block.mlp.state_dict())
    with torch.no_grad():
        block.mlp.b_out += 0.2
        mine.b_out += 0.2
    block.mlp = mine
    model.setup()
    assert isinstance(block.mlp, Mine)
    assert "blocks.0.mlp.hook_pre" in model.hook_dict
    assert not torch.allclose(model(torch.arange(5)[None]), before)
    half = HookedTransformerConfig(**ALONE, dtype=torch.bfloat16)
    for part in (c.MLP(half), c.Attention(half), c.LayerNorm(half), Mine(half)):
        assert {p.dtype for p in part.parameters()} == {torch.bfloat16}
    for wrong, message in (
        (lambda: c.Attention(cfg, "near"), "'global' or 'local'"),
        (lambda: c.GroupedQueryAttention(cfg), "n_key_value_heads"),
        (lambda: c.MoE(cfg), "num_experts"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_classic_dicts_make_configs_and_come_back() -> None:
    classic = {
        "n_layers": 2, "d_model": 16, "n_ctx": 12, "d_head": 4, "n_heads": 4, "d_vocab": 11,
        "act_fn": "gelu_new", "model_name": "custom", "d_mlp": 64, "eps": 1e-5, "seed": 3,
        "normalization_type": "LNPre", "attn_only": False, "use_attn_result": True,
        "device": "cpu", "dtype": torch.float32, "init_mode": "gpt2", "d_vocab_out": 11,
        "positional_embedding_type": "standard", "final_rms": False, "n_devices": 1,
        "parallel_attn_mlp": False, "use_hook_tokens": False, "gated_mlp": False,
        "original_architecture": "GPT2LMHeadModel", "from_checkpoint": False,
    }  # fmt: skip
    cfg = HookedTransformerConfig.from_dict(classic)
    assert {name: cfg.to_dict()[name] for name in classic} == classic
    assert HookedTransformerConfig.unwrap(classic) == cfg
    assert HookedTransformerConfig.from_dict(cfg.to_dict()) == cfg
    assert HookedTransformer(classic).cfg.d_mlp == 64
