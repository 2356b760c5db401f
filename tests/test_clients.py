"""What packages written for HookedTransformer do to a model: subclass it, replace its parts, set
its flags, edit its weights. Each test is a habit of a real client.

sae-lens and circuit-tracer themselves are run by tests/test_installed_clients.py.
"""

import copy
import warnings
from typing import Any

import native
import pytest
import tokenizers_for_tests
import torch
from torch import Tensor, nn

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig
from transformer_lens_lite.ActivationCache import ActivationCache
from transformer_lens_lite.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens_lite.components import MLP, AbstractAttention, CanBeUsedAsMLP
from transformer_lens_lite.hook_points import HookedRootModule, HookPoint
from transformer_lens_lite.past_key_value_caching import HookedTransformerKeyValueCache
from transformer_lens_lite.patching import get_act_patch_attn_out, get_act_patch_resid_pre
from transformer_lens_lite.prefixes import PrefixCache

TOKENS = native.tokens()


class Doubling(nn.Module):
    """What a spliced-in SAE is to the model: a module with a point of its own, in a point's
    place."""

    def __init__(self, hook: HookPoint | None = None) -> None:
        super().__init__()
        self.hook_inner = HookPoint() if hook is None else hook
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return 2 * self.hook_inner(x)


def get(model: nn.Module, path: str) -> Any:
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)  # type: ignore
    return model


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    before, _, last = path.rpartition(".")
    setattr(get(model, before) if before else model, last, module)
    model.setup()  # type: ignore[operator]


def doubled(x: Tensor, hook: Any) -> Tensor:
    return 2 * x


# --- points of ones own ---------------------------------------------------------------------------


class Halving(HookPoint):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


@torch.no_grad()
def test_a_hook_point_with_a_forward_of_its_own_computes() -> None:
    model = native.build()
    name = "blocks.1.attn.hook_pattern"
    expected = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: x / 2)])
    assert not torch.allclose(expected, model(TOKENS))
    model.blocks[1].attn.hook_pattern = Halving()
    model.setup()
    torch.testing.assert_close(model(TOKENS), expected)
    _, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(cache[name].sum(-1), torch.full_like(cache[name].sum(-1), 0.5))
    other = native.build()
    other.hook_dict[name].forward = lambda x: x / 2
    torch.testing.assert_close(other(TOKENS), expected)
    with other.hooks([(name, lambda x, hook: 2 * x)]):  # behind it
        torch.testing.assert_close(other(TOKENS), native.build()(TOKENS))
    torch.testing.assert_close(copy.deepcopy(other)(TOKENS), expected)


def test_every_way_to_a_forward_of_its_own_is_seen() -> None:
    class Mixin:
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    class Mixed(Mixin, HookPoint):
        pass

    class Named(HookPoint):
        def colour(self) -> str:
            return "red"

    x = torch.ones(2, 3)
    assert torch.equal(Mixed()(x), x / 2)
    point = Named()
    assert point(x) is x
    point.forward = lambda x: x / 2
    assert torch.equal(point(x), x / 2)
    assert point.colour() == "red"
    assert isinstance(point, Named)


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_torchs_own_hooks_of_a_point_are_called_until_they_are_gone(register: str) -> None:
    point, called = HookPoint(), []
    x = torch.ones(2, requires_grad=True)
    handle = getattr(point, register)(lambda *args: called.append(1))
    assert point.listened
    (2 * point(2 * x)).sum().backward()
    assert called == [1]
    handle.remove()
    assert not point.listened
    (2 * point(2 * x)).sum().backward()
    assert called == [1]
    assert HookPoint()(x) is x


def test_torchs_own_backward_hook_of_a_point_is_called() -> None:
    model, seen = native.build(), []
    point = model.hook_dict["blocks.0.hook_resid_post"]
    handle = point.register_full_backward_hook(lambda module, into, out: seen.append(out[0]))
    model(TOKENS, return_type="loss").backward()
    handle.remove()
    (gradient,) = seen
    _, cache = model.run_with_cache(TOKENS, return_type="loss", incl_bwd=False)
    with model.hooks(bwd_hooks=[(point.name, lambda gradient, hook: seen.append(gradient))]):
        model(TOKENS, return_type="loss").backward()
    torch.testing.assert_close(gradient, seen[1])
    assert cache[point.name].shape == gradient.shape


