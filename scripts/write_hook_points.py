"""List the hook points of every kind of model, and write `docs/hook_points.md`.

    python scripts/write_hook_points.py    (or: make hook-points)

Names come from the models themselves, shapes from a run, and what a value equals in Hugging Face
from the table its checkpoint is read by. A test holds the page against this script.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny  # noqa: E402

from transformer_lens_lite import HookedTransformer  # noqa: E402
from transformer_lens_lite.model import FLAG_OF_OPTIONAL_POINT  # noqa: E402
from transformer_lens_lite.saving import as_checkpoint  # noqa: E402
from transformer_lens_lite.verification import places_of  # noqa: E402

PAGE = ROOT / "docs" / "hook_points.md"
BATCH, POS = 3, 11
# a test model of each kind, and what is said about it
KINDS = {
    "gpt2": "GPT-2: learned positions, LayerNorm, plain MLP",
    "llama_gqa": "Llama: rotary positions, RMSNorm, gated MLP, grouped keys and values",
    "gptj": "GPT-J: attention and MLP side by side",
    "gemma2": "Gemma 2: norms before and behind every sublayer",
    "mixtral": "Mixtral: a mixture of experts",
    "deepseek_v3": "DeepSeek-V3: latent attention",
}
WHAT = {
    "hook_tokens": "token ids",
    "hook_embed": "token embeddings",
    "hook_pos_embed": "position embeddings",
    "hook_resid_pre": "the stream that enters the layer",
    "hook_attn_in": "the stream, once per head, before the norm",
    "hook_q_input": "the stream that queries are made from, once per head, before the norm",
    "hook_k_input": "the same for keys",
    "hook_v_input": "the same for values",
    "hook_scale": "what the norm divides by",
    "hook_normalized": "the quotient, before the norm's weight and bias",
    "hook_q": "queries, before any norm or rotation of them",
    "hook_k": "keys, before any norm or rotation of them",
    "hook_v": "values",
    "hook_q_latent": "what queries are made from",
    "hook_kv_latent": "what keys and values are made from",
    "hook_rot_q": "queries, rotated",
    "hook_rot_k": "keys, rotated (of the new positions)",
    "hook_attn_scores": "scores, capped (if they are) and masked, before the softmax",
    "hook_pattern": "attention pattern",
    "hook_z": "values weighed by the pattern",
    "hook_result": "what each head adds, before a norm behind attention",
    "hook_attn_out": "what attention adds to the stream",
    "hook_resid_mid": "the stream between attention and MLP",
    "hook_mlp_in": "the stream that enters the MLP's norm",
    "hook_pre": "before the activation function (of a gated MLP: the gate)",
    "hook_pre_linear": "the linear half of a gated MLP",
    "hook_post": "neurons: what W_out reads",
    "hook_mlp_out": "what the MLP adds to the stream",
    "hook_resid_post": "the stream that leaves the layer",
    "hook_expert_weights": "the router's scores, of all experts",
    "hook_expert_indices": "which experts were chosen",
    "hook_gate": "an expert's gate, before the activation function",
    "hook_in": "what W_U reads",
    "hook_out": "logits, before any softcap",
}
HEAD = """# Hook points

Written by `make hook-points`, not edited by hand. Every table is one kind of model; `{i}` is the
layer. A point in *italics* costs something to compute: it exists, is computed when somebody
listens, and is in a blanket `run_with_cache` only if the named flag is on. "In Hugging Face" is the
module whose output (or input) is the same value; heads are flattened there.

`cache["resid_post", 5]`, `cache["pattern", 5]`, `cache["scale", 5, "ln1"]` are short for the full
names.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for kind, title in KINDS.items():
        parts.append(
            f"\n## {title}\n\n| name | shape | what it is | in Hugging Face |\n|---|---|---|---|"
        )
        parts += [f"| {' | '.join(row)} |" for row in rows(kind)]
    return "\n".join(parts) + "\n"


