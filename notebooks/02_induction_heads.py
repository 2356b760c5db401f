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
# # Induction heads
#
# Read some random words, then the same words again. The first time nobody can guess the next one;
# the second time it's easy: find the present word further up, and say what followed it there. Most
# language models learn to do this. In 2022 Olsson et al. ("In-context Learning and Induction
# Heads") showed which part of them does it: a pair of attention heads in two different layers.
#
# This notebook finds that circuit in `tiny-lens`: first by what heads look at, then by what breaks
# without them, and last in the weights. You should know what queries, keys, values and the residual
# stream are; the first notebook explains them.

# %%
import math

import plotly.graph_objects as go
import torch

from transformer_lens_lite import HookedTransformer, plot
from transformer_lens_lite.ablation import ablate_heads
from transformer_lens_lite.head_detector import detect_head
from transformer_lens_lite.pretrained.tiny_language import facts

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("tiny-lens")

# %% [markdown]
# ## A test that can only be passed by looking back
#
# We draw 50 different words at random and say them twice, in 16 texts. Since no word comes twice in
# one saying, each has exactly one successor, and since the words are random, nothing but the first
# saying can tell which. (The numbers below 5 are the marks and the punctuation of the vocabulary.)

# %%
N = 50
generator = torch.Generator().manual_seed(0)
draws = [torch.randperm(model.cfg.d_vocab - 5, generator=generator)[:N] + 5 for _ in range(16)]
saying = torch.stack(draws)
start = torch.full((16, 1), model.tokenizer.bos_token_id)
tokens = torch.cat([start, saying, saying], dim=1)  # [batch, pos]: 16 texts of 101 tokens
words = model.to_str_tokens(tokens[0])
assert tokens.shape == (16, 101)
assert words[1 : N + 1] == words[N + 1 :]

# %% [markdown]
# The **loss** at a position is minus the logarithm of the probability the model gave to the word
# that really came: 0 if it was sure and right. Who thinks that each of the 416 words is as likely
# as any other has a loss of log 416, about 6.03.
#
# Within the first saying the loss is about that. In the second it falls at once, to 0.04: the model
# has 99 % of the words right.
#
# *The picture shows the loss at each position, the mean over the 16 texts: a flat line at 6 for the
# first 50 positions, a little higher at the very start; then a cliff, and a flat line at 0, with a
# single spike of about 1.*

# %%
loss = model(tokens, return_type="loss", loss_per_token=True)  # [batch, pos - 1]
first, second = loss[:, :N].mean(), loss[:, N + 1 :].mean()
print(f"first saying {first:.2f}, second saying {second:.2f}, log 416 = {math.log(416):.2f}")
assert abs(first - math.log(416)) < 0.1
assert second < 0.06

right = model(tokens)[:, N + 1 : -1].argmax(-1) == tokens[:, N + 2 :]
assert right.float().mean() > 0.99
assert (loss.mean(0)[N + 1 :] > 0.5).sum() == 1  # the spike

line = go.Scatter(y=loss.mean(0).tolist(), mode="lines", line_color=f"rgb({plot.BLUE})")
figure = plot.figure_of([line], "Loss at each position")
figure.update_layout(height=320, xaxis_title="position", yaxis_title="loss (nats)")
figure

# %% [markdown]
# ## Who looks where it would have to?
#
# A head that does this, an **induction head**, must look from the present word to what *followed*
# the same word the first time. The same word is 50 positions back, so its successor is 49 back. We
# take the attention pattern of every head and average the share of its attention that goes exactly
# there, over all positions of the second saying.

# %%
_, cache = model.run_with_cache(tokens)
patterns = torch.stack([cache["pattern", layer] for layer in range(3)])
print(patterns.shape)  # [layer, batch, head, looking, looked at]


def looks_back(n):
    """The share of attention on the position n back, from the second saying. [layer, head]"""
    return patterns.diagonal(-n, -2, -1)[..., N + 1 - n :].mean((1, 3))


induction = looks_back(N - 1)
heads = [f"head {head}" for head in range(4)]
assert 0.92 < induction[1, 0] < 0.94
assert induction.flatten().topk(2).values[1] < 0.02  # of all others, the most

# %% [markdown]
# Head 0 of layer 1 puts 93 % of its attention there. No other puts 2 %. *The picture has a row for
# each layer and a column for each head. One cell, layer 1 and head 0, is deep blue. The others are
# blank.*

# %%
figure = plot.patching(induction, columns=heads, title="Attention to what followed last time")
figure.update_layout(height=300)
figure

# %% [markdown]
# Here is what this head does in a shorter text. *The picture shows its attention: rows look at
# columns. In the first saying there is nothing to find, and all rows look at the first two
# positions. In the second a dark stripe runs parallel to the diagonal: each row looks at the word
# that came after its own in the first saying.*

