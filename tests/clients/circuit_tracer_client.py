"""What a user of circuit-tracer does, over this library under the name transformer_lens.

Run by tests/test_installed_clients.py in an environment of its own. The numbers it compares with
are those of the same run over TransformerLens 3.9.0.
"""

import transformer_lens_lite.as_transformer_lens  # noqa: F401, I001  (before circuit_tracer)

import sys

import huggingface_hub.constants

# circuit-tracer 0.5 asks a version of huggingface_hub for it that is older than ours
huggingface_hub.constants.HF_HUB_ENABLE_HF_TRANSFER = False

import torch  # noqa: E402
from circuit_tracer.attribution.attribute import attribute  # noqa: E402
from circuit_tracer.replacement_model.replacement_model_transformerlens import (  # noqa: E402
    TransformerLensReplacementModel,
)
from circuit_tracer.transcoder.single_layer_transcoder import (  # noqa: E402
    SingleLayerTranscoder,
    TranscoderSet,
)
from transformer_lens import HookedTransformer, HookedTransformerConfig  # noqa: E402

sys.path.append(sys.argv[1])  # the folder of tests
import tokenizers_for_tests  # noqa: E402

EXPECTED = {
    "edges": 2153.5210,
    "signed edges": 526.4248,
    "logits": 2618.8745,
    "features": 450.7599,
    "effect of a feature": 103.8374,
}


@torch.no_grad()
def fill(module, generator):
    for name, parameter in sorted(module.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        is_matrix = parameter.ndim > 1
        parameter.copy_(0.3 * noise if is_matrix else 0.2 * noise + name.endswith(".w"))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    tokenizer = tokenizers_for_tests.gpt2_like()
    cfg = HookedTransformerConfig(
        n_layers=3, d_model=24, n_ctx=64, d_head=6, n_heads=4, d_mlp=40, d_vocab=362,
        act_fn="gelu", device="cpu", positional_embedding_type="rotary", gated_mlp=True,
        normalization_type="RMS", n_key_value_heads=2, model_name="x",
    )  # fmt: skip
    source = HookedTransformer(cfg, tokenizer=tokenizer)
    fill(source, generator)
    transcoders = {}
    for layer in range(3):
        transcoders[layer] = SingleLayerTranscoder(
            24, 50, torch.nn.functional.relu, layer, device="cpu", dtype=torch.float32
        )
        fill(transcoders[layer], generator)
    model = TransformerLensReplacementModel(cfg, tokenizer=tokenizer)
    model.load_state_dict(source.state_dict())
    model._configure_replacement_model(TranscoderSet(transcoders, "mlp.hook_in", "mlp.hook_out"))

    tokens = torch.tensor([3, 50, 70, 90, 120, 7])
    edges = attribute(tokens, model, max_n_logits=4, batch_size=64).adjacency_matrix
    logits, features = model.get_activations(tokens)
    largest = int(features[1, 2].argmax())
    changed, _ = model.feature_intervention(tokens, [(1, 2, largest, 0.0)])
    found = {
        "edges": edges.abs().sum(),
        "signed edges": edges.sum(),
        "logits": logits.abs().sum(),
        "features": features.sum(),
        "effect of a feature": (changed - logits).abs().sum(),
    }
    for name, value in found.items():
        torch.testing.assert_close(float(value), EXPECTED[name], rtol=1e-4, atol=1e-2, msg=name)
    assert edges.shape == (494, 494)
    print("circuit-tracer works")


if __name__ == "__main__":
    main()
