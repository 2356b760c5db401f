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
# # The key-value cache
#
# A language model writes one word at a time. To find the next it would have to read the whole text
# again, each time with one word more. Almost all of that work was done before. The **key-value
# cache** is what one keeps so as not to do it again: it is the reason that a model can write a page
# in seconds, and most of the memory it takes while it does.
#
# We look at what is kept and why it is enough, follow a text through the two phases of writing, and
# then let many texts share one beginning. You should know queries, keys, values and the residual
# stream; the first notebook explains them.

# %%
import torch

from transformer_lens_lite import HookedTransformer, KeyValueCache, plot

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("tiny-lens")
cfg = model.cfg
prompt = "When Mary and John went to the store, John gave a drink to"
tokens = model.to_tokens(prompt)  # [batch, pos]
assert tokens.shape == (1, 15)

# %% [markdown]
# ## The past doesn't change
#
# A position sees itself and what is before it, never what comes after. So when a word is appended,
# nothing changes at the positions that are already there. We run the text with and without one more
# word and compare every layer.

# %%
longer = torch.cat([tokens, torch.tensor([[model.to_single_token(" Mary")]])], dim=1)
_, before = model.run_with_cache(tokens)
_, after = model.run_with_cache(longer)
for layer in range(cfg.n_layers):
    new, old = after["resid_post", layer], before["resid_post", layer]
    assert new.shape[1] == old.shape[1] + 1
    torch.testing.assert_close(new[:, :-1], old, atol=1e-4, rtol=1e-4)

# %% [markdown]
# What does the new position need of the old ones? Look at where information moves from one position
# to another: only in attention, and there the new position multiplies its own *query* with the
# **keys** of the others and sums their **values**. Nobody ever asks for the queries of the past,
# its neurons or its logits. So two vectors for each head and layer are all one has to keep.
#
# For `tiny-lens` that is 2 · 3 layers · 4 heads · 32 numbers, 768 for each position.

# %%
per_position = 2 * cfg.n_layers * cfg.n_heads * cfg.d_head
assert per_position == 768

# %% [markdown]
# ## Prefill: the prompt, all at once
#
# We begin with an empty cache. The first forward reads the whole prompt, computes all its positions
# side by side, and leaves their keys and values in the cache. This is the **prefill**.

# %%
kv = KeyValueCache.init_cache(cfg, cfg.device, batch_size=1)
assert kv.length == 0
logits = model(tokens, past_kv_cache=kv)
print(kv)
assert kv.length == 15
assert kv[1].past_keys.shape == kv[1].past_values.shape == (1, 15, 4, 32)  # [batch, pos, head, d]

# %% [markdown]
# What lies there has names we know. Values are those of `hook_v`. Keys are those of `hook_rot_k`:
# *after* they were turned to their positions. We come back to that.

