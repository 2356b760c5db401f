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
# # Modular addition: a small model learns, and we read how
#
# On a clock with 47 hours, what is 40 plus 12? It is 5: the sum is 52, and 47 of it are once
# around.
#
# In this notebook a small transformer learns to add on such a clock. We train it from nothing, on
# half of all pairs of numbers, in about half a minute. It learns the pairs by heart first, and only
# later finds out how to add those it has never seen. Then we read its weights. They hold an
# algorithm that nobody wrote: the model turns numbers into angles.
#
# That models of this kind do so was found by Nanda et al. 2023, *Progress measures for grokking via
# mechanistic interpretability* ([arXiv 2301.05217](https://arxiv.org/abs/2301.05217)). What is
# below repeats the central observations at a smaller size.

# %%
import math

import torch
from torch.nn.functional import cross_entropy

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig, plot

torch.set_num_threads(1)  # so small a model gains nothing from more, and sums keep their order

N = 47  # hours of the clock; a prime, so that no two ways of going around are alike
EQUALS = N  # one more token

# %% [markdown]
# ## The task
#
# A text has three tokens, `a b =`, and the model is to say the sum at the last one. There are 2209
# such texts, 47 times 47. A random half is for training, the model never sees the others.

# %%
a, b = torch.cartesian_prod(torch.arange(N), torch.arange(N)).T
texts = torch.stack([a, b, torch.full_like(a, EQUALS)], dim=1)  # [text, 3]
sums = (a + b) % N

shuffled = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
seen, unseen = shuffled.chunk(2)
assert len(texts) == 2209
assert not set(seen.tolist()) & set(unseen.tolist())

# %% [markdown]
# ## The model
#
# One layer: four attention heads, an MLP of 192 neurons, and no norms, so that everything is as
# linear as it can be. Nothing tells it that 12 comes after 11; each number is a row of the
# embedding matrix, at first a random one.

# %%
cfg = HookedTransformerConfig(
    n_layers=1,
    d_model=96,
    n_heads=4,
    d_head=24,
    d_mlp=192,
    act_fn="relu",
    normalization_type=None,
    d_vocab=N + 1,
    d_vocab_out=N,
    n_ctx=3,
    seed=0,
    device="cpu",
)
model = HookedTransformer(cfg)
weights = [parameter for name, parameter in model.named_parameters() if ".W_" in name]


def answers(which):
    """Logits at the last token, [text, N]."""
    return model(texts[which])[:, -1]


@torch.no_grad()
def share_right(which):
    return (answers(which).argmax(-1) == sums[which]).float().mean().item()


assert share_right(unseen) < 0.1  # guessing

# %% [markdown]
# ## Training
#
# All training texts at every step, AdamW with a learning rate that falls in the last 200 steps, and
# a strong **weight decay**: every weight is pulled towards zero all the time, so that a solution
# that needs less weight is better. That matters. Learning 1105 sums by heart is possible, but it
# takes more weight than knowing how to add.