def test_a_model_inside_another_works_by_its_own_names() -> None:
    class Outer(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = native.build()
            self.setup()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens)

    outer, plain = Outer(), native.build()
    out, cache = outer.model.run_with_cache(TOKENS, incl_bwd=False)
    _, expected = plain.run_with_cache(TOKENS)
    assert list(cache) == list(expected)
    assert all(torch.equal(cache[name], expected[name]) for name in cache)
    _, whole = outer.run_with_cache(TOKENS)
    assert list(whole) == [f"model.{name}" for name in expected]
    point = outer.model.hook_dict["blocks.0.hook_resid_post"]
    assert point.name == "model.blocks.0.hook_resid_post"
    assert cache[point.name] is cache["blocks.0.hook_resid_post"]
    got = get_act_patch_resid_pre(outer.model, TOKENS.flip(1), cache, lambda logits: logits.sum())
    want = get_act_patch_resid_pre(plain, TOKENS.flip(1), expected, lambda logits: logits.sum())
    torch.testing.assert_close(got, want)


@torch.no_grad()
def test_caching_hooks_may_be_attached_to_a_copy() -> None:
    model = native.build()
    cache, forward, _ = model.get_caching_hooks("blocks.0.hook_resid_post")
    other = copy.deepcopy(model)
    other.run_with_hooks(TOKENS, fwd_hooks=forward)
    _, expected = model.run_with_cache(TOKENS, names_filter="blocks.0.hook_resid_post")
    assert torch.equal(cache["blocks.0.hook_resid_post"], expected["blocks.0.hook_resid_post"])


# --- replaced methods -----------------------------------------------------------------------------


