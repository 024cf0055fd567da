"""Mixup: Zhang, Cisse, Dauphin, Lopez-Paz, ICLR 2018."""

from dataclasses import dataclass
from typing import Any

import torch

from fastgnl.engine import Engine
from fastgnl.loader import Batch
from fastgnl.methods.base import Method, Setting, given_loss, global_mean, terms_of
from fastgnl.terms import Terms


@dataclass(frozen=True)
class MixupOptions:
    alpha: float = 8.0
    """Of Beta(alpha, alpha); the paper takes 8 or 32 where labels are wrong."""


class Mixup(Method):
    """lambda CE(f(x~), y_i) + (1 - lambda) CE(f(x~), y_j), x~ = lambda x_i + (1 - lambda) x_j, lambda ~ Beta."""

    views = 1

    def __init__(self, setting: Setting, options: MixupOptions = MixupOptions()) -> None:
        super().__init__(setting)
        self.options = options

    def run(self, engine: Engine, net: Any, batch: Batch) -> Terms:
        alpha = torch.tensor(self.options.alpha)
        share = torch.distributions.Beta(alpha, alpha).sample().to(batch.x)
        other = torch.randperm(len(batch.labels), device=batch.x.device)
        z, _ = engine(share * batch.x + (1 - share) * batch.x[other], batch.index)
        own_B = given_loss(z, batch.labels)
        loss_B = share * own_B + (1 - share) * given_loss(z, batch.labels[other])
        return terms_of(global_mean(loss_B), own_B, batch.labels, batch.clean)
