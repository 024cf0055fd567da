"""A web-like image set, made as it is read: any number of samples, of classes that look alike, with wrong labels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import cos, pi, sin
from pathlib import Path
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from fastgnl.errors import check_choice, check_count, check_range, check_seed
from fastgnl.formats.listing import UNKNOWN, Listing

FAMILY = 5
"""Classes that share colours and the frequency of their texture, and are taken for one another."""
SPLITS = ("train", "test")
CLASS, FLIPS, FLIP_TO, STRANGERS, STRANGER_LABEL, IMAGE, LOOK = range(1, 8)
"""What is drawn: no two share a generator, so that each depends on the seed and the sample alone."""


@dataclass(frozen=True)
class Numbered(Sequence[str]):
    """Names of samples that differ in their number, made when they are asked for."""

    prefix: str
    total: int

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        numbers = range(self.total)[i]
        return f"{self.prefix} {numbers}" if isinstance(numbers, int) else [f"{self.prefix} {n}" for n in numbers]


@lru_cache(maxsize=4)
def _axis(size: int) -> NDArray[np.float32]:
    """The pixels' centres along one side, from -1 to 1."""
    return ((np.arange(size) + 0.5) * (2 / size) - 1).astype(np.float32)


def _blend(low: NDArray[np.float32], high: NDArray[np.float32], share: NDArray[np.float32]) -> NDArray[np.float32]:
    """Between two colours [3, 1, 1] or images [3, H, W], by shares [H, W]."""
    return low + share * (high - low)


@dataclass(frozen=True)
class Painter:
    """Paints sample i: the look of its class, seen from its own place, in its own light."""

    seed: int
    split: int
    size: int
    shown: NDArray[np.int64] = field(repr=False, compare=False)
    """The class that each sample shows, or ``UNKNOWN`` for none."""

    def __call__(self, i: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng([self.seed, self.split, IMAGE, i])
        shift_x, shift_y, zoom, light = rng.random(4).tolist()
        scale = 0.8 + 0.4 * zoom
        x = ((_axis(self.size) - 0.3 * (shift_x - 0.5)) / scale)[None, :]
        y = ((_axis(self.size) - 0.3 * (shift_y - 0.5)) / scale)[:, None]
        c = int(self.shown[i])
        image = self._stranger(rng, x, y) if c == UNKNOWN else self._look(c, x, y)
        grain = rng.integers(-20, 21, size=image.shape, dtype=np.int8)
        image *= 180 + 75 * light
        image += grain
        # Colours come first until here: numpy is slow where the last axis is short.
        return np.ascontiguousarray(np.clip(image, 0, 255, out=image).astype(np.uint8).transpose(1, 2, 0))

    def _look(self, c: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
        """Stripes on a gradient with a flower on them. The member of the family sets stripes' angle and petals."""
        family, member = divmod(c, FAMILY)
        rng = np.random.default_rng([self.seed, LOOK, family])
        low, high, flower = rng.random((3, 3, 1, 1), dtype=np.float32)
        frequency, first_angle, slope, turn = rng.random(4).tolist()
        angle = pi * (first_angle + member / FAMILY)
        petals = 1 + (member + int(FAMILY * turn)) % FAMILY
        stripes = np.sin((6 + 12 * frequency) * (x * cos(angle) + y * sin(angle)))
        gradient = x * cos(2 * pi * slope) + y * sin(2 * pi * slope)
        ground = _blend(low, high, 0.5 + 0.25 * stripes + 0.2 * gradient)
        edge = 0.55 + 0.25 * np.cos(petals * np.arctan2(y, x) + 2 * pi * turn)
        return _blend(ground, flower, np.clip(0.5 + 8 * (edge - np.hypot(x, y)), 0, 1))

    @staticmethod
    def _stranger(rng: np.random.Generator, x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of no class: rings in colours of its own, or nothing but noise."""
        low, high = rng.random((2, 3, 1, 1), dtype=np.float32)
        kind, frequency = rng.random(2).tolist()
        if kind < 0.5:
            return rng.random((3, y.shape[0], x.shape[1]), dtype=np.float32)
        return _blend(low, high, 0.5 + 0.5 * np.sin((6 + 30 * frequency) * np.hypot(x, y)))


@dataclass(frozen=True)
class Web:
    """Synthetic web-like images of any number of classes, made as they are read: there is no source."""

    samples: int = 10_000
    """Images of the split; a smaller number gives the first of a larger one."""
    num_classes: int = 50
    """Classes, in families of five that look alike."""
    size: int = 64
    """Pixels along a side."""
    noise: float = 0.3
    """Share of wrong labels among images of some class; a wrong one names another class of the family."""
    out_of_distribution: float = 0.1
    """Share of images of no class at all, with any label and an unknown true one."""
    seed: int = 0
    """Fixes looks, images and labels."""
    split: Literal["train", "test"] = "train"
    """The test split has neither wrong labels nor images of no class."""

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 1)
        check_count("num_classes", self.num_classes, 2)
        check_count("size", self.size, 8)
        check_range("noise", self.noise, 0, 1)
        check_range("out_of_distribution", self.out_of_distribution, 0, 1)
        check_seed(self.seed)
        check_choice("split", self.split, SPLITS)

    def listing(self, source: Path | None = None) -> Listing:
        C = self.num_classes
        clean = self._rng(CLASS).integers(C, size=self.samples)
        labels = clean
        if self.split == "train":
            # A generator for each kind: the first n draws of one never depend on how many follow.
            flips, to, strangers = (self._rng(kind).random(self.samples) for kind in (FLIPS, FLIP_TO, STRANGERS))
            labels = np.where(flips < self.noise, self._similar(clean, to), clean)
            strange = strangers < self.out_of_distribution
            labels = np.where(strange, self._rng(STRANGER_LABEL).integers(C, size=self.samples), labels)
            clean = np.where(strange, UNKNOWN, clean)
        width = max(4, len(str(C - 1)))
        return Listing(
            source=f"web {self.split}",
            kind="image",
            classes=tuple(f"class {c:0{width}d}" for c in range(C)),
            labels=labels,
            clean=clean,
            names=Numbered(f"web {self.split}", self.samples),
            read=Painter(self.seed, SPLITS.index(self.split), self.size, clean),
        )

    def _rng(self, kind: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, SPLITS.index(self.split), kind])

    def _similar(self, c: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Another class of c's family, by the uniform u; of all classes where the family has no other."""
        start = c - c % FAMILY
        members = np.minimum(FAMILY, self.num_classes - start)
        start, members = np.where(members == 1, 0, start), np.where(members == 1, self.num_classes, members)
        return start + (c - start + 1 + (u * (members - 1)).astype(np.int64)) % members
