# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Steering, and editing the past
#
# A model writes one token at a time. Between the tokens it remembers two things only: the text, and
# the **keys and values** of every position and layer, which later positions look back at. This
# notebook interferes with both halves of that: with what is being computed now, and with what is
# remembered.
#
# - **Steering**: add a direction to the residual stream while the model writes.
# - **Where a hook acts**: in the prompt, in what is written, at one position.
# - **Capture**: what went on while the text was written, steered as it was.
# - **Editing the past**: change what the model remembers, and leave the text as it is.
#
# `tiny-lens`, the model in the box, knows forty people and what each of them likes.

# %%
import torch

from transformer_lens_lite import CaptureSpec, HookedTransformer, plot
from transformer_lens_lite.pretrained.tiny_language import LIKES, NAMES

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("tiny-lens")


def write(prompt, n=14):
    """What the model says next, always its first choice."""
    return model.generate(
        prompt, max_new_tokens=n, do_sample=False, stop_at_eos=False, verbose=False
    )


normal = write("Anna likes")
print(normal)
assert normal.startswith("Anna likes milk.")
assert len(NAMES) == len(LIKES) == 40

# %% [markdown]
# ## A direction for tea
#
# Run "*name* likes" for everybody and keep the stream after layer 1 at the last word (position 2:
# the text begins with `<|endoftext|>`, then the name). People who like tea are alike there in one
# respect. So the mean over them, less the mean over all foods, is a **direction** that should stand
# for tea.

# %%
prompts = model.to_tokens([f"{name} likes" for name in NAMES])  # [40, 3]
LAYER, VERB = 1, 2

_, cache = model.run_with_cache(prompts, names_filter=("resid_post", LAYER))
stream = cache["resid_post", LAYER][:, VERB]  # [40, d_model]

foods = sorted(set(LIKES.values()))
means = {food: stream[[LIKES[name] == food for name in NAMES]].mean(0) for food in foods}
tea = means["tea"] - torch.stack(list(means.values())).mean(0)  # [d_model]

assert len(foods) == 12
assert sum(food == "tea" for food in LIKES.values()) == 4

# %% [markdown]
# Does it? Add it with growing strength and count how many of the forty are now said to like tea. As
# a control, add a random direction of the same length: if that did the same, "tea" would be in our
# eye only.


# %%
def tea_drinkers(direction, strength):
    """The share of people whose likeliest food is tea."""

    def steer(resid, hook):
        return resid + strength * direction

    logits = model.run_with_hooks(prompts, fwd_hooks=[(("resid_post", LAYER), steer)])
    return (logits[:, -1].argmax(-1) == model.to_single_token(" tea")).float().mean().item()


chance = torch.randn(len(tea), generator=torch.Generator().manual_seed(0))
chance *= tea.norm() / chance.norm()

strengths = [0, 0.5, 1, 1.5, 2]
steered = torch.tensor([tea_drinkers(tea, strength) for strength in strengths])
control = torch.tensor([tea_drinkers(chance, strength) for strength in strengths])
plot.patching(
    torch.stack([control, steered]),
    columns=[f"strength {strength}" for strength in strengths],
    rows=["random", "tea"],
    title="Share of people said to like tea",
).update_yaxes(title_text="direction")

# %% [markdown]
# *The picture: two rows of five cells. The upper one, for the tea direction, turns from nearly
# blank to full blue as the strength grows; the lower one, for the random direction, starts as pale
# and is paler still at the end.*
#
# Without steering a tenth of the people like tea, and that is true. At strength 1 more than half
# do, at strength 2 all forty. The random direction makes nobody a tea drinker.

# %%
assert steered[0] == 0.1
assert (steered.diff() >= 0).all()
assert 0.5 < steered[2] < 0.9
assert steered[4] == 1.0
assert (control <= 0.1).all()

# %% [markdown]
# ## Where a hook acts
#
# In a generation a hook is called many times: once for the prompt (the **prefill**), then once for
# every new token (the **decode** steps). `when=` and `pos=` say where it is to act. `pos` counts
# from the start of the text, and is the same whether the text is prompt or has just been written.


# %%
def towards_tea(resid, hook):  # [batch, the chosen positions, d_model]
    return resid + 2 * tea


point = ("resid_post", LAYER)


def write_steered(**where):
    with model.hooks([(point, towards_tea)], **where):
        return write("Anna likes")


once = write_steered(pos=VERB)
everywhere = write_steered()
while_writing = write_steered(when="decode")
print(f"nowhere          {normal}")
print(f"at 'likes'       {once}")
print(f"everywhere       {everywhere}")
print(f"in what follows  {while_writing}")

# %% [markdown]
# (Where two sentences adjoin without a space the model has written its `<|endoftext|>`, which is
# not shown.)
#
# Steered at one word, the model says that Anna likes tea and goes on as if nothing had happened:
# the capital of Austria is Vienna. Steered everywhere it says that the capital of Sweden is tea.
# The direction stands for an answer and does not know what the question was. Steered in what
# follows the prompt only, it comes too late for Anna, since "milk" was chosen by the last position
# of the prompt.

