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
# # Writing a converter
#
# Every family of language models names and shapes its weights in its own way. Here all of them
# become the same `HookedTransformer`. What stands between is a table: *this tensor of theirs is
# that parameter of ours, with its axes in this order*.
#
# In this notebook we invent a family that nobody has a table for, write one, and see whether it is
# right. Then we make mistakes, the ones that everybody makes, and look at how they show.
#
# 1. The model, in Hugging Face's manner
# 2. The table: config and rows
# 3. `verify`: both models side by side, place by place
# 4. Wrong on purpose
# 5. And back: an export to the last bit
#
# ## 1. A family of our own
#
# It is called *parrot*. A real one would be a file in `transformers`; this is the same thing,
# shorter. Read `forward` and note what is peculiar: learned positions, LayerNorm before each half
# of a block, a squared ReLU, fewer keys than queries, and keys and values that lie in **one**
# matrix, interleaved head by head.

# %%
import tempfile
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.logging import disable_progress_bar

from transformer_lens_lite import HookedTransformer, verify
from weights_conversion import Architecture, Map, Zeros, register_architecture
from weights_conversion.parts import layer_norm
from weights_conversion.table import key_value, override, without

disable_progress_bar()


# %%
class ParrotConfig(PretrainedConfig):
    model_type = "parrot"
    attribute_map = {"num_hidden_layers": "depth"}  # transformers' own generate asks for it

    def __init__(
        self,
        width=24,
        depth=3,
        queries=4,
        keys=2,
        head=10,
        hidden=38,
        vocab_size=59,
        context=64,
        epsilon=1e-5,
        **others,
    ):
        self.width, self.depth, self.queries, self.keys = width, depth, queries, keys
        self.head, self.hidden, self.vocab_size = head, hidden, vocab_size
        self.context, self.epsilon = context, epsilon
        super().__init__(**{"tie_word_embeddings": False, **others})


class ParrotBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.norm_1 = nn.LayerNorm(config.width, eps=config.epsilon)
        self.query = nn.Linear(config.width, config.queries * config.head)
        self.key_value = nn.Linear(config.width, config.keys * 2 * config.head, bias=False)
        self.out = nn.Linear(config.queries * config.head, config.width)
        self.norm_2 = nn.LayerNorm(config.width, eps=config.epsilon)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)

    def forward(self, x):  # [batch, pos, width]
        x = x + self.out(self.attend(self.norm_1(x)))
        return x + self.down(self.up(self.norm_2(x)).relu() ** 2)

    def attend(self, x):
        config = self.config
        q = self.query(x).unflatten(-1, (config.queries, config.head))
        kv = self.key_value(x).unflatten(-1, (config.keys, 2, config.head))  # head by head
        k, v = kv.unbind(-2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [batch, head, pos, head size]
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return z.transpose(1, 2).flatten(2)


class ParrotForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ParrotConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList([ParrotBlock(config) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids}  # parrots have no key-value cache

    def forward(self, input_ids, attention_mask=None, output_hidden_states=False, **kwargs):
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        streams = [x]
        for block in self.blocks:
            x = block(x)
            streams.append(x)
        x = self.norm(x)
        streams[-1] = x  # as is the custom: the last one is behind the norm
        return CausalLMOutput(logits=self.head(x), hidden_states=tuple(streams))


AutoConfig.register("parrot", ParrotConfig)
AutoModelForCausalLM.register(ParrotConfig, ParrotForCausalLM)

# %% [markdown]
# A freshly made model hides mistakes: its norms multiply by one, its biases are zero, its attention
# is almost uniform, so that much could be swapped without a trace. Make it **loud**, and its sizes
# **awkward**: no two of them equal, 10 channels a head although 24 / 4 is 6, a large epsilon.

# %%
torch.manual_seed(0)
theirs = ParrotForCausalLM(ParrotConfig(epsilon=1e-3)).eval()
with torch.no_grad():
    for parameter in theirs.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))

config = theirs.config
sizes = [config.width, config.depth, config.queries, config.keys, config.head, config.hidden]
assert len(set(sizes)) == len(sizes)
for name, tensor in theirs.state_dict().items():
    if "blocks.0" in name or "blocks" not in name:
        print(f"{name:28}{list(tensor.shape)}")

# %% [markdown]
# Without a table there is no way to load it, and the error says so before anything is read.

# %%
load = partial(HookedTransformer.from_pretrained_no_processing, device="cpu")
message = ""
try:
    load(hf_model=theirs)
except ValueError as error:
    message = str(error)
print(message.partition(" Supported")[0])
assert "parrot" in message

# %% [markdown]
# ## 2. The table
#
# ### The config
#
# Left, what a `HookedTransformer` calls things; right, what parrots call them. A `Reading` checks
# the type of every field, and remembers which ones were looked at. A field that nobody reads is
# refused, unless it holds what the family's class has by default, for it could change the numbers.


