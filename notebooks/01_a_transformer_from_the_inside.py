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
# # A transformer from the inside
#
# A language model reads a text and says how likely every word is to come next. This notebook opens
# one and follows a sentence through it, from the words that go in to the numbers that come out. You
# need Python and matrix products, nothing else.
#
# The model, `tiny-lens`, comes with the library. It is small enough to be computed by hand, which
# is how we shall end, and it is built like the large ones: what has a name here has the same name
# in a model ten thousand times its size.

# %%
import re

import torch

from transformer_lens_lite import HookedTransformer, plot

torch.set_grad_enabled(False)  # we only look; nothing is trained
model = HookedTransformer.from_pretrained("tiny-lens")
cfg = model.cfg
cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head, cfg.d_mlp, cfg.d_vocab

# %% [markdown]
# Six sizes describe it: 3 layers, 4 attention heads in each, vectors of 128 numbers (`d_model`), of
# 32 inside a head (`d_head`) and of 320 inside an MLP (`d_mlp`), and a vocabulary of 421 words.

# %%
assert (cfg.n_layers, cfg.n_heads, cfg.d_model) == (3, 4, 128)
assert (cfg.d_head, cfg.d_mlp, cfg.d_vocab) == (32, 320, 421)
assert cfg.normalization_type == "RMSPre"  # a norm without weights, see below
assert cfg.n_heads * cfg.d_head == cfg.d_model  # the heads of a layer share its width

# %% [markdown]
# ## From text to numbers and back
#
# A model sees no letters. A text is cut into **tokens**, and each is replaced by its number in the
# vocabulary. Here a token is a word with the space before it; the large models have pieces of words
# too. The first token is a mark that says "a text begins".

# %%
prompt = "When Mary and John went to the store, John gave a drink to"
tokens = model.to_tokens(prompt)  # [batch, pos]: one text, 15 tokens
words = model.to_str_tokens(prompt)
print(words)
assert tokens.shape == (1, 15)
assert (words[0], words[2], words[-1]) == ("<|endoftext|>", " Mary", " to")
assert model.to_string(tokens[0, 1:]) == prompt  # nothing was lost

# %% [markdown]
# Now we run the model and keep everything it computes on the way. `logits` is the result: for every
# position, one number for each of the 421 words. The softmax turns them into probabilities of the
# **next** word. At the last position more than 99 % of it is on " Mary": John gives, so Mary gets.

# %%
logits, cache = model.run_with_cache(tokens)
probabilities = logits[0, -1].softmax(-1)
for token in probabilities.topk(3).indices:
    print(f"{model.to_single_str_token(int(token)):>6} {probabilities[token]:.4f}")

assert logits.shape == (1, 15, 421)
assert probabilities[model.to_single_token(" Mary")] > 0.99

# %% [markdown]
# ## The map
#
# `cache` holds every intermediate value under a name. The names belong to **hook points**, places
# at which you can read a value and also replace it. Here they are, all of them, where they lie.
#
# *In the drawing, a double line goes straight down on the left, from the tokens to the logits. In
# each of the three blocks two branches leave it to the right and come back: first attention, then
# the MLP. What a branch returns is added to the line.*
#
# A star marks what is computed only when somebody asks for it by name, because it takes time or
# memory.

# %%
PICTURE = """
 tokens                             hook_tokens*
   │ W_E: one row for each token
   ╠═ hook_embed
   ║
   ║   blocks.0, then blocks.1, then blocks.2, each of them so:
 ┌─║───────────────────────────────────────────────────────────────────────────────┐
 │ ╠═ hook_resid_pre                                                               │
 │ ║    │ one copy for each head:   hook_attn_in*                                  │
 │ ║    │ and for each of q, k, v:  hook_q_input*  hook_k_input*  hook_v_input*    │
 │ ║    └─ norm: ln1.hook_scale, ln1.hook_normalized                               │
 │ ║             │ W_Q                  │ W_K                  │ W_V               │
 │ ║         attn.hook_q            attn.hook_k            attn.hook_v             │
 │ ║             │ turn                 │ turn                 │                   │
 │ ║         attn.hook_rot_q        attn.hook_rot_k            │                   │
 │ ║             └───────── q·k ────────┘                      │                   │
 │ ║                attn.hook_attn_scores                      │                   │
 │ ║                         │ softmax                         │                   │
 │ ║                attn.hook_pattern ───── weighted sum ──────┘                   │
 │ ║                                             │                                 │
 │ ║                                        attn.hook_z                            │
 │ ║                                             │ W_O                             │
 │ ║                                        attn.hook_result*                      │
 │ ║                                             │ sum of the heads                │
 │ +◄══════════════════════════════════════ hook_attn_out                          │
 │ ║                                                                               │
 │ ╠═ hook_resid_mid                                                               │
 │ ║    │ a copy:  hook_mlp_in*                                                    │
 │ ║    └─ norm: ln2.hook_scale, ln2.hook_normalized                               │
 │ ║             │ W_gate               │ W_in                                     │
 │ ║         mlp.hook_pre           mlp.hook_pre_linear                            │
 │ ║             └─── silu(·) times ────┘                                          │
 │ ║                mlp.hook_post                                                  │
 │ ║                         │ W_out                                               │
 │ +◄═════════════════ hook_mlp_out                                                │
 │ ║                                                                               │
 │ ╠═ hook_resid_post                                                              │
 └─║───────────────────────────────────────────────────────────────────────────────┘
   ║
   └─ norm: ln_final.hook_scale, ln_final.hook_normalized
        │
      unembed.hook_in
        │ W_U
      unembed.hook_out               the logits
"""
print(PICTURE)

