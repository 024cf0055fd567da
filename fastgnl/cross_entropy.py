"""The baseline: plain cross-entropy, called like ``GNLObjective``."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fastgnl.distributed import sum_over_ranks, world_size
from fastgnl.terms import Terms


class CrossEntropy(nn.Module):
    """-log q_i[y_i]."""

    wants_losses = False
    wants_momentum = None

    def forward(
        self,
        z: Tensor,
        t: Tensor | None,
        labels: Tensor,
        index: Tensor,
        clean: Tensor | None = None,
        momentum: Tensor | None = None,
    ) -> Terms:
        loss_B = nn.functional.cross_entropy(z, labels, reduction="none")
        rows = sum_over_ranks(loss_B.new_full((1,), len(loss_B)))
        mean = loss_B.detach().mean()
        return Terms(
            loss_B.sum() * (world_size() / rows.squeeze()),
            torch.stack([mean, torch.zeros_like(mean), torch.zeros_like(mean)]),
            loss_B.detach(),
            torch.ones_like(labels),
            None if clean is None else labels == clean,
        )

    def end_epoch(self, losses: Tensor | None = None) -> None:
        pass

    def check_owns(self, ids: Tensor) -> None:
        pass

    def shared_state(self) -> dict[str, Tensor]:
        return {}

    def shard_state(self) -> dict[str, Tensor]:
        return {}

    def load_shards(self, shards: Iterable[dict[str, Tensor]]) -> None:
        pass
