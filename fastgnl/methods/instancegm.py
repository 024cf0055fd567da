"""InstanceGM: Garg, Nguyen, Felix, Do, Carneiro, WACV 2023."""

from dataclasses import dataclass
from typing import Any

from fastgnl.engine import Engine
from fastgnl.loader import Batch
from fastgnl.methods.base import Setting, given_loss, terms_of
from fastgnl.methods.dividemix import DivideMix, DivideMixOptions
from fastgnl.methods.generative import ElboOptions, Generate, negative_elbo
from fastgnl.terms import Terms


@dataclass(frozen=True)
class InstanceGMOptions(DivideMixOptions):
    unlabelled: float = 25.0
    """lambda_u, as in its own code."""
    confidence: float = 0.0
    """Its warm-up is cross-entropy alone."""
    elbo: ElboOptions = ElboOptions()


class InstanceGM(DivideMix):
    """CausalNL's generative model in DivideMix's training: after the warm-up its loss, and the evidence bound of the
    rows as they are, with a continuous Bernoulli for the reconstruction."""

    def __init__(self, setting: Setting, options: InstanceGMOptions = InstanceGMOptions()) -> None:
        super().__init__(setting, options)
        self.elbo = options.elbo

    def run(self, engine: Engine, net: Any, batch: Batch) -> Terms:
        if self.in_warmup:
            return super().run(engine, net, batch)
        mixed = self.mixed(net, batch)
        made: Any = engine(Generate(mixed.x, batch.x), batch.index)  # type: ignore[arg-type]
        bound = negative_elbo(made, batch.x, batch.labels, "continuous bernoulli", self.elbo)
        return terms_of(
            self.mixmatch(made.z, mixed) + bound, given_loss(made.z_raw, batch.labels), batch.labels, batch.clean
        )
