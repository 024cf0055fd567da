"""VolMinNet: Li, Liu, Han, Niu, Sugiyama, ICML 2021."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastgnl.methods.base import Setting
from fastgnl.methods.loss import RowLoss
from fastgnl.transition import TransitionNet

LEAST = 1e-8


class VolumeNet(TransitionNet):
    """A classifier with one transition matrix for all inputs: t = log(q T).

    T = norm(1 + sigmoid(a) off the diagonal), rows summing to 1; about a half is on the diagonal at first."""

    def __init__(self, backbone: nn.Module, num_features: int, num_classes: int) -> None:
        super().__init__(backbone, num_features, num_classes, transition_input="none")
        share = min(1 / (num_classes - 1), 0.5)
        self.a_CC = nn.Parameter(torch.full((num_classes, num_classes), math.log(share / (1 - share))))

    def matrix(self) -> Tensor:
        """T[a, b] = p(given = b | true = a), [C, C]."""
        one_CC = torch.eye(self.num_classes, device=self.a_CC.device)
        T_CC = one_CC + (1 - one_CC) * self.a_CC.sigmoid()
        return T_CC / T_CC.sum(1, keepdim=True)

    def forward(self, x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        z_BC, _ = super().forward(x, index)
        if not self.training:
            return z_BC, None
        return z_BC, (z_BC.float().softmax(1) @ self.matrix() + LEAST).log()


@dataclass(frozen=True)
class VolMinOptions:
    weight: float = 1e-4
    """lambda, of the volume."""


class VolMinNet(RowLoss):
    """-log (q_i T)[y_i] + lambda log det T."""

    def __init__(self, setting: Setting, net: VolumeNet, options: VolMinOptions = VolMinOptions()) -> None:
        super().__init__(setting)
        self.options = options
        self.__dict__["net"] = net  # not a part of this module: the engine trains and keeps it

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        assert t is not None
        volume = torch.linalg.slogdet(self.__dict__["net"].matrix()).logabsdet
        return -t.gather(1, labels[:, None]).squeeze(1) + self.options.weight * volume
