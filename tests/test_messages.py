"""What a newcomer does wrong, and what the library answers."""

import inspect
from pathlib import Path
from typing import Any

import jaxtyping
import native
import pytest
import torch

from transformer_lens_lite import CaptureSpec, HookedTransformer, KeyValueCache
from transformer_lens_lite.generate import ids_of, is_list_of
from transformer_lens_lite.loading import open_checkpoint
from transformer_lens_lite.root_module import checked_pairs


def test_an_additive_mask_is_refused() -> None:
    mask = torch.zeros(2, 5, dtype=torch.long)
    mask[0, 0] = -(
        10**9
    )  # as Hugging Face's layers take it: the opposite of what it would mean here
    with pytest.raises(ValueError, match="1 for tokens and 0 for padding"):
        native.build()(native.tokens(2, 5), attention_mask=mask)


def test_a_loss_over_one_position_is_refused() -> None:
    model = native.build()
    with pytest.raises(ValueError, match="at least two positions"):
        model(native.tokens(2, 1), return_type="loss")
    assert model(native.tokens(2, 1), return_type="loss", loss_per_token=True).shape == (2, 0)


@pytest.mark.parametrize("number", ["1", 1.5, torch.tensor(1.5)])
def test_a_layer_is_a_number(number: Any) -> None:
    forward = HookedTransformer.forward.__wrapped__  # without pytest's look at types
    for name in ("start_at_layer", "stop_at_layer"):
        with pytest.raises(ValueError, match=f"{name} must be a layer's number, got "):
            forward(native.build(), native.tokens(), **{name: number})
    assert native.build()._layer_range(torch.tensor(0), torch.tensor(-1)) == range(1)


@torch.no_grad()
def test_caches_take_what_autocast_makes() -> None:
    model, tokens = native.build("grouped_rotary"), native.tokens(2, 9)
    generate = {"do_sample": False, "stop_at_eos": False, "verbose": False}
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(tokens)
        cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
        parts = [model(part, past_kv_cache=cache) for part in tokens.split(4, 1)]
        new = model.generate(tokens, 3, **generate)
    assert whole.dtype == torch.bfloat16
    assert cache[0].past_keys.dtype == torch.float32
    near = (torch.cat(parts, 1) - whole).float().abs().max() / whole.float().abs().max()
    assert near < 0.03
    assert new.shape == (2, 12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_stream_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    model = native.build()
    stream = torch.randn(2, 3, model.cfg.d_model)
    with pytest.raises(ValueError, match=f"stream is {dtype}, the model's weights torch.float32"):
        model(stream.to(dtype), start_at_layer=0)
    with torch.autocast("cpu", torch.bfloat16):  # there, dtypes may mix
        model(stream.to(torch.bfloat16), start_at_layer=0)


def test_a_loss_over_padding_alone_is_refused() -> None:
    model, tokens = native.build(), native.tokens(2, 3)
    for mask in (torch.zeros(2, 3), torch.tensor([[1, 0, 1], [0, 0, 1]])):
        with pytest.raises(ValueError, match="no two neighbouring tokens"):
            model(tokens, return_type="loss", attention_mask=mask.long())
    per_token = model(tokens, return_type="loss", attention_mask=mask.long(), loss_per_token=True)
    assert not per_token.any()


def test_small_integer_types_are_token_ids() -> None:
    model, tokens = native.build(), native.tokens(2, 5)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(model(tokens.to(dtype)), model(tokens))


def test_too_long_a_text_is_refused_and_not_cut() -> None:
    model = HookedTransformer.from_pretrained_no_processing("tiny-lens", device="cpu")
    with pytest.raises(ValueError, match=r"reaches 301 positions.*n_ctx=256"):
        model(" Mary" * 300)
    with pytest.raises(ValueError, match="n_ctx=256"):
        model.generate(" Mary" * 300, max_new_tokens=1)
    assert model.to_tokens(" Mary" * 300).shape == (1, 256)


def test_a_short_hook_name_gets_its_full_one() -> None:
    with pytest.raises(ValueError, match=r"'hook_z'. Did you mean 'blocks.0.attn.hook_z'"):
        native.build().run_with_cache(native.tokens(1, 3), names_filter="hook_z")


# --- names that are nearly right, and hooks that cannot be called ---------------------------------


def test_an_unknown_argument_names_the_nearest() -> None:
    model = native.build()
    with pytest.raises(TypeError, match=r"no argument 'max_new_token'.*'max_new_tokens'"):
        model.generate(native.tokens(), max_new_token=3)
    with pytest.raises(TypeError, match=r"no argument 'temprature'.*'temperature'"):
        model.generate_stream(native.tokens(), temprature=1.0)
    for load in (
        HookedTransformer.from_pretrained,
        HookedTransformer.from_pretrained_no_processing,
    ):
        with pytest.raises(TypeError, match=r"no argument 'devise'.*'device'"):
            load("tiny-lens", devise="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_p": True}, "top_p must be a number"),
        ({"eos_token_id": 99}, "eos_token_id=99 is outside the vocabulary of"),
        ({"pad_token_id": -1}, "pad_token_id=-1 is outside the vocabulary"),
    ],
)
def test_arguments_of_generation_that_are_of_the_wrong_kind(
    arguments: dict[str, Any], message: str
) -> None:
    start = inspect.unwrap(HookedTransformer.generate)  # past the annotations, which tests check
    model = native.build()
    plain = {"max_new_tokens": 2, "stop_at_eos": False, "verbose": False, **arguments}
    if "eos_token_id" in arguments:
        plain["stop_at_eos"] = True
    with pytest.raises(ValueError, match=message):
        start(model, native.tokens(), **plain)