# %% [markdown]
# A map should be complete, so we compare it with the model: all 84 hook points are on it, and
# nothing else is. What has a star is what the cache, which holds 65, has left out.

# %%
top, inside, bottom = re.split(r" [┌└]─║─+[┐┘]\n", PICTURE)
drawn = set(re.findall(r"[\w.]*hook_\w+\*?", top + bottom))
for layer in range(cfg.n_layers):
    drawn |= {f"blocks.{layer}.{name}" for name in re.findall(r"[\w.]*hook_\w+\*?", inside)}

assert {name.rstrip("*") for name in drawn} == set(model.hook_dict)
assert {name for name in drawn if not name.endswith("*")} == set(cache)
assert (len(model.hook_dict), len(cache)) == (84, 65)

# %% [markdown]
# ## The residual stream
#
# The double line is the **residual stream**: one vector of 128 numbers for every position. It
# begins as the **embedding**: the row of the matrix `W_E` that belongs to the token. At this point
# a position knows its own word and nothing else.

# %%
assert model.W_E.shape == (421, 128)
assert torch.equal(cache["embed"], model.W_E[tokens])
assert torch.equal(cache["resid_pre", 0], cache["embed"])

# %% [markdown]
# From here on every branch *adds* to the stream and nothing is ever erased. Three sums say so; the
# second index is the layer. (`cache["resid_mid", 1]` is short for
# `cache["blocks.1.hook_resid_mid"]`.)

# %%
for layer in range(cfg.n_layers):
    pre, mid, post = (cache[name, layer] for name in ("resid_pre", "resid_mid", "resid_post"))
    assert pre.shape == (1, 15, 128)
    assert torch.equal(mid, pre + cache["attn_out", layer])
    assert torch.equal(post, mid + cache["mlp_out", layer])
    if layer + 1 < cfg.n_layers:
        assert torch.equal(cache["resid_pre", layer + 1], post)

# %% [markdown]
# So the final stream is a sum of seven vectors at each position: the embedding, three attentions
# and three MLPs. That is what makes the inside of a transformer legible: one can ask each of the
# seven what it contributed. `decompose_resid` lists them.

# %%
parts, labels = cache.decompose_resid(return_labels=True)  # [component, batch, pos, d_model]
print(labels)
assert len(parts) == 7
torch.testing.assert_close(parts.sum(0), cache["resid_post", 2], atol=1e-4, rtol=1e-4)

# %% [markdown]
# ## The norm in front of every branch
#
# The stream grows as it is added to: here its vectors become more than fifty times as long. Before
# a branch reads it, each vector is divided by the root of the mean of its squares, so that the
# branch always sees numbers of the same size. The stream itself stays as it is. (The norm in a
# checkpoint also multiplies each coordinate by a weight. When the model was loaded, these weights
# were multiplied into the matrices that come next.)


# %%
def norm(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + cfg.eps).sqrt()


lengths = [cache["resid_pre", 0].norm(dim=-1).mean(), cache["resid_post", 2].norm(dim=-1).mean()]
print(f"mean length of the stream: {lengths[0]:.1f} at first, {lengths[1]:.1f} at last")
assert lengths[1] > 50 * lengths[0]
normalized = cache["normalized", 1, "ln1"]
torch.testing.assert_close(normalized, norm(cache["resid_pre", 1]), atol=1e-5, rtol=1e-4)
torch.testing.assert_close(normalized.pow(2).mean(-1), torch.ones(1, 15), atol=1e-3, rtol=0)

# %% [markdown]
# ## Attention: where positions talk to each other
#
# Attention is the only place at which information moves from one position to another. Each head
# makes three vectors of 32 numbers at every position:
#
# * a **query**: what I am looking for;
# * a **key**: what I can be found by;
# * a **value**: what I hand over when found.