class Counting(HookedTransformer):
    """A subclass whose own forward, tokenisation or embedding has to be heard by everybody."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs) + torch.eye(self.cfg.d_vocab_out)[5] * 1e4


class Shouting(HookedTransformer):
    def to_tokens(self, input: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().to_tokens(input.upper(), *args, **kwargs)


@torch.no_grad()
def test_a_forward_of_ones_own_is_what_generate_calls() -> None:
    cfg, how = native.build("rotary").cfg, {"do_sample": False, "verbose": False}
    model = Counting(cfg)
    new = model.generate(TOKENS, 3, stop_at_eos=False, **how)[:, TOKENS.shape[1] :]
    assert model.calls == 3
    assert (new == 5).all()
    uncached = model.generate(TOKENS, 3, stop_at_eos=False, use_past_kv_cache=False, **how)
    assert torch.equal(uncached[:, TOKENS.shape[1] :], new)
    plain = HookedTransformer(cfg)
    forward, shapes = plain.forward, []

    def noted(input: Any, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(input.shape))
        return forward(input, *args, **kwargs)

    expected = plain.generate(TOKENS, 3, stop_at_eos=False, **how)
    plain.forward = noted  # type: ignore[method-assign]
    assert torch.equal(plain.generate(TOKENS, 3, stop_at_eos=False, **how), expected)
    assert shapes == [tuple(TOKENS.shape), (len(TOKENS), 1), (len(TOKENS), 1)]


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_a_forward_of_ones_own_is_a_step_of_its_generation(cached: bool) -> None:
    plain = native.build("rotary")
    own = Counting(plain.cfg)
    own.load_state_dict(plain.state_dict())
    how: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": False}
    how |= {"use_past_kv_cache": cached, "max_new_tokens": 3}
    seen: list[tuple[int, int]] = []

    def note(value: Tensor, hook: Any) -> None:
        seen.append((hook.step.step, hook.step.expected_stop))

    with own.hooks([("hook_embed", note)], when="decode"):
        out, cache = own.generate(TOKENS, return_cache="resid_post", **how)
    n = TOKENS.shape[1]
    assert seen == [(1, n + 3), (2, n + 3), (3, n + 3)]
    _, expected = plain.run_with_cache(out, names_filter="resid_post")
    assert cache["resid_post", 1].shape == expected["resid_post", 1].shape
    torch.testing.assert_close(cache["resid_post", 1], expected["resid_post", 1])
    with pytest.raises(ValueError, match="a prompt of embeddings, and a forward of one's own"):
        own.generate(plain(TOKENS, stop_at_layer=0), **how)


@torch.no_grad()
def test_sweeps_run_a_forward_of_ones_own() -> None:
    class Negating(HookedTransformer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            return out if kwargs.get("stop_at_layer") is not None else -out

    plain = native.build("rotary")
    own = Negating(plain.cfg)
    own.load_state_dict(plain.state_dict())
    _, cache = plain.run_with_cache(TOKENS.flip(1))
    got = get_act_patch_resid_pre(own, TOKENS, cache, lambda logits: logits[:, -1].sum())
    want = get_act_patch_resid_pre(plain, TOKENS, cache, lambda logits: logits[:, -1].sum())
    torch.testing.assert_close(got, -want)


@torch.no_grad()
@pytest.mark.parametrize("as_module", [True, False])
def test_sweeps_apply_what_stands_before_a_layer_once(as_module: bool) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    def build(hooked: bool) -> HookedTransformer:
        model = native.build("rotary")
        if hooked:
            model.add_hook("blocks.1.hook_resid_pre", doubled)
        elif as_module:
            model.blocks[1].hook_resid_pre = Twice()
            model.setup()
        else:
            model.blocks[1].hook_resid_pre.forward = lambda x: 2 * x
        return model

    _, cache = native.build("rotary").run_with_cache(TOKENS.flip(1))
    got, want = (
        get_act_patch_attn_out(build(hooked), TOKENS, cache, lambda logits: logits[:, -1].sum())
        for hooked in (False, True)
    )
    torch.testing.assert_close(got, want)


@torch.no_grad()
def test_prefixes_see_that_a_part_was_replaced() -> None:
    how: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": False}

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 3 * self.inner(x)

    def wrap(model: HookedTransformer) -> None:
        model.blocks[0].mlp = Wrapped(model.blocks[0].mlp)
        model.setup()

    def assign(model: HookedTransformer) -> None:
        forward = model.blocks[0].mlp.forward
        model.blocks[0].mlp.forward = lambda x: 3 * forward(x)

    def assign_whole(model: HookedTransformer) -> None:
        forward = model.forward
        model.forward = lambda ids, *args, **more: forward((ids + 1) % 20, *args, **more)

    def point(model: HookedTransformer) -> None:
        model.blocks[0].hook_mlp_out.forward = lambda x: 3 * x

    for change in (wrap, assign, assign_whole, point):
        model = native.build("rotary")
        prefixes, prefix = PrefixCache(model, 2**24), model.prefix(TOKENS[:1, :3])
        prefixes.generate(TOKENS, 2, **how)
        model(TOKENS[:, 3:], past_kv_cache=prefix)
        change(model)
        expected = model.generate(TOKENS, 2, **how)
        assert torch.equal(prefixes.generate(TOKENS, 2, **how), expected)
        with pytest.raises(ValueError, match="its weights or parts are others"):
            model(TOKENS[:, 3:], past_kv_cache=prefix)


@torch.no_grad()
def test_the_embedding_may_be_wrapped() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: Tensor) -> Tensor:
            return 2 * self.inner(tokens)

    model, how = native.build("rotary"), {"stop_at_eos": False, "verbose": False}
    expected = model(2 * model(TOKENS, stop_at_layer=0), start_at_layer=0)
    model.embed = Wrapped(model.embed)
    model.setup()
    torch.testing.assert_close(model(TOKENS), expected)
    new = model.generate(TOKENS, 1, do_sample=False, **how)
    assert torch.equal(new[:, -1], expected[:, -1].argmax(-1))


@torch.no_grad()
def test_tokens_of_ones_own_are_what_forward_reads() -> None:
    tokenizer = tokenizers_for_tests.byte_level()
    cfg = native.build("rotary", d_vocab=len(tokenizer)).cfg
    shouting = Shouting(cfg, tokenizer)
    plain = HookedTransformer(cfg, tokenizer)
    plain.load_state_dict(shouting.state_dict())
    assert torch.equal(shouting("a b"), plain("A B"))
    assert not torch.equal(shouting("a b"), plain("a b"))
    how = {"do_sample": False, "verbose": False, "return_type": "tokens", "stop_at_eos": False}
    assert torch.equal(shouting.generate("a b", 2, **how), plain.generate("A B", 2, **how))
    with pytest.warns(UserWarning, match="Embedding.input_to_embed is called by nobody"):
        type("Embedding", (HookedTransformer,), {"input_to_embed": lambda self, input: input})


# --- replaced parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "grouped_rotary", "sandwich_rms", "parallel", "experts"])
def test_a_module_in_any_hook_points_place_sees_every_value(kind: str) -> None:
    """Also in the place of points whose value is otherwise never computed."""
    model = native.build(kind).double()  # so that bounds are those of the mechanism
    clean = model(TOKENS)
    names = [n for n in model.hook_dict if "experts." not in n and n != "hook_tokens"]
    assert len(names) > 30
    for name in names:
        is_of_all_heads = name.endswith("hook_attn_in") and model.cfg.n_key_value_heads == 2
        if "indices" in name or is_of_all_heads:  # whole numbers; and what grouped keys have not
            continue
        expected = model.run_with_hooks(TOKENS, fwd_hooks=[(name, doubled)])
        point = get(model, name)
        put(model, name, Doubling())
        wrapper = get(model, name)
        assert name not in model.hook_dict
        assert wrapper.hook_inner.name == f"{name}.hook_inner"
        torch.testing.assert_close(model(TOKENS), expected, atol=1e-5, rtol=1e-5)
        assert wrapper.seen, name
        out, cache = model.run_with_cache(TOKENS, names_filter=[f"{name}.hook_inner"])
        assert torch.equal(cache[f"{name}.hook_inner"], wrapper.seen[-1])
        zero = [(f"{name}.hook_inner", lambda x, hook: x * 0.5)]
        torch.testing.assert_close(
            model.run_with_hooks(TOKENS, fwd_hooks=zero),
            model_with(model, name, HookPoint()),
            atol=1e-5,
            rtol=1e-5,
        )
        put(model, name, point)
        assert torch.equal(model(TOKENS), clean), name


def model_with(model: HookedTransformer, name: str, module: nn.Module) -> Tensor:
    """The logits with another module at a place, which then is as it was."""
    before = get(model, name)
    put(model, name, module)
    try:
        return model(TOKENS)
    finally:
        put(model, name, before)


class Wrapped(nn.Module):
    """As circuit-tracer wraps MLPs and unembeddings."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.hook_in = HookPoint()
        self.hook_out = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_out(self.inner(self.hook_in(x)))


