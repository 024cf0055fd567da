"""The built-in reader of image files: PIL, NumPy and threads, where FFCV is not installed."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgnl.augment import DTYPES, Augment, Windows
from fastgnl.beton import RAW, Beton
from fastgnl.errors import InputError
from fastgnl.images import Pixels, decode, resized_window
from fastgnl.prefetch import prefetched

BATCHES_AHEAD = 3


def pixels_of(beton: Beton, row: int) -> Pixels:
    """The image of a record."""
    image, data = beton.records["f0"][row], beton.data(row)
    if image["mode"] == RAW:
        return np.frombuffer(data, np.uint8).reshape(image["height"], image["width"], 3)
    try:
        return decode(data)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{beton.path}: record {row} ({beton.names[row]}) cannot be decoded ({error}), wanted an image"
        ) from error


class BuiltinReader:
    """Batches of a ``.beton`` file's images."""

    def __init__(self, beton: Beton, augment: Augment, output: tuple[int, int], workers: int) -> None:
        self.beton, self.augment, self.output, self.workers = beton, augment, output, workers
        self.bytes = np.frombuffer(beton.map, np.uint8)

    def read(self, batches: Sequence[NDArray[np.int64]], windows: Windows) -> Iterator[Tensor]:
        """The inputs of each batch in turn, a few batches ahead."""
        with ThreadPoolExecutor(self.workers, "fastgnl-reader") as pool:
            yield from prefetched(pool, lambda rows: self._batch(rows, windows), batches, self.workers + BATCHES_AHEAD)

    def _batch(self, rows: NDArray[np.int64], windows: Windows) -> Tensor:
        out = np.empty((len(rows), *self.output, 3), np.uint8)
        image = self.beton.records["f0"][rows]
        records = zip(
            rows.tolist(),
            (image["mode"] == RAW).tolist(),
            image["data_ptr"].tolist(),
            image["height"].tolist(),
            image["width"].tolist(),
            strict=True,
        )
        top, left, rows_of, cols_of, flip = (column[rows].tolist() for column in windows)
        for i, (row, raw, start, height, width) in enumerate(records):
            if raw:
                pixels = self.bytes[start : start + 3 * height * width].reshape(height, width, 3)
            else:
                pixels = pixels_of(self.beton, row)
            cut(pixels, top[i], left[i], rows_of[i], cols_of[i], out[i, :, ::-1] if flip[i] else out[i])
        return normalised(out, self.augment)


def normalised(images: Pixels, augment: Augment) -> Tensor:
    """[B, H, W, 3] bytes as [B, 3, H, W] of the output's type: ``augment.table()``, in the same steps of rounding."""
    width = images.shape[2]
    x = torch.from_numpy(images).float().div_(255)
    # A row of pixels at a time: a broadcast over three numbers is slow.
    x_rows = x.flatten(2)
    x_rows.sub_(torch.tensor(augment.mean).repeat(width)).div_(torch.tensor(augment.std).repeat(width))
    x = x.permute(0, 3, 1, 2).to(DTYPES[augment.dtype])
    return x if augment.channels_last else x.contiguous()


def cut(pixels: Pixels, top: int, left: int, rows: int, cols: int, out: Pixels) -> None:
    """A window of an image, at the size of ``out``; black where it reaches beyond the image."""
    out_rows, out_cols = out.shape[:2]
    height, width = pixels.shape[:2]
    if (rows, cols) != (out_rows, out_cols):
        out[:] = resized_window(pixels, top, left, rows, cols, out_rows, out_cols)
    elif 0 <= top <= height - rows and 0 <= left <= width - cols:
        out[:] = pixels[top : top + rows, left : left + cols]
    else:
        out[:] = 0
        first_row, first_col = max(-top, 0), max(-left, 0)
        inside = pixels[max(top, 0) : max(top + rows, 0), max(left, 0) : max(left + cols, 0)]
        out[first_row : first_row + inside.shape[0], first_col : first_col + inside.shape[1]] = inside