# %%
assert once.startswith("Anna likes tea.")
assert once.count("tea") == 1
assert "The capital of Austria is Vienna." in once
assert everywhere.startswith("Anna likes tea.")
assert "The capital of Sweden is tea." in everywhere
assert while_writing.startswith("Anna likes milk.")
assert "is tea." in while_writing
assert not model.list_hooks()  # none of them is left behind

# %% [markdown]
# With `pos=` an edit does not depend on how the text is computed. With a key-value cache the word
# "likes" is computed once; without one it is computed again at every step, and edited again.

# %%
again = []
with model.hooks([(point, towards_tea)], pos=slice(VERB, 6)):
    for use_past_kv_cache in (True, False):
        again.append(
            model.generate(
                "Anna likes",
                max_new_tokens=14,
                do_sample=False,
                stop_at_eos=False,
                verbose=False,
                use_past_kv_cache=use_past_kv_cache,
            )
        )
assert again[0] == again[1]

# %% [markdown]
# A hook that never comes to act is easily overlooked: a position too far right, a phase that does
# not happen. `bind` makes a model of its own out of model and hooks, which refuses to say nothing
# about that.

# %%
bound = model.bind([(point, towards_tea)], pos=VERB)
bound("Anna likes")
(rule,) = bound.last_report.rules
print(rule.fires)
assert len(rule.fires) == 1

too_far = model.bind([(point, towards_tea)], pos=100)
try:
    too_far("Anna likes")
    raise AssertionError("a rule that never acted went unnoticed")
except RuntimeError as error:
    print(error)

# %% [markdown]
# ## Capture while writing
#
# What does the stream look like while a steered text is written? `return_cache=` keeps activations
# **as they were computed**, hooks included, and puts them together so that column j of a tensor is
# token j of the text. Here: how far the stream reaches into the direction of tea, after each layer
# and at each token.

# %%
spec = CaptureSpec("resid_post")
unit = tea / tea.norm()


def reach(prompt):
    """[layer, pos]: the stream's component along the tea direction, and the tokens."""
    _, cache = model.generate(
        prompt,
        max_new_tokens=8,
        do_sample=False,
        stop_at_eos=False,
        verbose=False,
        return_cache=spec,
    )
    streams = torch.stack([cache["resid_post", layer][0] for layer in range(model.cfg.n_layers)])
    return streams @ unit, cache.tokens[0]


free, free_tokens = reach("Anna likes")
with model.hooks([(point, towards_tea)], pos=VERB):
    pushed, pushed_tokens = reach("Anna likes")

plot.patching(
    pushed - free,
    columns=model.to_str_tokens(pushed_tokens),
    title="Along the direction of tea: steered less normal",
)

# %% [markdown]
# *The picture: three layers by eleven tokens, nearly all white. At the word "likes" layers 1 and 2
# are deep blue and layer 0 is white. At the two tokens behind it some cells are pale blue.*
#
# The edit is where we made it, at "likes" after layer 1, and it has exactly the size we gave it:
# twice the length of the direction. Layer 0 comes before it and is untouched there. From the next
# token on even layer 0 differs, for the token itself is another one, "tea" instead of "milk".

# %%
assert model.to_str_tokens(free_tokens)[3] == " milk"
assert model.to_str_tokens(pushed_tokens)[3] == " tea"
added = pushed - free
assert torch.allclose(added[LAYER, VERB], 2 * tea.norm(), rtol=1e-3)
assert added[0, : VERB + 1].abs().max() < 1e-4  # before the edit,
assert added[:, :VERB].abs().max() < 1e-4  # in layers and in positions
assert added[0, 3].abs() > 0.1

# %% [markdown]
# The captured values are those of the steps. They are also what one forward over the whole text
# computes under the same edit, which is how we know that nothing was lost on the way:

# %%
with model.hooks([(point, towards_tea)], pos=VERB):
    _, whole = model.run_with_cache(pushed_tokens[None])
at_once = torch.stack([whole["resid_post", layer][0] for layer in range(model.cfg.n_layers)]) @ unit
assert torch.allclose(at_once, pushed, atol=1e-3)

# %% [markdown]
# ## Editing the past
#
# Now we leave the computation alone and change the memory. `model.prefix` runs a text and keeps its
# keys and values; whatever continues from there looks back at them.
#
# Notebook 03 takes this sentence apart; here is what matters now. Its last word, " to", is the
# position that says the name, so the prefix ends right before it.

# %%
TEXT = "When Mary and John went to the store, John gave a drink"
mary, john, grace = (model.to_single_token(f" {name}") for name in ("Mary", "John", "Grace"))
words = model.to_str_tokens(TEXT)
past = model.prefix(TEXT)


def preference(logits):
    """Of Mary over John, at the end."""
    return (logits[0, -1, mary] - logits[0, -1, john]).item()