# %%
short = torch.cat([tokens[:1, :11], tokens[:1, 1:11]], dim=1)
_, of_short = model.run_with_cache(short, names_filter=("pattern", 1))
stripe = of_short["pattern", 1][0, 0].diagonal(-9)[2:]
assert stripe.mean() > 0.8
assert of_short["pattern", 1][0, 0, 1:11, :2].sum(-1).min() > 0.8
figure = plot.attention(
    of_short["pattern", 1][0, 0], model.to_str_tokens(short[0]), title="Layer 1, head 0"
)
figure.update_layout(height=560, yaxis_scaleanchor="x")
figure

# %% [markdown]
# You need not write such a search yourself. `detect_head` knows a few kinds of heads and finds the
# same one.

# %%
text = model.to_string(tokens[0, 1:])
found = detect_head(model, text, "induction_head", exclude_bos=True)
assert divmod(int(found.argmax()), 4) == (1, 0)
assert found[1, 0] > 3 * found.flatten().topk(2).values[1]

# %% [markdown]
# ## Does the model need it?
#
# That a head looks at a place doesn't mean that it matters. So we **ablate** it: we set what it
# writes to zero, and measure the loss on the second saying. For comparison we do so with each of
# the other eleven heads.


# %%
def second_loss(logits):
    log_probabilities = logits[:, N + 1 : -1].log_softmax(-1)
    return -log_probabilities.gather(-1, tokens[:, N + 2 :, None]).mean()


without = ablate_heads(model, tokens, second_loss)  # [layer, head]
for layer in range(3):
    print(f"layer {layer}: " + "  ".join(f"{value:.2f}" for value in without[layer]))

# %% [markdown]
# Without the induction head the loss is 6.0 again: the model has no idea what comes. It isn't
# alone. Two heads of layer 0 are needed just as much, although they don't look 49 back. Each of the
# other nine heads can be taken away without raising the loss above 0.3.
#
# *The picture has a bar for each of the twelve heads, as long as the loss without it. Three are
# long: layer 0 head 0, layer 0 head 3, layer 1 head 0.*

# %%
needed = without > 3
assert needed.nonzero().tolist() == [[0, 0], [0, 3], [1, 0]]
assert without[needed].min() > 5.9
assert without[~needed].max() < 0.3

figure = plot.attribution(without.flatten(), model.all_head_labels(), title="Loss without a head")
figure.update_layout(height=400)
figure

# %% [markdown]
# **What else breaks?** If these heads did everything, the experiment would say little. The model
# also knows facts ("The capital of France is" → " Paris"), 104 of them. Without the induction head
# all of them are still right: this head serves repetition. Without head 0 of layer 0 none is. That
# one does more than our circuit needs it for.

# %%
known = facts()
answers = torch.tensor([model.to_single_token(fact.answer) for fact in known])


def silence(head):
    def hook(z, hook):  # z: [batch, pos, head, d_head]
        z[:, :, head] = 0.0
        return z

    return hook


def share_of_facts(hooks):
    with model.hooks(fwd_hooks=hooks):
        said = [int(model(fact.prompt)[0, -1].argmax()) for fact in known]
    return (torch.tensor(said) == answers).float().mean()


assert len(known) == 104
assert share_of_facts([]) == 1.0
assert share_of_facts([("blocks.1.attn.hook_z", silence(0))]) == 1.0
assert share_of_facts([("blocks.0.attn.hook_z", silence(0))]) == 0.0

# %% [markdown]
# **Zero is not the only way to take something away.** Instead of nothing, the head may be given
# what it wrote in *another* text. Then the loss is 14, more than twice that of knowing nothing: the
# head goes on saying the next word of the other text, and the model believes it and is sure of the
# wrong thing. What this head writes decides what the model says.

# %%
swapped = ablate_heads(model, tokens, second_loss, lambda z: z.flip(0))  # the texts, last one first
print(f"layer 1 head 0 with what it wrote in another text: {swapped[1, 0]:.1f}")
assert 13.5 < swapped[1, 0] < 14.5

# %% [markdown]
# ## How can it know?
#
# Think of the text … A B … A. At the second A the head must find B. But a head compares a query
# with a key, and the query is made from A while B is made of B. Nothing about B alone says that it
# once followed A. Somebody must have told B beforehand.
#
# That is a second head, in an earlier layer: it looks one position back, and so writes into B's
# stream "before me stood A". Then the key of B can say "I follow A", and the query of the second A
# can look for just that. Who looks one back?

# %%
one_back, itself = looks_back(1), looks_back(0)
assert one_back[0, 0] > 0.9
assert itself[0, 3] > 0.9
for layer in range(3):
    print(f"layer {layer}, one back: " + "  ".join(f"{value:.2f}" for value in one_back[layer]))

