"""The built-in loader: samples held in memory, visited once an epoch in an order keyed by (seed, epoch)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from fastgnl.distributed import rank, world_size
from fastgnl.errors import check


@dataclass(frozen=True)
class Samples:
    """Inputs [N, ...] (a tensor, or a CSR array that is made dense batch by batch) with their labels."""

    x: Tensor | csr_array
    labels: Tensor
    """The given labels, [N]."""
    clean: Tensor | None = None
    """The true ones where they are known."""

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Any) -> Tensor:
        """The inputs at ``index`` (a tensor of ids or a slice)."""
        if isinstance(self.x, Tensor):
            return self.x[index]
        return torch.from_numpy(self.x[index if isinstance(index, slice) else index.numpy()].toarray())


def epoch_order(num_samples: int, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """The global batches of one epoch: a permutation cut into the fewest nearly equal parts of at most
    ``batch_size``, so that no epoch ends in a tiny batch and every sample is visited exactly once."""
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    return [torch.from_numpy(part) for part in np.array_split(order, -(-num_samples // batch_size))]


def rank_part(batch: Tensor) -> Tensor:
    """This rank's share of a global batch: nearly equal parts in the order of the ranks."""
    part = batch.tensor_split(world_size())[rank()]
    check(len(part) > 0, f"a batch of {len(batch)} rows was split over {world_size()} ranks, wanted a row for each")
    return part


def slices(num_samples: int, size: int = 1024) -> Iterator[slice]:
    """0 to N in order, in pieces."""
    return (slice(start, min(start + size, num_samples)) for start in range(0, num_samples, size))
