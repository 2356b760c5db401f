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
# # Who gets the drink?
#
# *When Mary and John went to the store, John gave a drink to* … Mary, of course. Nobody told the
# model a rule, and yet it knows that the receiver is the one of the two who is not giving. Such a
# sentence has an **indirect object** (Mary) and a **subject** (John, who is named twice).
#
# This notebook finds out how a model does it. It uses three instruments, each of which answers a
# question that the one before leaves open:
#
# | instrument | question |
# |---|---|
# | direct logit attribution | which part *writes* the answer? |
# | activation patching | which activations, where, *carry* what the answer depends on? |
# | path patching | *through whom* does one part act on another? |
#
# The model is the one in the box, `tiny-lens`: 3 layers of 4 attention heads each. It speaks a
# small language of its own, in which people go places and give each other things.

# %%
import random

import torch

from transformer_lens_lite import HookedTransformer, patching, plot
from transformer_lens_lite.ablation import ablate_heads
from transformer_lens_lite.path_patching import path_patch, path_patch_heads
from transformer_lens_lite.pretrained.tiny_language import GIVINGS, OPENINGS, name_pairs
from transformer_lens_lite.sites import Site

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("tiny-lens")

# %% [markdown]
# ## The prompts
#
# One prompt proves little: a head may do something for "Mary" alone. So we take eight pairs of
# names, none of which ever shared a sentence while the model was trained: what it does with them is
# a rule and no memory.
#
# Every pair is used in two orders. In **ABBA** the indirect object is named first, in **BABA** the
# subject is. A rule like "say the first name" would be right in one of them and wrong in the other.
# All prompts have the same length, so that position 10 always holds the second mention of the
# subject.

# %%
pairs = random.Random(0).sample(name_pairs(held_out=True), 8)
TEMPLATE = "When {} and {} went to the store, {} gave a drink to"

abba = [TEMPLATE.format(io, subject, subject) for io, subject in pairs]
baba = [TEMPLATE.format(subject, io, subject) for io, subject in pairs]
clean = model.to_tokens(abba + baba)  # [16, 15]

receivers = torch.tensor([model.to_single_token(f" {io}") for io, _ in pairs] * 2)
subjects = torch.tensor([model.to_single_token(f" {subject}") for _, subject in pairs] * 2)

AND, WENT, AGAIN, END = 3, 5, 10, 14  # positions
print(abba[0], baba[0], sep="\n")
places = model.to_str_tokens(clean[0])
assert [places[i] for i in (AND, WENT, END)] == [" and", " went", " to"]
assert (clean[:, AGAIN] == subjects).all()

places[2], places[4], places[AGAIN] = "name 1", "name 2", "subject again"  # labels for pictures

# %% [markdown]
# The model's answer is a row of **logits**, one number for each of its 421 tokens; the softmax of
# them is the probability of each token to be next. We measure how much it prefers the receiver over
# the subject: the **logit difference**, averaged over all prompts. A difference of 9 means odds of
# $e^9$, about 8000 to 1.


# %%
def preference(logits):  # [batch, pos, d_vocab]
    last = logits[:, -1]
    return (last.gather(1, receivers[:, None]) - last.gather(1, subjects[:, None])).mean()


logits, cache = model.run_with_cache(clean)
print(f"logit difference {preference(logits):.2f}")

assert logits.shape[-1] == 421
assert 8.5 < preference(logits) < 9.5
assert (logits[:, -1].argmax(-1) == receivers).all()  # the first choice in all 16 prompts

# %% [markdown]
# ## Who writes the answer? Direct logit attribution
#
# The **residual stream** at the last position is a sum: the embedding of the token, plus what every
# attention head added, plus what every MLP added. Logits are a linear function of that sum (once
# the scale of the last norm is held at what it was), so the logit difference is a sum too, with one
# term for each part.

# %%
parts, labels = cache.get_full_resid_decomposition(
    expand_neurons=False, pos_slice=-1, return_labels=True
)  # [part, batch, d_model]
direct = cache.logit_attrs(parts, receivers, subjects, pos_slice=-1).mean(-1)  # [part]

assert torch.allclose(direct.sum(), preference(logits), atol=1e-3)  # nothing is left over
plot.attribution(direct, labels, title="What each part adds to the logit difference")

# %% [markdown]
# *The picture: one bar for each part of the model. A single bar, the MLP of the last layer, is
# long; those of all heads are short.*
#
# More than nine tenths come from `2_mlp_out`, the last MLP. No head adds as much as 1.

# %%
share = dict(zip(labels, direct.tolist(), strict=True))
assert share["2_mlp_out"] > 0.9 * preference(logits)
assert max(abs(value) for name, value in share.items() if name.startswith("L")) < 1

