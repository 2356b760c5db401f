"""Ctrl-C, wherever it comes: no hook stays, no mode, and no cache of half a forward."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import loud
import native
import pytest
import torch
from torch import Tensor

import transformer_lens_lite
from transformer_lens_lite import HookPoint, KeyValueCache, steps


def interrupted_at(
    number: int, event: Literal["line", "call"], files: tuple[str, ...], run: Callable[[], Any]
) -> bool:
    """Run with Ctrl-C before the number-th line, or call of a function, of the files whose path
    contains one of these; whether it came so far.

    Leaving a `with` block is not interrupted: nobody can take back what was only half left.
    """
    left = number

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if not any(file in code.co_filename for file in files) or code.co_name == "__exit__":
            return None
        if what == event:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return left <= 0


def double(value: Tensor, hook: HookPoint) -> Tensor:
    """A hook that edits."""
    return value * 2


@pytest.mark.parametrize("grad", [False, True])
def test_ctrl_c_before_any_line_leaves_all_layers_equally_long(grad: bool) -> None:
    """Either the forward is stored whole, or nothing of it."""
    model, ids = loud.build("rotary"), loud.tokens(1, 9)
    with torch.no_grad():
        whole = model(ids)
    files = ("kv_cache.py", "components/context.py")
    lengths = set()
    for line in itertools.count(1):
        cache = KeyValueCache.init_cache(model.cfg, "cpu")
        with torch.no_grad():
            model(ids[:, :4], past_kv_cache=cache)
        with torch.set_grad_enabled(grad):
            came = interrupted_at(
                line, "line", files, lambda c=cache: model(ids[:, 4:6], past_kv_cache=c)
            )
        done = cache.length
        lengths.add(done)
        assert {entry.length for entry in cache.entries} == {done}
        assert (done, cache.n_forwards) in [(4, 1), (6, 2)]
        with torch.no_grad():
            rest = model(ids[:, done:], past_kv_cache=cache)
        torch.testing.assert_close(rest, whole[:, done:], atol=1e-5, rtol=1e-5)
        if not came:
            break
    assert lengths == {4, 6}
    assert line > 50


# one that comes in an iterator that dies can only be told of
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["hooks", "capture", "generation"])
def test_ctrl_c_before_any_call_leaves_no_hook(what: str) -> None:
    """Python looks for it where functions begin."""
    model, ids = native.build("rotary"), native.tokens(1, 3)
    hooks = [("blocks.1.hook_resid_mid", double), ("blocks.0.attn.hook_z", double)]
    model.add_hook("hook_embed", double)
    how: dict[str, Any] = {"stop_at_eos": False, "verbose": False, "return_cache": "resid_post"}
    runs = {
        "hooks": lambda: model.run_with_hooks(ids, fwd_hooks=hooks),
        "capture": lambda: model.run_with_cache(ids, names_filter="blocks.1.hook_resid_post"),
        "generation": lambda: model.generate(ids, 1, **how),
    }
    library = str(Path(transformer_lens_lite.__file__).parent)
    attached = {name: len(handles) for name, handles in model.list_hooks().items()}
    for call in itertools.count(1):
        came = interrupted_at(call, "call", (library,), runs[what])
        assert {name: len(handles) for name, handles in model.list_hooks().items()} == attached
        assert model.context_level == 0
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        if not came:
            break
    assert call > 200


class InterruptedAfter:
    """A context variable during whose first `set` Ctrl-C comes."""

    def __init__(self, variable: Any) -> None:
        self.variable, self.armed = variable, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.variable, name)

    def set(self, value: Any) -> None:
        self.variable.set(value)
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


def test_ctrl_c_as_a_forward_begins_leaves_no_forward_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = native.build("rotary"), native.tokens(1, 3)
    monkeypatch.setattr(steps, "_running", InterruptedAfter(steps._running))
    with pytest.raises(KeyboardInterrupt):
        model(ids)
    assert steps.current_step() is None
    _, cache = model.run_with_cache(ids)
    assert cache["resid_post", 1].shape[:2] == (1, 3)


def test_ctrl_c_before_any_line_leaves_an_edit_whole_or_undone() -> None:
    """Of what lies in a shared prefix and in the tail at once."""
    model, ids = loud.build("rotary"), loud.tokens(1, 9)
    start = model.prefix(ids[:, :4])
    done = set()
    for line in itertools.count(1):
        cache = start.branch(1)
        with torch.no_grad():
            model(ids[:, 4:7], past_kv_cache=cache)
        came = interrupted_at(
            line, "line", ("kv_cache.py",), lambda c=cache: c.edit(0, [1, 5], values=0.0)
        )
        edited = [bool((cache[0].past_values[:, pos] == 0).all()) for pos in (1, 5)]
        assert edited[0] == edited[1]
        done.add(edited[0])
        if not came:
            break
    assert done == {False, True}


def test_ctrl_c_before_any_line_leaves_all_layers_frozen_or_none() -> None:
    model, ids = loud.build("rotary"), loud.tokens(1, 4)
    done = set()
    for line in itertools.count(1):
        cache = KeyValueCache.init_cache(model.cfg, "cpu")
        with torch.no_grad():
            model(ids, past_kv_cache=cache)
        came = interrupted_at(line, "line", ("kv_cache.py",), cache.freeze)
        (frozen,) = {cache.frozen, *(entry.frozen for entry in cache.entries)}
        done.add(frozen)
        if not came:
            break
    assert done == {False, True}
