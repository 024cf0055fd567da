"""What a data set holds, known before any of it is decoded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fastgnl.errors import check

UNKNOWN = -1
"""The clean label of a sample whose true class nobody knows."""


@dataclass(frozen=True)
class Listing:
    """The samples of one split, in the order that gives them their ids."""

    source: str
    """What the samples were listed from, for messages."""
    kind: Literal["image", "text", "features"]
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    """The given labels, [N], as numbers of ``classes``."""
    clean: NDArray[np.int64] | None
    """The true ones where they are known (``UNKNOWN`` where not)."""
    names: Sequence[str]
    """A name for each sample: its path below the source, or the file and its place in it."""
    read: Callable[[int], Any]
    """Sample i, undecoded. Image: the bytes of an image file, or uint8 [H, W, 3]. Text: a str. Features: float32 [D].
    Raises ``OSError`` or ``ValueError`` where sample i cannot be read."""

    def __post_init__(self) -> None:
        check(len(self.labels) > 0, f"{self.source} lists no samples, wanted at least one")
        check(len(self.classes) >= 2, f"{self.source} names {len(self.classes)} class(es), wanted at least two")
        check(
            len(self.names) == len(self.labels),
            f"{self.source} has {len(self.names)} samples and {len(self.labels)} labels, wanted as many of each",
        )
        check_labels(self.source, self.labels, len(self.classes), self.names)
        if self.clean is not None:
            check(
                len(self.clean) == len(self.labels),
                f"{self.source} has {len(self.clean)} clean labels for {len(self.labels)} samples, wanted one each",
            )
            known = np.where(self.clean == UNKNOWN, 0, self.clean)
            check_labels(self.source, known, len(self.classes), self.names)

    def __len__(self) -> int:
        return len(self.labels)


def check_labels(source: str, labels: NDArray[np.int64], classes: int, names: Sequence[str]) -> None:
    """Each label must be the number of a class; the sentence names the first sample whose is not."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        i = int(wrong[0])
        check(False, f"{source}: {names[i]} has label {labels[i]}, wanted 0 to {classes - 1}")


class Format(Protocol):
    """A layout on disk. Its fields are the options of ``fastgnl convert NAME``."""

    def listing(self, source: Path) -> Listing:
        """What lies at ``source``; ``InputError`` with the layout that is wanted when it is not there."""
        ...


def require(path: Path, layout: str) -> Path:
    """The path, or one sentence that says what was wanted there."""
    check(path.exists(), f"{path} does not exist, wanted {layout}")
    return path