# %%
optimizer = torch.optim.AdamW(weights, lr=3e-3, betas=(0.9, 0.98), weight_decay=2.0)
slower = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (801 - step) / 200))
history = []
for step in range(801):
    if step % 50 == 0:
        history.append((step, share_right(seen), share_right(unseen)))
    loss = cross_entropy(answers(seen), sums[seen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    slower.step()

model.requires_grad_(False)
steps, right_seen, right_unseen = zip(*history, strict=True)
plot.patching(
    torch.tensor([right_unseen, right_seen]),
    columns=[str(step) for step in steps],
    rows=["unseen", "seen"],
    title="Share of right answers by training step",
).update_yaxes(title_text="pairs")

# %% [markdown]
# *The picture: two rows of cells over the steps of training. The upper one, for the pairs it is
# trained on, is full blue from step 100 on; the lower one, for pairs it never sees, turns blue only
# gradually, some hundreds of steps later.*
#
# At step 100 it knows all pairs it was shown and fails on most others. It has memorised. At the end
# it is right on practically all of the others too (more than 99 %). Nothing in the training data
# changed in between; it was already without fault there.

# %%
assert len(seen) == 1105
assert right_seen[2] > 0.98
assert right_unseen[2] < 0.5
assert share_right(seen) == 1.0
assert share_right(unseen) > 0.99
print(f"right on unseen pairs: {share_right(unseen):.1%}")

# %% [markdown]
# ## Reading the embedding
#
# What is a number to this model? Row $a$ of $W_E$ is a vector of 96. Going around the clock, from
# row to row, each of its 96 entries is a function on the circle, and can be taken apart into waves:
# one that goes around once, twice, and so on, up to 23 times. (That is a discrete Fourier
# transform.)
#
# If numbers were just different from one another, all waves would have a similar share.

# %%
numbers = torch.arange(N)
frequencies = torch.arange(1, N // 2 + 1)  # 1 … 23


def waves(frequency):
    """Cosine and sine on the clock, [2, N], of length one."""
    angle = 2 * math.pi * frequency * numbers / N
    return math.sqrt(2 / N) * torch.stack([angle.cos(), angle.sin()])


W_E = model.W_E[:N]  # the numbers, without "="
shares = torch.stack([(waves(k) @ W_E).pow(2).sum() for k in frequencies]) / W_E.pow(2).sum()
plot.attribution(
    shares,
    [f"{k} times around" for k in frequencies.tolist()],
    title="Share of each wave in the embedding",
)

# %% [markdown]
# *The picture: 23 bars, one for each frequency. A few are long and of similar length, all others
# next to nothing.*
#
# A handful of frequencies hold nearly everything. Before training each had about one part in 23.
# Which ones they are is chance (another seed finds others); that they are few is not.

# %%
keys = frequencies[shares > 0.05].tolist()
print("frequencies:", keys, f"share {shares[shares > 0.05].sum():.0%}")
assert 1 < len(keys) <= 6
assert shares[shares > 0.05].sum() > 0.85

untrained = HookedTransformer(cfg).W_E[:N].detach()
before = torch.stack([(waves(k) @ untrained).pow(2).sum() for k in frequencies])
assert (before / untrained.pow(2).sum()).max() < 0.08

# %% [markdown]
# A cosine and a sine of the same frequency are a point on a circle. So for each of these
# frequencies $k$ the model puts the number $a$ on a circle, at the angle $2\pi k a / 47$. Here are
# the first two: as the number grows, they swing.

# %%
found = []
for k in keys[:2]:
    plane = torch.linalg.qr((waves(k) @ W_E).T).Q  # [d_model, 2]: where this circle lies
    found.append((W_E @ plane).T)
found = torch.cat(found)  # [4, N]
plot.patching(
    found / found.norm(dim=1, keepdim=True),
    columns=[str(number) for number in range(N)],
    rows=[f"{k} around, {axis}" for k in keys[:2] for axis in ("first axis", "second axis")],
    title="Numbers, seen in the planes of two frequencies",
).update_yaxes(title_text="")

# %% [markdown]
# *The picture: four rows of 47 cells, in pairs. Along each, blue and vermilion take turns as often
# as the frequency says, and the second row of a pair is a quarter of a turn behind the first.*
#
# If these are circles, all numbers are about equally far from the centre:

# %%
radius = found[:2].norm(dim=0)
assert radius.std() < 0.25 * radius.mean()

# %% [markdown]
# ## Why angles?
#
# Because angles add. Going around by $a$ and then by $b$ is going around by $a + b$, and the clock
# comes for free: 47 is a full turn. In formulas,
#
# $$\cos(w(a+b)) = \cos wa \, \cos wb - \sin wa \, \sin wb.$$
#
# To add, the model must *multiply* what it knows of $a$ with what it knows of $b$. Attention brings
# the two together at "="; on average it takes equally much of each.

# %%
logits, cache = model.run_with_cache(texts)
looks = cache["pattern", 0][:, :, -1].mean(0)  # [head, key_pos]
print(looks)
assert ((looks[:, 0] - 0.5).abs() < 0.1).all()
assert ((looks[:, 1] - 0.5).abs() < 0.1).all()

# %% [markdown]
# The MLP does the rest. Look at one neuron as a function of $a$ and $b$, a picture of 47 by 47. Its
# waves are those of a two-dimensional Fourier transform. How much of its variation is made of one
# frequency only?

# %%
post = cache["post", 0][:, -1].T.reshape(-1, N, N)  # [neuron, a, b]
varying = post - post.mean((1, 2), keepdim=True)
spectrum = torch.fft.fft2(varying).abs().pow(2)

by_frequency = []
for k in frequencies.tolist():
    only = torch.tensor([0, k, N - k])  # this frequency in a, in b, or in both
    by_frequency.append(spectrum[:, only][:, :, only].sum((1, 2)))
by_frequency = torch.stack(by_frequency) / spectrum.sum((1, 2))  # [frequency, neuron]

strongest, best = by_frequency.max(0)
clearest = int(strongest.argmax())
ticks = [str(number) if number % 5 == 0 else "" for number in range(N)]
share, turns = f"{strongest[clearest]:.0%}", int(frequencies[best[clearest]])
plot.patching(
    post[clearest],
    columns=ticks,
    rows=ticks,
    title=f"{share} of this neuron goes around {turns} times",
).update_yaxes(title_text="a").update_xaxes(title_text="b")

# %% [markdown]
# *The picture: a square of 47 by 47 cells, one for each pair. Blue patches lie in it in a regular
# pattern, repeating in both directions.*
#
# Neurons specialise. More than four fifths of the middle neuron is a single frequency, and for
# nearly all neurons it is one of those of the embedding.

# %%
print(f"median {strongest.median():.0%}")
assert strongest.median() > 0.8
assert torch.isin(frequencies[best], torch.tensor(keys)).float().mean() > 0.95

# %% [markdown]
# ## Reading the answer
#
# If the model computes angles of $a + b$, it can compare them with the angle of every possible
# answer $c$: $\cos(w(a+b-c))$ is largest where $c$ is the sum. One frequency alone has a broad top,
# and its neighbours are nearly as high. Added up over several frequencies, only the right answer is
# high in all of them.
#
# That is a claim about every logit: it should depend on $a + b - c$ only, and be a sum of these
# cosines. So fit them, with one number for each frequency, and see how much they explain.

# %%
final = logits[:, -1] - logits[:, -1].mean(-1, keepdim=True)  # [text, c]
distance = (a + b)[:, None] - numbers  # a + b - c

explained, formula = 0.0, torch.zeros_like(final)
for k in keys:
    wave = (2 * math.pi * k * distance / N).cos()
    strength = (wave * final).sum() / wave.pow(2).sum()
    formula += strength * wave
    part = (strength * wave).pow(2).sum() / final.pow(2).sum()
    explained += part.item()
    print(f"{k:2} times around: strength {strength:.1f}, explains {part:.0%}")

print(f"together {explained:.1%}")
assert explained > 0.85
assert (formula.argmax(-1) == sums).all()

# %% [markdown]
# A formula with a handful of numbers stands for the whole model: it explains more than 85 % of the
# logits and gets every one of the 2209 sums right. How it picks the right answer can be seen from
# the logits against the distance to it:


# %%
by_distance = torch.stack([final[(distance % N) == d].mean() for d in range(N)])
plot.attribution(
    by_distance.roll(10)[:21],
    [f"{d:+}" for d in range(-10, 11)],
    title="Logit by distance from the right answer",
)

# %% [markdown]
# *The picture: 21 bars, for answers from ten too low to ten too high. The one in the middle, the
# right answer, is by far the longest; with growing distance the others go up and down, on both
# sides alike.*

# %%
assert by_distance.argmax() == 0
assert by_distance[0] > 1.3 * by_distance[1:].max()

# %% [markdown]
# ## Does it need them?
#
# A pattern that we find could be a by-product. The test is to take it away. Keep only the few
# frequencies in the embedding, or remove only them:

# %%
kept = torch.cat([waves(k) for k in keys])  # [2 * frequencies, N], orthonormal
only_keys = kept.T @ kept @ W_E
constant = W_E.mean(0)  # of all numbers alike


def right_with(embedding):
    def replace(embed, hook):  # [text, 3, d_model]
        embed[:, :2] = embedding[texts[:, :2]]

    out = model.run_with_hooks(texts, fwd_hooks=[("hook_embed", replace)])
    return (out[:, -1].argmax(-1) == sums).float().mean().item()


with_keys, without_keys = right_with(only_keys + constant), right_with(W_E - only_keys)
print(f"only these frequencies: {with_keys:.1%}; all the others: {without_keys:.1%}")
assert with_keys > 0.95
assert without_keys < 0.1

# %% [markdown]
# With the few frequencies alone the model adds as before. With everything but them it guesses. What
# we have read is what it uses.
#
# ## To try
#
# - Another seed: which frequencies does it choose, and how many?
# - No weight decay: does it still learn the pairs it never sees?
# - The matrix $W_U$: do the answers $c$ lie on the same circles?
