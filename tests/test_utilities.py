"""The small helpers classic code imports from `utils`, and where they are found."""

from pathlib import Path
from typing import Any

import loud
import native
import numpy as np
import pytest
import tokenizers_for_tests as toks
import torch
from torch import nn

from transformer_lens_lite import FactoredMatrix, HookedTransformer, utilities, utils
from transformer_lens_lite import utilities as u


def test_utils_has_all_of_utilities() -> None:
    for name in utilities.__all__:
        assert getattr(utils, name) is getattr(utilities, name), name
    with pytest.raises(AttributeError, match="no attribute 'to_nump'"):
        utils.to_nump  # noqa: B018


# --- tensors --------------------------------------------------------------------------------------


def test_to_numpy() -> None:
    half = torch.tensor([1.5, 2.0], dtype=torch.bfloat16, requires_grad=True)
    assert u.to_numpy(half).dtype == np.float32
    assert u.to_numpy(half).tolist() == [1.5, 2.0]
    assert u.to_numpy(torch.arange(3)).tolist() == [0, 1, 2]
    array = np.ones(3)
    assert u.to_numpy(array) is array
    assert u.to_numpy([1, 2]).tolist() == [1, 2]
    assert u.to_numpy(3.5) == 3.5
    with pytest.raises(ValueError, match="dict"):
        u.to_numpy({})


def test_shapes() -> None:
    x = torch.randn(2, 4, 5)
    assert torch.equal(u.get_corner(x), x[:3, :3, :3])
    assert torch.equal(u.get_corner(x, 2), x[:2, :2, :2])
    matrix = FactoredMatrix(torch.randn(5, 2), torch.randn(2, 6))
    torch.testing.assert_close(u.get_matrix_corner(matrix, 2), matrix.AB[:2, :2])
    torch.testing.assert_close(u.get_corner(matrix, 2).AB, matrix.AB[:2, :2])
    assert torch.equal(u.transpose(x), x.mT)
    assert torch.equal(u.remove_batch_dim(x[:1]), x[0])
    assert u.remove_batch_dim(x) is x or torch.equal(u.remove_batch_dim(x), x)
    assert u.is_square(x[0, :, :4])
    assert not u.is_square(x[0])
    assert not u.is_square(x)
    assert u.is_lower_triangular(torch.ones(3, 3).tril())
    assert not u.is_lower_triangular(torch.ones(3, 3))
    assert not u.is_lower_triangular(torch.ones(3, 4).tril())


def test_cumulative_sums_and_positions() -> None:
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert u.get_cumsum_along_dim(x, 1, reverse=True).tolist() == [[6, 5, 3], [15, 11, 6]]
    assert u.get_cumsum_along_dim(x, 0).tolist() == [[1, 2, 3], [5, 7, 9]]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert u.get_offset_position_ids(2, mask).tolist() == [[0, 1, 2], [2, 3, 4]]


def test_repeating_along_heads() -> None:
    x = torch.randn(2, 3, 4)
    copies = u.repeat_along_head_dimension(x, 5)
    assert copies.shape == (2, 3, 5, 4)
    assert all(torch.equal(copies[:, :, head], x) for head in range(5))
    copies[:, :, 0] = 0
    assert x.any()
    views = u.repeat_along_head_dimension(x, 5, clone_tensor=False)
    assert views.data_ptr() == x.data_ptr()


def test_filtering_by_prefix() -> None:
    found = u.filter_dict_by_prefix({"a.b": 1, "a.c.d": 2, "ab.c": 3, "b": 4}, "a")
    assert found == {"b": 1, "c.d": 2} == u.filter_dict_by_prefix({"a.b": 1, "a.c.d": 2}, "a.")


def test_checking_structure(capsys: pytest.CaptureFixture[str]) -> None:
    one = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [2.0, 2.0, 2.0]])
    u.check_structure(one, one + 5)
    assert capsys.readouterr().out == "PASSED\n"
    other = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    u.check_structure(one, other, verbose=True)
    said = capsys.readouterr().out
    assert "row mismatch: [0:1, 1:2]" in said
    assert "\trows 0:1\n" in said
    with pytest.raises(ValueError, match="one shape"):
        u.check_structure(one, one[:2])


