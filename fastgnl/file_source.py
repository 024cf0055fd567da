"""What every source of samples in a ``.beton`` file has in common: labels, ids, pages."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgnl.beton import Beton, Kind
from fastgnl.errors import check
from fastgnl.formats.listing import UNKNOWN, check_labels


class FileSource:
    """The samples of a ``.beton`` file, but for their inputs."""

    lengths: NDArray[np.int64] | None = None

    def __init__(self, path: Path | str, kind: Kind, wanted: str, labels: NDArray[np.int64] | None = None) -> None:
        """``labels``: by sample id, in place of those in the file."""
        self.beton = Beton(Path(path))
        check(self.beton.kind == kind, f"{path} holds {self.beton.kind}, wanted {wanted}")
        self.ids = torch.from_numpy(self.beton.ids.copy())
        clean = torch.from_numpy(self.beton.clean.copy())
        self.clean = clean if bool((clean != UNKNOWN).any()) else None
        self.labels = torch.from_numpy(self.beton.labels.copy()) if labels is None else self._given(labels)
        self.num_classes = len(self.beton.classes)
        self.pages = self.beton.pages

    def __len__(self) -> int:
        return len(self.beton)

    def _given(self, labels: NDArray[np.int64]) -> Tensor:
        given = np.asarray(labels)
        check(
            given.shape == (len(self.beton),),
            f"labels has shape {given.shape} for {self.beton.path}, wanted ({len(self.beton)},)",
        )
        by_row = given[self.beton.ids].astype(np.int64)
        check_labels(str(self.beton.path), by_row, len(self.beton.classes), self.beton.names)
        return torch.from_numpy(by_row)