class WrappedUnembed(Wrapped):
    @property
    def W_U(self) -> Tensor:
        return self.inner.W_U  # type: ignore[return-value]

    @property
    def b_U(self) -> Tensor:
        return self.inner.b_U  # type: ignore[return-value]


class ReplacementModel(HookedTransformer):
    """A subclass that wraps parts of what it was built with, and freezes where gradients go."""

    def configure(self) -> None:
        for block in self.blocks:
            block.mlp = Wrapped(block.mlp)
        self.unembed = WrappedUnembed(self.unembed)
        self.hook_extra = HookPoint()
        self.setup()
        points = [self.ln_final.hook_scale]
        masks = {}
        for block in self.blocks:
            points += [block.attn.hook_pattern, block.ln1.hook_scale, block.ln2.hook_scale]
            if hasattr(block, "ln1_post"):  # only where there is such a norm
                points += [block.ln1_post.hook_scale, block.ln2_post.hook_scale]
            masks[block.attn.attn_type] = block.attn.mask
        for block in self.blocks:
            block.attn.mask = masks[block.attn.attn_type]
        for point in points:
            point.add_hook(lambda x, hook: x.detach(), is_permanent=True)
        for parameter in self.parameters():
            parameter.requires_grad = False
        self.hook_embed.add_hook(lambda x, hook: x.requires_grad_(), is_permanent=True)


def replacement(kind: str = "sandwich_rms") -> ReplacementModel:
    plain = native.build(kind)
    model = ReplacementModel(plain.cfg)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(TOKENS), plain(TOKENS))
    model.configure()
    return model


@pytest.mark.parametrize("kind", ["sandwich_rms", "grouped_rotary", "gated", "tied"])
def test_a_replacement_model(kind: str) -> None:
    plain = native.build(kind)
    model = replacement(kind)
    logits, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(logits, plain(TOKENS), atol=1e-5, rtol=1e-5)
    _, clean = plain.run_with_cache(TOKENS)
    for ours, theirs in {
        "blocks.1.mlp.hook_out": "blocks.1.hook_mlp_out",
        "blocks.0.mlp.inner.hook_post": "blocks.0.mlp.hook_post",
        "unembed.inner.hook_out": "unembed.hook_out",
    }.items():
        if ours.endswith("mlp.hook_out") and kind == "sandwich_rms":
            continue  # a norm stands behind the MLP
        torch.testing.assert_close(cache[ours], clean[theirs], atol=1e-5, rtol=1e-5)
    assert torch.equal(model.W_U, plain.W_U)
    # with pattern and scales frozen and no MLP, the rest is linear in the embedding
    hooks: list[Any] = [(f"blocks.{i}.hook_mlp_out", lambda x, hook: x.detach()) for i in range(2)]
    live = []
    hooks.append(("hook_embed", lambda x, hook: live.append(x)))
    out = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    (slope,) = torch.autograd.grad(out[0, -1, 3], live)
    assert slope.abs().sum() > 0.1
    assert (slope[0, :-1] != 0).any()  # it goes through values of earlier positions


