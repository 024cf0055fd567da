"""ELR, early-learning regularisation: Liu, Niles-Weed, Razavian, Fernandez-Granda, NeurIPS 2020."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgnl.methods.base import Setting, given_loss
from fastgnl.methods.loss import RowLoss

CLIP = 1e-4


@dataclass(frozen=True)
class ELROptions:
    beta: float = 0.7
    """Decay of the targets."""
    weight: float = 3.0
    """lambda, of the regulariser: 3 for CIFAR-10, 7 for CIFAR-100."""


class ELR(RowLoss):
    """CE(q_i, y_i) + lambda log(1 - <q_i, t_i>), t_i <- beta t_i + (1 - beta) norm(clip(q_i))."""

    target_NC: Tensor

    def __init__(self, setting: Setting, options: ELROptions = ELROptions()) -> None:
        super().__init__(setting)
        self.options = options
        self.keep_rows("target_NC", torch.zeros(setting.num_samples, setting.num_classes))

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        q_BC = z.float().softmax(1).clamp(CLIP, 1 - CLIP)
        with torch.no_grad():
            fresh_BC = q_BC / q_BC.sum(1, keepdim=True)
            target_BC = self.options.beta * self.target_NC[index] + (1 - self.options.beta) * fresh_BC
            self.target_NC[index] = target_BC
        return given_loss(z, labels) + self.options.weight * torch.log1p(-(q_BC * target_BC).sum(1))
