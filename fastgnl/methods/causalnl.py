"""CausalNL: Yao, Liu, Gong, Han, Niu, Zhang, NeurIPS 2021."""

from dataclasses import dataclass
from typing import Any

from fastgnl.engine import Engine
from fastgnl.loader import Batch
from fastgnl.methods.base import Method, Setting, given_loss, global_mean, terms_of
from fastgnl.methods.coteaching import exchanged, remembered
from fastgnl.methods.generative import ElboOptions, Generate, negative_elbo
from fastgnl.terms import Terms


@dataclass(frozen=True)
class CausalNLOptions:
    gradual: int = 10
    """Epochs over which the share of rows that are left out rises to the noise rate."""
    elbo: ElboOptions = ElboOptions()


class CausalNL(Method):
    """Two classifiers taught by co-teaching, and the evidence bound of the VAE that each is a part of."""

    views = 1

    def __init__(self, setting: Setting, options: CausalNLOptions = CausalNLOptions()) -> None:
        super().__init__(setting)
        self.options = options

    def run(self, engine: Engine, net: Any, batch: Batch) -> Terms:
        made: Any = engine(Generate(None, batch.x), batch.index)  # type: ignore[arg-type]
        loss_2B = given_loss(made.z_raw, batch.labels)
        share = remembered(self.setting, self.now, self.options.gradual)
        elbo = negative_elbo(made, batch.x, batch.labels, "gaussian", self.options.elbo)
        return terms_of(global_mean(exchanged(loss_2B, share)) + elbo, loss_2B, batch.labels, batch.clean)
