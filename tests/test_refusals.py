"""What cannot be loaded says so in one line: its name, why, and the nearest thing that can."""

import copy
import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import weights_conversion
from transformer_lens_lite import HookedTransformer
from transformer_lens_lite.compat.configs import get_pretrained_model_config
from weights_conversion import Architecture, architecture_for, register_architecture, supported
from weights_conversion.families import llama
from weights_conversion.refusals import _BY_TYPE

HYBRID = "it is a hybrid, with state-space or linear-attention layers beside attention"
REFUSED = {
    "mamba": ("it has state-space layers", "a decoder with attention, such as pythia ('gpt_neox')"),
    "mamba2": ("it has state-space layers", "pythia ('gpt_neox')"),
    "falcon_mamba": ("it has state-space layers", "'falcon'"),
    "rwkv": ("it has recurrent layers", "pythia ('gpt_neox')"),
    "recurrent_gemma": (HYBRID, "'gemma2'"),
    "jamba": (HYBRID, "'mixtral'"),
    "falcon_h1": (HYBRID, "'falcon'"),
    "bamba": (HYBRID, "'llama'"),
    "zamba": (HYBRID, "'mistral'"),
    "granitemoehybrid": (HYBRID, "'granitemoe'"),
    "qwen3_next": (HYBRID, "'qwen3_moe'"),
    "t5": ("it is an encoder-decoder", "'bert' for an encoder, 'gpt2' for a decoder"),
    "mt5": ("it is an encoder-decoder", "'bert' for an encoder"),
    "bart": ("it is an encoder-decoder", "'bert' for an encoder"),
    "pegasus": ("it is an encoder-decoder", "'bert' for an encoder"),
    "whisper": ("it is an encoder-decoder", "'gpt2' for a decoder"),
    "blip": ("it sees images", "'bert'"),
    "llava": ("it sees images", "'llama'"),
    "qwen2_vl": ("it sees images", "'qwen2'"),
    "chatglm": ("it needs remote code", "'glm'"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_the_config_of_transformers_is_refused_with_a_reason_and_what_is_nearest(
    model_type: str,
) -> None:
    """With nothing but its model_type, and with all that Hugging Face's config says."""
    from transformers import CONFIG_MAPPING

    why, nearest = REFUSED[model_type]
    configs: list[dict[str, Any]] = [{"model_type": model_type}]
    if model_type in CONFIG_MAPPING:
        configs.append(CONFIG_MAPPING[model_type]().to_dict())
    for config in configs:
        with pytest.raises(ValueError, match="is not supported") as caught:
            architecture_for(config)
        said = str(caught.value)
        assert "\n" not in said
        assert said.startswith(f"model_type {model_type!r} is not supported: {why}")
        assert nearest in said.partition("The nearest supported is ")[2]


def test_everything_that_is_called_nearest_is_supported() -> None:
    for model_type, (_, nearest) in _BY_TYPE.items():
        assert model_type not in supported()
        named = nearest.split("'")[1::2]
        assert named, model_type
        assert set(named) <= set(supported()), model_type


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"is_encoder_decoder": True}, "it is an encoder-decoder. .* 'bert' for an encoder"),
        ({"vision_config": {"x": 1}}, "it sees images or hears sounds. .* such as 'llama'"),
        (
            {"vision_config": {"x": 1}, "text_config": {"model_type": "olmo2"}},
            "it sees images or hears sounds. .* 'olmo2', its language model",
        ),
        ({"audio_config": {"x": 1}, "text_config": {"model_type": "?"}}, "hears .* 'llama'"),
        ({"auto_map": {"AutoModel": "m.M"}}, "it needs remote code.* such as 'llama'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "hybrid.* such as 'llama'"),
        ({"mamba_d_state": 4}, "it is a hybrid.* such as 'llama'"),
        ({}, "'made_up' is not supported. Supported: .*'gpt2'.*register_architecture adds others"),
    ],
)
def test_types_nobody_has_heard_of_are_judged_by_their_signs(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        architecture_for({"model_type": "made_up", **config})


def test_quantised_weights_are_refused_with_their_method() -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(ValueError, match=r"\(gptq\).* the same checkpoint unquantised"):
        architecture_for(config)
    with pytest.raises(ValueError, match="state-space"):  # dequantised it would not load either
        architecture_for({**config, "model_type": "mamba"})


# --- code that is not transformers' ---------------------------------------------------------------


def folder_of(name: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint whose config.json says something more."""
    tiny.build(name).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def load(place: Any = None, **arguments: Any) -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing(place, device="cpu", **arguments)


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoModelForCausalLM": "modeling_my.MyLlamaForCausalLM"},
        {"AutoModelForCausalLM": "somebody/llama--modeling_llama.LlamaForCausalLM"},
        {"AutoConfig": "configuration_my.MyConfig"},
    ],
)
def test_remote_code_is_refused_with_the_way_to_go_on(
    auto_map: dict[str, str], tmp_path: Path
) -> None:
    folder = folder_of("llama", tmp_path, auto_map=auto_map)
    place = next(iter(auto_map.values()))
    message = rf"config.json: auto_map says that remote code, {place}, .*hf_config=.*hf_model="
    with pytest.raises(ValueError, match=message):
        load(folder)
    with pytest.raises(ValueError, match="auto_map says"):  # the config alone, too
        get_pretrained_model_config(str(folder))
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    ids = tiny.tokens(tiny.config("llama"))
    model = load(folder, hf_config=config)
    assert torch.equal(model(ids), load(hf_model=tiny.build("llama"))(ids))
    hf_model = tiny.build("llama")
    hf_model.config.auto_map = auto_map
    load(hf_model=hf_model)  # whoever passes it knows what made it


def test_code_of_a_tokenizer_alone_is_none_of_the_model(tmp_path: Path) -> None:
    auto_map = {"AutoTokenizer": ["tokenization_my.MyTokenizer", None]}
    load(folder_of("llama", tmp_path, auto_map=auto_map))


@pytest.mark.parametrize(
    ("name", "remote"),
    [
        ("phi3", "microsoft/Phi-3--modeling_phi3.Phi3ForCausalLM"),
        ("falcon", "modeling_falcon.FalconForCausalLM"),
        ("phimoe", "modeling_phimoe.PhiMoEForCausalLM"),
        ("mpt", "modeling_mpt.MPTForCausalLM"),
        ("ernie4_5", "modeling_ernie4_5.Ernie4_5_ForCausalLM"),
        ("deepseek_v3", "modeling_deepseek.DeepseekV3ForCausalLM"),
    ],
)
def test_code_that_transformers_has_by_now_is_what_the_table_is_of(
    name: str, remote: str, tmp_path: Path
) -> None:
    auto_map = {
        "AutoConfig": remote.replace("ForCausalLM", "Config"),
        "AutoModelForCausalLM": remote,
    }
    changes = {"auto_map": auto_map, "architectures": [remote.rsplit(".", 1)[-1]]}
    load(folder_of(name, tmp_path / "known", **changes))
    auto_map["AutoModelForCausalLM"] = remote.replace("ForCausalLM", "MineForCausalLM")
    with pytest.raises(ValueError, match="MineForCausalLM, makes this model"):
        load(folder_of(name, tmp_path / "strange", **changes))


@pytest.mark.parametrize("name", ["MyLlamaForCausalLM", "GPT2LMHeadCustomModel", "GPT2LMHeadModel"])
def test_a_class_of_another_name_is_refused(name: str, tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path, architectures=[name])
    message = rf"architectures names {name}, which is no .*'llama' \(.*LlamaForCausalLM, .*\)"
    with pytest.raises(ValueError, match=message):
        load(folder)
    with pytest.raises(ValueError, match=message):
        get_pretrained_model_config(str(folder))


@pytest.mark.parametrize("names", [["LLaMAForCausalLM"], ["LlamaModel"], [], None])
def test_classes_that_transformers_has_for_the_type_are_fine(names: Any, tmp_path: Path) -> None:
    load(folder_of("llama", tmp_path, architectures=names))


@pytest.mark.parametrize("wrong", [{"auto_map": 3}, {"architectures": "LlamaForCausalLM"}])
def test_fields_of_another_type_are_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"'{next(iter(wrong))}' must be a "):
        load(folder_of("llama", tmp_path, **wrong))


def test_a_family_of_a_users_own_may_have_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers has no such type: the table can only have been written after that code."""
    monkeypatch.setattr(weights_conversion, "_REGISTRY", dict(weights_conversion._REGISTRY))
    register_architecture("parrot", replace(llama.LLAMA, model_type="parrot"))
    changes = {"architectures": ["ParrotLM"], "auto_map": {"AutoModelForCausalLM": "m.ParrotLM"}}
    load(folder_of("llama", tmp_path, model_type="parrot", **changes))


def test_the_common_case_imports_no_model_of_transformers(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    code = (
        "import sys, json, weights_conversion as w\n"
        f"w.refuse_foreign_code(json.load(open({str(folder / 'config.json')!r})))\n"
        "assert not [name for name in sys.modules if name.startswith('transformers')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- tables that are none -------------------------------------------------------------------------


def lacking(**wrong: Any) -> Architecture:
    """Llama's table with something else in a field, past the types that tests check."""
    table = copy.copy(llama.LLAMA)
    for name, value in wrong.items():
        object.__setattr__(table, name, value)
    return table


@pytest.mark.parametrize(
    ("model_type", "table", "error", "message"),
    [
        ("foo", 5, TypeError, "table of 'foo' must be a weights_conversion.Architecture, got 5"),
        ("foo", llama, TypeError, "must be a weights_conversion.Architecture, got <module"),
        ("foo", None, TypeError, "must be a weights_conversion.Architecture, got None"),
        (3, llama.LLAMA, TypeError, "model_type must be a str, got 3"),
        ("", llama.LLAMA, ValueError, "model_type is empty"),
        ("foo", lacking(rows=[]), TypeError, r"rows of the table must be a function, got \["),
        ("foo", lacking(read_config=None), TypeError, "read_config of the table must be a funct"),
        ("foo", lacking(hf_class=""), TypeError, "hf_class of the table must be a name, got ''"),
        ("foo", lacking(cosmetic="x"), TypeError, "cosmetic of the table must be a dict, got 'x'"),
    ],
)
def test_what_is_no_table_is_not_registered(
    model_type: Any, table: Any, error: type[Exception], message: str
) -> None:
    register = inspect.unwrap(register_architecture)  # past its annotations, which tests check
    before = dict(weights_conversion._REGISTRY)
    with pytest.raises(error, match=message):
        register(model_type, table)
    assert before == weights_conversion._REGISTRY
