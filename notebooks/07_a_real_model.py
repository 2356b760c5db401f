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
# # A real model
#
# The notebooks before this one took apart `tiny-lens`, a model of 0.7 million numbers that
# speaks 421 words. This one asks the same questions of **SmolLM2-135M**, which has 135 million and
# has read the web: what does it cost to look, what does it know, does it repeat by induction heads,
# who gets the drink, what does a shared beginning save, and can it be steered?
#
# The code is that of the other notebooks. What changes is the size, and with it two things: you no
# longer keep everything because you can, and the answers are less tidy.
#
# **Where the model comes from.** From the folder that the environment variable `SMOLLM2_FOLDER`
# names (`make notebooks` sets it to the copy that the tests of this library use), and without one
# from the Hugging Face hub. Where there is neither, the model in the box answers in its place: the
# same cells run, but only what holds for every model is checked, and the text is about another
# model than the pictures. The first cell says which it is.
#
# The numbers of the text were measured on a copy of SmolLM2-135M-Instruct whose weights had once
# been rounded to four bits. That of the hub may differ in the second digit.

# %%
import math
import os
import random
import time

import torch

from transformer_lens_lite import CaptureSpec, HookedTransformer, patching, plot
from transformer_lens_lite.ablation import ablate
from transformer_lens_lite.attribution import attribution_patch
from transformer_lens_lite.pretrained.tiny_language import CAPITALS
from transformer_lens_lite.sites import Site

torch.set_grad_enabled(False)


def load():
    """SmolLM2 and True, or the model in the box and False."""
    if folder := os.environ.get("SMOLLM2_FOLDER"):
        return HookedTransformer.from_pretrained(folder), True  # a wrong folder is an error
    try:
        return HookedTransformer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct"), True
    except OSError as error:
        print(f"no SmolLM2 here: {error}")
        return HookedTransformer.from_pretrained("tiny-lens"), False


model, real = load()
cfg = model.cfg
print("This is", "SmolLM2-135M." if real else "tiny-lens. The text is about SmolLM2-135M.")

# %% [markdown]
# ## 1. Sizes
#
# 30 layers of 9 heads, a stream of 576 numbers, a vocabulary of 49,152 pieces of words. The heads
# are **grouped**: each of 3 key-value heads serves 3 query heads. `hook_q` has 9 heads and `hook_k`
# has 3; patterns have 9 again.

# %%
tokens = model.to_tokens("The capital of France is")
_, cache = model.run_with_cache(tokens, names_filter=[("q", 0), ("k", 0), ("pattern", 0)])
for name in ("q", "k", "pattern"):
    print(f"{name:8}", list(cache[name, 0].shape))

n_kv_heads = cfg.n_key_value_heads or cfg.n_heads
assert cache["q", 0].shape[2] == cache["pattern", 0].shape[1] == cfg.n_heads
assert cache["k", 0].shape[2] == n_kv_heads
if real:
    assert (cfg.n_layers, cfg.n_heads, n_kv_heads, cfg.d_model) == (30, 9, 3, 576)
    assert cfg.d_vocab == 49_152

# %% [markdown]
# The checkpoint has 134.5 million parameters, more than a fifth of them in the embedding, which is
# the unembedding as well. Here you count 163 million. `from_pretrained` folds the weights of the
# norms into the matrices behind them, and with the last norm folded into it the unembedding isn't
# the embedding any more. (`from_pretrained_no_processing` leaves all as it was.)

# %%
n_parameters = sum(parameter.numel() for parameter in model.parameters())
n_embedding = model.W_E.numel()
print(f"{n_parameters:,} parameters, the embedding {n_embedding:,}")
if real:
    assert 0.2 < n_embedding / 134_515_008 < 0.22
    assert abs(n_parameters - n_embedding - 134_515_008) < 200_000  # what is left: biases

# %% [markdown]
# **Ask before you take.** A `CaptureSpec` says what is to be kept, and `nbytes` how much memory
# that is, without running the text. Of one text of 1000 tokens:

# %%
specs = {
    "everything": CaptureSpec(),
    "the patterns": CaptureSpec("pattern"),
    "the stream entering each layer": CaptureSpec("resid_pre"),
    "the same, at the last token": CaptureSpec("resid_pre", pos_slice=slice(999, 1000)),
}
n_pos = 1000
megabytes = {what: spec.nbytes(model, 1, n_pos) / 1e6 for what, spec in specs.items()}
for what, size in megabytes.items():
    print(f"{what:32}{size:10,.2f} MB")

