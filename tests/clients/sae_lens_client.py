"""What a user of sae-lens does, over this library under the name transformer_lens.

Run by tests/test_installed_clients.py in an environment of its own; raises where anything is not as
it is with TransformerLens.
"""

import transformer_lens_lite.as_transformer_lens  # noqa: F401, I001  (before sae_lens imports it)

import torch
from sae_lens import HookedSAETransformer, StandardSAE, StandardSAEConfig
from sae_lens.saes.sae import SAEMetadata
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.hook_points import HookPoint

import transformer_lens_lite

SIZES = {
    "n_layers": 2, "d_model": 14, "n_heads": 4, "d_head": 6, "d_mlp": 19, "n_ctx": 32,
    "d_vocab": 23, "act_fn": "gelu", "device": "cpu", "seed": 0, "n_key_value_heads": 2,
}  # fmt: skip
WIDTHS = {
    "blocks.0.hook_resid_pre": 14,
    "blocks.1.hook_resid_post": 14,
    "blocks.1.hook_mlp_out": 14,
    "blocks.0.mlp.hook_post": 19,
    "blocks.1.attn.hook_z": 24,
    "blocks.0.hook_mlp_in": 14,
    "blocks.0.ln2.hook_normalized": 14,
    "blocks.0.attn.hook_q": 6,  # one for all heads
    "blocks.1.mlp.hook_in": 14,  # a point that sae-lens adds
}
D_SAE = 31


def make_sae(name: str) -> StandardSAE:
    reshape = "hook_z" if name.endswith("hook_z") else "none"
    cfg = StandardSAEConfig(
        d_in=WIDTHS[name],
        d_sae=D_SAE,
        device="cpu",
        reshape_activations=reshape,
        metadata=SAEMetadata(hook_name=name, model_name="custom"),
    )
    sae = StandardSAE(cfg)
    for parameter in sae.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return sae


def replace_by(value):
    return lambda activation, hook: value


def keep_in(values):
    return lambda gradient, hook: values.append(gradient.clone())


@torch.no_grad()
def loud(model):
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        parameter.copy_(0.4 * noise if "W_" in name else parameter + 0.3 * noise)


def main() -> None:
    torch.manual_seed(0)
    cfg = HookedTransformerConfig.from_dict(SIZES)
    assert cfg.n_key_value_heads == 2
    model = HookedSAETransformer(cfg)
    assert isinstance(model, HookedTransformer)
    assert isinstance(model, transformer_lens_lite.HookedTransformer)
    loud(model)
    tokens = torch.randint(23, (2, 9))
    plain = model(tokens)
    _, clean = model.run_with_cache(tokens)
    every_name = list(model.hook_dict)

    for name in WIDTHS:
        sae = make_sae(name)
        if name not in clean:
            _, clean_here = model.run_with_cache(tokens, names_filter=[name])
        else:
            clean_here = clean
        acts = clean_here[name]

        # encode and decode what was cached
        features = sae.encode(acts)
        assert features.shape[:2] == (2, 9), features.shape
        assert features.shape[-1] == D_SAE, features.shape
        by_hand = sae.decode(features)

        # spliced in, the model goes on from the reconstruction: as a hook that puts it there
        spliced = model.run_with_saes(tokens, saes=[sae])
        hooked = model.run_with_hooks(tokens, fwd_hooks=[(name, replace_by(by_hand))])
        torch.testing.assert_close(spliced, hooked, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(spliced, plain, atol=1e-3), name

        # with its error the model says what it said before
        whole = model.run_with_saes(tokens, saes=[sae], use_error_term=True)
        torch.testing.assert_close(whole, plain, atol=1e-4, rtol=1e-4)

        # the SAE's own points are in the cache, under the point's name
        out, cache = model.run_with_cache_with_saes(tokens, saes=[sae])
        torch.testing.assert_close(out, spliced)
        post = f"{name}.hook_sae_acts_post"
        torch.testing.assert_close(cache[post], features, atol=1e-5, rtol=1e-5)

        # ablate the feature that is active most
        feature = int(features.flatten(0, -2).mean(0).argmax())

        def ablate(acts, hook, feature=feature):
            assert isinstance(hook, HookPoint)
            acts[..., feature] = 0
            return acts

        ablated = model.run_with_hooks_with_saes(tokens, saes=[sae], fwd_hooks=[(post, ablate)])
        without = features.clone()
        without[..., feature] = 0
        rest = sae.decode(without)
        hooked = model.run_with_hooks(tokens, fwd_hooks=[(name, replace_by(rest))])
        torch.testing.assert_close(ablated, hooked, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(ablated, spliced, atol=1e-4), name

        # the gradient of a logit with respect to the features
        gradients = []
        model.add_sae(sae)
        assert post in model.hook_dict
        with model.hooks(bwd_hooks=[(post, keep_in(gradients))]):
            model(tokens)[0, -1, 3].backward()
        step = 1e-3 * torch.randn(features.shape)
        step[features == 0] = 0

        model.reset_saes()

        @torch.no_grad()
        def at(features, name=name, sae=sae):
            hook = replace_by(sae.decode(features))
            return model.run_with_hooks(tokens, fwd_hooks=[(name, hook)])[0, -1, 3]

        slope = (at(features + step) - at(features - step)) / 2
        expected = (gradients[0] * step).sum()
        torch.testing.assert_close(slope, expected, atol=3e-4, rtol=2e-2)
        model.zero_grad()

        # and everything is as it was
        assert list(model.hook_dict) == every_name, name
        torch.testing.assert_close(model(tokens), plain, atol=0, rtol=0)

    # several at a time, generation under them, and back
    saes = [make_sae("blocks.0.hook_resid_pre"), make_sae("blocks.1.attn.hook_z")]
    with model.saes(saes=saes):
        assert len(model.acts_to_saes) == 2
        model.generate(tokens[:, :4], max_new_tokens=4, stop_at_eos=False, verbose=False)
    torch.testing.assert_close(model(tokens), plain, atol=0, rtol=0)

    # as a checkpoint's class
    loaded = HookedSAETransformer.from_pretrained_no_processing("tiny-lens", device="cpu")
    assert type(loaded) is HookedSAETransformer
    logits, cache = loaded.run_with_cache("When Mary and John went to the store")
    assert torch.isfinite(logits).all()
    assert "blocks.0.mlp.hook_in" in cache
    reference = transformer_lens_lite.HookedTransformer.from_pretrained_no_processing(
        "tiny-lens", device="cpu"
    )
    same, _ = reference.run_with_cache("When Mary and John went to the store")
    torch.testing.assert_close(same, logits)
    print("sae-lens works")


if __name__ == "__main__":
    main()
