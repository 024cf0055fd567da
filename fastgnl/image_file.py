"""Images in a ``.beton`` file as a source of batches, by FFCV or the built-in reader."""

import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgnl.augment import Augment, Windows
from fastgnl.builtin_reader import BuiltinReader
from fastgnl.errors import check, check_choice, check_count, check_seed
from fastgnl.file_source import FileSource
from fastgnl.torch_threads import torch_threads_kept

READERS = ("auto", "ffcv", "builtin")
EVAL_NUMBERS = 1 << 24
"""Numbers of the inputs that are evaluated at a time, about."""


class Reader(Protocol):
    """What delivers the images of a file: FFCV or the built-in one."""

    def read(self, batches: Sequence[NDArray[np.int64]], windows: Windows) -> Iterator[Tensor]: ...


@cache
def ffcv_problem() -> str | None:
    """Why FFCV cannot be used here, or None."""
    if find_spec("ffcv") is None:
        return "FFCV is not installed"
    try:
        with torch_threads_kept():
            import fastgnl.ffcv_reader  # noqa: F401
    except (ImportError, OSError) as error:
        return f"FFCV cannot be imported ({error})"
    return None


@cache
def _notice(text: str) -> None:
    """One line, once, from one rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


class ImageFile(FileSource):
    """The images of a ``.beton`` file."""

    def __init__(
        self,
        path: Path | str,
        augment: Augment | None = None,
        seed: int = 0,
        labels: NDArray[np.int64] | None = None,
        reader: Literal["auto", "ffcv", "builtin"] = "auto",
        workers: int | None = None,
        os_cache: bool = True,
    ) -> None:
        """``seed``: key of the augmentation. ``labels``: by sample id, in place of those in the file. ``workers``:
        threads that decode, torch's number by default. ``os_cache=False``: FFCV keeps only the pages in use in memory,
        with ``Loader(order="quasi-random")`` for files larger than memory."""
        check_choice("reader", reader, READERS)
        check_seed(seed)
        super().__init__(path, "image", "images", labels)
        self.augment, self.seed = augment or Augment(), seed
        workers = torch.get_num_threads() if workers is None else workers
        check_count("workers", workers, 1)
        self.workers = workers
        image = self.beton.records["f0"]
        self.heights, self.widths = image["height"], image["width"]
        self.output = self.augment.output(self.heights, self.widths)
        self.eval_rows = min(1024, max(16, EVAL_NUMBERS // (3 * self.output[0] * self.output[1])))
        problem = ffcv_problem() if reader != "builtin" else None
        check(problem is None or reader == "auto", f"reader is 'ffcv' but {problem}, wanted 'auto' or 'builtin'")
        if problem:
            _notice(f"{problem}: the built-in loader reads the images (fastgnl doctor says how to install it)")
        self.reader_name = "builtin" if reader == "builtin" or problem else "ffcv"
        self.reader: Reader
        if self.reader_name == "ffcv":
            from fastgnl.ffcv_reader import FFCVReader

            _notice("FFCV compiles its pipeline in the first epoch, once a run: some seconds")
            self.reader = FFCVReader(self.beton, self.augment, self.output, workers, os_cache)
        else:
            self.reader = BuiltinReader(self.beton, self.augment, self.output, workers)

    def load(self, batches: Sequence[NDArray[np.int64]], epoch: int | None = None, view: int = 0) -> Iterator[Tensor]:
        """The inputs of each batch of rows in turn: augmented as that epoch wants it, or as they are without one. All
        views but the first come from the built-in reader: FFCV's threads read one file at a time."""
        if not batches:
            return iter(())
        windows = self.augment.windows(
            self.beton.ids.copy(), self.heights, self.widths, self.output, self.seed, epoch, view
        )
        reader = self.reader if view == 0 else BuiltinReader(self.beton, self.augment, self.output, self.workers)
        return reader.read(batches, windows)
