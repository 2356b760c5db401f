"""Which heads attend as a known pattern says: to the previous token, to duplicates, or to what
followed the last duplicate (induction)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.nearest import closest
from transformer_lens_lite.utilities import is_lower_triangular

ERROR_MEASURES = ("mul", "abs")
Pattern = Float[Tensor, "pos key_pos"]


def get_previous_token_head_detection_pattern(tokens: Int[Tensor, "1 pos"]) -> Pattern:
    """Every position attends to the one before it."""
    return torch.eye(tokens.shape[-1]).roll(1, 0).tril(-1)


def get_duplicate_token_head_detection_pattern(tokens: Int[Tensor, "1 pos"]) -> Pattern:
    """Every position attends to the earlier places of its own token."""
    row = tokens.reshape(-1)
    return (row[:, None] == row).float().tril(-1).cpu()


def get_induction_head_detection_pattern(tokens: Int[Tensor, "1 pos"]) -> Pattern:
    """Every position attends to what followed the earlier places of its own token (Olsson et al.
    2022)."""
    followed = get_duplicate_token_head_detection_pattern(tokens).roll(1, 1)
    followed[:, 0] = 0
    return followed.tril()


PATTERNS = {
    "previous_token_head": get_previous_token_head_detection_pattern,
    "duplicate_token_head": get_duplicate_token_head_detection_pattern,
    "induction_head": get_induction_head_detection_pattern,
}
HEAD_NAMES = tuple(PATTERNS)


def get_supported_heads() -> None:
    """Print the names `detect_head` knows."""
    print(f"Supported heads: {', '.join(HEAD_NAMES)}")


def detect_head(
    model: Any,
    seq: str | list[str],
    detection_pattern: Tensor | str,
    heads: Sequence[tuple[int, int]] | Mapping[int, Sequence[int]] | None = None,
    cache: Any = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
) -> Float[Tensor, "layer head"]:
    """How closely every head's attention follows a pattern.

    Args:
        seq: a text; for a list of texts, the mean over them.
        detection_pattern: one of `HEAD_NAMES`, or a lower-triangular matrix [pos, key_pos].
        heads: (layer, head) pairs, or heads by layer; the others are -1. None: all.
        cache: the activations of `seq`, if they are there already.
        exclude_bos: attention to the first position does not count.
        exclude_current_token: attention of a position to itself does not count.
        error_measure: see `compute_head_attention_similarity_score`.
    Raises: ValueError for a pattern or head that is not there, a pattern of another size than the
        text, several texts with one cache, and a text that is empty or too long.
    """
    wanted = heads_by_layer(model, heads)
    check_measure(error_measure)
    if isinstance(detection_pattern, str) and detection_pattern not in PATTERNS:
        raise ValueError(
            f"detection_pattern={detection_pattern!r} is none of {list(HEAD_NAMES)}, nor a tensor."
            f"{closest(detection_pattern, HEAD_NAMES)}"
        )
    if not isinstance(seq, str):
        if cache is not None:
            raise ValueError("cache= is of one text; for several give none, or call once for each")
        if not seq:
            raise ValueError("seq is an empty list")
    total = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)
    texts = [seq] if isinstance(seq, str) else seq
    every = [checked_tokens(model, text) for text in texts]
    patterns = [pattern_for(detection_pattern, tokens) for tokens in every]
    for tokens, pattern in zip(every, patterns, strict=True):
        if cache is None:
            names = [f"blocks.{layer}.attn.hook_pattern" for layer in wanted]
            with torch.no_grad():
                _, run = model.run_with_cache(tokens, return_type=None, names_filter=names)
        else:
            run = cache
        for layer in wanted:
            seen = run[f"blocks.{layer}.attn.hook_pattern"]
            seen = seen[0] if seen.ndim == 4 else seen
            if seen.shape[-2:] != pattern.shape:
                raise ValueError(
                    f"the cache has attention patterns {list(seen.shape)}, the text has "
                    f"{len(pattern)} tokens"
                )
            total[layer] += scores(seen, pattern, exclude_bos, exclude_current_token, error_measure)
    result = torch.full_like(total, -1.0)
    for layer, chosen in wanted.items():
        result[layer, chosen] = total[layer, chosen] / len(texts)
    return result


def compute_head_attention_similarity_score(
    attention_pattern: Pattern,
    detection_pattern: Pattern,
    *,
    exclude_bos: bool,
    exclude_current_token: bool,
    error_measure: str,
) -> float:
    """How closely one head's attention follows a pattern.

    "mul": the share of its attention that falls where the pattern is 1 (weighed by the pattern).
    "abs": 1 minus the mean difference per row: 1 for the pattern itself, less without a limit.
    """
    if not is_lower_triangular(detection_pattern) or (
        attention_pattern.shape != detection_pattern.shape
    ):
        raise ValueError(
            "both patterns must be lower triangular and of one size: "
            f"{list(attention_pattern.shape)} and {list(detection_pattern.shape)}"
        )
    check_measure(error_measure)
    found = scores(
        attention_pattern, detection_pattern, exclude_bos, exclude_current_token, error_measure
    )
    return float(found)


def scores(
    attention: Float[Tensor, "*head pos key_pos"],
    pattern: Pattern,
    exclude_bos: bool,
    exclude_current_token: bool,
    error_measure: str,
) -> Float[Tensor, "*head"]:
    """`compute_head_attention_similarity_score` of every head."""
    attention = attention.detach().float().cpu()
    counted = torch.ones_like(pattern)
    if exclude_bos:
        counted[:, 0] = 0
    if exclude_current_token:
        counted.fill_diagonal_(0)
    if error_measure == "mul":
        attention = attention * counted
        return (attention * pattern).sum((-2, -1)) / attention.sum((-2, -1))
    return 1 - ((attention - pattern).abs() * counted).sum((-2, -1)) / len(pattern)


def check_measure(error_measure: str) -> None:
    """ValueError for what is no way to compare patterns."""
    if error_measure not in ERROR_MEASURES:
        raise ValueError(
            f"error_measure must be one of {list(ERROR_MEASURES)}, got {error_measure!r}"
        )


def heads_by_layer(model: Any, heads: Any) -> dict[int, list[int]]:
    """{layer: heads} of what was asked for; ValueError for a head that is not there."""
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    if heads is None:
        return {layer: list(range(n_heads)) for layer in range(n_layers)}
    pairs = (
        [(layer, head) for layer, several in heads.items() for head in several]
        if isinstance(heads, Mapping)
        else list(heads)
    )
    found: dict[int, list[int]] = {}
    for layer, head in pairs:
        if not (0 <= layer < n_layers and 0 <= head < n_heads):
            raise ValueError(f"there is no head L{layer}H{head} in {n_layers} layers of {n_heads}")
        found.setdefault(layer, []).append(head)
    return found


def checked_tokens(model: Any, text: str) -> Int[Tensor, "1 pos"]:
    """The tokens of a text; ValueError when it is empty or fills the context."""
    tokens = model.to_tokens(text, truncate=False)
    if not 1 < tokens.shape[-1] < model.cfg.n_ctx:
        raise ValueError(
            f"the text has {tokens.shape[-1]} tokens; from 2 to {model.cfg.n_ctx - 1} are needed"
        )
    return tokens


def pattern_for(given: Tensor | str, tokens: Int[Tensor, "1 pos"]) -> Pattern:
    """The pattern itself, as floats on the CPU; ValueError when it does not fit the tokens."""
    pattern = PATTERNS[given](tokens) if isinstance(given, str) else given.float().cpu()
    size = tokens.shape[-1]
    if tuple(pattern.shape) != (size, size) or not is_lower_triangular(pattern):
        raise ValueError(
            f"detection_pattern must be lower triangular, [{size}, {size}] for this text; got "
            f"{list(pattern.shape)}"
        )
    return pattern