assert megabytes["the patterns"] * 1e6 == cfg.n_layers * cfg.n_heads * n_pos**2 * 4
if real:
    assert 3500 < megabytes["everything"] < 3800
    assert 1079 < megabytes["the patterns"] < 1081
    assert 69 < megabytes["the stream entering each layer"] < 70
    assert 0.06 < megabytes["the same, at the last token"] < 0.08

# %% [markdown]
# 3.7 gigabytes of everything, for one text of a model that is half a gigabyte itself. The patterns
# alone are 1.1, and they grow with the square of the length. The stream as it enters each layer is
# 69 MB, and at the last token, which is often all one needs, 0.07. So from here on each cell asks
# for what it reads. The estimate is exact:

# %%
wanted = CaptureSpec(["resid_pre", "resid_post"], pos_slice=slice(3, 6))
_, cache = model.run_with_cache(tokens, names_filter=wanted)
assert cache.nbytes() == wanted.nbytes(model, batch=1, pos=6)

# %% [markdown]
# ## 2. What does it know?
#
# What follows "The capital of France is"? *The table shows the five likeliest tokens: " Paris" with
# three quarters of the probability, and four others with less than 3 % each.*

# %%
logits, cache = model.run_with_cache(tokens, names_filter=["resid_pre", "resid_post"])
probabilities = logits[0, -1].softmax(-1)
best = probabilities.topk(5)
for probability, token in zip(best.values, best.indices, strict=True):
    print(f"{model.to_single_str_token(int(token))!r:12} {probability:.1%}")

paris = model.to_single_token(" Paris")
assert best.indices[0] == paris
if real:
    assert 0.65 < best.values[0] < 0.85
    assert best.values[1] < 0.03

# %% [markdown]
# When did it know? The **logit lens** reads the stream as if the model ended there: the stream that
# enters each layer goes through the last norm and the unembedding. In three lines of your own:

# %%
stream = cache.accumulated_resid(apply_ln=True, pos_slice=-1)  # [depth, batch, d_model]
lens = model.logits_of(stream)[:, 0].softmax(-1)  # [depth, d_vocab]
of_paris = lens[:, paris]
rank = (lens > of_paris[:, None]).sum(-1)  # how many tokens are likelier
for depth in range(0, cfg.n_layers + 1, 3):
    print(f"entering layer {depth:2}: Paris {of_paris[depth]:6.1%}, place {int(rank[depth]) + 1}")

assert torch.allclose(lens[-1], probabilities, atol=1e-5)  # the last depth is the model itself
assert torch.allclose(lens, cache.logit_lens(pos_slice=-1)[:, 0].softmax(-1), atol=1e-5)

# %% [markdown]
# And drawn, for every token of the prompt:

# %%
figure = plot.logit_lens(cache, title="What the model would say if it ended here")
figure.update_layout(height=900 if real else 400)
figure

# %% [markdown]
# *The picture: a column for each of the 6 tokens and a row for each of 31 depths, the input at the
# bottom. Each cell shows the likeliest token, by a deeper blue the likelier. In the bottom row that
# is mostly the token itself, further up mostly a comma, a hyphen or a blank. The last column says
# " Paris" in the top three rows, pale at first and deep blue in the topmost.*
#
# For four fifths of the depth this lens sees nothing: hundreds of tokens are likelier than Paris,
# most of the time thousands. Then it rises within a few layers. As layer 25 begins it is among the
# first hundred, as layer 29 begins it is the likeliest of all. That says when the answer is written
# in the *language of the unembedding*. It doesn't say that nothing was known before; part 4 shows a
# case.

# %%
if real:
    assert rank[:24].min() > 300
    assert (rank[:24] > 1000).float().mean() > 0.8
    assert rank[25] < 100
    assert rank[28] < 3
    assert (rank[29:] == 0).all()
    assert of_paris[:26].max() < 0.01

# %% [markdown]
# ## 3. Does it repeat by induction heads?
#
# The test of notebook 02: fifty random tokens, then the same fifty again, in three texts. The
# second time the next token can be found by looking back: it followed the same token 50 positions
# ago, so it stands 49 back. (The tokens are of medium rank; the rarest were hardly ever trained.)