# %%
LAYER = 1
attn = model.blocks[LAYER].attn
q = torch.einsum("bpm,nmh->bpnh", normalized, attn.W_Q) + attn.b_Q
k = torch.einsum("bpm,nmh->bpnh", normalized, attn.W_K) + attn.b_K
v = torch.einsum("bpm,nmh->bpnh", normalized, attn.W_V) + attn.b_V
for ours, name in ((q, "q"), (k, "k"), (v, "v")):
    assert ours.shape == (1, 15, 4, 32)  # [batch, pos, head, d_head]
    torch.testing.assert_close(cache[name, LAYER], ours, atol=1e-4, rtol=1e-4)

# %% [markdown]
# Nothing yet says where in the text a key stands. So queries and keys are **turned**: their 32
# numbers are read as 16 points in a plane, and each is turned by an angle that grows with the
# position. The first turns by one radian a step, the last by less than a five-thousandth of one.
# Turning changes no length. But the product of a query and a key now depends on how far apart the
# two stand, for their turns differ by just that.


# %%
def turn(x):
    pos = torch.arange(x.shape[1])
    angle = pos[:, None] * 10000.0 ** (-torch.arange(16) / 16)  # [pos, plane]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # the same for every head
    a, b = x[..., :16], x[..., 16:]  # coordinate i and coordinate i + 16 are one plane
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


assert 10000.0 ** (-15 / 16) < 1 / 5000
torch.testing.assert_close(cache["rot_q", LAYER], turn(q), atol=1e-4, rtol=1e-4)
torch.testing.assert_close(cache["rot_k", LAYER], turn(k), atol=1e-4, rtol=1e-4)
torch.testing.assert_close(cache["rot_k", LAYER].norm(dim=-1), k.norm(dim=-1), atol=1e-4, rtol=1e-4)

# %% [markdown]
# The **score** of a pair of positions is the product of query and key, over the root of 32 to keep
# it moderate. A position may not look at what comes after it, for that is what the model is to
# predict: those scores are minus infinity. The softmax turns each row of scores into weights.

# %%
scores = torch.einsum("bqnh,bknh->bnqk", turn(q), turn(k)) / 32**0.5
future = torch.ones(15, 15, dtype=torch.bool).triu(1)
scores = scores.masked_fill(future, -torch.inf)
torch.testing.assert_close(cache["attn_scores", LAYER], scores, atol=1e-3, rtol=1e-4)

pattern = cache["pattern", LAYER]
assert pattern.shape == (1, 4, 15, 15)  # [batch, head, looking, looked at]
torch.testing.assert_close(pattern, scores.softmax(-1), atol=1e-4, rtol=1e-4)
torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 4, 15))  # the rows are shares of a whole
assert pattern[..., future].eq(0).all()  # and nobody sees the future

# %% [markdown]
# These weights, the **attention pattern**, are what people look at first in a model. *The picture
# shows that of head 3 in layer 1. Each row is a position that looks; the darker a cell, the more of
# its attention goes to the word of that column. All is on or below the diagonal. The last row has
# one dark cell, in column 3: the word " and" between the two names.*

# %%
figure = plot.attention(pattern[0, 3], words, title="Layer 1, head 3")
figure.update_layout(height=520, yaxis_scaleanchor="x")
assert pattern[0, 3, -1, 3] > 0.99
assert words[3] == " and"
figure

# %% [markdown]
# Why would anybody look at " and"? Because by layer 1 that position no longer stands for the word
# alone. In layer 0, head 0 looked from " and" at " Mary", the word before it, with more than 95 %
# of its attention, and wrote there what it found. What a position *is* and what it *carries* are
# different things; the notebook on indirect objects takes this up.

# %%
assert words[2] == " Mary"
assert cache["pattern", 0][0, 0, 3, 2] > 0.95

# %% [markdown]
# The head now sums the values with these weights (`z`) and writes the sum into the stream through
# its own matrix `W_O`. What one head adds is its `result`: we ask for it by name. Their sum, and a
# constant vector, is what attention adds.

# %%
z = torch.einsum("bnqk,bknh->bqnh", pattern, v)
torch.testing.assert_close(cache["z", LAYER], z, atol=1e-4, rtol=1e-4)

_, extra = model.run_with_cache(tokens, names_filter="blocks.1.attn.hook_result")
result = torch.einsum("bqnh,nhm->bqnm", z, attn.W_O)
assert extra["result", LAYER].shape == (1, 15, 4, 128)  # [batch, pos, head, d_model]
torch.testing.assert_close(extra["result", LAYER], result, atol=1e-4, rtol=1e-4)
torch.testing.assert_close(cache["attn_out", LAYER], result.sum(2) + attn.b_O, atol=1e-4, rtol=1e-4)

# %% [markdown]
# ## The MLP: each position by itself
#
# The second branch moves nothing between positions. It widens the vector to 320 **neurons**,
# applies a function that isn't linear, and narrows it again. Here each neuron has a gate: the one
# product decides how far it opens, the other what passes through.

