"""Samples held in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor


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

    @property
    def ids(self) -> Tensor:
        return torch.arange(len(self))

    pages = None
    lengths = None
    eval_rows = 1024

    def rows(self, index: Any) -> Tensor:
        """The inputs at ``index`` (an array of rows or a slice)."""
        if isinstance(self.x, Tensor):
            return self.x[index]
        return torch.from_numpy(self.x[index if isinstance(index, slice) else np.asarray(index)].toarray())

    def load(self, batches: Sequence[NDArray[np.int64]], epoch: int | None = None, view: int = 0) -> Iterator[Tensor]:
        """The inputs of each batch in turn; all views of a sample are the same."""
        return (self.rows(batch) for batch in batches)
