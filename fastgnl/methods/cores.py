"""CORES2, confidence-regularised sample sieve: Cheng, Zhu, Li, Gong, Sun, Liu, ICLR 2021."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgnl.methods.base import Setting, given_loss
from fastgnl.methods.loss import RowLoss


@dataclass(frozen=True)
class CoresOptions:
    beta: float = 2.0
    """Weight of the confidence regulariser, reached in a line from the warm-up's end on ..."""
    reached: float = 1 / 3
    """... over this share of the epochs after it; from then on the sieve leaves rows out."""
    largest: float = 18.4
    """Losses of other labels are cut off here: taken away, they leave the whole without a bound."""


class Cores(RowLoss):
    """v_i (CE(q_i, y_i) - beta E_y[CE(q_i, y)]), y ~ the given labels;

    the sieve v_i is 1 where CE(q_i, y_i) is at most its mean over all labels, 1/C sum_j CE(q_i, j)."""

    count_C: Tensor

    def __init__(self, setting: Setting, options: CoresOptions = CoresOptions()) -> None:
        super().__init__(setting)
        self.options = options
        self.keep_shared("count_C", torch.ones(setting.num_classes))

    @property
    def ramp(self) -> float:
        """How far beta has risen, from 0 to 1."""
        after = self.options.reached * (self.setting.epochs - self.setting.warmup_epochs)
        return min(max((self.now - self.setting.warmup_epochs) / max(after, 1e-9), 0.0), 1.0)

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        if self.now == 0:
            self.count_C += torch.bincount(labels, minlength=len(self.count_C))
        loss_BC = -torch.log_softmax(z.float(), 1)
        loss_B = given_loss(z, labels)
        prior_C = self.count_C / self.count_C.sum()
        regularised_B = loss_B - self.options.beta * self.ramp * loss_BC.clamp(max=self.options.largest) @ prior_C
        if self.ramp < 1:
            return regularised_B
        return regularised_B * (loss_B <= loss_BC.mean(1)).detach()