def test_the_offset_of_a_cache() -> None:
    model, tokens = loud.build("rotary"), loud.tokens(2, 4)
    cache = loud.frozen_prefix(model, tokens)
    assert u.get_pos_offset(None, 2) == 0
    assert u.get_pos_offset(cache, 2) == u.get_pos_offset(cache, 4) == 4
    with pytest.raises(ValueError, match="holds 2 rows, the input has 3"):
        u.get_pos_offset(cache, 3)


def test_softcap() -> None:
    x = torch.tensor([0.0, 1.0, 100.0])
    torch.testing.assert_close(u.apply_softcap(x, 2.0), 2 * (x / 2).tanh())
    for cap in (None, u.SOFTCAP_DISABLED):
        assert torch.equal(u.apply_softcap(x, cap), x)
        assert not u.softcap_enabled(cap)


# --- initial weights ------------------------------------------------------------------------------


def test_fans() -> None:
    for shape, fans in {(5,): (1, 5), (4, 5): (4, 5), (3, 4, 5): (4, 15)}.items():
        assert u.calc_fan_in_and_fan_out(torch.empty(shape)) == fans
    with pytest.raises(ValueError, match=r"\[2, 3, 4, 5\]"):
        u.calc_fan_in_and_fan_out(torch.empty(2, 3, 4, 5))


@pytest.mark.parametrize("shape", [(200, 300), (4, 100, 60)])
def test_initial_deviations(shape: Any) -> None:
    n_in, n_out = u.calc_fan_in_and_fan_out(torch.empty(shape))
    wanted = {
        "xavier": (2 * (2 / (n_in + n_out)) ** 0.5, {"gain": 2.0}),
        "kaiming": ((2 / n_in) ** 0.5, {}),
        "kaiming ": (3 / n_out**0.5, {"gain": 3.0, "nonlinearity": "linear", "mode": "fan_out"}),
    }
    for name, (deviation, options) in wanted.items():
        for kind in ("normal", "uniform"):
            param = nn.Parameter(torch.empty(shape))
            filled = getattr(u, f"init_{name.strip()}_{kind}_")(param, **options)
            assert filled is param
            assert abs(param.std().item() / deviation - 1) < 0.02
            bound = deviation * 3**0.5
            assert (param.abs().max() <= bound) == (kind == "uniform")
    with pytest.raises(ValueError, match="'fan_in' or 'fan_out'"):
        u.init_kaiming_normal_(torch.empty(3, 3), mode="fan")


# --- text -----------------------------------------------------------------------------------------


def test_a_tokenizer_with_bos() -> None:
    for maker in (toks.gpt2_like, toks.with_own_pad):
        tokenizer = maker()
        plain = tokenizer.encode("Hello world")
        changed = u.get_tokenizer_with_bos(tokenizer)
        assert changed.encode("Hello world") == [tokenizer.bos_token_id, *plain]
        assert tokenizer.encode("Hello world") == plain  # the one given is as it was
    adds = toks.llama3_like()
    assert u.get_tokenizer_with_bos(adds) is adds
    bare = toks.byte_level(end_of_text=False)
    assert u.get_tokenizer_with_bos(bare) is bare


def test_bos_written_and_removed() -> None:
    assert u.get_input_with_manually_prepended_bos("<b>", "a") == "<b>a"
    assert u.get_input_with_manually_prepended_bos("<b>", ["a", "b"]) == ["<b>a", "<b>b"]
    assert u.get_input_with_manually_prepended_bos(None, "a") == "a"
    tokenizer = toks.with_own_pad()
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    right = torch.tensor([[bos, 5, 6], [bos, 7, pad]])
    assert u.get_tokens_with_bos_removed(tokenizer, right).tolist() == [[5, 6], [7, pad]]
    left = torch.tensor([[bos, 5, 6], [pad, bos, 7]])
    assert u.get_tokens_with_bos_removed(tokenizer, left, "left").tolist() == [[5, 6], [pad, 7]]
    assert u.get_attention_mask(tokenizer, left, True, "left").tolist() == [[1, 1, 1], [0, 1, 1]]


