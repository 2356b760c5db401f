"""What a user of CircuitsVis does with our tensors: pictures that hold the very numbers.

Run by tests/test_installed_clients.py in an environment of its own.
"""

import json
import re

import circuitsvis as cv
import torch

from transformer_lens_lite import HookedTransformer

TEXT = "When Mary and John went to the store, John gave a drink to"


def props(picture) -> dict:
    """What a picture hands to its script."""
    said = re.search(r"render\(\s*\"[^\"]*\",\s*\w+,\s*(\{.*\})\s*\)", str(picture), re.DOTALL)
    assert said, str(picture)[-500:]
    return json.loads(said[1])


model = HookedTransformer.from_pretrained("tiny-lens", device="cpu")
logits, cache = model.run_with_cache(TEXT)
words = model.to_str_tokens(TEXT)
n = len(words)

pattern = cache["pattern", 1][0]
for draw in (cv.attention.attention_patterns, cv.attention.attention_heads):
    shown = props(draw(tokens=words, attention=pattern))
    assert shown["tokens"] == words
    drawn = torch.tensor(shown["attention"])
    assert drawn.shape == (model.cfg.n_heads, n, n)
    torch.testing.assert_close(drawn, pattern, atol=1e-4, rtol=0)

values = cache["resid_post", 1][0, :, 0]
shown = props(cv.tokens.colored_tokens(words, values))
torch.testing.assert_close(torch.tensor(shown["values"]), values, atol=1e-4, rtol=0)

neurons = torch.stack([cache["post", layer][0] for layer in range(model.cfg.n_layers)], 1)
shown = props(cv.activations.text_neuron_activations(words, neurons))
torch.testing.assert_close(torch.tensor(shown["activations"]), neurons, atol=1e-3, rtol=0)

log_probs = logits[0].log_softmax(-1)
tokens = model.to_tokens(TEXT)[0]
shown = props(cv.logits.token_log_probs(tokens, log_probs, model.to_string))
assert shown["prompt"] == words
right = log_probs[:-1].gather(1, tokens[1:, None])[:, 0]
torch.testing.assert_close(torch.tensor(shown["correctTokenLogProb"]), right, atol=1e-4, rtol=0)
best = [model.to_single_str_token(int(i)) for i in log_probs[:-1].argmax(-1)]
assert [each[0] for each in shown["topKTokens"]] == best

print("circuitsvis works")
