"""The training loop: a network, an objective, a loader. The same for one process and for torchrun's workers."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastgnl.distributed import is_distributed, sum_over_ranks, world_size
from fastgnl.errors import check, check_count, check_range
from fastgnl.loader import Batch, Loader, Source, once
from fastgnl.objective import Terms
from fastgnl.transition import PairNet, TransitionNet


@dataclass(frozen=True)
class TrainConfig:
    """How to optimise. The defaults are the paper's for small images."""

    epochs: int = 40
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 5e-4
    decay_at: float = 2 / 3
    """The learning rate drops to a tenth after this share of the epochs."""

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs, 1)
        check_range("lr", self.lr, 0, 100)
        check_range("momentum", self.momentum, 0, 1)
        check_range("weight_decay", self.weight_decay, 0, 1)
        check_range("decay_at", self.decay_at, 0, 1)


@dataclass(frozen=True)
class Epoch:
    """What one epoch showed, over all ranks. Shares are in [0, 1]; NaN where the clean labels are not known."""

    number: int
    seconds: float
    """Of training, the refit of w included, evaluation not."""
    wait: float
    """The share of them that this rank waited for data."""
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


class Objective(Protocol):
    """What the loop needs of a loss."""

    @property
    def wants_losses(self) -> bool:
        """Whether ``end_epoch`` needs the losses of an eval-mode pass now."""
        ...

    def train(self) -> object: ...

    def __call__(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor, clean: Tensor | None) -> Terms: ...

    def end_epoch(self, losses: Tensor | None = None) -> None: ...


class CrossEntropy(nn.Module):
    """The baseline -log q_i[y_i], called like ``GNLObjective``."""

    wants_losses = False

    def forward(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor, clean: Tensor | None = None) -> Terms:
        loss_B = nn.functional.cross_entropy(z, labels, reduction="none")
        rows = sum_over_ranks(loss_B.new_full((1,), len(loss_B)))
        mean = loss_B.detach().mean()
        return Terms(
            loss_B.sum() * (world_size() / rows.squeeze()),
            torch.stack([mean, torch.zeros_like(mean), torch.zeros_like(mean)]),
            loss_B.detach(),
            torch.ones_like(labels),
            None if clean is None else labels == clean,
        )

    def end_epoch(self, losses: Tensor | None = None) -> None:
        pass


class _Waited:
    """An iterator that counts the seconds spent waiting for its next item."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.batches = batches
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            batch = next(self.batches, None)
            self.seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch


def train(
    net: TransitionNet | PairNet,
    objective: Objective,
    loader: Loader,
    config: TrainConfig,
    test: Source | None = None,
    on_batch: Callable[[int], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """SGD over the epochs of ``config``. ``on_batch`` is told the rows of each global batch."""
    model = DistributedDataParallel(net) if is_distributed() else net
    optimizer = torch.optim.SGD(
        net.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [round(config.epochs * config.decay_at)], 0.1)
    objective.train()
    history = []
    for number in range(config.epochs):
        net.train()
        start = time.perf_counter()
        tally = _Tally()
        batches = _Waited(loader.epoch(number))
        for batch in batches:
            z, t = model(batch.x, batch.index)
            clean = None if batch.clean is None else batch.clean.clamp(min=0)
            terms = objective(z, t, batch.labels, batch.index, clean)
            optimizer.zero_grad()
            terms.loss.backward()
            optimizer.step()
            tally.add(terms, batch)
            if on_batch:
                on_batch(batch.global_rows)
        objective.end_epoch(eval_losses(net, loader.source) if objective.wants_losses else None)
        schedule.step()
        seconds = time.perf_counter() - start
        test_accuracy = None if test is None else accuracy(net, test)
        history.append(tally.epoch(number, seconds, batches.seconds / seconds, test_accuracy))
        check(
            math.isfinite(history[-1].loss),
            f"the loss became {history[-1].loss} in epoch {number + 1}, wanted a finite one: lower lr (it is "
            f"{config.lr:g}) or scale the inputs",
        )
        if on_epoch:
            on_epoch(history[-1])
    net.eval()
    return history


class _Tally:
    """Sums over the rows of an epoch, added over the ranks at its end."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

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
        self.rows.append(torch.cat([means.new_full((1,), len(size)), means, known]))

    def epoch(self, number: int, seconds: float, wait: float, test_accuracy: float | None) -> Epoch:
        rows, loss, ce, prior, estep, covered, clean_size, clean, noisy_size, noisy = sum_over_ranks(
            torch.stack(self.rows).sum(0)
        ).tolist()
        return Epoch(
            number,
            seconds,
            wait,
            loss / rows,
            ce / rows,
            prior / rows,
            estep / rows,
            covered / (clean + noisy) if clean + noisy else float("nan"),
            clean_size / clean if clean else float("nan"),
            noisy_size / noisy if noisy else float("nan"),
            test_accuracy,
        )


@torch.no_grad()
def predict_proba(net: TransitionNet | PairNet, samples: Source) -> Tensor:
    """q of every sample in eval mode, by sample id, [N, C]; the ranks share the work."""
    net.eval()
    q_NC = torch.zeros(len(samples.labels), net.num_classes, dtype=next(net.parameters()).dtype)
    for batch in once(samples):
        q_NC[batch.index] = net.predict_proba(batch.x).cpu()
    return sum_over_ranks(q_NC)


@torch.no_grad()
def accuracy(net: TransitionNet | PairNet, samples: Source) -> float:
    """Share of the samples whose label is the argmax of q; the ranks share the work."""
    net.eval()
    right = torch.zeros(1, dtype=torch.float64)
    for batch in once(samples):
        right += (net.predict_proba(batch.x).argmax(1).cpu() == batch.labels).sum()
    return float(sum_over_ranks(right)) / len(samples.labels)


@torch.no_grad()
def eval_losses(net: TransitionNet | PairNet, samples: Source) -> Tensor:
    """-log q_i[y_i] of every sample in eval mode, by sample id, [N], or [2, N] of two networks."""
    net.eval()
    count = 2 if isinstance(net, PairNet) else 1
    losses = torch.zeros(count, len(samples.labels))
    for batch in once(samples):
        z, _ = net(batch.x)
        l = torch.log_softmax(z, -1).view(count, -1, net.num_classes)
        given = batch.labels.expand(count, -1)[..., None]
        losses[:, batch.index] = -l.gather(-1, given).squeeze(-1).float().cpu()
    losses = sum_over_ranks(losses)
    return losses if isinstance(net, PairNet) else losses[0]
