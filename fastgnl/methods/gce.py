"""Generalised cross-entropy: Zhang and Sabuncu, NeurIPS 2018."""

from dataclasses import dataclass

from torch import Tensor

from fastgnl.methods.base import Setting, given_loss
from fastgnl.methods.loss import RowLoss


@dataclass(frozen=True)
class GCEOptions:
    power: float = 0.7
    """Between cross-entropy (0) and the mean absolute error (1)."""


class GCE(RowLoss):
    """(1 - q_i[y_i]^power) / power."""

    def __init__(self, setting: Setting, options: GCEOptions = GCEOptions()) -> None:
        super().__init__(setting)
        self.options = options

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        power = self.options.power
        return -(-power * given_loss(z, labels)).expm1() / power