# %%
mlp = model.blocks[LAYER].mlp
x = norm(cache["resid_mid", LAYER])
gate, passing = x @ mlp.W_gate, x @ mlp.W_in
neurons = torch.nn.functional.silu(gate) * passing
assert neurons.shape == (1, 15, 320)
torch.testing.assert_close(cache["pre", LAYER], gate, atol=1e-4, rtol=1e-4)
torch.testing.assert_close(cache["pre_linear", LAYER], passing, atol=1e-4, rtol=1e-4)
torch.testing.assert_close(cache["post", LAYER], neurons, atol=1e-4, rtol=1e-4)
torch.testing.assert_close(cache["mlp_out", LAYER], neurons @ mlp.W_out, atol=1e-3, rtol=1e-4)

# %% [markdown]
# ## Back to words
#
# After the last layer the stream is normalised once more, and `W_U` compares it with a vector for
# every word. That is all: the logits are a product.

# %%
last = norm(cache["resid_post", 2])
torch.testing.assert_close(cache["ln_final.hook_normalized"], last, atol=1e-5, rtol=1e-4)
torch.testing.assert_close(logits, last @ model.W_U + model.b_U, atol=1e-3, rtol=1e-4)

# %% [markdown]
# The stream has the same form everywhere, so we may end early and ask what the model would say
# after the first or second layer. This is the **logit lens** (nostalgebraist, 2020). *The picture
# has a row for each depth, the embedding at the bottom and the end on top, and a column for each
# word of the sentence. In each cell is the likeliest next word, on a darker ground where it is
# surer. Read the last column upwards: " to", the word itself, twice; then " John"; and only on top
# " Mary".*

# %%
lens = cache.logit_lens()[:, 0, -1].softmax(-1)  # at the last position, one row a depth
said = [model.to_single_str_token(int(row.argmax())) for row in lens]
assert said == [" to", " to", " John", " Mary"]
assert 0.05 < lens[2, model.to_single_token(" Mary")] < 0.25  # one layer before the end
torch.testing.assert_close(lens[-1], probabilities, atol=1e-4, rtol=1e-3)

figure = plot.logit_lens(cache)
figure.update_layout(height=320)
figure

# %% [markdown]
# ## The whole model in twenty lines
#
# You have now seen every step. Put together, they are a transformer, and it computes what the
# library does.


# %%
def transformer(tokens):
    stream = model.W_E[tokens]
    n = tokens.shape[1]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        x = norm(stream)
        q = torch.einsum("bpm,nmh->bpnh", x, attn.W_Q) + attn.b_Q
        k = torch.einsum("bpm,nmh->bpnh", x, attn.W_K) + attn.b_K
        v = torch.einsum("bpm,nmh->bpnh", x, attn.W_V) + attn.b_V
        scores = torch.einsum("bqnh,bknh->bnqk", turn(q), turn(k)) / 32**0.5
        pattern = scores.masked_fill(future, -torch.inf).softmax(-1)
        z = torch.einsum("bnqk,bknh->bqnh", pattern, v)
        stream = stream + torch.einsum("bqnh,nhm->bqm", z, attn.W_O) + attn.b_O
        x = norm(stream)
        neurons = torch.nn.functional.silu(x @ mlp.W_gate) * (x @ mlp.W_in)
        stream = stream + neurons @ mlp.W_out
    return norm(stream) @ model.W_U + model.b_U


torch.testing.assert_close(transformer(tokens), model(tokens), atol=1e-3, rtol=1e-4)

# %% [markdown]
# ## Reaching in
#
# A hook point is also a place to interfere. A hook is a function that gets the value and may return
# another. This one takes away what head 3 of layer 1, the one that looked at " and", has found for
# the last position. The logit of " Mary", which was 6.9 above that of " John", is only 1.9 above it
# then: one head of twelve made most of the difference.


# %%
def without_head_3(z, hook):  # z: [batch, pos, head, d_head]
    z[:, -1, 3] = 0.0
    return z


changed = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", without_head_3)])
mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")
before = logits[0, -1, mary] - logits[0, -1, john]
after = changed[0, -1, mary] - changed[0, -1, john]
print(f"Mary's logit above John's: {before:.1f}, without the head {after:.1f}")
assert 6.8 < before < 7.0
assert 1.8 < after < 2.0
torch.testing.assert_close(changed[0, :-1], logits[0, :-1], atol=1e-3, rtol=1e-4)  # no other place
assert not model.list_hooks()  # nothing stays behind

# %% [markdown]
# ## Where to go from here
#
# * *Induction heads*: a circuit of two heads in two layers, found by what they look at.
# * *Indirect objects*: which parts of the model make it say " Mary".
# * *The key-value cache*: how a text is continued without computing it anew for each word.
