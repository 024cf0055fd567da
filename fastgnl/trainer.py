"""The training loop: a network, an objective, samples. The same for one process and for torchrun's workers."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastgnl.distributed import is_distributed, rank, sum_over_ranks, world_size
from fastgnl.errors import check, check_count, check_range, check_seed
from fastgnl.objective import Terms
from fastgnl.samples import Samples, epoch_order, rank_part, slices
from fastgnl.transition import PairNet, TransitionNet


@dataclass(frozen=True)
class TrainConfig:
    """How to optimise. The defaults are the paper's for small images."""

    epochs: int = 40
    batch_size: int = 128
    """Rows of the global batch, over all ranks, at most."""
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 5e-4
    decay_at: float = 2 / 3
    """The learning rate drops to a tenth after this share of the epochs."""
    seed: int = 0
    """Key of the order of the samples."""

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs, 1)
        check_count("batch_size", self.batch_size, 1)
        check_range("lr", self.lr, 0, 100)
        check_range("momentum", self.momentum, 0, 1)
        check_range("weight_decay", self.weight_decay, 0, 1)
        check_range("decay_at", self.decay_at, 0, 1)
        check_seed(self.seed)


@dataclass(frozen=True)
class Epoch:
    """What one epoch showed, over all ranks. Shares are in [0, 1]; NaN where the clean labels are not known."""

    number: int
    seconds: float
    """Of training, the refit of w included, evaluation not."""
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


def train(
    net: TransitionNet | PairNet,
    objective: Objective,
    samples: Samples,
    config: TrainConfig,
    test: Samples | None = None,
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
        for batch in epoch_order(len(samples), config.batch_size, config.seed, number):
            index = rank_part(batch)
            clean = None if samples.clean is None else samples.clean[index]
            z, t = model(samples.rows(index), index)
            terms = objective(z, t, samples.labels[index], index, clean)
            optimizer.zero_grad()
            terms.loss.backward()
            optimizer.step()
            tally.add(terms, len(batch), samples.labels[index], clean)
            if on_batch:
                on_batch(len(batch))
        objective.end_epoch(eval_losses(net, samples) if objective.wants_losses else None)
        schedule.step()
        seconds = time.perf_counter() - start
        history.append(tally.epoch(number, seconds, None if test is None else accuracy(net, test)))
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

    def add(self, terms: Terms, global_rows: int, labels: Tensor, clean: Tensor | None) -> None:
        size = terms.set_size.to(torch.float64)
        # terms.loss is weighted for DDP's average over ranks, the three terms are means over this rank's rows.
        rows = size.new_tensor([global_rows / world_size(), len(size), len(size), len(size)])
        means = torch.cat([terms.loss.detach()[None], terms.means[:3]]).double() * rows
        if clean is None or terms.covered is None:
            known = means.new_full((5,), float("nan"))
        else:
            right = (labels == clean).double()
            known = torch.stack(
                [
                    terms.covered.double().sum(),
                    (size * right).sum(),
                    right.sum(),
                    (size * (1 - right)).sum(),
                    (1 - right).sum(),
                ]
            )
        self.rows.append(torch.cat([means.new_full((1,), len(size)), means, known]))

    def epoch(self, number: int, seconds: float, test_accuracy: float | None) -> Epoch:
        rows, loss, ce, prior, estep, covered, clean_size, clean, noisy_size, noisy = sum_over_ranks(
            torch.stack(self.rows).sum(0)
        ).tolist()
        return Epoch(
            number,
            seconds,
            loss / rows,
            ce / rows,
            prior / rows,
            estep / rows,
            covered / rows,
            clean_size / clean if clean else float("nan"),
            noisy_size / noisy if noisy else float("nan"),
            test_accuracy,
        )


@torch.no_grad()
def predict_proba(net: TransitionNet | PairNet, samples: Samples) -> Tensor:
    """q of every sample in eval mode, [N, C]; the ranks share the work."""
    net.eval()
    parts = list(slices(len(samples)))
    q_NC = torch.zeros(len(samples), net.num_classes, dtype=next(net.parameters()).dtype)
    for part in parts[rank() :: world_size()]:
        q_NC[part] = net.predict_proba(samples.rows(part)).cpu()
    return sum_over_ranks(q_NC)


def accuracy(net: TransitionNet | PairNet, samples: Samples) -> float:
    """Share of the samples whose label is the argmax of q."""
    return float((predict_proba(net, samples).argmax(1) == samples.labels).double().mean())


@torch.no_grad()
def eval_losses(net: TransitionNet | PairNet, samples: Samples) -> Tensor:
    """-log q_i[y_i] of every sample in eval mode, [N], or [2, N] of two networks."""
    net.eval()
    count = 2 if isinstance(net, PairNet) else 1
    losses = torch.zeros(count, len(samples))
    for part in list(slices(len(samples)))[rank() :: world_size()]:
        z, _ = net(samples.rows(part))
        l = torch.log_softmax(z, -1).view(count, -1, net.num_classes)
        given = samples.labels[part].expand(count, -1)[..., None]
        losses[:, part] = -l.gather(-1, given).squeeze(-1).float().cpu()
    losses = sum_over_ranks(losses)
    return losses if isinstance(net, PairNet) else losses[0]
