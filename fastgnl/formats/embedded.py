"""Data that need no files of their own: scikit-learn's digits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fastgnl.errors import check_choice, check_seed
from fastgnl.formats.listing import Listing


@dataclass(frozen=True, eq=False)
class Rows:
    """Reads row i of an array."""

    array: NDArray[Any]

    def __call__(self, i: int) -> NDArray[Any]:
        return self.array[i]


@dataclass(frozen=True, eq=False)
class Grey:
    """Reads grey image i of a uint8 array [N, H, W] as [H, W, 3]."""

    array: NDArray[np.uint8]

    def __call__(self, i: int) -> NDArray[np.uint8]:
        return np.repeat(self.array[i][:, :, None], 3, axis=2)


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits of 8x8, part of the installation: there is no source."""

    split: Literal["train", "test"] = "train"
    """The stratified fifth for testing, or the rest."""
    seed: int = 0
    """Fixes the split, which is that of ``fastgnl.digits.noisy_digits``."""

    def __post_init__(self) -> None:
        check_choice("split", self.split, ("train", "test"))
        check_seed(self.seed, 32)

    def listing(self, source: Path | None = None) -> Listing:
        pixels, labels = load_digits(return_X_y=True)
        train, test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=self.seed, stratify=labels)
        ids = train if self.split == "train" else test
        images = np.rint(pixels[ids].reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
        given = labels[ids].astype(np.int64)
        names = [f"digits:{i}" for i in ids]
        return Listing("digits", "image", tuple("0123456789"), given, given, names, Grey(images))