# %% [markdown]
# Head 0 of layer 0 does, with more than 90 % of its attention. And head 3 of layer 0, the other one
# that was needed, looks at its own position, also with more than 90 %. It moves nothing; it says
# the present word again, in a form that others may read.
#
# This gives a guess that can be tested: the *key* of the induction head needs head 0, its *query*
# needs head 3. The library has a separate copy of the stream for the queries, keys and values of
# each head. From one copy at a time we subtract what one part of layer 0 wrote; everybody else
# still sees it.

# %%
_, layer_0 = model.run_with_cache(
    tokens, names_filter=["blocks.0.attn.hook_result", ("mlp_out", 0)]
)
written = {f"head {head}": layer_0["result", 0][:, :, head] for head in range(4)}
written["MLP"] = layer_0["mlp_out", 0]


def loss_unread(what, reader):
    """The loss if head 0 of layer 1 can't see `what` in its queries, keys or values."""

    def hide(stream, hook):  # [batch, pos, head, d_model]
        stream[:, :, 0] -= what
        return stream

    with model.hooks(fwd_hooks=[(f"blocks.1.hook_{reader}_input", hide)]):
        return second_loss(model(tokens))


unread = torch.stack(
    [torch.stack([loss_unread(what, reader) for reader in "qkv"]) for what in written.values()]
)  # [part of layer 0, reader]
assert unread[0, 1] > 5.9  # keys without head 0
assert unread[3, 0] > 5.9  # queries without head 3
assert 1.5 < unread[3, 2] < 3  # values without head 3

# %% [markdown]
# So it is. If the keys can't see head 0, or the queries can't see head 3, the loss is 6 again: it's
# as if there was no induction head. Queries don't miss head 0, and keys don't miss head 3: below
# 0.1 each. What is handed over, the values, comes partly from head 3 too: without it the loss is
# about 2. Nothing else of layer 0 matters much; the worst other case is 0.2.
#
# *The picture has a row for each part of layer 0 and a column for each of queries, keys and
# values. Two cells are deep blue: head 0 with keys, head 3 with queries. Head 3 with values is
# of a lighter blue, and all others are blank.*

# %%
others = unread.clone()
others[0, 1] = others[3, 0] = others[3, 2] = 0.0
assert max(unread[0, 0], unread[3, 1]) < 0.1
assert others.max() < 0.25

figure = plot.patching(
    unread,
    columns=["queries", "keys", "values"],
    rows=list(written),
    title="Loss if layer 1 head 0 can't see a part of layer 0",
)
figure.update_layout(height=340, yaxis_title="hidden")
figure

# %% [markdown]
# ## The same in the weights
#
# Everything so far was measured on texts. The circuit can also be read off the matrices, without
# running the model.
#
# **What it copies.** Follow a word through the value and output matrices of the induction head and
# then through the unembedding: for each word, what does the head make the model say when it looks
# at that word? A copying head should raise the word itself most. It does, for all of the 416 words.

# %%
W_E, W_U = model.W_E[5:], model.W_U[:, 5:]
copies = W_E @ model.W_V[1, 0] @ model.W_O[1, 0] @ W_U  # [looked at, said]
own = torch.arange(416)
assert (copies.argmax(-1) == own).all()

other_head = W_E @ model.W_V[1, 1] @ model.W_O[1, 1] @ W_U
assert (other_head.argmax(-1) == own).float().mean() < 0.05  # its neighbour doesn't

# %% [markdown]
# **What it matches.** Let the query be made from a word, and the key from what head 0 of layer 0
# writes when it has looked at a word. For each query the largest product should be that of the same
# word: "I look for the one that follows *me*". That is so for more than 99 % of the words. It is so
# too when the query is made of what head 3 writes.

# %%
told = W_E @ model.W_V[0, 0] @ model.W_O[0, 0]  # what is left at the position after a word
again = W_E @ model.W_V[0, 3] @ model.W_O[0, 3]  # the word, said again by head 3
W_QK = model.W_Q[1, 0] @ model.W_K[1, 0].T
for query in (W_E, again):
    matches = query @ W_QK @ told.T  # [word that looks, word that stood before]
    share = (matches.argmax(-1) == own).float().mean()
    print(f"{share:.1%}")
    assert share > 0.99

# %% [markdown]
# ## What we know now
#
# | step | who | evidence |
# |---|---|---|
# | "before me stood A" is written at B | layer 0, head 0 | looks one back; the keys need it |
# | "I am A" is said again at A | layer 0, head 3 | looks at itself; the queries need it |
# | the second A finds B and says it | layer 1, head 0 | looks 49 back; copies every word |
#
# Two remarks on how far this goes. The training of `tiny-lens` was helped along: a head of layer 0
# *began* by looking one back, and one of layer 1 by matching what that one copied (the model's
# README tells how). Larger models find such heads alone. And head 3 was not part of that help, nor
# is it part of the textbook: this model wants the word said again. A circuit in a real model is
# rarely quite the one on the blackboard, which is why one measures.