class Rows:
    """The part of the `datasets` library that is used, for texts in memory."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.asked: dict[str, Any] = {}

    @property
    def features(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def remove_columns(self, names: list[str]) -> "Rows":
        return Rows(**{n: c for n, c in self.columns.items() if n not in names})

    def map(self, function: Any, **options: Any) -> "Rows":
        made = Rows(**function(self.columns))
        made.asked = options
        return made

    def with_format(self, kind: str, columns: list[str]) -> "Rows":
        assert (kind, columns) == ("torch", ["tokens"])
        return self


@pytest.mark.parametrize("maker", [toks.gpt2_like, toks.llama3_like])
@pytest.mark.parametrize("with_bos", [True, False])
def test_report_143_tokenize_and_concatenate(maker: Any, with_bos: bool) -> None:
    """Also with a tokenizer that puts BOS in front of every text by itself."""
    tokenizer = maker()
    before = (len(tokenizer), tokenizer.special_tokens_map, tokenizer.padding_side)
    texts = ["Hello world, the cat sat.", "Once upon a time", "Paris is in France."] * 3
    data = Rows(text=texts, other=[0] * 9)
    made = u.tokenize_and_concatenate(data, tokenizer, max_length=6, add_bos_token=with_bos)
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    joined = sum(([*ids, tokenizer.eos_token_id] for ids in bare), [])[:-1]
    rows = made.columns["tokens"]
    starts = [tokenizer.bos_token_id] if with_bos else []
    assert all(len(row) == 6 and row[: len(starts)] == starts for row in rows)
    text = sum((row[len(starts) :] for row in rows), [])
    assert text == joined[: len(text)]
    assert len(joined) - len(text) < 6 - len(starts)
    assert made.asked["num_proc"] == 9
    assert max(map(max, rows)) < len(tokenizer)  # no id is invented, a padding token's least of all
    assert (len(tokenizer), tokenizer.special_tokens_map, tokenizer.padding_side) == before


def test_report_143_what_cannot_be_concatenated() -> None:
    data = Rows(text=["Hello"])
    with pytest.raises(ValueError, match="eos_token_id=None"):
        u.tokenize_and_concatenate(data, toks.byte_level())
    with pytest.raises(ValueError, match="no room"):
        u.tokenize_and_concatenate(data, toks.gpt2_like(), max_length=1)
    with pytest.raises(ValueError, match="fewer than 99 tokens"):
        u.tokenize_and_concatenate(data, toks.gpt2_like(), max_length=100, num_proc=None)


def test_logits_as_a_table() -> None:
    pytest.importorskip("pandas")
    tokenizer = toks.gpt2_like()
    logits = torch.randn(tokenizer.vocab_size)
    table = u.logits_to_df(logits, tokenizer, top_k=3)
    columns = ["token_index", "token_string", "logit", "log_prob", "probability"]
    assert list(table.columns) == columns
    assert table["token_index"].tolist() == logits.topk(3).indices.tolist()
    assert table["token_string"][0] == tokenizer.decode([int(logits.argmax())])
    assert len(u.logits_to_df(logits)) == len(logits)
    assert abs(u.logits_to_df(logits)["probability"].sum() - 1) < 1e-5


def test_a_prompt_is_tested(capsys: pytest.CaptureFixture[str]) -> None:
    model = HookedTransformer.from_pretrained("tiny-lens", device="cpu")
    prompt = "When Mary and John went to the store, John gave a book to"
    u.test_prompt(prompt, "Mary", model, top_k=4)
    said = capsys.readouterr().out
    logits = model(prompt)[0, -1]
    answer = model.to_tokens(" Mary", prepend_bos=False)[0]
    rank = int((logits > logits[answer[0]]).sum())
    probability = logits.softmax(-1)[answer[0]].item()
    assert f"rank {rank:<8} logit {logits[answer[0]].item():5.2f} prob {probability:6.2%}" in said
    assert said.count("th token. logit") == 4 * len(answer)
    assert (
        f"Ranks of the answer tokens of ' Mary': [({model.to_string(answer[:1])!r}, {rank})" in said
    )
    u.test_prompt(prompt, ["Mary", " John"], model, print_details=False)
    assert len(capsys.readouterr().out.splitlines()) == 2


# --- settings, attributes, libraries --------------------------------------------------------------


def test_defaults_for_a_while() -> None:
    model = HookedTransformer(native.config(d_vocab=-1), toks.with_own_pad())
    with u.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="left"):
        assert model.cfg.default_prepend_bos is False
        assert model.tokenizer.padding_side == "left"
        assert model.to_tokens(["Hello", "Hello world there"])[0, 0] == model.tokenizer.pad_token_id
    assert model.cfg.default_prepend_bos is True
    assert model.tokenizer.padding_side == "right"
    with pytest.raises(KeyError), u.LocallyOverridenDefaults(model, prepend_bos=False):
        raise KeyError
    assert model.cfg.default_prepend_bos is True
    with u.LocallyOverridenDefaults(model, prepend_bos=u.USE_DEFAULT_VALUE):
        assert model.cfg.default_prepend_bos is True
    with pytest.raises(ValueError, match="pad_side"):
        u.LocallyOverridenDefaults(model, pad_side="left")
    assert u.override_or_use_default_value(1, None) == 1
    assert u.override_or_use_default_value(1, 0) == 0


def test_nested_attributes() -> None:
    model = native.build()
    assert u.get_nested_attr(model, "blocks.1.attn.hook_z") is model.blocks[1].attn.hook_z
    u.set_nested_attr(model, "cfg.use_attn_result", True)
    assert model.cfg.use_attn_result
    assert u.select_compatible_kwargs({"prompt": 1, "else": 2}, u.test_prompt) == {"prompt": 1}


def test_a_parameter_swapped_for_a_while() -> None:
    model = native.build()
    tokens = native.tokens()
    before, weight = model(tokens), model.blocks[0].attn.W_Q.detach().clone()
    with u.temporarily_swap_parameter(
        model.blocks[0].attn.W_Q, torch.zeros_like(weight)
    ) as swapped:
        assert not swapped.any()
        assert not torch.allclose(model(tokens), before, atol=1e-3)
    assert torch.equal(model.blocks[0].attn.W_Q, weight)
    assert torch.equal(model(tokens), before)
    with (
        pytest.raises(ValueError, match="does not fit"),
        u.temporarily_swap_parameter(model.blocks[0].attn.W_Q, weight[0]),
    ):
        pass


def test_libraries_devices_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert u.is_library_available("torch")
    assert not u.is_library_available("no_such_library")
    assert u.get_device() in ("cuda", "cpu")
    model = native.build()
    assert u.get_device_for_block_index(1, model.cfg) == torch.device("cpu")
    assert u.get_device_for_block_index(0, model.cfg, "meta") == torch.device("meta")
    with pytest.raises(ValueError, match="layer 2"):
        u.get_device_for_block_index(2, model.cfg)
    assert u.get_best_available_device(model.cfg) == torch.device("cpu")
    assert u.sort_devices_based_on_available_memory([(0, 5), (1, 9)]) == [(1, 9), (0, 5)]
    assert u.move_to_and_update_config(model, torch.float64) is model
    assert (model.cfg.dtype, model.W_E.dtype) == (torch.float64, torch.float64)
    u.print_gpu_mem("here")
    assert capsys.readouterr().out.splitlines()[-1].startswith("here ~ ")
    with pytest.warns(UserWarning, match="MPS"):
        u.warn_if_mps("mps")
    u.warn_if_mps("cpu")
    assert isinstance(u.TypedModuleList([nn.Identity()])[0], nn.Identity)
    assert u.SUPPORTED_ACTIVATIONS["gelu_new"] is u.gelu_new


# --- the hub --------------------------------------------------------------------------------------


def test_data_sets_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(u, "is_library_available", lambda name: False)
    with pytest.raises(ImportError, match="pip install datasets"):
        u.get_dataset("pile")
    with pytest.raises(ValueError, match="'c4'"):
        u.get_dataset("nothing")


def test_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "a.json").write_text('{"x": 1}')
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pth")
    asked = []

    def download(repo_id: str, filename: str, subfolder: Any, cache_dir: Any) -> str:
        asked.append((repo_id, subfolder, cache_dir))
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert u.download_file_from_hf("me/it", "a.json") == {"x": 1}
    assert u.download_file_from_hf("me/it", "b.pth", "sub", "there")["w"].sum() == 2
    assert u.download_file_from_hf("me/it", "c.txt") == str(tmp_path / "c.txt")
    assert asked[:2] == [("me/it", None, None), ("me/it", "sub", "there")]


def test_the_cache_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    (folder / "models--x").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    u.clear_huggingface_cache()
    assert not folder.exists()
    u.clear_huggingface_cache()