@torch.no_grad()
def rows(kind: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, shape, meaning and Hugging Face's place of every point of one layer."""
    hf_model = tiny.build(kind)
    model = HookedTransformer.from_pretrained_no_processing(hf_model=hf_model, device="cpu")
    layer = model.cfg.n_layers - 1  # the first ones of DeepSeek are plain
    grouped = model.cfg.n_key_value_heads not in (None, model.cfg.n_heads)
    names = [n for n in model.hook_dict if not (grouped and n.endswith("hook_attn_in"))]
    wanted = [n for n in names if not n.startswith("blocks.") or n.startswith(f"blocks.{layer}.")]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.cfg.d_vocab, (BATCH, POS), generator=generator)
    _, cache = model.run_with_cache(tokens, names_filter=wanted)
    # nobody listening to inputs by head, norms have no head axis
    plain = [n for n in wanted if not n.endswith(("_input", "hook_attn_in"))]
    _, unsplit = model.run_with_cache(tokens, names_filter=plain)
    places = hugging_face_places(model)
    for name in dict.fromkeys(key.split(":")[0] for key in cache):
        if ".experts." in name and f"experts.{first_expert(cache)}." not in name:
            continue
        value = unsplit[name] if name in unsplit else cache[name]
        short = name.rsplit(".", 1)[-1]
        shown = f"`{name.replace(f'blocks.{layer}', 'blocks.{i}')}`"
        shown = shown.replace(f"experts.{first_expert(cache)}", "experts.{e}")
        if model.hook_dict[name].optional:
            flag = FLAG_OF_OPTIONAL_POINT.get(short)
            shown = f"*{shown}*" + (f" `{flag}`" if flag else "")
        yield shown, shape_of(model, name, value), WHAT[short], places.get(name, "")


def first_expert(cache: Any) -> str:
    """The number of an expert that some token was sent to."""
    return next((n.split(".experts.")[1].split(".")[0] for n in cache if ".experts." in n), "")


def hugging_face_places(model: HookedTransformer) -> dict[str, str]:
    """The shortest path of theirs for each of our points."""
    layer = model.cfg.n_layers - 1
    found: dict[str, str] = {}
    _, table = as_checkpoint(model)
    for place in places_of(table, model):
        found.setdefault(place.hook, f"{place.side}put of `{place.module}`")
    theirs = [path for path in model.outputs_by_module() if path not in model.mod_dict]
    for path in sorted(theirs, key=lambda path: -path.count(".")):
        if path.startswith(("model.", "transformer.", "gpt_neox.")):
            found[model.outputs_by_module()[path]] = f"output of `{path}`"
    return {name: place.replace(f".{layer}", ".{i}") for name, place in found.items()}


def shape_of(model: HookedTransformer, name: str, value: torch.Tensor) -> str:
    """The axes by their names."""
    cfg, short = model.cfg, name.rsplit(".", 1)[-1]
    if ".experts." in name:
        return "[token, d_mlp]"
    last = {
        "hook_scale": "1",
        "hook_attn_scores": "key_pos",
        "hook_pattern": "key_pos",
        "hook_expert_weights": "expert",
        "hook_expert_indices": "expert",
        "hook_q_latent": "q_rank",
        "hook_kv_latent": "kv_rank",
        "hook_out": "d_vocab",
    }.get(short)
    if last is None and value.ndim > 2:
        width = value.shape[-1]
        sizes = {cfg.d_model: "d_model", cfg.d_mlp: "d_mlp", cfg.d_head: "d_head"}
        sizes[cfg.d_shared_expert] = "d_shared"
        last = sizes.get(width, "d_value" if short in ("hook_v", "hook_z") else f"{width}")
        if "latent_norm" in name:
            last = "kv_rank" if "kv_latent" in name else "q_rank"
    if short in ("hook_attn_scores", "hook_pattern"):
        axes = ["batch", "head", "pos"]
    elif value.ndim == 4:
        kv = value.shape[2] != cfg.n_heads
        axes = ["batch", "pos", "kv_head" if kv else "head"]
    else:
        axes = ["batch", "pos"]
    return f"[{', '.join([*axes, last] if last else axes)}]"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