# %%
N, TEXTS = 50, 3
generator = torch.Generator().manual_seed(0)
low, high = cfg.d_vocab // 40, cfg.d_vocab // 2
draws = [torch.randperm(high - low, generator=generator)[:N] + low for _ in range(TEXTS)]
saying = torch.stack(draws)
start = torch.full((TEXTS, 1), model.tokenizer.bos_token_id)
repeated = torch.cat([start, saying, saying], dim=1)  # [batch, pos]


def losses(logits):
    """The loss of the first saying and of the second. [2]"""
    each = -logits[:, :-1].log_softmax(-1).gather(-1, repeated[:, 1:, None])[..., 0]
    return torch.stack([each[:, :N].mean(), each[:, N + 1 :].mean()])


_, cache = model.run_with_cache(repeated, names_filter="pattern")
induction = torch.stack(
    [
        cache["pattern", layer].diagonal(-(N - 1), -2, -1)[..., 1:].mean((0, 2))
        for layer in range(cfg.n_layers)
    ]
)  # [layer, head]: the share of its attention that goes 49 back
heads = [f"head {head}" for head in range(cfg.n_heads)]
figure = plot.patching(induction, columns=heads, title="Attention to what followed last time")
figure.update_layout(height=700 if real else 300)
figure

# %% [markdown]
# *The picture: 30 layers by 9 heads, layer 0 at the bottom, nearly all blank. Blue cells lie in
# layers 17 to 24 only; the deepest are head 6 of layer 18 and, beside each other, heads 3, 4 and 5
# of layer 17.*
#
# It has not one induction head but a family of them. The best, L18H6, puts nine tenths of its
# attention 49 back. The best eight put more than 0.35 there, each of them between the layers 17 and
# 23. More than 240 of the 270 heads put less than a tenth there. Three neighbours in layer 17 are
# among them, and that is no accident: heads 3, 4 and 5 are one group and share their keys and
# values.

# %%
ranking = [divmod(int(i), cfg.n_heads) for i in induction.flatten().argsort(descending=True)]
found = ranking[: 8 if real else 1]
print("  ".join(f"L{layer}H{head} {induction[layer, head]:.2f}" for layer, head in found))
assert induction[found[0]] > 0.8
if real:
    assert found[0] == (18, 6)
    assert {(17, 3), (17, 4), (17, 5)} < set(found)
    assert min(induction[head] for head in found) > 0.35
    assert all(17 <= layer <= 23 for layer, _ in found)
    assert (induction < 0.1).sum() > 240

# %% [markdown]
# Does the model need them? Switch off the best one, two, four and eight, and measure the loss of
# both sayings. As a control, three times eight others are drawn from the *same layers*.

# %%
of_family = {layer for layer, _ in found}
others = [head for head in ranking if head[0] in of_family and induction[head] < 0.1]
counts = [0, 1, 2, 4, 8] if real else [0, 1]
chosen = {f"the best {n}": found[:n] for n in counts}
for seed in range(3):
    chosen[f"others, draw {seed + 1}"] = random.Random(seed).sample(others, len(found))
cells = [[Site("z", layer, head=head) for layer, head in group] for group in chosen.values()]
first, second = ablate(model, repeated, losses, cells, verbose=False).T  # [group]
for name, before, after in zip(chosen, first, second, strict=True):
    print(f"{name:16} first saying {before:5.1f}, second saying {after:5.1f}")

figure = plot.attribution(
    second, list(chosen), title="Loss of the second saying without some heads"
)
figure.update_layout(height=360)
figure

# %% [markdown]
# *The picture: eight bars. Those for the best 0, 1, 2, 4 and 8 heads get longer and longer; the
# three for other heads are hardly longer than the first.*
#
# The second saying has a loss of 2.4, against 13.8 in the first. (Knowing nothing would cost log
# 49,152, or 10.8. This model knows better than that what texts look like, and is *wrong* about
# random ones.) Without the best head it is above 3.5, and without the best eight, 3 % of the heads,
# above 10: little of the ability is left. The same number of other heads in the same layers costs
# less than 1.5, and the first saying isn't touched by either.
#
# In `tiny-lens` one head was everything. Here every one of them can be missed a little, for the
# others go on. Whoever ablates one head of a large model and sees nothing has learned little.