def test_a_model_that_is_not_given_by_name_is_told_how() -> None:
    import tiny

    hf_model = tiny.build("llama")
    with pytest.raises(ValueError, match="pass it as hf_model="):
        open_checkpoint(hf_model)
    with pytest.raises(ValueError, match="take the family's …ForCausalLM"):
        HookedTransformer.from_pretrained(hf_model=hf_model.model, device="cpu")


def test_what_is_no_token_id_is_named() -> None:
    for wrong in ("a", 1.5, [True], [None], torch.tensor([0.5])):
        with pytest.raises(ValueError, match="eos_token_id must be a token id or a list of them"):
            ids_of("eos_token_id", wrong, 60)
    assert not is_list_of(str, 3)
    assert not is_list_of(str, ["a", 3])
    assert is_list_of(str, ("a",))


def test_eos_may_be_a_tensor() -> None:
    model = native.build()
    tokens = model.generate(native.tokens(), 3, do_sample=False, eos_token_id=[0, 1], verbose=False)
    ids = ids_of("eos_token_id", torch.tensor([0, 1]), 60)
    again = model.generate(native.tokens(), 3, do_sample=False, eos_token_id=ids, verbose=False)
    assert torch.equal(tokens, again)


def test_a_hook_that_returns_no_floats_is_named() -> None:
    name = "blocks.0.hook_resid_pre"
    with pytest.raises(ValueError, match=f"'{name}' returned torch.int64, expected torch.float32"):
        native.build().run_with_hooks(
            native.tokens(), fwd_hooks=[(name, lambda value, hook: value.long())]
        )


def test_a_hook_may_return_another_floating_dtype() -> None:
    """A vector found in fp32 steers a model in bf16."""
    model = native.build().to(torch.bfloat16)
    model.eval()
    name, vector = "blocks.0.hook_resid_pre", torch.full((model.cfg.d_model,), 0.5)

    def steer(value: torch.Tensor, hook: Any) -> torch.Tensor:
        return value + vector

    def steer_in_place(value: torch.Tensor, hook: Any) -> None:
        value += vector

    out = model(native.tokens())
    with model.hooks([(name, steer)]):
        steered = model(native.tokens())
        _, cache = model.run_with_cache(native.tokens())
        model.generate(native.tokens(), 2, verbose=False, stop_at_eos=False)
    assert cache[name].dtype == torch.bfloat16
    assert not torch.equal(steered, out)
    assert torch.equal(
        steered, model.run_with_hooks(native.tokens(), fwd_hooks=[(name, steer_in_place)])
    )


def test_a_hook_that_cannot_be_called_is_refused_when_it_is_attached() -> None:
    model = native.build()

    def without_point(value):
        return value

    name = "blocks.0.hook_resid_pre"
    with pytest.raises(TypeError, match=rf"'{name}' is called as without_point\(tensor, hook="):
        model.run_with_hooks(native.tokens(), fwd_hooks=[(name, without_point)])
    # in tests the annotation of `fwd_hooks` refuses a bare pair first
    with pytest.raises(TypeError, match="must be a list of .* pairs"):
        checked_pairs((name, lambda value, hook: None), "fwd")
    with pytest.raises(TypeError, match="must be a list of .* pairs"):
        checked_pairs([(None, lambda value, hook: None)], "fwd")
    assert model.list_hooks() == {}
    assert model.context_level == 0


def test_ids_the_model_does_not_have_are_no_text() -> None:
    model = HookedTransformer.from_pretrained_no_processing("tiny-lens", device="cpu")
    n = model.cfg.d_vocab
    for ids in ([-1], [0, n], torch.tensor([[1, 10**6]])):
        with pytest.raises(ValueError, match=rf"token id (-1|{n}|1000000) is not one of the .*{n}"):
            model.to_string(ids)
    with pytest.raises(ValueError, match=f"token id {n} "):
        model.to_single_str_token(n)
    with pytest.raises(ValueError, match=f"token id {n} "):
        model.to_str_tokens(torch.tensor([1, n]))
    model.cfg.d_vocab_out = n + 1  # rows that no token of the tokenizer has
    assert model.to_string([n]) == ""


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="revision='main' is for names on the hub"):
        HookedTransformer.from_pretrained("tiny-lens", revision="main")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"revision='v2'.*is a folder"):
        HookedTransformer.from_pretrained(str(tmp_path), revision="v2")