def test_attention_says_of_what_type_it_is() -> None:
    model = native.build("window")
    assert [block.attn.attn_type for block in model.blocks] == ["local", "global"]
    assert not any("mask" in name for name in model.state_dict())


def test_a_gradient_put_in_by_hand_reaches_hooks_that_are_gone() -> None:
    """How circuit-tracer attributes: forward under hooks, backward when they are detached, from an
    activation whose gradient is replaced."""
    model = replacement()
    seen: dict[str, Tensor] = {}
    live: list[Tensor] = []
    with model.hooks(
        fwd_hooks=[("unembed.hook_in", lambda x, hook: live.append(x))],
        bwd_hooks=[("hook_embed", lambda g, hook: seen.update(g=g.clone()))],
    ):
        model(TOKENS)
    wanted = torch.randn_like(live[0])
    handle = live[0].register_hook(lambda gradient: wanted)
    live[0].backward(gradient=torch.zeros_like(live[0]), retain_graph=True)
    handle.remove()
    injected = seen.pop("g")
    live[0].backward(gradient=wanted)
    torch.testing.assert_close(injected, seen["g"])
    assert injected.abs().sum() > 1


def test_a_permanent_hook_outlives_reset_and_moves_with_a_copy() -> None:
    model = replacement()
    before = model(TOKENS)
    model.reset_hooks()
    assert any(handle.is_permanent for handle in model.hook_dict["hook_embed"].fwd_hooks)
    copied = copy.deepcopy(model)
    assert type(copied) is ReplacementModel
    torch.testing.assert_close(copied(TOKENS), before)
    copied.hook_dict["blocks.0.mlp.hook_out"].add_hook(lambda x, hook: 0 * x)
    assert not torch.allclose(copied(TOKENS), before, atol=1e-3)
    torch.testing.assert_close(model(TOKENS), before)
    model.reset_hooks(including_permanent=True)
    assert not model.list_hooks()


def test_an_mlp_wrapped_in_one_block_keeps_every_other_name() -> None:
    model = native.build()
    names, before = set(model.hook_dict), model(TOKENS)
    block = model.blocks[1]
    assert isinstance(block.mlp, CanBeUsedAsMLP)
    assert isinstance(block.mlp, MLP)
    assert isinstance(block.attn, AbstractAttention)
    block.mlp = Wrapped(block.mlp)
    model.setup()
    inside = {n for n in names if n.startswith("blocks.1.mlp.")}
    added = {"blocks.1.mlp.hook_in", "blocks.1.mlp.hook_out"}
    assert set(model.hook_dict) == names - inside | added | {
        n.replace("mlp.", "mlp.inner.") for n in inside
    }
    torch.testing.assert_close(model(TOKENS), before, atol=1e-6, rtol=1e-6)
    zero = [("blocks.1.mlp.inner.hook_post", lambda x, hook: 0 * x)]
    assert not torch.allclose(model.run_with_hooks(TOKENS, fwd_hooks=zero), before, atol=1e-2)
    # a forward that was put in place by assignment is used
    block.mlp.forward = lambda x: torch.zeros_like(x)
    _, cache = model.run_with_cache(TOKENS)
    assert not cache["mlp_out", 1].any()