# %%
n_best = len(counts)
assert second[0] < first[0] - 3
assert second[n_best - 1] > second[n_best:].max() + 1
if real:
    assert 2 < second[0] < 2.8
    assert 13 < first[0] < 14.5
    assert 10.7 < math.log(cfg.d_vocab) < 10.9
    assert (second[:n_best].diff() > 0).all()
    assert second[1] > 3.5
    assert second[4] > 10
    assert (second[n_best:] < second[0] + 1.5).all()
    assert (first - first[0]).abs().max() < 0.6

# %% [markdown]
# ## 4. Who gets the drink?
#
# The sentence of notebook 03, with two pairs of names, each in both orders. The metric is how much
# the model prefers the receiver's name over the giver's, the logit difference. In the corrupted
# prompts the other person gives.

# %%
TEMPLATE = "When {} and {} went to the store, {} gave a drink to"
pairs = [("Mary", "John"), ("Kate", "Paul")]
abba = [TEMPLATE.format(io, subject, subject) for io, subject in pairs]
baba = [TEMPLATE.format(subject, io, subject) for io, subject in pairs]
clean = model.to_tokens(abba + baba)  # [4, 15]
receivers = torch.tensor([model.to_single_token(f" {io}") for io, _ in pairs] * 2)
givers = torch.tensor([model.to_single_token(f" {subject}") for _, subject in pairs] * 2)

AGAIN, END = 10, 14
places = model.to_str_tokens(clean[0])
places[2], places[4], places[AGAIN] = "name 1", "name 2", "giver again"
assert (clean[:, AGAIN] == givers).all()
assert clean.shape == (4, END + 1)
corrupted = clean.clone()
corrupted[:, AGAIN] = receivers


def preference(logits):
    last = logits[:, -1]
    return (last.gather(1, receivers[:, None]) - last.gather(1, givers[:, None])).mean()


needed = ["hook_embed", "resid_pre", "resid_post", "z", "mlp_out", "attn_out", "pattern", "scale"]
logits, cache = model.run_with_cache(clean, names_filter=needed)
high, low = preference(logits), preference(model(corrupted))
print(f"clean {high:.1f}, corrupted {low:.1f}")
assert (logits[:, -1].argmax(-1) == receivers).all()  # right in all four
assert high > 4
assert low < -3
if real:
    assert 5.5 < high < 7.5
    assert -5.5 < low < -3

# %% [markdown]
# **Where is it?** Activation patching puts one activation of the clean run into the corrupted one
# and says how much of the clean preference comes back. First the stream, entering each layer, at
# each position: 450 runs, of which the engine computes only what a patch can change.

# %%
started = time.perf_counter()
patched = patching.get_act_patch_resid_pre(model, corrupted, cache, preference, verbose=False)
seconds = time.perf_counter() - started
recovered = (patched - low) / (high - low)  # [layer, pos]: 0 as corrupted, 1 as clean
estimate = attribution_patch(model, corrupted, cache, preference, "resid_pre", ("layer", "pos"))
print(f"{patched.numel()} patches in {seconds:.1f} s")

figure = plot.patching(
    torch.stack([recovered, estimate / (high - low)]),
    columns=places,
    names=["patched", "estimated by one gradient"],
    title="Share of the clean preference that the stream brings back",
)
figure.update_layout(height=700 if real else 400)
figure

# %% [markdown]
# *The picture: two grids of 30 layers by 15 positions, layer 0 at the bottom. Left, the column
# "giver again" is deep blue from the bottom up to layer 20, half as blue in the next three and then
# blank; the last column, "to", takes over at the same pace. Right, the last column looks the same,
# and "giver again" is faint throughout.*
#
# For nineteen layers, who gives stands at the second mention of the giver and nowhere else. Then it
# is fetched to the end in two steps: nearly half of it by layers 19 and 20, nearly all of the rest
# by layers 23 and 24. It is the picture of notebook 03, where it took three layers.
#
# **To first order.** On the right is attribution patching: one backward pass instead of 450 runs.
# From layer 24 on the two agree (a correlation above 0.98). In the first fifteen layers the patch
# brings back everything, and the estimate promises less than a quarter. A gradient tells what a
# small step would do. Another name is not a small step, and twenty layers lie behind it.


# %%
def correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]


