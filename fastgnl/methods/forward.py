"""Forward loss correction: Patrini, Rozza, Menon, Nock, Qu, CVPR 2017."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgnl.distributed import sum_over_ranks_
from fastgnl.methods.base import Setting, given_loss
from fastgnl.methods.loss import RowLoss

LEAST = 1e-8


@dataclass(frozen=True)
class ForwardOptions:
    quantile: float = 0.97
    """Of q_j over the samples: the one just below it is taken for an example of class j, the few above for outliers."""


def anchored(q_NC: Tensor, quantile: float) -> Tensor:
    """T[j] = q(x^j), where x^j is the sample whose q_j is at the quantile, [C, C]."""
    rank = round(quantile * (len(q_NC) - 1))
    return q_NC[q_NC.argsort(0)[rank]]


class Forward(RowLoss):
    """-log (q_i T)[y_i]; T = 1 in the warm-up, from whose last epoch it is then estimated.

    The paper trains a second network from scratch with T; here the first one goes on, so that all methods see the data
    as often."""

    T: Tensor
    q_NC: Tensor

    def __init__(self, setting: Setting, options: ForwardOptions = ForwardOptions()) -> None:
        super().__init__(setting)
        self.options = options
        self.keep_shared("T", torch.eye(setting.num_classes))
        self.keep_rows("q_NC", torch.zeros(setting.num_samples, setting.num_classes))

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        if self.in_warmup:
            self.q_NC[index] = z.detach().float().softmax(1)
            return given_loss(z, labels)
        return -((z.float().softmax(1) @ self.T).gather(1, labels[:, None]).squeeze(1) + LEAST).log()

    def end_epoch(self, losses: Tensor | None = None) -> None:
        super().end_epoch()
        if self.now == self.setting.warmup_epochs:
            own = self.setting.own_ids.to(self.q_NC.device)
            all_NC = torch.zeros_like(self.q_NC)
            all_NC[own] = self.q_NC[own]
            self.T.copy_(anchored(sum_over_ranks_(all_NC), self.options.quantile))
