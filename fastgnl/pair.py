"""``GNLPair``: two networks that teach each other."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from fastgnl.batch import check_batch, check_below
from fastgnl.config import GNLConfig
from fastgnl.errors import check
from fastgnl.objective import GNLObjective
from fastgnl.terms import Terms


def _named(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The states of both, told apart by a number before each name."""
    return {f"{i} {name}": value for i, state in enumerate(states) for name, value in state.items()}


class GNLPair(nn.Module):
    """Two networks trained together (METHOD section 8), each with its own M and w.

    Takes z and t of shape [2, B, C] (``with_transition((first, second), ...)``). Each network uses the w the
    other estimated, and both coverage labels are in either candidate set.
    """

    def __init__(self, num_samples: int, num_classes: int, *, ids: Tensor | None = None, **options: object) -> None:
        super().__init__()
        self.objectives = nn.ModuleList(
            GNLObjective(num_samples, num_classes, ids=ids, network=network, **options) for network in range(2)
        )

    @property
    def config(self) -> GNLConfig:
        return self._members()[0].config

    def _members(self) -> tuple[GNLObjective, GNLObjective]:
        first, second = self.objectives
        return cast(GNLObjective, first), cast(GNLObjective, second)

    def forward(
        self,
        z: Tensor,
        t: Tensor,
        labels: Tensor,
        index: Tensor,
        clean: Tensor | None = None,
        momentum: Tensor | None = None,
    ) -> Terms:
        """The sum of the two losses; the other terms are means of the two."""
        for name, given in (("z", z), ("t", t)):
            check(given.dim() >= 3 and len(given) == 2, f"{name} has shape {tuple(given.shape)}, wanted (2, B, C)")
        members = self._members()
        for member, z_BC in zip(members, z, strict=True):
            check_batch(z_BC, labels, index, clean, member.config.num_classes)
            check_below("index", index, member.config.num_samples)
        with torch.no_grad():
            coverage = None if self.config.coverage == "none" else [m.coverage_labels(index) for m in members]
        a, b = (
            member(
                z[i],
                t[i],
                labels,
                index,
                clean,
                None if momentum is None else momentum[i],
                coverage=coverage or [],
                w=other.w_N,
            )
            for i, (member, other) in enumerate(zip(members, members[::-1], strict=True))
        )
        return Terms(
            a.loss + b.loss,
            (a.means + b.means) / 2,
            (a.sample_loss + b.sample_loss) / 2,
            (a.set_size + b.set_size) / 2,
            None if a.covered is None or b.covered is None else (a.covered.float() + b.covered.float()) / 2,
        )

    def end_epoch(self, losses: Tensor | None = None) -> None:
        """``losses`` as for ``GNLObjective.end_epoch``, of shape [2, N]."""
        if losses is not None:
            wanted = (2, self.config.num_samples)
            check(losses.shape == wanted, f"losses has shape {tuple(losses.shape)}, wanted {wanted}")
        for i, member in enumerate(self._members()):
            member.end_epoch(None if losses is None else losses[i])

    @property
    def wants_losses(self) -> bool:
        return self._members()[0].wants_losses

    @property
    def wants_momentum(self) -> float | None:
        return self._members()[0].wants_momentum

    def check_owns(self, ids: Tensor) -> None:
        self._members()[0].check_owns(ids)

    def shared_state(self) -> dict[str, Tensor]:
        return _named(member.shared_state() for member in self._members())

    def shard_state(self) -> dict[str, Tensor]:
        return _named(member.shard_state() for member in self._members())

    def load_shards(self, shards: Iterable[dict[str, Tensor]]) -> None:
        kept = list(shards)
        for i, member in enumerate(self._members()):
            mark = f"{i} "
            member.load_shards(
                {name.removeprefix(mark): value for name, value in shard.items() if name.startswith(mark)}
                for shard in kept
            )

    @property
    def w_N(self) -> Tensor:
        """The noise probabilities, the mean of the two estimates."""
        a, b = self._members()
        return (a.w_N + b.w_N) / 2
