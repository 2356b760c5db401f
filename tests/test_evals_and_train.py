"""Quick measures, and the training loop: on tiny models, and on the trained one in the box."""

import sys
import types
from pathlib import Path
from typing import Any

import native
import pytest
import tokenizers_for_tests as toks
import torch

from transformer_lens_lite import HookedTransformer, evals
from transformer_lens_lite.train import HookedTransformerTrainConfig, optimizer_for, train

# --- losses ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def boxed() -> HookedTransformer:
    return HookedTransformer.from_pretrained("tiny-lens", device="cpu")


@torch.no_grad()
def test_loss_over_batches() -> None:
    model = native.build("grouped_rotary")
    batches = [native.tokens(2), native.tokens(2)[:, :6], native.tokens(1)]
    total = sum(
        float(model(batch, return_type="loss", loss_per_token=True).sum()) for batch in batches
    )
    count = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in batches)
    assert abs(evals.evaluate_on_dataset(model, batches) - total / count) < 1e-5
    one = float(model(batches[0], return_type="loss"))
    assert abs(evals.evaluate_on_dataset(model, [{"tokens": b} for b in batches], 1) - one) < 1e-5
    with pytest.raises(ValueError, match="no batch"):
        evals.evaluate_on_dataset(model, [])


@torch.no_grad()
def test_a_trained_model_is_sane(boxed: HookedTransformer) -> None:
    trained = evals.sanity_check(boxed)
    fresh = HookedTransformer(boxed.cfg, boxed.tokenizer)
    fresh.init_weights()
    untrained = evals.sanity_check(fresh)
    assert trained == float(boxed(evals.SANE_TEXT, return_type="loss"))
    assert trained != untrained


def test_induction_loss() -> None:
    """A model that is told what came subseq_len before is right from the second token on."""
    n, length = native.SIZES["d_vocab"], 7
    model = native.build(n_ctx=40)
    assert evals.induction_loss(model, subseq_len=length, seed=0) > 2
    seen: list[torch.Tensor] = []

    def copying(logits: torch.Tensor, hook: Any) -> torch.Tensor:
        tokens = hook.step.tokens
        seen.append(tokens)
        copied = torch.nn.functional.one_hot(tokens.roll(length - 1, 1), n).float() * 100
        copied[:, :length] = (
            0  # of the first half, and of the second's first token, it knows nothing
        )
        return copied

    with model.hooks(fwd_hooks=[("unembed.hook_out", copying)]):
        assert evals.induction_loss(model, batch_size=3, subseq_len=length, seed=0) < 1e-5
    (tokens,) = seen
    assert tokens.shape == (3, 14)  # without a tokenizer there is no BOS
    assert torch.equal(tokens[:, :7], tokens[:, 7:])
    one = evals.induction_loss(model, subseq_len=length, seed=5)
    assert one == evals.induction_loss(model, subseq_len=length, seed=5)
    assert one != evals.induction_loss(model, subseq_len=length)
    with pytest.raises(ValueError, match="40"):
        evals.induction_loss(model, subseq_len=21)


def test_losses_are_tensors_as_clients_expect(boxed: HookedTransformer) -> None:
    assert isinstance(evals.sanity_check(boxed).item(), float)
    assert isinstance(evals.induction_loss(boxed, subseq_len=8).item(), float)


def test_induction_loss_puts_bos_in_front() -> None:
    tokenizer = toks.with_own_pad()
    model = native.loud(HookedTransformer(native.config(d_vocab=-1), tokenizer))
    for given, length in ((None, 11), (True, 11), (False, 10)):
        with model.capture("hook_tokens") as cache:
            evals.induction_loss(model, subseq_len=5, prepend_bos=given)
        tokens = cache["hook_tokens"]
        assert tokens.shape == (4, length)
        assert (tokens[:, 0] == tokenizer.bos_token_id).all() == (given is not False)


# --- indirect object identification ---------------------------------------------------------------


class Words:
    """A tokenizer of whole words; "Anna" and "Anne" have two tokens, and the first in common."""

    bos_token_id = 0

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        words = text.replace(",", " ,").replace("Ann", "An n").split()
        return [self.ids.setdefault(word, len(self.ids) + 1) for word in words]