assert (recovered[:, :AGAIN].abs() < 1e-4).all()  # the texts agree there
if real:
    assert (recovered[:20, AGAIN] > 0.97).all()
    assert (recovered[:20, END].abs() < 0.05).all()
    assert 0.3 < recovered[21, END] < 0.6
    assert recovered[25, END] > 0.75
    assert recovered[25:, AGAIN].max() < 0.1
    assert correlation(recovered[24:], estimate[24:]) > 0.98
    assert ((estimate / (high - low))[:15, AGAIN] < 0.25).all()

# %% [markdown]
# **Which heads?** Three views on all 270: what each adds to the preference *directly* (logit
# attribution of the clean run), what comes back when its output is patched, and the estimate of the
# latter by one gradient.

# %%
parts, labels = cache.get_full_resid_decomposition(
    expand_neurons=False, pos_slice=-1, return_labels=True
)
direct = cache.logit_attrs(parts, receivers, givers, pos_slice=-1).mean(-1)  # [part]
assert torch.allclose(direct.sum(), high, atol=1e-3)  # nothing is left over
of_head = torch.tensor([direct[labels.index(name)] for name in model.all_head_labels()])
of_head = of_head.view(cfg.n_layers, cfg.n_heads)

by_head = patching.get_act_patch_attn_head_out_all_pos(
    model, corrupted, cache, preference, verbose=False
)
guess = attribution_patch(model, corrupted, cache, preference, "z", ("layer", "head"))
for name, values in {"direct": of_head, "patched": by_head - low, "estimated": guess}.items():
    best = values.flatten().abs().topk(6).indices
    shown = [f"{model.all_head_labels()[i]} {values.flatten()[i]:+.1f}" for i in best]
    print(f"{name:10}", "  ".join(shown))

figure = plot.patching(
    torch.stack([of_head, by_head - low, guess]),
    columns=heads,
    names=["added directly", "patched", "estimated"],
    title="What a head does to the preference (logits)",
)
figure.update_layout(height=700 if real else 300)
figure

# %% [markdown]
# *The picture: three grids of 30 layers by 9 heads, layer 0 at the bottom, nearly all blank. Head 3
# of layer 23 is the bluest cell of each. In the top row head 1 is blue and head 0 vermilion, in all
# three. Head 4 of layer 17 and head 0 of layer 20 are blue in the middle grid alone.*
#
# No part is hard to explain after notebook 03, but there is more of it:
#
# - **L23H3** brings back half of the preference by itself. From the last position it looks at the
#   giver's second mention, with more than half of its attention, and *lowers* that name.
# - **L23H0** next to it looks at the receiver instead.
# - **L17H4** adds next to nothing directly, and a quarter comes back when it is patched. It is one
#   of the induction heads of part 3: at the giver's second mention it looks at the word after the
#   first one, "and" or "went", and so knows which of the two it is. L1H0 of `tiny-lens` did just
#   that.
# - **L20H0** fetches what is known there to the end: it looks from there at the second mention.
# - **L29H0** works *against* the answer.
#
# The gradient finds L23H3, L29H1 and L29H0, and overlooks L17H4 and L20H0, which act through others
# on the way. Its correlation with the patches over all heads is 0.88.

# %%
print(f"correlation of patched and estimated {correlation(by_head - low, guess):.2f}")
if real:
    share = (by_head - low) / (high - low)
    order = share.flatten().argsort(descending=True)[:4]
    assert {divmod(int(i), 9) for i in order} == {(23, 3), (20, 0), (29, 1), (17, 4)}
    assert 0.4 < share[23, 3] < 0.65
    assert min(share[17, 4], share[20, 0]) > 0.2
    assert max(of_head[17, 4].abs(), of_head[20, 0].abs()) < 0.3
    assert max(guess[17, 4].abs(), guess[20, 0].abs()) < 0.1 * (high - low)
    assert guess[23, 3] > 0.4 * (high - low)
    assert max(of_head[29, 0], share[29, 0], guess[29, 0]) < -0.1
    assert correlation(by_head - low, guess) > 0.8

    rows = torch.arange(4)
    receiver_at, giver_at = torch.tensor([2, 2, 4, 4]), torch.tensor([4, 4, 2, 2])
    assert (cache["pattern", 23][:, 3, END, AGAIN] > 0.5).all()
    assert (cache["pattern", 23][rows, 0, END, receiver_at] > 0.35).all()
    assert (cache["pattern", 17][rows, 4, AGAIN, giver_at + 1] > 0.5).all()
    assert cache["pattern", 20][:, 0, END, AGAIN].mean() > 0.6
    assert (17, 4) in found
    mover = parts[labels.index("L23H3")]
    assert cache.logit_attrs(mover[None], givers, pos_slice=-1).mean() < -0.5

