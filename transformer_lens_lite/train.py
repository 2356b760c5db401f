"""A training loop for small language models. Larger ones want a trainer of their own: a
HookedTransformer is an nn.Module."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from transformer_lens_lite.config import default_device
from transformer_lens_lite.utilities import is_library_available

OPTIMIZERS = ("Adam", "AdamW", "SGD")


@dataclass
class HookedTransformerTrainConfig:
    """What `train` does.

    Raises: ValueError for what cannot be done.
    """

    num_epochs: int
    batch_size: int
    lr: float = 1e-3
    seed: int = 0  # of the order of the data
    momentum: float = 0.0  # of SGD
    max_grad_norm: float | None = None
    weight_decay: float | None = None
    optimizer_name: str = "Adam"  # or "AdamW", "SGD"
    device: str | torch.device | None = None  # None: a GPU when there is one
    warmup_steps: int = 0  # the learning rate grows from 0 to its full size over so many
    save_every: int | None = None  # steps
    save_dir: str | None = None
    wandb: bool = False
    wandb_project_name: str | None = None
    print_every: int | None = 50  # steps
    max_steps: int | None = None  # of an epoch

    def __post_init__(self) -> None:
        if self.optimizer_name not in OPTIMIZERS:
            raise ValueError(
                f"optimizer_name must be one of {list(OPTIMIZERS)}, got {self.optimizer_name!r}"
            )
        if self.save_every is not None and self.save_dir is None:
            raise ValueError("save_every needs save_dir=")
        for name in ("num_epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def train(model: Any, config: HookedTransformerTrainConfig, dataset: Any) -> Any:
    """Train a model in place on next-token loss; returns it.

    `dataset` holds rows of token ids under "tokens", as `tokenize_and_concatenate` makes them.
    Where `config.wandb` is set, losses and learning rates are logged there.
    """
    log = wandb_log(config)
    device = torch.device(config.device or default_device())
    model.to(device).train()
    optimizer = optimizer_for(model.parameters(), config)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / config.warmup_steps) if config.warmup_steps else 1
    )
    order = torch.Generator().manual_seed(config.seed)
    batches = DataLoader(dataset, batch_size=config.batch_size, shuffle=True, generator=order)
    step = 0
    for epoch in tqdm(range(1, config.num_epochs + 1), disable=config.num_epochs == 1):
        for in_epoch, batch in enumerate(batches):
            if config.max_steps is not None and in_epoch >= config.max_steps:
                break
            loss = model(batch["tokens"].to(device), return_type="loss")
            loss.backward()
            if config.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            log({"train_loss": loss.item(), "lr": warm_up.get_last_lr()[0], "epoch": epoch})
            warm_up.step()
            optimizer.zero_grad()
            step += 1
            if config.print_every and step % config.print_every == 0:
                print(f"Epoch {epoch} Step {step} Loss {loss.item():.4f}")
            if config.save_every and step % config.save_every == 0:
                save(model, Path(config.save_dir or "."), step)
    return model


def optimizer_for(
    parameters: Iterable[nn.Parameter], config: HookedTransformerTrainConfig
) -> torch.optim.Optimizer:
    """The optimizer a config asks for, without weight decay unless one is given. That of Adam is
    decoupled too (Loshchilov and Hutter 2019, arXiv 1711.05101), which is AdamW."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay or 0.0}
    if config.optimizer_name == "SGD":
        return torch.optim.SGD(parameters, momentum=config.momentum, **options)
    return torch.optim.AdamW(parameters, **options)


def save(model: nn.Module, folder: Path, step: int) -> None:
    """Write the weights as `model_{step}.pt`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / f"model_{step}.pt")


def wandb_log(config: HookedTransformerTrainConfig) -> Callable[[dict[str, Any]], None]:
    """Where numbers go at every step. ImportError when wandb is wanted and not installed."""
    if not config.wandb:
        return lambda values: None
    if not is_library_available("wandb"):
        raise ImportError("wandb=True needs the package wandb: pip install wandb")
    import wandb

    wandb.init(project=config.wandb_project_name, config=vars(config))
    return wandb.log
