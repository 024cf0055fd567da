"""Co-teaching (Han, Yao, Yu, Niu, Xu, Hu, Tsang, Sugiyama, NeurIPS 2018) and JoCoR (Wei, Feng, Chen, An, CVPR 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgnl.methods.base import Setting, given_loss
from fastgnl.methods.loss import RowLoss


def remembered(setting: Setting, epoch: int, gradual: int) -> float:
    """R(e) = 1 - noise rate * min(e / gradual, 1), where gradual is at most a quarter of the epochs."""
    return 1 - setting.noise_rate * min(epoch / max(min(gradual, setting.epochs // 4), 1), 1.0)


def small_losses(loss_B: Tensor, share: float) -> Tensor:
    """1 for the rows of the smallest losses, that share of them and at least one, else 0; [B]."""
    count = max(round(share * len(loss_B)), 1)
    chosen_B = torch.zeros_like(loss_B)
    chosen_B[loss_B.detach().topk(count, largest=False).indices] = 1
    return chosen_B


def exchanged(loss_2B: Tensor, share: float) -> Tensor:
    """The loss of each network on the rows whose loss is small for the other, scaled to be a mean over these, [B]."""
    chosen_2B = torch.stack([small_losses(loss_B, share) for loss_B in loss_2B.flip(0)])
    return (loss_2B * chosen_2B).sum(0) * (loss_2B.shape[1] / chosen_2B[0].sum())


@dataclass(frozen=True)
class CoTeachingOptions:
    gradual: int = 10
    """Epochs over which the share of rows that are left out rises to the noise rate."""


class CoTeaching(RowLoss):
    """Each of two networks is taught the rows of the batch whose loss is small for the other."""

    def __init__(self, setting: Setting, options: CoTeachingOptions = CoTeachingOptions()) -> None:
        super().__init__(setting)
        self.options = options

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        share = remembered(self.setting, self.now, self.options.gradual)
        return exchanged(given_loss(z, labels), share)


@dataclass(frozen=True)
class JoCoROptions:
    gradual: int = 10
    """Epochs over which the share of rows that are left out rises to the noise rate."""
    weight: float = 0.65
    """lambda, of the agreement between the networks, from 0 to below 1."""


class JoCoR(RowLoss):
    """CE_1 + CE_2 + lambda / (1 - lambda) (KL(q1 || q2) + KL(q2 || q1)) of the rows where that is small.

    The paper has 1 - lambda times that, whose scale its Adam does not see; the steps of SGD would be a tenth."""

    def __init__(self, setting: Setting, options: JoCoROptions = JoCoROptions()) -> None:
        super().__init__(setting)
        self.options = options

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        loss_2B, weight = given_loss(z, labels), self.options.weight
        l_2BC = torch.log_softmax(z.float(), -1)
        q_2BC = l_2BC.exp()
        apart_B = ((q_2BC[0] - q_2BC[1]) * (l_2BC[0] - l_2BC[1])).sum(1)
        joint_B = loss_2B.sum(0) + weight / (1 - weight) * apart_B
        chosen_B = small_losses(joint_B, remembered(self.setting, self.now, self.options.gradual))
        return joint_B * chosen_B * (len(joint_B) / chosen_B.sum())