# %% [markdown]
# ## 5. One beginning, many questions
#
# How do you tell a model that was only made to continue texts what kind of answer you want? By a
# beginning in which such questions are answered. Ours says the capitals of sixteen countries, both
# ways round, in 225 tokens, and then we ask for twenty-four, both ways round. Computed once and
# **frozen**, the beginning serves all 48 questions; its keys and values are not even copied.

# %%
told = list(CAPITALS.items())[:16]
lines = [f"The capital of {country} is {capital}." for country, capital in told]
lines += [f"{capital} is the capital of {country}." for country, capital in told]
random.Random(0).shuffle(lines)
beginning = " ".join(lines)
questions = [f" The capital of {country} is" for country in CAPITALS]
questions += [f" {capital} is the capital of" for capital in CAPITALS.values()]
answers = [f" {word}" for word in (*CAPITALS.values(), *CAPITALS)]

started = time.perf_counter()
past = model.prefix(beginning)
from_prefix = model(questions, past_kv_cache=past, padding_side="left")[:, -1]
seconds_each = (time.perf_counter() - started) / len(questions)
print(f"{past.length} tokens, {past.nbytes() / 1e6:.1f} MB of keys and values")
assert past.length == 225
assert len(questions) == 48
# two of them (keys, values), of the key-value heads only, in four bytes a number
assert past.nbytes() == 225 * 2 * cfg.n_layers * n_kv_heads * cfg.d_head * 4


def is_right(logits):
    """Whether the likeliest token begins the answer. [question]"""
    said = [model.to_single_str_token(int(token)) for token in logits.argmax(-1)]
    return torch.tensor([a.startswith(s) for a, s in zip(answers, said, strict=True)])


alone = model([question.strip() for question in questions], padding_side="left")[:, -1]
print(f"right: {is_right(from_prefix).sum()} of 48, without the beginning {is_right(alone).sum()}")
if real:
    assert abs(is_right(from_prefix).sum() - 45) <= 2
    assert abs(is_right(alone)[:24].sum() - 21) <= 2  # the capital of …
    assert abs(is_right(alone)[24:].sum() - 4) <= 3  # … is the capital of

# %% [markdown]
# With the beginning 45 of 48 are right, without it 25. It isn't knowledge that was missing: asked
# for the capital, the model knows 21 of 24 by itself. Asked for the country it says only 4. After
# "Paris is the capital of" texts like to go on with "the", and so does a model of texts.
#
# (The cache of keys and values is where grouped heads pay: with nine key-value heads instead of
# three it would be three times the size.)
#
# Nothing is lost by it: the logits are those of whole texts, to rounding. How much time is saved
# depends on the machine; the cell prints it. Whole texts would have to read the 225 tokens 48
# times.

# %%
few = [0, 15, 23, 47]
whole_texts = [beginning + questions[i] for i in few]
started = time.perf_counter()
from_whole = model(whole_texts, padding_side="left")[:, -1]
whole_each = (time.perf_counter() - started) / len(few)
print(f"a question takes {1000 * seconds_each:.0f} ms, its share of the beginning included")
print(f"the whole text {1000 * whole_each:.0f} ms: {whole_each / seconds_each:.1f} times as long")
assert torch.allclose(from_prefix[few], from_whole, atol=1e-5 * from_whole.abs().max(), rtol=0)

# %% [markdown]
# ## 6. Can it be steered?
#
# Two prompts that differ in one word give a direction: the stream after "Anna was happy" minus that
# after "Anna was sad", in the middle of the model. We add it, or subtract it, while the model tells
# about somebody else. The story's beginning is frozen *unsteered*; `pos=` lets the hook act on all
# that follows.

# %%
LAYER = cfg.n_layers // 2
point = ("resid_post", LAYER)
_, cache = model.run_with_cache(["Anna was happy", "Anna was sad"], names_filter=point)
glad, sorry = cache[point][:, -1]  # [d_model]
direction = glad - sorry