# %% [markdown]
# It is tempting to say "so the heads do not matter". That would be wrong. An MLP sees one position
# only, the last one, whose token is " to"; it cannot know any name unless somebody brought it
# there, and only attention moves things between positions. Attribution finds who *writes* and is
# blind to who *told the writer*.
#
# ## What carries the information? Activation patching
#
# Take a second, **corrupted** prompt that differs in one word and has the opposite answer: the
# other person gives.
#
# > When Mary and John went to the store, **Mary** gave a drink to
#
# Now run it with one activation taken from the clean run, and look at the answer. If it becomes
# that of the clean run, this activation carries what the answer depends on. Do so for every layer
# and position.

# %%
corrupted = clean.clone()
corrupted[:, AGAIN] = receivers
assert -9.5 < preference(model(corrupted)) < -8.5  # just the opposite


def recovered(patched):
    """0: as in the corrupted run, 1: as in the clean one."""
    low, high = preference(model(corrupted)), preference(logits)
    return (patched - low) / (high - low)


stream = recovered(
    patching.get_act_patch_resid_pre(model, corrupted, cache, preference, verbose=False)
)  # [layer, pos]
moved = recovered(
    patching.get_act_patch_attn_out(model, corrupted, cache, preference, verbose=False)
)
plot.patching(
    torch.stack([stream, moved]),
    columns=places,
    names=["stream entering the layer", "what attention adds"],
    title="Share of the clean answer that one activation brings back",
)

# %% [markdown]
# *The picture: two grids of layers by positions. On the left only the column of the repeated
# subject is blue, in all three layers. On the right three cells are: layers 0 and 1 at the repeated
# subject, and layer 2 at the last position.*
#
# Before layer 2 everything stands at the repeated subject: patching the stream there brings all of
# the answer back, and patching it elsewhere nothing. Then the attention of layer 2 carries it to
# the end, in one move.

# %%
elsewhere = [i for i in range(clean.shape[1]) if i != AGAIN]
assert (stream[:, AGAIN] > 0.99).all()
assert (stream[:, elsewhere].abs() < 0.01).all()
assert moved[1, AGAIN] > 0.95  # the second layer adds something to it,
assert moved[2, END] > 0.95  # the third one reads it from the end

# %% [markdown]
# ### Which heads?
#
# The same with the output of one head at a time, at all positions.

# %%
heads = recovered(
    patching.get_act_patch_attn_head_out_all_pos(model, corrupted, cache, preference, verbose=False)
)  # [layer, head]
plot.patching(
    heads,
    columns=[f"head {head}" for head in range(model.cfg.n_heads)],
    title="Share of the clean answer that one head brings back",
)

# %% [markdown]
# *The picture: a grid of 3 layers by 4 heads. One cell in each layer is blue: head 3 in layer 0,
# head 0 in layer 1, head 0 in layer 2.*
#
# Three of twelve heads bring back more than half each; the next one brings less than a tenth.

# %%
order = heads.flatten().argsort(descending=True)
found = {model.all_head_labels()[i] for i in order[:3]}
assert found == {"L0H3", "L1H0", "L2H0"}
assert (heads.flatten()[order[:3]] > 0.5).all()
assert heads.flatten()[order[3]] < 0.1

# %% [markdown]
# ### What do they look at?
#
# A head's **pattern** says from where it takes what it adds: for every position, weights over the
# earlier ones that sum to one. These are the three heads at the position where they mattered,
# averaged over the eight pairs.


# %%
def looks(layer, head, position):
    """[order, key_pos]: ABBA and BABA."""
    pattern = cache["pattern", layer][:, head, position]  # [batch, key_pos]
    return torch.stack([pattern[:8].mean(0), pattern[8:].mean(0)])


duplicate, after, reader = looks(0, 3, AGAIN), looks(1, 0, AGAIN), looks(2, 0, END)
rows = ["L0H3 ABBA", "L0H3 BABA", "L1H0 ABBA", "L1H0 BABA", "L2H0 ABBA", "L2H0 BABA"]
plot.patching(
    torch.cat([duplicate, after, reader]),
    columns=places,
    rows=rows,
    title="Where three heads look (L0H3 and L1H0 from the repeated subject, L2H0 from the end)",
).update_yaxes(title_text="")

# %% [markdown]
# *The picture: six rows, two for each head. L0H3 looks at the repeated subject itself and at its
# first mention. L1H0 looks at "went" in ABBA and at "and" in BABA. L2H0 looks at the repeated
# subject in BABA, and at several other words in ABBA.*
#
# - **L0H3** compares tokens: all of its attention is on the same name, here and where it was said
#   first. A *duplicate-token head*.
# - **L1H0** looks at the word *after* the first mention. That is what an **induction head** does
#   ("what came after this word last time?", see notebook 02). Nobody needs its usual guess here.
#   But the word after the first name is always "and", and the word after the second is "went":
#   whatever it fetches tells *which of the two names* the subject is.
# - **L2H0** sits at the end and does one thing in one case and another in the other: in BABA nearly
#   all of its attention goes to the repeated subject, in ABBA next to none.

