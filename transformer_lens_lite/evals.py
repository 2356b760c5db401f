"""Quick measures of a language model: loss on data, on repeated random tokens, and indirect object
identification.

Data sets of the hub need the package `datasets` and a network; token batches of your own need
nothing.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from transformer_lens_lite.utilities import (
    get_dataset,
    load_hub_dataset,
    tokenize_and_concatenate,
)

SANE_TEXT = (
    "The train to the coast left at nine in the morning. She had packed a book, two apples and a "
    "warm coat, because it was always colder by the sea than in the city."
)


# --- loss -----------------------------------------------------------------------------------------


@torch.no_grad()
def sanity_check(model: Any) -> Float[Tensor, ""]:
    """The loss on a short English text: a few nats per token for any working model."""
    return model(SANE_TEXT, return_type="loss")


@torch.no_grad()
def evaluate_on_dataset(
    model: Any, data_loader: Iterable[Any], truncate: int | None = 100, device: Any = None
) -> float:
    """The mean next-token loss, in nats, over the batches of a loader.

    Args:
        data_loader: yields token ids [batch, pos], or mappings with them under "tokens".
        truncate: batches to look at; None: all.
        device: where to put the tokens; None: where the model is.
    Raises: ValueError when there is no batch.
    """
    total, count = 0.0, 0
    place = model.cfg.device if device is None else device
    for batch in islice(data_loader, truncate):
        tokens = torch.as_tensor(batch["tokens"] if isinstance(batch, Mapping) else batch)
        n = tokens.shape[0] * (tokens.shape[1] - 1)
        total += n * float(model(tokens.to(place), return_type="loss"))
        count += n
    if not count:
        raise ValueError("the loader has no batch to evaluate on")
    return total / count


@torch.no_grad()
def induction_loss(
    model: Any,
    tokenizer: Any = None,
    batch_size: int = 4,
    subseq_len: int = 384,
    prepend_bos: bool | None = None,
    device: Any = None,
    seed: int | None = None,
) -> Float[Tensor, ""]:
    """The mean loss, in nats, on the second half of random tokens said twice: near zero for a model
    that can copy, log(d_vocab) or more for one that cannot.

    Args:
        tokenizer: whose BOS stands in front; None: the model's.
        subseq_len: tokens that are said twice.
        prepend_bos: None: the model's default. Without a tokenizer there is no BOS.
        seed: draw the same tokens every time.
    Raises: ValueError when two halves and a BOS are longer than the context.
    """
    tokens = repeated_tokens(model, tokenizer, batch_size, subseq_len, prepend_bos, seed)
    tokens = tokens.to(model.cfg.device if device is None else device)
    losses = model(tokens, return_type="loss", loss_per_token=True)
    # the second half's first token is new to everybody
    return losses[:, 1 - subseq_len :].mean()


def repeated_tokens(
    model: Any,
    tokenizer: Any,
    batch_size: int,
    subseq_len: int,
    prepend_bos: bool | None,
    seed: int | None,
) -> Int[Tensor, "batch pos"]:
    """Random tokens said twice, perhaps behind a BOS."""
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    with_bos = model.cfg.default_prepend_bos if prepend_bos is None else prepend_bos
    bos = None if tokenizer is None or not with_bos else tokenizer.bos_token_id
    length = 2 * subseq_len + (bos is not None)
    if subseq_len < 2 or length > model.cfg.n_ctx:
        raise ValueError(
            f"subseq_len={subseq_len}: at least 2, and {length} positions must fit into "
            f"n_ctx={model.cfg.n_ctx}"
        )
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    once = torch.randint(model.cfg.d_vocab, (batch_size, subseq_len), generator=generator)
    start = [] if bos is None else [torch.full((batch_size, 1), bos)]
    return torch.cat((*start, once, once), 1)


# --- data sets of the hub -------------------------------------------------------------------------


def loader_of(dataset: Any, tokenizer: Any, batch_size: int, **options: Any) -> DataLoader:
    """A loader of batches of tokens, in random order."""
    rows = tokenize_and_concatenate(dataset, tokenizer, **options)
    return DataLoader(rows, batch_size=batch_size, shuffle=True, drop_last=True)


def make_wiki_data_loader(tokenizer: Any, batch_size: int = 8) -> DataLoader:
    """Batches of WikiText-2."""
    wiki = load_hub_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train")
    return loader_of(wiki, tokenizer, batch_size)


def make_named_data_loader(tokenizer: Any, batch_size: int = 8, *, dataset_name: str) -> DataLoader:
    """Batches of one of the data sets that `get_dataset` knows."""
    return loader_of(get_dataset(dataset_name), tokenizer, batch_size)


make_owt_data_loader = partial(make_named_data_loader, dataset_name="owt")
make_pile_data_loader = partial(make_named_data_loader, dataset_name="pile")
make_code_data_loader = partial(make_named_data_loader, dataset_name="code")

DATASET_NAMES = ["wiki", "owt", "pile", "code"]
DATASET_LOADERS: list[Callable[..., DataLoader]] = [
    make_wiki_data_loader,
    make_owt_data_loader,
    make_pile_data_loader,
    make_code_data_loader,
]


def evaluate(
    model: Any, truncate: int = 100, batch_size: int = 8, tokenizer: Any = None
) -> dict[str, float]:
    """The loss on each of four data sets of the hub, as {"wiki_loss": …}.

    Raises: ImportError without the package `datasets`.
    """
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    return {
        f"{name}_loss": evaluate_on_dataset(model, make(tokenizer, batch_size), truncate)
        for name, make in zip(DATASET_NAMES, DATASET_LOADERS, strict=True)
    }


# --- indirect object identification ---------------------------------------------------------------

IOI_TEMPLATES = (
    "After [A] and [B] walked to the [LOCATION] for some [OBJECT], [B] handed the [OBJECT] to [A]",
    "When [B] and [A] met at the [LOCATION], [B] passed the [OBJECT] to [A]",
)
IOI_NAMES = ("John", "Mary", "Tom", "Anna")
IOI_NOUNS = {
    "LOCATION": ("store", "market", "school"),
    "OBJECT": ("milk", "bread", "book", "ball"),
}


class IOIDataset(Dataset):
    """Sentences that end in the indirect object (Wang et al. 2022, arXiv 2211.00593).

    An item is {"prompt": ids of the whole sentence [pos], "IO": ids of its last word, "S": ids of
    the other name}.

    Args:
        templates: sentences with [A], the indirect object, [B], the subject, and any of `nouns`;
            [A] comes last.
        symmetric: every second sentence is the one before it with the two names exchanged.
        prepend_bos: the tokenizer's BOS comes first.
    Raises: ValueError for templates that do not end in [A], or fewer than two names.
    """

    def __init__(
        self,
        tokenizer: Any,
        templates: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        nouns: Mapping[str, Sequence[str]] | None = None,
        num_samples: int = 1000,
        symmetric: bool = False,
        prepend_bos: bool = True,
        seed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prepend_bos = prepend_bos
        self.templates = list(IOI_TEMPLATES if templates is None else templates)
        self.names = list(IOI_NAMES if names is None else names)
        self.nouns = {k: list(v) for k, v in (IOI_NOUNS if nouns is None else nouns).items()}
        wrong = [t for t in self.templates if not t.endswith("[A]") or "[B]" not in t]
        if wrong or not self.templates:
            raise ValueError(f"a template has [B] in it and ends in [A]; {wrong[:1]} does not")
        if len(set(self.names)) < 2:
            raise ValueError(f"two different names are needed, got {self.names}")
        draw = random.Random(seed)
        self.samples: list[dict[str, str]] = []
        while len(self.samples) < num_samples:
            self.samples += self._drawn(draw)[: 2 if symmetric else 1]
        del self.samples[num_samples:]

    def _drawn(self, draw: random.Random) -> list[dict[str, str]]:
        """A sentence, and the same with the names exchanged."""
        text = draw.choice(self.templates)
        for noun, choices in self.nouns.items():
            text = text.replace(f"[{noun}]", draw.choice(choices))
        pair = draw.sample(self.names, 2)
        return [
            {"text": text.replace("[A]", a).replace("[B]", b), "IO": f" {a}", "S": f" {b}"}
            for a, b in (pair, pair[::-1])
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        start = [self.tokenizer.bos_token_id] if self.prepend_bos else []
        prompt = torch.tensor(start + self._ids(sample["text"]))
        return {
            "prompt": prompt,
            "IO": torch.tensor(self._ids(sample["IO"])),
            "S": torch.tensor(self._ids(sample["S"])),
        }

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@torch.no_grad()
def ioi_eval(
    model: Any,
    dataset: Any = None,
    batch_size: int = 8,
    num_samples: int = 1000,
    tokenizer: Any = None,
    symmetric: bool = False,
) -> dict[str, float]:
    """How a model finishes such sentences: {"Logit Difference": mean logit of the indirect object
    less that of the subject, "Accuracy": how often that is positive}.

    A name of several tokens counts by the first in which the two differ.
    """
    if dataset is None:
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
        dataset = IOIDataset(tokenizer, num_samples=num_samples, symmetric=symmetric)
    differences = []
    for start in range(0, len(dataset), batch_size):
        items = [dataset[i] for i in range(start, min(start + batch_size, len(dataset)))]
        differences.append(logit_differences(model, items))
    found = torch.cat(differences)
    return {
        "Logit Difference": float(found.mean()),
        "Accuracy": float((found > 0).float().mean()),
    }


def logit_differences(model: Any, items: Sequence[Mapping[str, Tensor]]) -> Float[Tensor, " item"]:
    """The logit of the indirect object less that of the subject, in each of some sentences."""
    lengths = [len(item["prompt"]) for item in items]
    ids = torch.zeros(len(items), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(items):
        ids[row, : lengths[row]] = item["prompt"]
        mask[row, : lengths[row]] = 1
    place = model.cfg.device
    logits = model(ids.to(place), attention_mask=mask.to(place))
    found = []
    for row, item in enumerate(items):
        right, other = item["IO"].tolist(), item["S"].tolist()
        at = next((i for i, (a, b) in enumerate(zip(right, other, strict=False)) if a != b), None)
        if at is None:
            raise ValueError(f"the names {right} and {other} begin with the same tokens")
        # the logits that predict the name's token `at`, when the name ends the sentence
        here = logits[row, lengths[row] - len(right) + at - 1]
        found.append(here[right[at]] - here[other[at]])
    return torch.stack(found).float().cpu()
