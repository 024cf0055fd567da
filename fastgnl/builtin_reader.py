"""The built-in reader of image files: PIL, NumPy and threads, where FFCV is not installed."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fastgnl.augment import DTYPES, Augment, Windows
from fastgnl.beton import RAW, Beton
from fastgnl.errors import OwnInputError
from fastgnl.images import Pixels, open_image, window_of
from fastgnl.prefetch import prefetched

BATCHES_AHEAD = 3
PIXEL = np.dtype("V3")
"""Three bytes that are moved as one: mirroring bytes is slow."""
BLACK = np.zeros((), PIXEL)
CACHED = 1 << 17
"""Numbers that are normalised at a time."""


def image_of(beton: Beton, row: int) -> Image.Image:
    """The image of a record."""
    image, data = beton.records["f0"][row], beton.data(row)
    if image["mode"] == RAW:
        return Image.fromarray(np.frombuffer(data, np.uint8).reshape(image["height"], image["width"], 3))
    try:
        return open_image(data)
    except (OSError, ValueError) as error:
        raise OwnInputError(
            f"{beton.path}: record {row} ({beton.names[row]}) cannot be decoded ({error}), wanted an image"
        ) from error


class BuiltinReader:
    """Batches of a ``.beton`` file's images."""

    def __init__(self, beton: Beton, augment: Augment, output: tuple[int, int], workers: int) -> None:
        self.beton, self.augment, self.output = beton, augment, output
        # Decoding runs beside Python; copying small images does not, and threads would only fight over it.
        self.workers = 1 if (beton.records["f0"]["mode"] == RAW).all() else workers
        self.bytes = np.frombuffer(beton.map, np.uint8)

    def read(self, batches: Sequence[NDArray[np.int64]], windows: Windows) -> Iterator[Tensor]:
        """The inputs of each batch in turn, a few batches ahead."""
        size = max(len(rows) for rows in batches)
        depth = self.workers + BATCHES_AHEAD
        # Buffers go round: new memory for each batch costs more than the work done in it.
        slots = depth + 2
        pixels = np.empty((slots, size, *self.output, 3), np.uint8)
        inputs = np.empty((slots, size, *self.output, 3), np.float32)

        def work(item: tuple[int, NDArray[np.int64]]) -> Tensor:
            number, rows = item
            slot = number % slots
            self._cut(rows, windows, pixels[slot])
            normalise(pixels[slot, : len(rows)], self.augment, inputs[slot, : len(rows)])
            x = torch.from_numpy(inputs[slot, : len(rows)]).permute(0, 3, 1, 2).to(DTYPES[self.augment.dtype])
            return x if self.augment.channels_last else x.contiguous()

        with ThreadPoolExecutor(self.workers, "fastgnl-reader") as pool:
            yield from prefetched(pool, work, enumerate(batches), depth)

    def _cut(self, rows: NDArray[np.int64], windows: Windows, out: Pixels) -> None:
        """The windows of a batch, as bytes."""
        table = self.beton.records["f0"][rows]
        records = zip(
            rows.tolist(),
            (table["mode"] == RAW).tolist(),
            table["data_ptr"].tolist(),
            table["height"].tolist(),
            table["width"].tolist(),
            *(column[rows].tolist() for column in windows),
            strict=True,
        )
        pixels = out.view(PIXEL)[..., 0]
        for i, (row, raw, start, height, width, top, left, h, w, flip) in enumerate(records):
            if raw and (h, w) == self.output:
                image = self.bytes[start : start + 3 * height * width].view(PIXEL).reshape(height, width)
                cut(image, top, left, pixels[i, :, ::-1] if flip else pixels[i])
            else:
                out[i] = window_of(image_of(self.beton, row), top, left, h, w, *self.output, flip)


def normalise(images: Pixels, augment: Augment, out: NDArray[np.float32]) -> None:
    """Bytes [B, H, W, 3] as ``augment.table()`` has them, in the same steps of rounding."""
    width = images.shape[2]
    # A row of pixels at a time (a broadcast over three numbers is slow), and no more images than a cache holds.
    mean, std = (np.tile(np.array(value, np.float32), width) for value in (augment.mean, augment.std))
    step = max(1, CACHED // out[0].size)
    for start in range(0, len(images), step):
        x = out[start : start + step]
        x[:] = images[start : start + step]
        x_rows = x.reshape(len(x), -1, 3 * width)
        x_rows /= np.float32(255)
        x_rows -= mean
        x_rows /= std


def cut(image: NDArray[np.void], top: int, left: int, out: NDArray[np.void]) -> None:
    """A window of the size of ``out``, both [rows, cols] of pixels; black where it reaches beyond the image."""
    rows, cols = out.shape
    height, width = image.shape
    if 0 <= top <= height - rows and 0 <= left <= width - cols:
        out[:] = image[top : top + rows, left : left + cols]
    else:
        out[:] = BLACK
        first_row, first_col = max(-top, 0), max(-left, 0)
        inside = image[max(top, 0) : max(top + rows, 0), max(left, 0) : max(left + cols, 0)]
        out[first_row : first_row + inside.shape[0], first_col : first_col + inside.shape[1]] = inside