# %%
first = torch.tensor([4, 2])  # where the subject is named first, in ABBA and in BABA
assert (duplicate[[0, 1], first] + duplicate[:, AGAIN] > 0.98).all()
assert (after[[0, 1], first + 1] > 0.85).all()
assert first.add(1).tolist() == [WENT, AND]
assert reader[1, AGAIN] > 0.98
assert reader[0, AGAIN] < 0.05

# %% [markdown]
# ## Through whom? Path patching
#
# We have three heads and a story: L0H3 notices the repetition, L1H0 finds out which name it was,
# L2H0 reads that. Is it a chain? Patching cannot say: a head that is patched changes everything
# behind it.
#
# **Path patching** lets a change pass along one path only. The sender's output is that of the other
# text, all other heads are held at what they were, and only the receiver's input is allowed to
# change. We start from the clean run now and spoil it: a path that matters brings the preference
# down.
#
# Who tells L1H0 where to look? A head looks by its **query**, so the query is the receiver.

# %%
_, other = model.run_with_cache(corrupted)


def spoiled(into):
    """Preference that is left when each head's message to these inputs is the wrong one."""
    return path_patch_heads(model, clean, other, preference, receivers=into, verbose=False)


into_query = spoiled([Site("q", 1, head=0)])
into_key = spoiled([Site("k", 2, head=0)])
into_value = spoiled([Site("v", 2, head=0)])
plot.patching(
    torch.stack([into_query, into_key, into_value]),
    columns=[f"head {head}" for head in range(model.cfg.n_heads)],
    names=["into L1H0's query", "into L2H0's keys", "into L2H0's values"],
    baseline=float(preference(logits)),
    title="Preference that is left",
)

# %% [markdown]
# *The picture: three grids of layers by heads, nearly everywhere at the baseline. One cell of each
# is vermilion: L0H3 deep in the first, L1H0 deep in the second and pale in the third.*
#
# It is a chain. L0H3 alone turns the preference around through the query of L1H0. L1H0 in turn acts
# on L2H0 by its **keys**: it decides whether L2H0 will look at the repeated subject at all. What
# L2H0 finds there, its **values**, matters as well, though less. All other heads change less than
# 0.2.

# %%
assert into_query[0, 3] < 0
assert into_key[1, 0] < 0
assert 0 < into_value[1, 0] < 6.5
for result, layer, head in ((into_query, 0, 3), (into_key, 1, 0), (into_value, 1, 0)):
    changed = (result - preference(logits)).abs()
    changed[layer, head] = 0
    assert changed.max() < 0.2

# %% [markdown]
# ### And the puzzle of the short bars
#
# L2H0 is decisive and its bar was shorter than 1. Path patching resolves that. Let L2H0 reach the
# logits, once together with the MLP behind it and once with that MLP held still:

# %%
reader_head = [Site("z", 2, head=0)]
with_mlp = path_patch(model, clean, other, preference, reader_head, verbose=False)
without = path_patch(model, clean, other, preference, reader_head, freeze_mlps=True, verbose=False)
print(f"through the MLP {with_mlp.item():.2f}, past it {without.item():.2f}")

assert with_mlp < -6.5  # turned around
assert 5.5 < without < 7.5  # most of the preference stays

# %% [markdown]
# Most of what L2H0 does goes *through the MLP*. What the head adds is no name; it is a signal by
# which the MLP chooses one.
#
# ## And where do the names come from?
#
# To say a name the last MLP must have both names before it. So far nothing could tell us about
# them, for clean and corrupted prompts contained the same two names. A corruption shows only what
# it changes! So change something else: the receiver's name, into a third one, and see how its
# identity travels to the end.

# %%
third = torch.tensor(
    [model.to_single_token(f" {name}") for name in ("Tom", "Kate", "Grace", "Adam")]
)
strangers = third.repeat(4)
assert not torch.isin(strangers, torch.cat([receivers, subjects])).any()


def travels(rows, named_at):
    """[layer, head, pos]: share of the receiver's identity that a head carries at a position."""
    whole, changed = clean[rows], clean[rows].clone()
    changed[:, named_at] = strangers[rows]

    def identity(logits):
        right, wrong = receivers[rows, None], strangers[rows, None]
        return (logits[:, -1].gather(1, right) - logits[:, -1].gather(1, wrong)).mean()

    logits, known = model.run_with_cache(whole)
    result = patching.get_act_patch_attn_head_out_by_pos(
        model, changed, known, identity, verbose=False
    )  # [layer, pos, head]
    low = identity(model(changed))
    return ((result - low) / (identity(logits) - low)).transpose(1, 2)