# %%
for layer in range(cfg.n_layers):
    torch.testing.assert_close(kv[layer].past_keys, before["rot_k", layer], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kv[layer].past_values, before["v", layer], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(kv[layer].past_keys, before["k", layer], atol=0.1)

# %% [markdown]
# ## Decode: one position at a time
#
# Now the model has said its first word, " Mary". From here on each forward gets *one* token. Its
# stream has one position; its attention looks at the new position and at all that are stored. We
# write three words and compare each time with a run of the whole text from nothing.

# %%
text = tokens
for _ in range(3):
    said = logits[:, -1:].argmax(-1)  # [batch, 1]
    text = torch.cat([text, said], dim=1)
    with model.capture(["resid_pre", "pattern"]) as seen:
        logits = model(said, past_kv_cache=kv)
    print(repr(model.to_string(said[0])), list(seen["pattern", 1].shape))
    assert seen["resid_pre", 0].shape == (1, 1, 128)  # one position is computed
    assert seen["pattern", 1].shape == (1, 4, 1, kv.length)  # and looks at all of them
    torch.testing.assert_close(logits[:, -1], model(text)[:, -1], atol=1e-3, rtol=1e-4)

assert model.to_string(text[0, 15:]) == " Mary.<|endoftext|>"
assert kv.length == 18

# %% [markdown]
# Step by step, one head by hand: the query of the new position, times the keys that are stored, is
# its row of the attention pattern; that row times the values is what the head has found.

# %%
said = torch.tensor([[model.to_single_token("The")]])
with model.capture(["rot_q", "pattern", "z"]) as seen:
    model(said, past_kv_cache=kv)  # the new key and value are stored too

LAYER, HEAD = 1, 0
query = seen["rot_q", LAYER][0, 0, HEAD]  # [d_head]
keys, values = kv[LAYER].past_keys[0, :, HEAD], kv[LAYER].past_values[0, :, HEAD]  # [pos, d_head]
row = (keys @ query / cfg.d_head**0.5).softmax(0)
torch.testing.assert_close(seen["pattern", LAYER][0, HEAD, 0], row, atol=1e-4, rtol=1e-4)
torch.testing.assert_close(seen["z", LAYER][0, 0, HEAD], row @ values, atol=1e-4, rtol=1e-4)

# %% [markdown]
# No mask is needed here: all that is stored is past.
#
# ## What is saved, drawn
#
# `generate` does all this by itself, and can also be told not to. A hook notes which positions each
# forward computes, while both write the same 10 words.


# %%
def forwards(use_cache):
    """The first and last position of each forward, and the text."""
    spans = []

    def note(resid, hook):
        spans.append((hook.step.start, hook.step.stop))

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", note)]):
        out = model.generate(
            tokens,
            max_new_tokens=10,
            do_sample=False,
            stop_at_eos=False,
            use_past_kv_cache=use_cache,
            return_type="tokens",
            verbose=False,
        )
    return spans, out


cached, text_cached = forwards(True)
uncached, text_uncached = forwards(False)
assert torch.equal(text_cached, text_uncached)
assert cached == [(0, 15)] + [(n, n + 1) for n in range(15, 24)]
assert uncached == [(0, n) for n in range(15, 25)]

# %% [markdown]
# With a cache 24 positions are computed, each of them once. Without, it is 195, and the gap widens
# with the square of the length.
#
# *The picture has two panels, each with a row for each of the ten forwards, from top to bottom, and
# a column for each position. Blue is computed, vermilion is read from the cache. With a cache
# (left), the first row is blue up to position 14, and below it runs one blue cell a row, a
# staircase, with vermilion to its left. Without (right), everything is blue.*

# %%
work = torch.zeros(2, 10, 24)  # 0: not there yet
for panel, spans in enumerate([cached, uncached]):
    for forward, (start, stop) in enumerate(spans):
        work[panel, forward, :start] = -1  # read
        work[panel, forward, start:stop] = 1  # computed
assert (work[0] == 1).sum() == 24
assert (work[1] == 1).sum() == 195

figure = plot.patching(work, names=["cached", "uncached"])
figure.update_traces(showscale=False, hovertemplate="forward %{y}, position %{x}<extra></extra>")
ticks = [0, 5, 10, 15, 20]
figure.update_xaxes(tickvals=ticks, ticktext=ticks, title_text="position")
figure.update_yaxes(autorange="reversed", title_text=None)
figure.update_yaxes(title_text="forward", col=1)
figure.update_layout(height=320)
figure

# %% [markdown]
# The two phases are different work for a machine. In the prefill many positions go through each
# weight matrix together. In decode a single one does, so that reading the weights, and reading the
# cache, takes longer than calculating with them.
#
# ## Why keys are turned once
#
# In this model, as in most today, positions are told by **turning** (rotary positions). The numbers
# of a query or key are pairs, points in a plane; at position *p* each is turned by *p* times an
# angle of its own.


# %%
def turn(x, pos):  # x: [..., pos, head, d_head], pos: [pos]
    half = cfg.d_head // 2
    angle = pos[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


pos = torch.arange(15)
q, k = before["q", LAYER], before["k", LAYER]
torch.testing.assert_close(before["rot_k", LAYER], turn(k, pos), atol=1e-4, rtol=1e-4)

# %% [markdown]
# A key is turned by its *own* position. It doesn't matter who will look at it, or when: the turn
# can be made when the key is, and never again.
#
# It looks as if the turn would go stale, for what counts in a text is how far apart two words are,
# and each new query is further away. But the query is turned too, by its own position. The product
# of two turned vectors depends only on the *difference* of their turns, which is just that
# distance. So move everything by 100 positions, queries and keys alike: no score changes.


# %%
def scores(shift_q, shift_k):
    turned_q, turned_k = turn(q, pos + shift_q), turn(k, pos + shift_k)
    return torch.einsum("bqnh,bknh->bnqk", turned_q, turned_k) / cfg.d_head**0.5


past = torch.ones(15, 15, dtype=torch.bool).tril()
there = before["attn_scores", LAYER][..., past]
torch.testing.assert_close(scores(0, 0)[..., past], there, atol=1e-3, rtol=1e-3)
torch.testing.assert_close(scores(100, 100)[..., past], there, atol=1e-3, rtol=1e-3)
moved = (scores(100, 0)[..., past] - there).abs().max()
print(f"only the queries moved: scores differ by up to {moved:.0f}")
assert moved > 10

# %% [markdown]
# And if somebody turned stored keys again, at each step, as a careless cache might? We spoil a copy
# in just this way and let the model read its prompt's last word over it. The right cache gives
# " Mary" 99 %. The spoilt one gives her less than one in a thousand.

# %%
right = KeyValueCache.init_cache(cfg, cfg.device, batch_size=1)
model(tokens[:, :-1], past_kv_cache=right)
spoilt = right.clone()
for layer in range(cfg.n_layers):
    twice = turn(spoilt[layer].past_keys, torch.arange(14))
    spoilt.edit(layer, slice(None), keys=twice)

mary = model.to_single_token(" Mary")
from_right = model(tokens[:, -1:], past_kv_cache=right)[0, -1].softmax(-1)[mary]
from_spoilt = model(tokens[:, -1:], past_kv_cache=spoilt)[0, -1].softmax(-1)[mary]
print(f"right {from_right:.3f}, spoilt {from_spoilt:.1e}")
assert from_right > 0.99
assert from_spoilt < 0.001

# %% [markdown]
# ## One beginning, many continuations
#
# Often many texts begin alike: the same instructions, the same document with different questions,
# the same question answered eight times. Their common past is the same keys and values. So it can
# be computed once and **frozen**: from then on it is only read.

# %%
beginning = "When Mary and John went to the store,"
start = model.prefix(beginning)
assert start.frozen
assert start.length == 10

endings = [f" {who} gave a {what} to" for who in ("John", "Mary") for what in ("drink", "book")]
with model.capture("resid_pre") as seen:
    logits = model(endings, past_kv_cache=start)  # [batch, new positions, d_vocab]
answers = [model.to_single_str_token(int(i)) for i in logits[:, -1].argmax(-1)]
print(answers)
assert logits.shape == (4, 5, 421)
assert answers == [" Mary", " Mary", " John", " John"]
assert start.length == 10  # as it was

# %% [markdown]
# The result is that of four whole texts. But only 10 + 4 · 5 = 30 positions were computed and not
# 4 · 15 = 60.

# %%
whole = model([beginning + ending for ending in endings])
assert whole.shape[:2] == (4, 15)
assert seen["resid_pre", 0].shape[:2] == (4, 5)
torch.testing.assert_close(logits, whole[:, 10:], atol=1e-3, rtol=1e-4)

# %% [markdown]
# Nor is the beginning copied for each of the four. A *branch* grows from it: a **segment** that is
# shared, and a tail of its own for each row.
#
# *In the drawing a block of ten columns and one row stands on the left: the frozen prefix. Four
# rows of five columns branch off to its right, one for each ending.*
#
# ```
#                                          ┌── John gave a drink to
#                                          ├── John gave a book  to
#   <|endoftext|> When Mary … the store, ══╡
#                                          ├── Mary gave a drink to
#                                          └── Mary gave a book  to
#
#   one row, ten positions:                 four rows, five positions each:
#   stored once and only read               each row grows by itself
# ```

# %%
branch = start.branch(4)
model(endings, past_kv_cache=branch)
(shared, _), (own, _) = branch[LAYER].segments  # of each segment its keys, [row, head, pos, d_head]
assert shared.shape == (1, 4, 10, 32)
assert own.shape == (4, 4, 5, 32)
assert shared.data_ptr() == start[LAYER].segments[0][0].data_ptr()  # the very same memory
assert branch.length == 15

# %% [markdown]
# But how can attention be computed in two parts, when the softmax divides by the sum over *all*
# positions? Weigh each segment as if it were alone, and keep for each the logarithm of its sum of
# exponentials. The softmax of these two numbers says how much each segment counts, and the mean
# with these shares is the whole. (Large systems do it so too: Hydragen, arXiv 2402.05099.)
#
# By hand, for the last query of each of the four rows in layer 2:

# %%
LAST = 2
with model.capture(["rot_q", "z"]) as seen:
    model(endings, past_kv_cache=start)
query = seen["rot_q", LAST][:, -1]  # [row, head, d_head]

parts, sums = [], []
for keys, values in branch[LAST].segments:  # one row of shared keys serves all four
    part_scores = (keys @ query[..., None])[..., 0] / cfg.d_head**0.5  # [row, head, pos]
    parts.append((part_scores.softmax(-1)[..., None] * values).sum(2))
    sums.append(part_scores.logsumexp(-1))
shares = torch.stack(sums).softmax(0)  # [segment, row, head]
z = (shares[..., None] * torch.stack(parts)).sum(0)
torch.testing.assert_close(seen["z", LAST][:, -1], z, atol=1e-4, rtol=1e-4)

# %% [markdown]
# The shares are worth a look: they tell how much of what a head finds comes from the beginning.
# *The picture has a row for each of the four texts and a column for each head of layer 2. Head 0 is
# deep blue, with more than 90 % from the beginning, where John gives (the two rows at the bottom),
# and blank, below 1 %, where Mary does. Head 2 has about half in all of them.*

# %%
assert shares[0, :2, 0].min() > 0.9
assert shares[0, 2:, 0].max() < 0.01
assert ((shares[0, :, 2] > 0.4) & (shares[0, :, 2] < 0.5)).all()

figure = plot.patching(
    shares[0],
    columns=[f"head {head}" for head in range(4)],
    rows=endings,
    title="Share of the common beginning in layer 2",
)
figure.update_traces(hovertemplate="%{y}, %{x}: %{z:.2f}<extra></extra>")
figure.update_layout(height=320)
figure.update_yaxes(title_text=None)
figure

# %% [markdown]
# ## What it costs
#
# The cache grows with every position of every text, in each layer. For a model with 32 layers and 8
# key-value heads of 128 numbers in 16 bits, as many have today, that is 128 KiB a position: a text
# of 8192 positions takes one GiB, and 64 such texts take 64. If they share a beginning of 8000
# positions, it is less than 2.5.


# %%
def cache_bytes(layers, kv_heads, d_head, positions, bytes_each=2):
    return 2 * layers * kv_heads * d_head * positions * bytes_each


assert cache_bytes(32, 8, 128, 1) == 128 * 2**10
assert cache_bytes(32, 8, 128, 8192) == 2**30
assert cache_bytes(32, 8, 128, 8000 + 64 * 192) < 2.5 * 2**30

ours = cache_bytes(cfg.n_layers, cfg.n_heads, cfg.d_head, start.length, bytes_each=4)
assert start.nbytes() == ours  # our frozen beginning holds nothing else

# %% [markdown]
# A cache is a computed thing: it belongs to the weights, and to the interventions, it was computed
# with. A frozen one knows both and refuses others before anything is run.

# %%
louder = model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda resid, hook: 1.5 * resid)])
try:
    with louder:
        model(endings, past_kv_cache=start)
    refused = ""
except ValueError as error:
    refused = str(error)
print(refused)
assert "would have acted on its 10 positions" in refused

# %% [markdown]
# The page on prefixes in the documentation goes on from here: keeping prefixes in files, finding
# the longest one that is known, and editing the past.