def test_a_padding_side_is_left_or_right_although_prompts_are_padded_left() -> None:
    model = native.build()
    with pytest.raises(ValueError, match="padding_side must be 'left' or 'right', got 'x'"):
        model.generate(native.tokens(1, 3), 1, padding_side="x")
    generate = {"padding_side": "right", "stop_at_eos": False, "verbose": False}
    model.generate(native.tokens(1, 3), 1, **generate)


@pytest.mark.filterwarnings("ignore:var_mean")  # torch's, about tensors without entries
@torch.no_grad()
def test_empty_batches_and_texts_have_activations_and_no_mean_loss() -> None:
    model = native.build("grouped_rotary")
    for shape in ((0, 5), (2, 0), (0, 0)):
        tokens = torch.zeros(shape, dtype=torch.long)
        logits, cache = model.run_with_cache(tokens)
        assert logits.shape == (*shape, model.cfg.d_vocab)
        assert cache["hook_embed"].shape == (*shape, model.cfg.d_model)
        with pytest.raises(ValueError, match=r"no mean loss|at least two positions"):
            model(tokens, return_type="loss")


def test_a_slice_that_chooses_nothing_and_gradients_that_are_off_are_refused() -> None:
    model = native.build()
    with pytest.raises(ValueError, match=r"pos_slice=slice\(5, 2, None\) chooses none of the 9"):
        model.run_with_cache(native.tokens(2, 9), pos_slice=(5, 2))
    with torch.no_grad(), pytest.raises(ValueError, match="incl_bwd needs gradients"):
        model.run_with_cache(native.tokens(), return_type="loss", incl_bwd=True)


@torch.no_grad()
def test_a_model_without_layers_generates_and_keeps_nothing() -> None:
    model = native.build(n_layers=0)
    generate = {"stop_at_eos": False, "do_sample": False, "verbose": False}
    cached = model.generate(native.tokens(2, 4), 8, **generate)
    assert torch.equal(
        cached, model.generate(native.tokens(2, 4), 8, use_past_kv_cache=False, **generate)
    )
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    with pytest.raises(ValueError, match="without layers"):
        model(native.tokens(2, 4), past_kv_cache=cache)


def test_the_usual_mistakes_are_answered_with_what_helps() -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # users have no run-time check of types
    model = HookedTransformer.from_pretrained("tiny-lens", device="cpu")
    _, cache = model.run_with_cache("Mary and John")

    def get(key: Any) -> Any:
        return cache[key]

    mistakes: list[tuple[Any, type[Exception], str]] = [
        (lambda: model.run_with_cache("a", names_filter="patern"), KeyError, "mean 'pattern'"),
        (lambda: get("pattern"), KeyError, r"give a layer, such as cache\['pattern', 0\]"),
        (lambda: get(("pattern", 3)), KeyError, "3 layers, 0 to 2"),
        (
            lambda: model.to_single_token("Mary went"),
            AssertionError,
            r"Mary went is not .*'Mary', ' w",
        ),
        (lambda: model.to_single_token(5), TypeError, "named by its text, got 5"),
        (lambda: model([1, 2, 3]), TypeError, r"got list: make it one by torch.tensor"),
        (lambda: model(model.tokenizer("Mary")), TypeError, "pass its .input_ids"),
        (lambda: HookedTransformer.from_pretrained("tiny_lens"), FileNotFoundError, "'tiny-lens'"),
        (
            lambda: HookedTransformer.from_pretrained("tiny-lens", device="gpu"),
            ValueError,
            "^device='gpu' is not a device",
        ),
    ]
    for mistake, error, message in mistakes:
        with pytest.raises(error, match=message):
            mistake()
    misspelt: list[tuple[Any, str]] = [
        (
            lambda: model.run_with_cache("Mary", name_filter="z"),
            r"run_with_cache\(\).*names_filter",
        ),
        (lambda: model.run_with_cache("Mary", retrun_type="loss"), "'return_type'"),
        (lambda: model.run_with_hooks("Mary", fwd_hook=[]), r"run_with_hooks\(\).*'fwd_hooks'"),
        (lambda: model.hooks(fwd_hook=[]), "'fwd_hooks'"),
        (lambda: model.to_tokens("Mary", prepend_bso=True), "'prepend_bos'"),
        (lambda: model.prefix("Mary", prepend_bso=True), "'prepend_bos'"),
    ]
    for mistake, message in misspelt:
        with pytest.raises(TypeError, match=f"has no argument.*{message}|{message}"):
            mistake()
    with pytest.raises(TypeError) as raised:
        model.generate("Mary", seed=0)
    assert "'self'" not in str(raised.value)
    with pytest.warns(UserWarning, match="nothing was captured.*'decode'"):
        model.run_with_cache("Mary", names_filter=CaptureSpec("resid_post", steps="decode"))


def test_print_details_may_come_second(capsys: pytest.CaptureFixture[str]) -> None:
    model = native.build()
    assert model.to("cpu", False) is model
    assert not capsys.readouterr().out
    model.to(torch.float64, True)
    assert "torch.float64" in capsys.readouterr().out
