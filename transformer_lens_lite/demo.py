"""The main job in one minute: open a model, look inside, reuse a prefix.

Each function works something out and returns plain data; `report` says it on a terminal, and
`demo_page` as one HTML page.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.activations import ActivationCache
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.model import HookedTransformer

SHADES = " ░▒▓█"
NO_CONTINUATION = "(none: it looks both ways)"
INDUCTION = 0.3  # from this share of its attention on, a head counts as an induction head


@dataclass
class LensRow:
    """What the stream would predict at one depth."""

    depth: str
    guesses: list[tuple[str, float]]  # the likeliest tokens and their probabilities
    final_probability: float  # of the token the whole model predicts
    final_rank: int  # of that token, 1 for the likeliest


@dataclass
class HeadScores:
    """How much heads attend where a kind of head would, [layer, head], on a repeated random
    sequence."""

    induction: Float[Tensor, "layer head"]
    previous_token: Float[Tensor, "layer head"]
    pattern: Float[Tensor, "pos pos"]  # of the strongest induction head
    tokens: list[str]

    def strongest(self, n: int) -> list[tuple[str, float, float]]:
        """(label, induction, previous-token) of the heads that induce most."""
        order = self.induction.flatten().argsort(descending=True)[:n].tolist()
        heads = self.induction.shape[1]
        return [
            (
                f"L{i // heads}H{i % heads}",
                self.induction.flatten()[i].item(),
                self.previous_token.flatten()[i].item(),
            )
            for i in order
        ]


@dataclass
class PrefixReuse:
    """One prefix, many continuations: with the prefix frozen, and from scratch."""

    prefix_length: int
    suffixes: list[str]
    predictions: list[str]
    seconds_frozen: float
    seconds_full: float
    difference: float  # largest between the two ways' logits

    @property
    def speed_up(self) -> float:
        """How many times faster the frozen prefix is."""
        return self.seconds_full / self.seconds_frozen


@dataclass
class Demo:
    """Everything the demo shows."""

    model: HookedTransformer
    prompt: str
    tokens: list[str]
    cache: ActivationCache
    lens: list[LensRow]
    heads: HeadScores | None
    reuse: PrefixReuse | None  # None, as the continuation, of models that look both ways
    continuation: str | None


def logit_lens(model: HookedTransformer, cache: ActivationCache, top: int = 3) -> list[LensRow]:
    """The final norm and unembedding applied to the stream after every layer, at the last position.

    nostalgebraist, "interpreting GPT: the logit lens" (2020).
    """
    n_layers = model.cfg.n_layers
    streams = [("embedding", cache["resid_pre", 0])]
    streams += [(f"layer {layer}", cache["resid_post", layer]) for layer in range(n_layers)]
    logits = torch.stack([lens_logits(model, stream)[0] for _, stream in streams])
    probabilities = logits.float().softmax(-1)  # [depth, d_vocab]
    final = int(probabilities[-1].argmax())
    rows = []
    for (depth, _), row in zip(streams, probabilities, strict=True):
        values, ids = row.topk(top)
        guesses = [
            (model.to_single_str_token(i), p)
            for i, p in zip(ids.tolist(), values.tolist(), strict=True)
        ]
        rank = int((row > row[final]).sum()) + 1
        rows.append(LensRow(depth, guesses, row[final].item(), rank))
    return rows


def lens_logits(
    model: HookedTransformer, stream: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch d_vocab_out"]:
    """What the model would say at the last position if this were its final stream."""
    return model.logits_of(model.ln_final(stream[:, -1:]))[:, -1]


def head_scores(model: HookedTransformer, half: int = 20, batch: int = 8) -> HeadScores | None:
    """Find induction heads: on a random sequence said twice, they attend to what followed last
    time.

    Olsson et al., "In-context Learning and Induction Heads" (2022). None when the context is too
    short.
    """
    half = min(half, (model.cfg.n_ctx - 1) // 2)
    if half < 4:
        return None
    tokens = repeated_tokens(model, half, batch)
    _, cache = model.run_with_cache(tokens, names_filter="*hook_pattern", return_type=None)
    patterns = torch.stack([cache["pattern", layer] for layer in range(model.cfg.n_layers)])
    # [layer, batch, head, query, key]; a query in the second half looks half - 1 back
    after_last_time = patterns.diagonal(1 - half, -2, -1)[..., 1:]
    one_back = patterns.diagonal(-1, -2, -1)
    induction = after_last_time.float().mean((1, 3))
    layer, head = divmod(int(induction.argmax()), model.cfg.n_heads)
    return HeadScores(
        induction,
        one_back.float().mean((1, 3)),
        patterns[layer, 0, head].float(),
        readable(model, tokens[0]),
    )


def repeated_tokens(model: HookedTransformer, half: int, batch: int) -> Int[Tensor, "batch pos"]:
    """BOS (or some token) and a random sequence twice; the same every time."""
    generator = torch.Generator().manual_seed(0)
    special = set(getattr(model.tokenizer, "all_special_ids", []))
    usable = torch.tensor([i for i in range(model.cfg.d_vocab) if i not in special])
    choice = torch.randint(len(usable), (batch, half), generator=generator)
    first = torch.full((batch, 1), model.text.bos_token_id or 0)
    return torch.cat((first, usable[choice], usable[choice]), 1).to(model.W_E.device)


def reuse_prefix(
    model: HookedTransformer, prompt: str, n_suffixes: int = 16, length: int = 8
) -> PrefixReuse:
    """Run a long prefix once, freeze its cache, and continue it in many ways at once."""
    prompt_tokens = model.to_tokens(prompt)
    n_prefix = model.cfg.n_ctx - length
    prefix = prompt_tokens.repeat(1, n_prefix // prompt_tokens.shape[1] + 1)
    prefix = prefix[:, : min(n_prefix, 512)]
    generator = torch.Generator().manual_seed(1)
    suffixes = torch.randint(model.cfg.d_vocab, (n_suffixes, length), generator=generator)
    suffixes = suffixes.to(prefix.device)

    cache = KeyValueCache.init_cache(model.cfg, prefix.device)
    model(prefix, past_kv_cache=cache, return_type=None)
    cache.freeze()
    whole = torch.cat((prefix.expand(n_suffixes, -1), suffixes), 1)
    frozen, seconds_frozen = timed(lambda: model(suffixes, past_kv_cache=cache))
    full, seconds_full = timed(lambda: torch.cat([model(row[None])[:, -length:] for row in whole]))
    return PrefixReuse(
        prefix.shape[1],
        ["".join(readable(model, row)) for row in suffixes],
        [model.to_single_str_token(int(i)) for i in frozen[:, -1].argmax(-1)],
        seconds_frozen,
        seconds_full,
        (frozen - full).abs().max().item(),
    )


def timed(run: Any, times: int = 3) -> tuple[Any, float]:
    """The result of a call and the seconds the fastest of a few took."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def readable(model: HookedTransformer, tokens: Int[Tensor, " pos"]) -> list[str]:
    """The text of each token, line breaks made visible."""
    return [str(text).replace("\n", "⏎") for text in model.to_str_tokens(tokens)]


