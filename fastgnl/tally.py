"""What training shows: sums over the rows of an epoch, and the means they give."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgnl.distributed import sum_over_ranks, world_size
from fastgnl.loader import Batch
from fastgnl.terms import Terms


@dataclass(frozen=True)
class Epoch:
    """What one epoch showed, over all ranks. Shares are in [0, 1]; NaN where the clean labels are not known."""

    number: int
    seconds: float
    """Of training, the refit of w included, evaluation and checkpoints not."""
    wait: float
    """The share of them that this rank waited for data."""
    images_per_second: float
    """Over all ranks."""
    lr: float
    """Of the last step."""
    skipped: int
    """Steps left out so far because a loss or gradient was not finite."""
    loss: float
    ce: float
    prior: float
    estep: float
    coverage: float
    """Share of the candidate sets that hold the clean label."""
    clean_size: float
    """Mean |S_i| of the samples whose given label is right ..."""
    noisy_size: float
    """... and of those where it is wrong: the paper's clean- and noisy-label uncertainty."""
    test_accuracy: float | None
    """Top-1 on the first test set, of the trained weights."""
    scores: dict[str, float] = field(default_factory=dict)
    """Of every test set, by its name and what was scored: "test top1", "test network 2 top1", "test EMA top5"."""


def best(history: Sequence[Epoch]) -> Epoch:
    """The first epoch with the highest test accuracy; one that was not tested is below all others."""
    return max(history, key=lambda epoch: -1.0 if epoch.test_accuracy is None else epoch.test_accuracy)


@dataclass(frozen=True)
class Means:
    """Means over the rows of some steps, as in ``Epoch``."""

    rows: int
    loss: float
    ce: float
    prior: float
    estep: float
    set_size: float
    coverage: float
    clean_size: float
    noisy_size: float


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


class Tally:
    """Sums over rows on this rank; ``means`` adds those of all ranks."""

    def __init__(self) -> None:
        self.sums = torch.zeros(11, dtype=torch.float64)
        self._new: list[Tensor] = []

    def add(self, terms: Terms, batch: Batch) -> None:
        size = terms.set_size.to(torch.float64)
        # terms.loss is weighted for DDP's average over ranks, the three terms are means over this rank's rows.
        rows = size.new_tensor([batch.global_rows / world_size(), len(size), len(size), len(size)])
        means = torch.cat([terms.loss.detach()[None], terms.means[:3]]).double() * rows
        if batch.clean is None or terms.covered is None:
            known = means.new_zeros(5)
        else:
            right = (batch.labels == batch.clean).double()
            wrong = (batch.clean >= 0).double() - right
            covered = terms.covered * (right + wrong)
            known = torch.stack([covered.sum(), (size * right).sum(), right.sum(), (size * wrong).sum(), wrong.sum()])
        row = torch.cat([means.new_full((1,), len(size)), means, size.sum()[None], known])
        self._new.append(torch.where(row.isfinite().all(), row, 0.0))  # a skipped step says nothing

    def own_sums(self) -> Tensor:
        """The sums of this rank so far, [11]."""
        if self._new:
            self.sums = self.sums + torch.stack(self._new).sum(0).cpu()
            self._new.clear()
        return self.sums

    def means(self) -> Means:
        rows, loss, ce, prior, estep, size, covered, clean_size, clean, noisy_size, noisy = sum_over_ranks(
            self.own_sums()
        ).tolist()
        return Means(
            int(rows),
            _ratio(loss, rows),
            _ratio(ce, rows),
            _ratio(prior, rows),
            _ratio(estep, rows),
            _ratio(size, rows),
            _ratio(covered, clean + noisy),
            _ratio(clean_size, clean),
            _ratio(noisy_size, noisy),
        )
