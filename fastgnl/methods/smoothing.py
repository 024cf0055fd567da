"""Label smoothing (Lukasik, Bhojanapalli, Menon, Kumar, ICML 2020) and negative label smoothing (Wei, Liu, Liu, Niu,
Sugiyama, Liu, ICML 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgnl.methods.base import Setting, given_loss
from fastgnl.methods.loss import RowLoss


@dataclass(frozen=True)
class SmoothingOptions:
    rate: float = 0.6
    """r: what all classes share."""


@dataclass(frozen=True)
class NegativeSmoothingOptions:
    rate: float = -0.2
    """r, below 0: it takes away from all classes, after a warm-up of plain cross-entropy."""


def smoothed(z: Tensor, labels: Tensor, rate: float) -> Tensor:
    """(1 - r) CE(q_i, y_i) + r/C sum_j CE(q_i, j), [B]."""
    return (1 - rate) * given_loss(z, labels) - rate * torch.log_softmax(z.float(), 1).mean(1)


class LabelSmoothing(RowLoss):
    """(1 - r) CE(q_i, y_i) + r/C sum_j CE(q_i, j), r > 0."""

    def __init__(self, setting: Setting, options: SmoothingOptions = SmoothingOptions()) -> None:
        super().__init__(setting)
        self.options = options

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        return smoothed(z, labels, self.options.rate)


class NegativeLabelSmoothing(RowLoss):
    """The same with r < 0, once the warm-up is over."""

    def __init__(self, setting: Setting, options: NegativeSmoothingOptions = NegativeSmoothingOptions()) -> None:
        super().__init__(setting)
        self.options = options

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        return smoothed(z, labels, 0.0 if self.in_warmup else self.options.rate)