@torch.no_grad()
def run(model: HookedTransformer, prompt: str) -> Demo:
    """Everything, for one model and one prompt."""
    _, cache = model.run_with_cache(prompt)
    return Demo(
        model=model,
        prompt=prompt,
        tokens=readable(model, model.to_tokens(prompt)[0]),
        cache=cache,
        lens=logit_lens(model, cache),
        heads=head_scores(model),
        reuse=reuse_prefix(model, prompt) if model.is_causal else None,
        continuation=continued(model, prompt) if model.is_causal else None,
    )


def continued(model: HookedTransformer, prompt: str, most: int = 16) -> str:
    """The prompt and what the model says next, greedily."""
    room = model.cfg.n_ctx - model.to_tokens(prompt).shape[1] + 1
    can_stop = model.text.eos_token_id is not None
    text: Any = model.generate(
        prompt, max_new_tokens=min(most, room), temperature=0, stop_at_eos=can_stop, verbose=False
    )
    return text


# --- on a terminal --------------------------------------------------------------------------------


def report(demo: Demo) -> str:
    """The demo as text."""
    parts = [about(demo), lens_table(demo.lens)]
    if demo.heads is not None:
        parts += [heads_table(demo.heads), pattern_picture(demo.heads.pattern, demo.heads.tokens)]
    if demo.reuse is not None:
        parts.append(reuse_text(demo.reuse))
    return "\n\n".join(parts)