class Masked(HookedTransformer):
    """A subclass with a constructor and a forward of its own."""

    def __init__(self, cfg: Any, *args: Any, is_masked: bool = False, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.is_masked = is_masked
        self.mask = nn.Parameter(torch.ones(self.cfg.n_layers, self.cfg.n_heads))
        for layer, block in enumerate(self.blocks):
            block.attn.hook_z.add_perma_hook(self.mask_for(layer))

    def mask_for(self, layer: int) -> Any:
        return lambda z, hook: z * self.mask[hook.layer() if layer else 0][:, None]

    def forward(self, input: Any, **kwargs: Any) -> Any:
        out = super().forward(input, **kwargs)
        return out * 0 if self.is_masked else out


def test_a_subclass_is_built_loaded_and_trained() -> None:
    loaded = Masked.from_pretrained_no_processing("tiny-lens", device="cpu")
    assert type(loaded) is Masked
    assert torch.equal(loaded.mask, torch.ones(loaded.cfg.n_layers, loaded.cfg.n_heads))
    reference = HookedTransformer.from_pretrained_no_processing("tiny-lens", device="cpu")
    text = "When Mary and John"
    torch.testing.assert_close(loaded(text), reference(text), atol=1e-5, rtol=1e-5)
    model = Masked(native.config("grouped"), is_masked=False)
    native.loud(model)
    with torch.no_grad():
        model.mask.fill_(1.0)
    plain = HookedTransformer(model.cfg)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k != "mask"})
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), atol=1e-5, rtol=1e-5)
    model(TOKENS, return_type="loss").backward()
    assert (model.mask.grad != 0).all()
    with torch.no_grad():
        model.mask[1, 2] = 0
    zero = [("blocks.1.attn.hook_z", lambda z, hook: z.index_fill(2, torch.tensor([2]), 0.0))]
    torch.testing.assert_close(
        model(TOKENS), plain.run_with_hooks(TOKENS, fwd_hooks=zero), atol=1e-5, rtol=1e-5
    )
    assert not Masked(native.config(), is_masked=True)(TOKENS).any()
    out, cache = model.run_with_cache(TOKENS)
    assert isinstance(cache, ActivationCache)
    torch.testing.assert_close(out, model(TOKENS), atol=1e-5, rtol=1e-5)


# --- a client's own model -------------------------------------------------------------------------


class SparseAutoencoder(HookedRootModule):
    """As SAELens defines its own."""

    def __init__(self, d_in: int, d_sae: int) -> None:
        super().__init__()
        self.W_enc = nn.Parameter(torch.randn(d_in, d_sae))
        self.W_dec = nn.Parameter(torch.randn(d_sae, d_in))
        self.hook_acts = HookPoint()
        self.hook_recons = HookPoint()
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_recons(self.hook_acts((x @ self.W_enc).relu()) @ self.W_dec)


def test_a_clients_own_hooked_model() -> None:
    sae = SparseAutoencoder(14, 31)
    x = torch.randn(5, 14)
    out, cache = sae.run_with_cache(x)
    assert set(cache) == {"hook_acts", "hook_recons"} == set(sae.hook_dict)
    assert torch.equal(cache["hook_recons"], out)
    assert torch.equal(sae.run_with_hooks(x, fwd_hooks=[("hook_acts", doubled)]), sae(x) * 2)
    with sae.hooks(fwd_hooks=[("hook_acts", lambda a, hook: a * 0)]):
        assert not sae(x).any()
    model = native.build()

    def splice(acts: Tensor, hook: HookPoint) -> Tensor:
        hook.ctx["seen"] = acts
        return sae(acts)

    model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_resid_pre", splice)])
    assert model.hook_dict["blocks.1.hook_resid_pre"].ctx["seen"].shape == (2, 13, 14)
    assert model.hook_dict["blocks.1.hook_resid_pre"].layer() == 1


# --- flags, moves, copies -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("use_attn_result", "blocks.1.attn.hook_result"),
        ("use_split_qkv_input", "blocks.1.hook_q_input"),
        ("use_attn_in", "blocks.1.hook_attn_in"),
        ("use_hook_mlp_in", "blocks.1.hook_mlp_in"),
        ("use_hook_tokens", "hook_tokens"),
    ],
)
def test_a_flag_set_on_cfg_acts_at_once(flag: str, name: str) -> None:
    model = native.build()
    before = model(TOKENS)
    assert name not in model.run_with_cache(TOKENS)[1]
    setattr(model.cfg, flag, True)
    logits, cache = model.run_with_cache(TOKENS)
    assert name in cache
    torch.testing.assert_close(logits, before, atol=1e-5, rtol=1e-5)
    setattr(model.cfg, flag, False)
    assert name not in model.run_with_cache(TOKENS)[1]


def test_ungrouping_set_on_cfg_acts_at_once() -> None:
    model = native.build("grouped_rotary")
    before = model(TOKENS)
    assert model.run_with_cache(TOKENS)[1]["k", 0].shape[2] == 2
    model.cfg.ungroup_grouped_query_attention = True
    logits, cache = model.run_with_cache(TOKENS)
    assert cache["k", 0].shape[2] == 4
    torch.testing.assert_close(logits, before, atol=1e-5, rtol=1e-5)


