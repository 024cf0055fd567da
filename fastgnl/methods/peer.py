"""Peer loss: Liu and Guo, ICML 2020."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgnl.methods.base import Setting, given_loss
from fastgnl.methods.loss import RowLoss


@dataclass(frozen=True)
class PeerOptions:
    alpha: float = 1.0
    """Weight of the peer term, reached in a line over the first half of the epochs after the warm-up."""
    largest: float = 18.4
    """Peer losses are cut off here: taken away, they leave the whole without a bound."""


class PeerLoss(RowLoss):
    """CE(q_i, y_i) - alpha CE(q_a, y_b), where a and b are rows drawn each on its own."""

    def __init__(self, setting: Setting, options: PeerOptions = PeerOptions()) -> None:
        super().__init__(setting)
        self.options = options

    @property
    def alpha(self) -> float:
        after = self.setting.epochs - self.setting.warmup_epochs
        over = self.now - self.setting.warmup_epochs
        return self.options.alpha * min(max(2 * over / max(after, 1), 0.0), 1.0)

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        a_B, b_B = (torch.randperm(len(labels), device=z.device) for _ in range(2))
        peer_B = given_loss(z[a_B], labels[b_B]).clamp(max=self.options.largest)
        return given_loss(z, labels) - self.alpha * peer_B
