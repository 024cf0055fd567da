"""How an image becomes an input: which window of it, flipped or not, in which numbers.

What is random belongs to (seed, epoch, sample id), by the words of ``kernels/philox.py``: the same on every run, on any
number of ranks and workers, and in both readers.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastgnl.errors import check, check_choice, check_count
from fastgnl.kernels import philox

TRIES = 10
SCALE = (0.08, 1.0)
"""Share of the image's area that a resized crop covers ..."""
RATIO = (3 / 4, 4 / 3)
"""... and its width over its height."""

MIDDLE = 224 / 256
"""Of the shorter side: the square in the middle that evaluation takes where training takes resized crops."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Windows(NamedTuple):
    """For each sample the part of its image that is used, and whether it is mirrored. A window of the output's size may
    reach beyond the image, into black."""

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    flip: NDArray[np.bool_]


@dataclass(frozen=True)
class Augment:
    """Crop, flip, normalise. The defaults leave images as they are, in [0, 1]."""

    size: int | None = None
    """Side of the output; as the images are, which must then be of one size, when not given."""
    crop: Literal["none", "random", "resized"] = "none"
    """Of training: the middle, a window anywhere, or a window of random size and proportions, resized."""
    padding: int = 0
    """Black border that a random window may reach into."""
    flip: bool = False
    """Mirror every second image in training."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Subtracted from pixels in [0, 1], and divided by."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    channels_last: bool = True
    """Memory order of the output, [B, 3, H, W] in either."""

    def __post_init__(self) -> None:
        if self.size is not None:
            check_count("size", self.size, 1)
        check_choice("crop", self.crop, ("none", "random", "resized"))
        check_count("padding", self.padding, 0)
        check(self.padding == 0 or self.crop == "random", f"padding is {self.padding}, wanted crop='random' with it")
        check(self.crop != "resized" or self.size is not None, "crop is 'resized' without a size, wanted one")
        check(len(self.mean) == len(self.std) == 3, "mean and std have another length than 3, wanted a number a colour")
        check(all(s > 0 for s in self.std), f"std is {self.std}, wanted numbers above 0")
        check_choice("dtype", self.dtype, DTYPES)

    def output(self, heights: NDArray[np.int64], widths: NDArray[np.int64]) -> tuple[int, int]:
        """Height and width of the inputs."""
        if self.size is not None:
            return self.size, self.size
        (low, high), (narrow, wide) = ((int(sides.min()), int(sides.max())) for sides in (heights, widths))
        check(
            low == high and narrow == wide,
            f"the images are {narrow} to {wide} wide and {low} to {high} high, wanted the option size, or images "
            "converted to one size",
        )
        return low, narrow

    def table(self) -> NDArray[np.float32]:
        """What each value of each colour becomes, [256, 3]."""
        value = np.arange(256, dtype=np.float32)[:, None] / np.float32(255)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.asarray((value - mean) / std, np.float32)

    def windows(
        self,
        ids: NDArray[np.int64],
        heights: NDArray[np.int64],
        widths: NDArray[np.int64],
        output: tuple[int, int],
        seed: int,
        epoch: int | None,
        view: int = 0,
    ) -> Windows:
        """The window of each sample: of training in an epoch, of evaluation (the middle) without one. Each view of a
        sample has its own."""
        heights, widths = heights.astype(np.int64), widths.astype(np.int64)
        out_h, out_w = output
        # An image that is too small for a window of the output's size gives its largest square, resized.
        pad = self.padding if epoch is not None else 0
        fits = (heights + 2 * pad >= out_h) & (widths + 2 * pad >= out_w)
        side = np.minimum(heights, widths)
        if self.crop == "resized":
            fits[:], side = False, np.maximum(1, np.rint(side * MIDDLE).astype(np.int64))
        rows, cols = np.where(fits, out_h, side), np.where(fits, out_w, side)
        pad_N = np.where(fits, pad, 0)
        middle = (heights - rows) // 2, (widths - cols) // 2
        no_flip = np.zeros(len(ids), bool)
        if epoch is None or (self.crop == "none" and not self.flip):
            return Windows(*middle, rows, cols, no_flip)
        count = 3 + 2 * TRIES if self.crop == "resized" else 3
        draws = philox.words(seed, torch.from_numpy(ids), count, epoch, [philox.stream(philox.AUGMENT, draw=view)])
        word = draws[0].numpy()
        flip = (word[:, 0] >> 31) == 1 if self.flip else no_flip
        if self.crop == "none":
            return Windows(*middle, rows, cols, flip)
        if self.crop == "resized":
            rows, cols = resized_sizes(word[:, 3:], heights, widths)
            pad_N = np.zeros_like(pad_N)
        top = ((word[:, 1] * (heights + 2 * pad_N - rows + 1)) >> 32) - pad_N
        left = ((word[:, 2] * (widths + 2 * pad_N - cols + 1)) >> 32) - pad_N
        return Windows(top, left, rows, cols, flip)


def resized_sizes(
    words: NDArray[np.int64], heights: NDArray[np.int64], widths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of a random-resized crop: the first of ten tries that lies in the image, else the largest window
    of an allowed proportion. Area share uniform in SCALE, log of the proportion uniform in log RATIO."""
    u = words / 2.0**32
    area = (heights * widths)[:, None] * (SCALE[0] + (SCALE[1] - SCALE[0]) * u[:, :TRIES])
    low, high = np.log(RATIO)
    ratio = np.exp(low + (high - low) * u[:, TRIES:])
    cols = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    rows = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (cols >= 1) & (cols <= widths[:, None]) & (rows >= 1) & (rows <= heights[:, None])
    first = fits.argmax(1)[:, None]
    found = fits.any(1)
    widest = np.clip(np.rint(heights * RATIO[1]).astype(np.int64), 1, widths)
    highest = np.clip(np.rint(widths / RATIO[0]).astype(np.int64), 1, heights)
    return (
        np.where(found, np.take_along_axis(rows, first, 1)[:, 0], highest),
        np.where(found, np.take_along_axis(cols, first, 1)[:, 0], widest),
    )