def about(demo: Demo) -> str:
    """What was loaded and run."""
    cfg = demo.model.cfg
    continuation = NO_CONTINUATION if demo.continuation is None else repr(demo.continuation)
    return "\n".join(
        [
            f"{cfg.model_name}: {cfg.n_layers} layers, {cfg.n_heads} heads, d_model {cfg.d_model}, "
            f"{demo.model.n_params_total:,} parameters",
            f"prompt         {demo.prompt!r}",
            f"continuation   {continuation}",
            f"cached         {len(demo.cache)} activations by name, "
            f"{demo.cache.nbytes() / 2**20:.2f} MiB; for example",
            *(
                f"               {name:<34}{list(demo.cache[name].shape)}"
                for name in (
                    "blocks.0.attn.hook_pattern",
                    f"blocks.{cfg.n_layers - 1}.hook_resid_post",
                )
            ),
        ]
    )


def lens_table(rows: list[LensRow]) -> str:
    """The logit lens as a table."""
    final = rows[-1].guesses[0][0]
    lines = [f"Logit lens at the last position (the model predicts {final!r})"]
    for row in rows:
        guesses = "   ".join(f"{text!r} {p:.0%}" for text, p in row.guesses)
        lines.append(f"  {row.depth:<11} {final!r} is no. {row.final_rank:<6} {guesses}")
    return "\n".join(lines)


def heads_table(heads: HeadScores) -> str:
    """The heads that look most like induction heads."""
    lines = [
        "Heads on a random sequence said twice",
        "  head      attends to what followed last time   attends one back",
    ]
    for label, induction, previous in heads.strongest(5):
        lines.append(f"  {label:<9} {induction:>8.2f}  {bar(induction):<24} {previous:>8.2f}")
    if heads.induction.max() < INDUCTION:
        lines.append("  None of them is an induction head.")
    return "\n".join(lines)


def bar(share: float, width: int = 24) -> str:
    """A bar for a number between 0 and 1."""
    return "█" * round(share * width)


def pattern_picture(pattern: Float[Tensor, "pos pos"], tokens: list[str]) -> str:
    """An attention pattern in shades: one line per query, one column per key."""
    width = max(len(token) for token in tokens)
    lines = ["The pattern of the first of them (each row attends to the dark columns)"]
    for token, row in zip(tokens, pattern.tolist(), strict=True):
        cells = "".join(SHADES[min(int(p * len(SHADES)), len(SHADES) - 1)] * 2 for p in row)
        lines.append(f"  {token:>{width}} |{cells}|")
    return "\n".join(lines)


def reuse_text(reuse: PrefixReuse) -> str:
    """What a frozen prefix saved."""
    n = len(reuse.suffixes)
    return "\n".join(
        [
            f"A frozen prefix of {reuse.prefix_length} tokens, {n} continuations",
            f"  from scratch   {reuse.seconds_full * 1e3:8.1f} ms",
            f"  frozen prefix  {reuse.seconds_frozen * 1e3:8.1f} ms   "
            f"{reuse.speed_up:.1f} times faster, logits within {reuse.difference:.0e}",
        ]
    )
