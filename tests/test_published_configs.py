"""The config.json files that people load, with their old, stale and surplus fields.

`published_configs.json` holds them as they are remembered: field by field after the files on the
hub, not copies of them; long lists are shortened to one value repeated.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from weights_conversion import architecture_for, refuse_foreign_code, supported

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
# files whose way of writing rope_scaling Hugging Face's class does not take any more
THEIRS_FAILS = {"Phi-3-mini-128k(su)"}


def read(config: dict[str, Any]) -> Any:
    architecture = architecture_for(config)
    return architecture.read(architecture.reading(config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_hugging_face_reads_it(name: str) -> None:
    config = PUBLISHED[name]
    refuse_foreign_code(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = read(config)
    if name in THEIRS_FAILS:
        return
    fields = {n: v for n, v in config.items() if n not in ("model_type", "auto_map")}
    theirs = CONFIG_MAPPING[config["model_type"]](**fields)
    assert read(theirs.to_dict()) == ours


def test_most_families_have_a_published_config() -> None:
    of_types = {config["model_type"] for config in PUBLISHED.values()}
    assert of_types <= set(supported())
    assert len(of_types) >= 48


@pytest.mark.parametrize("model_type", ["gpt_neox", "persimmon"])
def test_fields_that_the_code_reads_and_no_class_declares_are_refused(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]().to_dict()
    assert "head_dim" not in config
    with pytest.raises(ValueError, match="has fields this conversion does not know.*head_dim=4"):
        read({**config, "head_dim": 4})


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_fields_nobody_knows_are_ignored_as_hugging_face_does_and_said(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]().to_dict()
    with pytest.warns(UserWarning, match=r"neither this conversion nor transformers.*: blub='x'"):
        cfg = read({**config, "blub": "x", "empty": []})
    assert cfg == read(config)
