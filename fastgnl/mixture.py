"""Is a label noisy? A two-component Gaussian mixture on the losses (METHOD section 6).

The EM runs on a histogram of the scaled losses, not on the losses: its cost does not grow with their
number, and integer counts add up to the same bits in any order.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastgnl.distributed import is_distributed, sum_over_ranks_

BINS = 1 << 16
MAX_ITER = 20
TOLERANCE = 1e-2
VARIANCE_FLOOR = 5e-4
SAME = 1e-6
"""Losses that differ by less than this share are equal but for rounding."""


class Mixture(NamedTuple):
    """Two Gaussians on [0, 1], the one with the larger mean last. float64, shape [2] each."""

    weight: Tensor
    mean: Tensor
    variance: Tensor

    def log_joint(self, x: Tensor) -> Tensor:
        """log(weight_c N(x; mean_c, variance_c)), shape [..., 2]."""
        gap = (x[..., None] - self.mean).square() / self.variance
        return self.weight.log() - 0.5 * (gap + self.variance.log() + 1.8378770664093453)


def _two_means(x: Tensor, count: Tensor) -> Tensor:
    """The best split of sorted, weighted values into two clusters, exactly: the one whose between-cluster sum of
    squares s^2/n + (S - s)^2/(N - n) is largest. Returns how many values the lower cluster has."""
    n, s = torch.cumsum(count, 0), torch.cumsum(count * x, 0)
    between = s[:-1].square() / n[:-1] + (s[-1] - s[:-1]).square() / (n[-1] - n[:-1])
    return between.argmax() + 1


def _maximise(x: Tensor, weighted_resp: Tensor, floor: float) -> Mixture:
    """M-step: weights, means, and variances + floor."""
    mass = weighted_resp.sum(0) + 1e-15
    mean = (weighted_resp * x[:, None]).sum(0) / mass
    variance = (weighted_resp * (x[:, None] - mean).square()).sum(0) / mass + floor
    return Mixture(mass / mass.sum(), mean, variance)


def fit_mixture(
    x: Tensor,
    count: Tensor,
    max_iter: int = MAX_ITER,
    tolerance: float = TOLERANCE,
    floor: float = VARIANCE_FLOOR,
) -> Mixture:
    """EM on sorted values ``x`` that occur ``count`` times, started from two-means.

    Stops when the mean log-likelihood moves by less than ``tolerance``."""
    share = count / count.sum()
    lower = torch.arange(len(x), device=x.device) < _two_means(x, count.to(x.dtype))
    mixture = _maximise(x, share[:, None] * torch.stack([lower, ~lower], 1).to(x.dtype), floor)
    previous = -float("inf")
    for _ in range(max_iter):
        log_joint = mixture.log_joint(x)
        log_density = torch.logsumexp(log_joint, 1)
        mixture = _maximise(x, share[:, None] * (log_joint - log_density[:, None]).exp(), floor)
        likelihood = float((share * log_density).sum())
        if abs(likelihood - previous) < tolerance:
            break
        previous = likelihood
    order = mixture.mean.argsort()
    return Mixture(*(part[order] for part in mixture))


def noise_probability(
    losses: Tensor,
    max_iter: int = MAX_ITER,
    tolerance: float = TOLERANCE,
    floor: float = VARIANCE_FLOOR,
    of_all_ranks: bool = False,
) -> Tensor:
    """w_i: the responsibility of the component with the larger mean, float32 of the losses' shape.

    A loss that is not finite (a sample never visited) gets 0, and so does every sample when the losses say
    nothing: all equal, or a component that holds none of them. ``of_all_ranks``: the mixture is that of the losses of
    all ranks, each of which has its own part.
    """
    w = torch.zeros_like(losses, dtype=torch.float32)
    finite = torch.isfinite(losses)
    known = losses if bool(finite.all()) else losses[finite]
    ends = torch.stack([-known.min(), known.max()]) if known.numel() else known.new_full((2,), -math.inf)
    if of_all_ranks and is_distributed():
        dist.all_reduce(ends, dist.ReduceOp.MAX)
    low, high = -ends[0], ends[1]
    if not bool(high - low > SAME * high.abs()):
        return w
    scaled = (known - low) / (high - low)
    bins = (scaled * BINS).to(torch.int32).clamp(max=BINS - 1)
    count = torch.bincount(bins, minlength=BINS)
    if of_all_ranks:
        sum_over_ranks_(count)
    used = count.nonzero().squeeze(1)
    if len(used) < 2:
        return w
    centre = (used.to(torch.float64) + 0.5) / BINS
    mixture = fit_mixture(centre, count[used].to(torch.float64), max_iter, tolerance, floor)
    if not bool(torch.isfinite(torch.cat(mixture)).all()) or float(mixture.weight.min()) * int(count.sum()) < 0.5:
        return w
    w[finite] = _responsibility(mixture, scaled.to(torch.float32))
    return w


def _responsibility(mixture: Mixture, x: Tensor) -> Tensor:
    """P(component 1 | x) = sigmoid(a x^2 + b x + c), the log-odds of two Gaussians being a parabola."""
    (m0, m1), (v0, v1) = mixture.mean, mixture.variance
    a = 0.5 * (1 / v0 - 1 / v1)
    b = m1 / v1 - m0 / v0
    c = 0.5 * (m0**2 / v0 - m1**2 / v1 + torch.log(v0 / v1)) + torch.log(mixture.weight[1] / mixture.weight[0])
    return torch.sigmoid((float(a) * x + float(b)) * x + float(c))