def test_softcap_and_context_set_on_cfg_act_at_once() -> None:
    model = native.build("rotary")
    logits = model(TOKENS)
    model.cfg.output_logits_soft_cap = 2.0
    torch.testing.assert_close(model(TOKENS), 2 * (logits / 2).tanh(), atol=1e-5, rtol=1e-5)
    model.cfg.n_ctx = 5
    with pytest.raises(ValueError, match="n_ctx=5"):
        model(TOKENS)


def test_to_moves_and_casts_and_cfg_follows() -> None:
    model = native.build()
    logits = model(TOKENS)
    assert model.to(torch.float64) is model
    assert model.cfg.dtype == torch.float64
    torch.testing.assert_close(model(TOKENS).float(), logits, atol=1e-4, rtol=1e-4)
    model.to("cpu").float().cpu()
    assert (model.cfg.device, model.cfg.dtype) == ("cpu", torch.float32)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.W_E.zero_()
    assert torch.equal(model(TOKENS), native.build().to(torch.float64).float()(TOKENS))
    assert copied.cfg is not model.cfg


@pytest.mark.parametrize("kind", ["plain", "xielu", "alibi", "yarn", "experts_grouped"])
@torch.no_grad()
def test_report_135_a_model_moves_with_everything_it_has_to_one_device(kind: str) -> None:
    model = native.build(kind)
    names = [name for name, module in model.named_modules() if list(module.buffers(recurse=False))]
    assert bool(names) == (kind == "xielu")
    model.register_buffer("of_my_own", torch.zeros(2), persistent=False)
    model.to("meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    for several in (
        lambda: native.build(kind, n_devices=2),
        lambda: HookedTransformer.from_pretrained("tiny-lens", n_devices=2),
    ):
        with pytest.raises(ValueError, match="n_devices=2: splitting a model over devices is not"):
            several()


def test_report_027_apples_gpu_is_never_chosen_and_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = native.config(device=None)
    assert cfg.device == "cpu"
    assert HookedTransformer.from_pretrained("tiny-lens").cfg.device == "cpu"

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self  # there is no such device here

    monkeypatch.setattr(torch.nn.Module, "_apply", move)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            HookedTransformer(native.config(device="mps"))
    assert [str(each.message)[:31] for each in shown] == ["results on MPS have been wrong "]
    model = native.build()
    on_mps = property(lambda self: torch.device("mps"))
    monkeypatch.setattr(nn.Parameter, "device", on_mps, raising=False)
    with pytest.warns(UserWarning, match="MPS"):
        model.to("mps")


# --- weights --------------------------------------------------------------------------------------

STACKED = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
STACKED += ("W_in", "W_out", "W_gate", "b_in", "b_out")


@pytest.mark.parametrize("kind", ["gated", "grouped_rotary"])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_a_stacked_weight_edited_in_place_leaves_the_model_alone(kind: str, n_layers: int) -> None:
    model = native.build(kind, n_layers=n_layers)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        for name in STACKED:
            stacked = getattr(model, name)
            if stacked is not None:
                stacked /= stacked.norm() + 1
        for matrix in (model.QK, model.OV):
            matrix.A.zero_()
            matrix.B.zero_()
        model.W_E_pos.zero_() if kind == "gated" else None
        model.accumulated_bias(n_layers - 1, mlp_input=True).zero_()
        model.accumulated_bias(0).add_(1)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("kind", ["plain", "grouped_rotary", "alibi"])
def test_classic_checkpoints_load_strictly(kind: str) -> None:
    """They carry attention's old buffers."""
    model = native.build(kind)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    for layer in range(2):
        state[f"blocks.{layer}.attn.mask"] = torch.ones(32, 32).tril().bool()
        state[f"blocks.{layer}.attn.IGNORE"] = torch.tensor(-torch.inf)
        state[f"blocks.{layer}.attn.rotary_sin"] = torch.zeros(32, 6)
        state[f"blocks.{layer}.attn.rotary_cos"] = torch.zeros(32, 6)
    if kind == "alibi":
        state["pos_embed.W_pos"] = torch.zeros(48, 14)
    other = native.build(kind, seed=1)
    assert not torch.allclose(other(TOKENS), model(TOKENS), atol=1e-2)
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(TOKENS), model(TOKENS))
    state["blocks.0.attn.else"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="else"):
        other.load_state_dict(state, strict=True)