# %%
def read_config(reading):
    reading.require("tie_word_embeddings", False, "words and head are two matrices")
    return {
        "d_model": reading.size("width"),
        "n_layers": reading.size("depth"),
        "n_heads": reading.size("queries"),
        "n_key_value_heads": reading.size("keys"),
        "d_head": reading.size("head"),
        "d_mlp": reading.size("hidden"),
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": reading.size("context"),
        "eps": reading.number("epsilon"),
        "act_fn": "relu2",
        "normalization_type": "LN",
        "positional_embedding_type": "standard",
    }


def write_config(cfg, needs):
    return {
        "width": cfg.d_model,
        "depth": cfg.n_layers,
        "queries": cfg.n_heads,
        "keys": cfg.n_key_value_heads or cfg.n_heads,
        "head": cfg.d_head,
        "hidden": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "context": cfg.n_ctx,
        "epsilon": cfg.eps,
    }


# %% [markdown]
# ### The rows
#
# `Map("theirs", "ours", "their axes -> our axes")`. Letters are sizes: `m` the width of the stream,
# `n` heads, `k` key heads, `h` channels of a head, `f` neurons, `v` and `u` the vocabulary going in
# and out, `c` positions. Brackets join axes that lie in one, and `{i}` runs over the layers.
# torch's `Linear` stores [out, in], while here weights are [in, out], so most arrows turn something
# around.
#
# The interesting row is that of `key_value`. Its output axis is `(k s h)`: for each key head, first
# a key and then a value. The arrow brings `s` to the front, and there the tensor is cut into the
# two parameters.
#
# What a family does not have is zero, and a row says that too: keys and values have no bias in a
# parrot.


# %%
ATTN, MLP = "blocks.{i}.attn.", "blocks.{i}.mlp."


def rows(cfg, reading):
    W_K, W_V = key_value(cfg, "W_K"), key_value(cfg, "W_V")
    return [
        Map("words.weight", "embed.W_E", "v m"),
        Map("places.weight", "pos_embed.W_pos", "c m"),
        *layer_norm("blocks.{i}.norm_1", "blocks.{i}.ln1"),
        Map("blocks.{i}.query.weight", f"{ATTN}W_Q", "(n h) m -> n m h"),
        Map("blocks.{i}.query.bias", f"{ATTN}b_Q", "(n h) -> n h"),
        Map("blocks.{i}.key_value.weight", (W_K, W_V), "(k s h) m -> s k m h"),
        Zeros(key_value(cfg, "b_K"), "k h"),
        Zeros(key_value(cfg, "b_V"), "k h"),
        Map("blocks.{i}.out.weight", f"{ATTN}W_O", "m (n h) -> n h m"),
        Map("blocks.{i}.out.bias", f"{ATTN}b_O", "m"),
        *layer_norm("blocks.{i}.norm_2", "blocks.{i}.ln2"),
        Map("blocks.{i}.up.weight", f"{MLP}W_in", "f m -> m f"),
        Map("blocks.{i}.up.bias", f"{MLP}b_in", "f"),
        Map("blocks.{i}.down.weight", f"{MLP}W_out", "m f -> f m"),
        Map("blocks.{i}.down.bias", f"{MLP}b_out", "m"),
        *layer_norm("norm", "ln_final"),
        Map("head.weight", "unembed.W_U", "u m -> m u"),
        Zeros("unembed.b_U", "u"),
    ]