untouched = preference(model(" to", past_kv_cache=past))
print(f"Mary over John: {untouched:.2f}")
assert 6 < untouched < 8

# %% [markdown]
# A finished prefix is frozen. `branch` grows from it and may be edited; the prefix itself stays as
# it is.
#
# There are two ways to erase something from the past, and they are not the same.
#
# 1. A **hook** sets the values of one position to zero *while the prefix is computed*. Later words
#    of the prefix then look at the changed values too, and what they make of them is stored in
#    turn.
# 2. An **edit at rest** sets the same values to zero when the prefix is *finished*. Its own later
#    words have looked already, and remember what they saw.


# %%
def erased_while_computed(layer, pos):
    with model.hooks([(("v", layer), lambda v, hook: v * 0)], pos=pos):
        return preference(model(f"{TEXT} to"))


def erased_at_rest(layer, pos):
    branch = past.branch(1)
    branch.edit(layer=layer, pos=pos, values=0.0)
    return preference(model(" to", past_kv_cache=branch))


cells = [[(layer, pos) for pos in range(len(words))] for layer in range(model.cfg.n_layers)]
computed = torch.tensor([[erased_while_computed(*cell) for cell in row] for row in cells])
at_rest = torch.tensor([[erased_at_rest(*cell) for cell in row] for row in cells])
plot.patching(
    torch.stack([computed, at_rest]),
    columns=words,
    names=["erased while computed", "erased at rest"],
    baseline=untouched,
    title="Preference of Mary over John without one position's values in one layer",
)

# %% [markdown]
# *The picture: two grids of layers by words. On the left, layer 0 has many coloured cells, the
# deepest vermilion one at "Mary", and layer 1 has three: "and" and "went" vermilion, the second
# name blue. On the right, layer 0 has only "and", pale blue, and layer 1 lacks "went". The rows of
# layer 2 are the same in both.*
#
# - **"Mary" in layer 0**: erased while the prefix is computed, the answer turns into John. Erased
#   at rest, nothing happens: the word "and" has fetched the name already, and nobody looks at
#   "Mary" again.
# - **"went" in layer 1**: the same story. The second "John" looks at it, in the prefix, to find out
#   which of the two it is.
# - **"and" in layer 1**: that is where the name waits. Erase it at rest, and the preference is
#   gone.
# - **Layer 2** has no layer behind it. What it stores is read by the last word only, so that there
#   is nothing that could have looked before: both ways are the same, to rounding.
#
# The right-hand picture is a map of what the future reads.

# %%
MARY, AND, WENT = (words.index(word) for word in (" Mary", " and", " went"))
assert computed[0, MARY] < -3
assert abs(at_rest[0, MARY] - untouched) < 0.2
assert computed[1, WENT] < 0.5
assert abs(at_rest[1, WENT] - untouched) < 0.2
assert at_rest[1, AND] < 0.5
assert torch.allclose(computed[2], at_rest[2], atol=1e-3)

# %% [markdown]
# ### Another memory
#
# If the name waits at "and", then we can put another one there. Take the values of "and" in layer 1
# from a text in which Grace went to the store, write them into the memory of the first text, and
# let the model go on.

# %%
_, other = model.run_with_cache(TEXT.replace("Mary", "Grace"), names_filter=("v", 1))

memory = past.branch(1)
memory.edit(layer=1, pos=AND, values=other["v", 1][:, [AND]])  # [batch, 1, head, d_head]
memory.freeze()  # a branch grows with every forward; from now on this one is a prefix too


def continued(past):
    tokens = model.to_tokens(" to", prepend_bos=False)
    return model.generate(
        tokens,
        max_new_tokens=1,
        do_sample=False,
        past_kv_cache=past,
        verbose=False,
        return_type="str",
    )


print(TEXT, "…")
print("as remembered:", continued(past))
print("after the edit:", continued(memory))
assert continued(past) == " to Mary"
assert continued(memory) == " to Grace"

# %% [markdown]
# The text says Mary. The model has read it and says Grace, for what it knows of the text is what it
# remembers. The edit touched one position of fourteen in one layer of three: 128 numbers out of
# 10,752.

# %%
n_edited = other["v", 1][:, [AND]].numel()
n_stored = sum(entry.past_keys.numel() + entry.past_values.numel() for entry in past.entries)
assert len(words) == 14
assert n_edited == 128
assert n_stored == 10_752

# %% [markdown]
# And the prefix that we branched from has not changed, so that any number of edits can be tried
# from the same point.

# %%
assert preference(model(" to", past_kv_cache=past)) == untouched

# %% [markdown]
# ## To try
#
# - Make a direction for another food, or for a home (`HOMES` beside `LIKES`), and add two of them
#   at once.
# - Steer after layer 0 instead of layer 1. Does it still work for tea? And for fish?
# - Swap keys and not values at "and". A key says who is found and a value what is found there: what
#   do you expect?