@pytest.mark.parametrize("assign", [False, True])
def test_classic_mixtures_of_experts_load_strictly(assign: bool) -> None:
    """Their router and experts are linear layers, [out, in]."""
    model, other = native.build("experts"), native.build("experts", seed=1)
    state = {}
    for name, each in model.state_dict().items():
        if name.endswith("mlp.W_router"):
            state[name.replace("W_router", "W_gate.weight")] = each.T.clone()
        elif ".experts." in name and ".W_" in name:
            state[f"{name}.weight"] = each.T.clone()
        else:
            state[name] = each.clone()
    assert sum(name.endswith(".weight") for name in state) == 2 * (1 + 3 * model.cfg.num_experts)
    assert not torch.allclose(other(TOKENS), model(TOKENS), atol=1e-2)
    other.load_state_dict(state, strict=True, assign=assign)
    assert torch.equal(other(TOKENS), model(TOKENS))
    assert other.blocks[0].mlp.experts[0].W_in.T.is_contiguous()


@pytest.mark.parametrize("kind", ["plain", "grouped_rotary", "alibi", "latent", "experts"])
@torch.no_grad()
def test_parts_of_a_model_are_called_by_themselves(kind: str) -> None:
    """As exercises do that build a transformer from its parts."""
    model = native.build(kind)
    x = model.embed(TOKENS)
    if hasattr(model, "pos_embed"):
        assert model.pos_embed(TOKENS).shape == x.shape
        x = x + model.pos_embed(TOKENS)
    _, cache = model.run_with_cache(TOKENS)
    for layer, block in enumerate(model.blocks):
        normed = block.ln1(x)
        out = block.attn(normed, normed, normed)
        torch.testing.assert_close(out, cache["attn_out", layer], atol=5e-5, rtol=0)
        mid = x + out
        torch.testing.assert_close(
            mid + block.mlp(block.ln2(mid)), cache["resid_post", layer], atol=5e-5, rtol=0
        )
        x = block(x)
        torch.testing.assert_close(x, cache["resid_post", layer], atol=5e-5, rtol=0)
        assert block.attn.attn_scale == pytest.approx(model.cfg.attn_scale)
    torch.testing.assert_close(model.unembed(model.ln_final(x)), model(TOKENS), atol=5e-5, rtol=0)


def test_the_older_cache_of_keys_and_values() -> None:
    assert HookedTransformerKeyValueCache is TransformerLensKeyValueCache
    model = native.build("grouped_rotary")
    whole = model(TOKENS)
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device, 2)
    model(TOKENS[:, :5], past_kv_cache=cache)
    cache.freeze()
    for _ in range(2):
        rest = model(TOKENS[:, 5:], past_kv_cache=cache)
        torch.testing.assert_close(rest, whole[:, 5:], atol=1e-5, rtol=1e-5)
    assert cache[0].past_keys.shape == (2, 5, 2, 6)
    assert cache.previous_attention_mask.shape == (2, 5)


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", ["gpt2_like", "llama3_like", "with_own_pad"])
def test_the_models_tokenizer_adds_no_bos(maker: str) -> None:
    tokenizer = getattr(tokenizers_for_tests, maker)()
    cfg = native.config(d_vocab=-1)
    model = HookedTransformer(cfg, tokenizer)
    bos = tokenizer.bos_token_id
    alone = model.tokenizer("Hello")["input_ids"]
    assert bos not in alone
    assert model.to_tokens("Hello")[0].tolist() == [bos, *alone]
    assert model.to_tokens("Hello", prepend_bos=False)[0].tolist() == alone
    assert torch.equal(model("Hello"), model(torch.tensor([[bos, *alone]])))


def test_a_config_reaches_the_model_as_any_object_does() -> None:
    """Clients keep, compare, copy and change configs, and build models from what they read."""
    cfg = native.config()
    model = HookedTransformer(cfg)
    for other in (copy.deepcopy(model.cfg), HookedTransformerConfig(**model.cfg.to_dict())):
        assert other == model.cfg
    cfg.n_layers = 5  # the model has its own
    assert model.cfg.n_layers == 2 == len(model.blocks)
    assert HookedTransformer(cfg).cfg.n_layers == 5