story = model.prefix("When the day was over, Tom was")
happy, sad = model.to_single_token(" happy"), model.to_single_token(" sad")


def pushing(push):
    """A block in which all that follows the beginning is pushed."""
    return model.hooks([(point, lambda resid, hook: resid + push)], pos=slice(story.length, None))


def after_very(push):
    """The logits of what comes after "very"."""
    with pushing(push):
        return model(" very", past_kv_cache=story)[0, -1]


def told_on(push):
    with pushing(push):
        return model.generate(
            " very",
            max_new_tokens=14,
            do_sample=False,
            stop_at_eos=False,
            past_kv_cache=story,
            verbose=False,
        )


strengths = [-1.0, -0.5, 0.0, 0.5, 1.0]
texts = [told_on(strength * direction) for strength in strengths]
logits = torch.stack([after_very(strength * direction) for strength in strengths])
moods = logits[:, happy] - logits[:, sad]
for strength, mood, text in zip(strengths, moods, texts, strict=True):
    print(f"{strength:+.1f}  happy over sad {mood:+5.1f} … Tom was{text}")

bars = [f"strength {strength:+.1f}" for strength in strengths]
figure = plot.attribution(moods, bars, title="Happy over sad, after “very” (logits)")
figure.update_layout(height=300)
figure

# %% [markdown]
# *The picture: five bars. For the strengths −1 and −0.5 they are vermilion and point left; for 0,
# 0.5 and 1 they are blue, point right and get longer.*
#
# Each step of strength shifts the odds of "happy" against "sad" the same way: at −1 they stand 2.8
# logits for sad, unsteered 2.0 for happy, at +1 it is 5.1. At −1 the model says "very sad", with a
# probability of more than a third, and goes on in that mood. At +1 it says "very happy".

# %%
assert (moods.diff() > 0).all()
if real:
    assert (moods[[0, 2, 4]] - torch.tensor([-2.8, 2.0, 5.1])).abs().max() < 0.7
    assert logits[0].softmax(-1)[sad] > 0.33
    assert texts[0].startswith(" very sad")
    assert texts[4].startswith(" very happy")

# %% [markdown]
# Is it this direction that does it, or any push? As a control, ten random ones of the same length.
# They shift the odds by 1.2 on average, the worst by 2.4, and ours by 4.9. So a good part of any
# push is noise, and it takes a control to know how much.

# %%
generator = torch.Generator().manual_seed(0)
shifts = []
for _ in range(10):
    chance = torch.randn(cfg.d_model, generator=generator)
    disturbed = after_very(chance * direction.norm() / chance.norm())
    shifts.append((disturbed[happy] - disturbed[sad] - moods[2]).abs())
shifts = torch.stack(shifts)
print(
    f"ours shifts by {moods[2] - moods[0]:.1f} at -1; random ones by {shifts.mean():.1f} on average"
)
if real:
    assert shifts.mean() < (moods[2] - moods[0]) / 3
    assert shifts.max() < (moods[2] - moods[0]) * 2 / 3
assert not model.list_hooks()  # nothing stays behind

# %% [markdown]
# Push harder and it breaks. At four times the direction there is no happiness, and no sentence
# either:

# %%
broken = told_on(4 * direction)
print(broken)
if real:
    assert "happy" not in broken

# %% [markdown]
# ## What changed with the size, and what didn't
#
# | question | `tiny-lens`, 3 layers | SmolLM2, 30 layers |
# |---|---|---|
# | keep everything, of 1000 tokens | 0.13 GB | 3.7 GB |
# | repetition | one head | a family in layers 17 to 24 |
# | the loss without the best head | from 0.0 to 6.0 | from 2.4 to 4.1 |
# | the giver is noticed | at its second mention | at its second mention |
# | … and fetched to the end | by layer 2, in one move | by layers 19 to 24, in two steps |
# | the word after the first mention | read by an induction head | read by an induction head |
#
# Names, shapes and calls were the same throughout. The parts are more, and each of them matters
# less; that is what to be prepared for.

# %%
box = HookedTransformer.from_pretrained("tiny-lens")
assert 0.6e6 < sum(parameter.numel() for parameter in box.parameters()) < 0.75e6
assert 0.125e9 < CaptureSpec().nbytes(box, 1, 1000) < 0.135e9