def test_sentences() -> None:
    words = Words()
    data = evals.IOIDataset(words, num_samples=7, symmetric=True, seed=0)
    assert len(data) == 7
    for i, sample in enumerate(data.samples):
        assert sample["text"].endswith(sample["IO"])
        assert sample["text"].count(sample["S"].strip()) == 2
        assert sample["text"].count(sample["IO"].strip()) == 2
        assert "[" not in sample["text"]
        prompt = data[i]["prompt"]
        assert prompt[0] == 0
        assert prompt[1:].tolist() == words.encode(sample["text"], add_special_tokens=False)
        assert prompt.tolist()[-len(data[i]["IO"]) :] == data[i]["IO"].tolist()
    for first, second in zip(data.samples[0:6:2], data.samples[1:6:2], strict=True):
        assert (first["IO"], first["S"]) == (second["S"], second["IO"])
        changed = first["text"].replace(first["IO"], " X").replace(first["S"], first["IO"])
        assert changed.replace(" X", first["S"]).lower() == second["text"].lower() or (
            first["text"].split()[0] != second["text"].split()[0]
        )
    again = evals.IOIDataset(words, num_samples=7, symmetric=True, seed=0)
    assert again.samples == data.samples
    own = evals.IOIDataset(
        words, ["[B] saw [A] at the [X]; [B] waved to [A]"], ["Al", "Bo"], {"X": ["sea"]}, 3,
        prepend_bos=False,
    )  # fmt: skip
    assert {s["text"] for s in own.samples} <= {
        "Al saw Bo at the sea; Al waved to Bo", "Bo saw Al at the sea; Bo waved to Al"
    }  # fmt: skip
    assert own[0]["prompt"][0] != 0
    with pytest.raises(ValueError, match=r"ends in \[A\]"):
        evals.IOIDataset(words, templates=["[A] and [B]"])
    with pytest.raises(ValueError, match="two different names"):
        evals.IOIDataset(words, names=["Al", "Al"])


@torch.no_grad()
def test_ioi_by_hand() -> None:
    """Sentences of several lengths in one batch, and names that begin alike."""
    words = Words()
    data = evals.IOIDataset(words, names=["Anna", "Anne", "Tom"], num_samples=9, seed=1)
    model = native.build("rotary", d_vocab=64, n_ctx=40)
    differences, alike = [], []
    for i in range(len(data)):
        item = data[i]
        right, other = item["IO"].tolist(), item["S"].tolist()
        same = int(right[0] == other[0])
        alike.append(same)
        logits = model(item["prompt"])[0, len(item["prompt"]) - len(right) - 1 + same]
        differences.append(float(logits[right[same]] - logits[other[same]]))
    found = evals.ioi_eval(model, data, batch_size=4)
    assert abs(found["Logit Difference"] - sum(differences) / 9) < 1e-4
    assert found["Accuracy"] == pytest.approx(sum(d > 0 for d in differences) / 9)
    assert len({len(data[i]["prompt"]) for i in range(9)}) > 1
    assert set(alike) == {0, 1}
    data.samples[0]["S"] = data.samples[0]["IO"]
    with pytest.raises(ValueError, match="begin with the same tokens"):
        evals.ioi_eval(model, data)


def test_ioi_of_the_model_in_the_box(boxed: HookedTransformer) -> None:
    found = evals.ioi_eval(boxed, num_samples=12, symmetric=True)
    assert set(found) == {"Logit Difference", "Accuracy"}
    assert 0 <= found["Accuracy"] <= 1


# --- data sets of the hub -------------------------------------------------------------------------


