"""Compiles models and prints, as JSON, how far they are from what they were before.

    python tests/compiled.py BACKEND VARIANT…
    python tests/compiled.py used VARIANT…     with a cache, and hooked afterwards

A process of its own: compilers cannot trace the run-time checks of shapes that pytest switches on.
"""

import json
import sys
import warnings

import native
import torch

from transformer_lens_lite import KeyValueCache

warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, in inductor


def differences(name: str, backend: str) -> dict[str, float]:
    """The largest difference of logits, and of gradients, by situation; and how many graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = native.build(name)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    tokens = native.tokens()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    found = {}

    def compare(situation: str, **arguments: object) -> None:
        ours, theirs = compiled(tokens, **arguments), model(tokens, **arguments)
        where = arguments.get("attention_mask", torch.ones_like(tokens)).bool()
        found[situation] = (ours - theirs)[where].abs().max().item()

    gradients = []
    for each in (compiled, model):
        each(tokens, return_type="loss").backward()
        # of an expert without tokens: none, or in a graph, zeros
        zeros = [torch.zeros_like(parameter) for parameter in model.parameters()]
        own = [parameter.grad for parameter in model.parameters()]
        gradients.append([o if o is not None else z for o, z in zip(own, zeros, strict=True)])
        model.zero_grad()
    pairs = zip(*gradients, strict=True)
    found["gradients"] = max((a - b).abs().max().item() for a, b in pairs)
    with torch.no_grad():
        compare("no_grad")
        compare("padded", attention_mask=mask)
    found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


@torch.no_grad()
def used(name: str) -> dict[str, float]:
    """The largest difference of logits behind a cache that grows, and under a hook that came after
    the compiler."""
    torch._dynamo.reset()
    model, tokens = native.build(name), native.tokens()
    cache = KeyValueCache.init_cache(model.cfg, "cpu", len(tokens), max_len=tokens.shape[1])
    model(tokens[:, :-2], past_kv_cache=cache)
    step = torch.compile(model, fullgraph=True, backend="eager")
    stepped = [step(tokens[:, [i]], past_kv_cache=cache) for i in (-2, -1)]
    found = {"cached": (torch.cat(stepped, 1) - model(tokens)[:, -2:]).abs().max().item()}
    compiled = torch.compile(model, backend="eager")
    compiled(tokens)
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value * 2)
    found["hooked"] = (compiled(tokens) - model(tokens)).abs().max().item()
    with model.hooks_set_aside():
        found["set aside"] = (compiled(tokens) - model(tokens)).abs().max().item()
    with model.capture("resid_post") as kept:
        compiled(tokens)
    _, expected = model.run_with_cache(tokens)
    found["captured"] = (kept["resid_post", 1] - expected["resid_post", 1]).abs().max().item()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    how, names = sys.argv[1], sys.argv[2:]
    print(
        json.dumps(
            {name: used(name) if how == "used" else differences(name, how) for name in names}
        )
    )