PARROT = Architecture(
    model_type="parrot",
    hf_class="ParrotForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
register_architecture("parrot", PARROT)

# %% [markdown]
# That is all: the library has no other place that would have to know about parrots.
#
# ## 3. Is it right?
#
# Equal logits are a good sign and no more than that: with two mistakes that cancel, or one that is
# small, they can look right. `verify` runs both models on the same tokens and compares them
# **inside** as well. Where? The table says: if `query.weight` is `W_Q`, then what the module
# `query` returns is `hook_q`.

# %%
result = verify(theirs)
print(result)
assert result.passed
assert result.logits < 1e-5
assert result.greedy == result.of_greedy == 40  # two rows of 20 new tokens
assert len(result.errors) >= 6 * config.depth  # at least six places in each layer
for place in list(result.places.values())[:8]:
    print("  compared:", place)

# %% [markdown]
# And everything that a `HookedTransformer` can do, parrots now can.

# %%
model = load(hf_model=theirs)
tokens = torch.randint(config.vocab_size, (2, 12))
logits, cache = model.run_with_cache(tokens)
with torch.no_grad():
    assert torch.allclose(logits, theirs(tokens).logits, atol=1e-4)
print(cache)
assert cache["pattern", 0].shape == (2, config.queries, 12, 12)
assert cache["k", 0].shape == (2, 12, config.keys, config.head)

# %% [markdown]
# ## 4. Wrong on purpose
#
# There are two kinds of mistakes. Those of the first kind cannot be made, since the table has to be
# complete: every tensor of the checkpoint goes somewhere, every parameter of the model comes from
# somewhere, every field of the config that says something is read.


# %%
def with_rows(change):
    """The family with another table: `change` makes it from the right one."""
    return replace(PARROT, rows=lambda cfg, reading: change(rows(cfg, reading)))


def complaint(architecture):
    register_architecture("parrot", architecture)
    try:
        load(hf_model=theirs)
    except ValueError as error:
        return str(error)
    finally:
        register_architecture("parrot", PARROT)
    raise AssertionError("nobody complained")


forgotten = complaint(with_rows(lambda rows: without(rows, f"{MLP}b_out")))
print(forgotten, end="\n\n")
assert "down.bias" in forgotten

turned = Map("blocks.{i}.up.weight", f"{MLP}W_in", "m f -> m f")  # Linear is [out, in]
mistaken = complaint(with_rows(lambda rows: override(rows, turned)))
print(mistaken, end="\n\n")
assert "up.weight" in mistaken


def without_epsilon(reading):
    fields = read_config(reading)
    reading.was_read.discard("epsilon")  # as if the line were missing
    return fields


unread = complaint(replace(PARROT, read_config=without_epsilon))
print(unread)
assert "epsilon" in unread

# %% [markdown]
# Those of the second kind load without a word: all shapes fit, and the numbers are wrong. For them
# there is `verify`. Here are five. Before you read on: where in the forward pass would each of them
# show first?
#
# | mistake | in the table |
# |---|---|
# | heads split the wrong way round | `(h n) m -> n m h` for queries |
# | keys and values not interleaved | `(s k h) m -> s k m h` |
# | keys taken for values | `(W_V, W_K)` |
# | another activation | `relu` for `relu2` |
# | another epsilon | `1e-5` for the config's 1e-3 |


# %%
def key_value_row(order, pattern):
    natives = tuple(f"{ATTN}_W_{x}" for x in order)
    return Map("blocks.{i}.key_value.weight", natives, pattern)


def with_fields(**fields):
    return replace(PARROT, read_config=lambda reading: {**read_config(reading), **fields})


wrong_query = Map("blocks.{i}.query.weight", f"{ATTN}W_Q", "(h n) m -> n m h")
wrong_layout = key_value_row("KV", "(s k h) m -> s k m h")
wrong_order = key_value_row("VK", "(k s h) m -> s k m h")

mistakes = {
    "heads split wrongly": with_rows(lambda rows: override(rows, wrong_query)),
    "not interleaved": with_rows(lambda rows: override(rows, wrong_layout)),
    "keys for values": with_rows(lambda rows: override(rows, wrong_order)),
    "another activation": with_fields(act_fn="relu"),
    "another epsilon": with_fields(eps=1e-5),
}

found = {}
try:
    for mistake, architecture in mistakes.items():
        register_architecture("parrot", architecture)
        found[mistake] = verify(theirs, n_greedy=0)
finally:
    register_architecture("parrot", PARROT)

for mistake, result in found.items():
    print(f"{mistake:20} logits off by {result.logits:.0e}, first at {result.first_difference}")

# %% [markdown]
# Each is found, and each at the earliest place where it can be seen:
#
# - queries where they leave their matrix, `hook_q`;
# - keys and values at `hook_z`, the first thing computed from both (they share a module, so there
#   is no place to compare before that);
# - the activation at `hook_post`, right behind it;
# - epsilon at `hook_q`, the first thing behind a norm. It is also the quietest: the logits are off
#   by a few hundredths of the largest, where the others are off by more than half of it. In a text
#   nobody would notice.

# %%
first = {mistake: result.first_difference for mistake, result in found.items()}
assert first == {
    "heads split wrongly": "blocks.0.attn.hook_q",
    "not interleaved": "blocks.0.attn.hook_z",
    "keys for values": "blocks.0.attn.hook_z",
    "another activation": "blocks.0.mlp.hook_post",
    "another epsilon": "blocks.0.attn.hook_q",
}
assert not any(result.passed for result in found.values())
assert 0.001 < found["another epsilon"].logits < 0.05
assert min(result.logits for name, result in found.items() if "epsilon" not in name) > 0.5

# %% [markdown]
# The whole report of one of them, as one would see it:

# %%
print(found["another activation"])

# %% [markdown]
# ## 5. And back
#
# The same rows read from right to left export. They rename, reshape and cut, and never calculate,
# so that what comes back is what was read, to the last bit. The saved folder is one that
# `AutoModelForCausalLM` loads.

# %%
exported = model.to_hf_state_dict()
assert exported.keys() == theirs.state_dict().keys()
assert all(torch.equal(exported[name], tensor) for name, tensor in theirs.state_dict().items())

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    assert verify(folder).passed

# %% [markdown]
# ## Where to go from here
#
# Most new families are an old one with a few rows replaced: `override(llama.rows(cfg, reading),
# Map(…))`. The page *Adding an architecture* of the documentation does that for a real model, and
# says where the file and its tests go. The questions to ask of the family's code are always the
# same: which positions? which norms, and where? which biases? how do heads lie in the matrices?
# what is scaled, capped or windowed? Answer them, write the rows, make the model loud, and let
# `verify` judge.