def test_evaluate_loads_four_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a library that stands for `datasets`: texts, columns and splits go the right way."""
    model = native.loud(HookedTransformer(native.config(d_vocab=-1, n_ctx=1024), toks.gpt2_like()))
    asked = []

    class Rows(list):
        features = ("text",)

        def remove_columns(self, names: list[str]) -> "Rows":
            assert names == []
            return self

        def map(self, function: Any, **options: Any) -> "Rows":
            texts = {"text": [row["text"] for row in self]}
            return Rows({"tokens": torch.tensor(r)} for r in function(texts)["tokens"])

        def with_format(self, kind: str, columns: list[str]) -> "Rows":
            return self

    def load_dataset(*args: str, split: str) -> Rows:
        asked.append((*args, split))
        return Rows({"text": "Once upon a time there was a cat. " * 40} for _ in range(20))

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("transformer_lens_lite.utilities.is_library_available", lambda name: True)
    found = evals.evaluate(model, truncate=1, batch_size=2)
    assert list(found) == ["wiki_loss", "owt_loss", "pile_loss", "code_loss"]
    assert all(0 < loss < 100 for loss in found.values())
    assert asked == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
        ("stas/openwebtext-10k", "train"),
        ("NeelNanda/pile-10k", "train"),
        ("NeelNanda/code-10k", "train"),
    ]


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_lens_lite.utilities.is_library_available", lambda name: False)
    with pytest.raises(ImportError, match="pip install datasets"):
        evals.evaluate(native.build())


# --- training -------------------------------------------------------------------------------------

ROWS = [{"tokens": (torch.arange(9) + start) % 23} for start in range(12)]


@torch.no_grad()
def loss_of(model: HookedTransformer, tokens: torch.Tensor) -> float:
    return float(model(tokens, return_type="loss"))


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
def test_training_lowers_the_loss(optimizer: str) -> None:
    model = native.build("grouped_rotary")
    tokens = torch.stack([row["tokens"] for row in ROWS])
    before = loss_of(model, tokens)
    config = HookedTransformerTrainConfig(
        num_epochs=8, batch_size=4, lr=1e-2, optimizer_name=optimizer, momentum=0.5,
        max_grad_norm=1.0, warmup_steps=3, print_every=None, device="cpu",
    )  # fmt: skip
    assert train(model, config, ROWS) is model
    assert loss_of(model, tokens) < 0.9 * before
    assert model.training


@pytest.mark.parametrize(
    ("name", "decay", "expected"),
    [
        ("Adam", None, 0.0),
        ("Adam", 0.5, 0.5),
        ("AdamW", None, 0.0),
        ("AdamW", 0.5, 0.5),
        ("SGD", None, 0.0),
        ("SGD", 0.5, 0.5),
    ],
)
def test_weight_decay_is_what_is_asked_for(name: str, decay: float | None, expected: float) -> None:
    """And decoupled from the gradient: a weight without one shrinks by lr · decay."""
    config = HookedTransformerTrainConfig(1, 1, lr=0.1, weight_decay=decay, optimizer_name=name)
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.zeros(3)
    optimizer_for([weight], config).step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 1 - 0.1 * expected))


def by_hand(model: HookedTransformer, config: HookedTransformerTrainConfig, n: int) -> None:
    """SGD with a growing rate, clipped, on the batches in the config's order."""
    order = torch.Generator().manual_seed(config.seed)
    loader = torch.utils.data.DataLoader(ROWS, config.batch_size, shuffle=True, generator=order)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, weight_decay=0.1)
    for step, batch in zip(range(n), loader, strict=False):
        optimizer.zero_grad()
        model(batch["tokens"], return_type="loss").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = config.lr * min(1, step / 2)
        optimizer.step()


def test_a_step_is_what_the_config_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = HookedTransformerTrainConfig(
        num_epochs=1, batch_size=4, lr=0.1, seed=3, optimizer_name="SGD", weight_decay=0.1,
        max_grad_norm=0.5, warmup_steps=2, max_steps=2, print_every=1, save_every=2,
        save_dir=str(tmp_path / "saved"), device="cpu",
    )  # fmt: skip
    trained, expected = native.build(), native.build()
    train(trained, config, ROWS)
    by_hand(expected, config, 2)
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), atol=1e-6, rtol=1e-5)
    assert not torch.equal(trained.W_E, native.build().W_E)
    assert [line.split(" Loss")[0] for line in capsys.readouterr().out.splitlines()] == [
        "Epoch 1 Step 1", "Epoch 1 Step 2"
    ]  # fmt: skip
    assert [file.name for file in (tmp_path / "saved").iterdir()] == ["model_2.pt"]
    fresh = native.build(seed=1)
    fresh.load_state_dict(torch.load(tmp_path / "saved" / "model_2.pt", weights_only=True))
    assert torch.equal(fresh(native.tokens()), trained(native.tokens()))


def test_numbers_go_to_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    started: dict[str, Any] = {}
    module = types.ModuleType("wandb")
    module.init = lambda **options: started.update(options)  # type: ignore[attr-defined]
    module.log = logged.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = HookedTransformerTrainConfig(
        num_epochs=1, batch_size=6, wandb=True, wandb_project_name="mine", device="cpu",
        warmup_steps=2, lr=0.4,
    )  # fmt: skip
    monkeypatch.setattr("transformer_lens_lite.train.is_library_available", lambda name: False)
    with pytest.raises(ImportError, match="pip install wandb"):
        train(native.build(), config, ROWS)
    monkeypatch.setattr("transformer_lens_lite.train.is_library_available", lambda name: True)
    train(native.build(), config, ROWS)
    assert started["project"] == "mine"
    assert started["config"]["batch_size"] == 6
    assert [entry["lr"] for entry in logged] == pytest.approx([0.0, 0.2])
    assert all(entry["train_loss"] > 0 and entry["epoch"] == 1 for entry in logged)


def test_what_cannot_be_trained() -> None:
    for wrong, message in (
        ({"optimizer_name": "adam"}, "one of"),
        ({"save_every": 2}, "save_dir"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(ValueError, match=message):
            HookedTransformerTrainConfig(**{"num_epochs": 1, "batch_size": 2, **wrong})