named_first = travels(slice(0, 8), 2)
named_second = travels(slice(8, 16), 4)
plot.patching(
    torch.stack([named_first.flatten(0, 1), named_second.flatten(0, 1)]),
    columns=places,
    rows=model.all_head_labels(),
    names=["receiver is name 1", "receiver is name 2"],
    title="How the receiver's identity travels",
).update_yaxes(title_text="")

# %% [markdown]
# *The picture: two grids of twelve heads by positions. On the left, L0H0 is deep blue at "and", and
# L1H2 and L1H3 are half as blue at the last position. On the right L1H0 is deep blue at the last
# position, and L0H3 a little paler at name 2 itself.*
#
# The two names take different roads:
#
# - **Name 1** is copied by L0H0, which looks one word back, onto "and". From there the heads 1, 2
#   and 3 of layer 1 take it to the end: each of them looks at "and" with more than nine tenths of
#   its attention. None of them brings back half of the name by itself.
# - **Name 2** is taken to the end by L1H0, the same head that did induction at the repeated
#   subject. From the end it looks straight at the second name. A head is not one function: what it
#   does depends on where it stands. (L0H3 helps where the name stands: it finds no earlier mention,
#   so it looks at the name itself.)

# %%
assert named_first[0, 0, AND] > 0.95
assert named_second[1, 0, END] > 0.95
assert named_second[0, 3, 4] > 0.4
assert (cache["pattern", 0][8:, 3, 4, 4] > 0.95).all()
at_end = cache["pattern", 1][:, :, END].mean(0)  # [head, key_pos]
assert (at_end[1:, AND] > 0.9).all()
assert at_end[0, 4] > 0.9
assert (named_first[1, 1:, END] < 0.5).all()

# %% [markdown]
# When several parts do the same work, patching one at a time shows each of them too small. So patch
# the three together; a hook is enough for that, a function that edits the value at a named place:

# %%
known, changed = cache["z", 1][:8], clean[:8].clone()
changed[:, 2] = strangers[:8]


def put_back(z, hook):  # z: [batch, pos, head, d_head]
    z[:, END, 1:] = known[:, END, 1:]


def margin(logits):
    last = logits[:, -1]
    return (last.gather(1, receivers[:8, None]) - last.gather(1, strangers[:8, None])).mean()


together = margin(model.run_with_hooks(changed, fwd_hooks=[(("z", 1), put_back)]))
print(f"without {margin(model(changed)):.2f}, with them {together:.2f}")
print(f"with the true name {margin(logits[:8]):.2f}")
assert margin(model(changed)) < -10
assert together > 0.95 * margin(logits[:8]) > 9  # the three together bring back all of it

# %% [markdown]
# ## The whole circuit
#
# ```
#   layer 0                   layer 1                                 layer 2
#
#   L0H0 copies name 1        L1H1 L1H2 L1H3 bring name 1 ─┐
#   onto "and"  ─────────►    L1H0 brings name 2 ──────────┴─ both ──► MLP: picks one
#                                                                        ▲
#   L0H3 at the repeated      L1H0 there looks at the word               │
#   subject finds its   ─q─►  after the first mention:  ────k, v───► L2H0 looks at it
#   first mention             "and" or "went"                        or looks away
# ```
#
# Does it hold together? A test from the other side: with any one of the three heads of the lower
# row switched off, the preference should be gone. Without any of the heads that the picture leaves
# out, at least four fifths should remain.

# %%
left = ablate_heads(model, clean, preference, verbose=False)  # [layer, head]
assert max(left[0, 3], left[1, 0], left[2, 0]) < 2
for layer, head in ((0, 1), (0, 2), (2, 1), (2, 2), (2, 3)):
    assert left[layer, head] > 0.8 * preference(logits)
plot.patching(
    left,
    columns=[f"head {head}" for head in range(model.cfg.n_heads)],
    baseline=float(preference(logits)),
    title="Preference that is left without one head",
)

# %% [markdown]
# *The picture: a grid of layers by heads. L0H0, L0H3, L1H0 and L2H0 are deep vermilion, the others
# pale.*
#
# ## What this did not show
#
# - One sentence pattern of the 70 that the model knows (ten openings, seven ways of giving).
#   Whether the same heads serve the others is, with the code above, a quick question.
# - How the last MLP picks. Its 320 neurons are there to be looked at: `cache["post", 2]`.
# - L2H1, which pulls a little in the same direction: with `Site("k", 2, head=1)` as the receiver,
#   path patching shows who tells it.

# %%
assert 0 < heads[2, 1] < 0.1
assert len(OPENINGS) * len(GIVINGS) == 70
assert model.cfg.d_mlp == cache["post", 2].shape[-1] == 320
