"""What every method of comparison has: the setting it is trained in, the state it keeps, the terms it gives."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastgnl.distributed import sum_over_ranks, world_size
from fastgnl.errors import check, check_count, check_range, check_seed
from fastgnl.terms import Terms


@dataclass(frozen=True, eq=False)
class Setting:
    """What a method is told of the run it is part of."""

    num_samples: int
    num_classes: int
    epochs: int
    warmup_epochs: int
    """Epochs of plain cross-entropy first, for the methods that have them."""
    noise_rate: float = 0.4
    """The share of wrong labels, for the methods that must be told it (co-teaching and its kin)."""
    seed: int = 0
    ids: Tensor | None = None
    """The samples that come to this rank (``Loader.shard``); all of them when not given."""
    shape: tuple[int, ...] = ()
    """Of an input, for the methods that reconstruct it."""

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples, 1)
        check_count("num_classes", self.num_classes, 2)
        check_count("epochs", self.epochs, 1)
        check_count("warmup_epochs", self.warmup_epochs, 0)
        check_range("noise_rate", self.noise_rate, 0, 1)
        check_seed(self.seed)

    @property
    def own_ids(self) -> Tensor:
        """The ids of this rank's samples."""
        return torch.arange(self.num_samples) if self.ids is None else self.ids


class Method(nn.Module):
    """A loss with what ``fastgnl.trainer.train`` asks of one besides.

    A method is called with the network's logits (``forward``), or runs the network itself (``fastgnl.trainer.Runs``).
    Rows of a batch that are mixed or compared are rows of one rank.
    """

    wants_momentum = None
    epoch: Tensor

    def __init__(self, setting: Setting | None = None) -> None:
        super().__init__()
        if setting is not None:
            self.setting = setting
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self._rows: list[str] = []
        self._shared: list[str] = ["epoch"]
        self.now = 0
        """The epoch, as a number: to read the buffer in each step would stall a device."""

    def keep_rows(self, name: str, rows: Tensor) -> None:
        """State that has a row a sample, by sample id; a rank only uses and keeps those of its own."""
        self.register_buffer(name, rows)
        self._rows.append(name)

    def keep_shared(self, name: str, value: Tensor) -> None:
        """State that is equal on all ranks."""
        self.register_buffer(name, value)
        self._shared.append(name)

    @property
    def wants_losses(self) -> bool:
        """Whether ``end_epoch`` needs the losses of an eval-mode pass."""
        return False

    @property
    def in_warmup(self) -> bool:
        return self.now < self.setting.warmup_epochs

    def end_epoch(self, losses: Tensor | None = None) -> None:
        self.epoch += 1
        self.now = int(self.epoch)

    def check_owns(self, ids: Tensor) -> None:
        check(
            not self._rows or torch.equal(self.setting.own_ids, ids.cpu()),
            "this method was not told which samples come to this rank, wanted Setting(..., ids=loader.shard())",
        )

    def shared_state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._shared}

    def shard_state(self) -> dict[str, Tensor]:
        if not self._rows:
            return {}
        own = self.setting.own_ids
        return {"ids": own} | {name: getattr(self, name)[own.to(self.epoch.device)] for name in self._rows}

    def load_shards(self, shards: Iterable[dict[str, Tensor]]) -> None:
        self.now = int(self.epoch)
        for shard in shards:
            for name in self._rows:
                rows = getattr(self, name)
                rows[shard["ids"].to(rows.device)] = shard[name].to(rows)


def global_mean(loss_B: Tensor) -> Tensor:
    """The mean over this rank's rows, weighted so that DDP's average is the mean over the global batch."""
    rows = sum_over_ranks(loss_B.new_full((1,), len(loss_B)).detach())
    return loss_B.sum() * (world_size() / rows.squeeze())


def given_loss(z: Tensor, labels: Tensor) -> Tensor:
    """-log q_i[y_i], [B]; of two networks [2, B]."""
    rows = labels.expand(z.shape[:-1])
    return nn.functional.cross_entropy(z.flatten(0, -2), rows.flatten(), reduction="none").view(z.shape[:-1])


def terms_of(loss: Tensor, sample_loss_B: Tensor, labels: Tensor, clean: Tensor | None) -> Terms:
    """What the loop shows of a loss that has no terms of its own."""
    sample_loss_B = sample_loss_B.detach()
    if sample_loss_B.dim() == 2:
        sample_loss_B = sample_loss_B.mean(0)
    mean = sample_loss_B.mean()
    return Terms(
        loss,
        torch.stack([mean, torch.zeros_like(mean), torch.zeros_like(mean)]),
        sample_loss_B,
        torch.ones_like(labels),
        None if clean is None else labels == clean,
    )
