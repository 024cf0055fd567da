"""FFCV's reader of image files: decoding, windows, flips and normalising in compiled threads, ahead of training.

FFCV draws its own random numbers from a generator that nobody can seed. So windows and flips come with the table of
records, as columns that are filled in anew for each epoch, and the decoder below obeys them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty
from typing import Any

import ffcv.loader.loader
import numpy as np
from ffcv.fields.rgb_image import IMAGE_MODES, SimpleRGBImageDecoder
from ffcv.libffcv import ctypes_imdecode, resize_crop
from ffcv.loader import Loader, OrderOption
from ffcv.loader.epoch_iterator import EpochIterator
from ffcv.memory_managers.os_cache import OSCacheContext, OSCacheManager
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.state import State
from ffcv.reader import Reader
from ffcv.transforms import NormalizeImage, ToTensor, ToTorchImage
from numpy.typing import NDArray
from torch import Tensor

from fastgnl.augment import DTYPES, Augment, Windows
from fastgnl.beton import IMAGE, NUMBERS, Beton
from fastgnl.errors import OwnInputError
from fastgnl.torch_threads import torch_threads_kept

WINDOWED = np.dtype(
    [
        *((name, IMAGE[name]) for name in IMAGE.names or ()),
        *((name, "<i4") for name in ("top", "left", "rows", "cols")),
        ("flip", "<u1"),
        ("failed", "<u1"),
    ],
    align=True,
)
"""A record's image with the window it is cut to in this epoch, and whether its decoding failed."""


class WindowDecoder(SimpleRGBImageDecoder):
    """Decode an image and cut it to its window, resized where that has another size than the output."""

    def __init__(self, output: tuple[int, int]) -> None:
        super().__init__()
        self.output = output

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, tuple[AllocationQuery, AllocationQuery]]:
        jpeg = self.metadata["mode"] == IMAGE_MODES["jpg"]
        pixels = self.metadata["width"].astype(np.int64) * self.metadata["height"]
        largest = int(pixels[jpeg].max()) if jpeg.any() else 0
        shape, dtype = (*self.output, 3), np.dtype("u1")
        return (
            replace(previous_state, jit_mode=True, shape=shape, dtype=dtype),
            (AllocationQuery(shape, dtype), AllocationQuery((3 * largest,), dtype)),
        )

    def generate_code(self) -> Callable[..., Any]:
        jpeg = IMAGE_MODES["jpg"]
        read = self.memory_read
        # Not FFCV's function around it: compiled for constants, that one fails in a finaliser when it is collected.
        decode = ctypes_imdecode
        resize = Compiler.compile(resize_crop)
        threads = Compiler.get_iterator()
        out_h, out_w = self.output

        def cut(batch_indices, memory, metadata, storage_state):  # type: ignore[no-untyped-def]
            destination, decoded = memory
            for i in threads(len(batch_indices)):
                record = metadata[batch_indices[i]]
                height, width = np.int64(record["height"]), np.int64(record["width"])
                top, left = np.int64(record["top"]), np.int64(record["left"])
                rows, cols = np.int64(record["rows"]), np.int64(record["cols"])
                flip = record["flip"] == 1
                data = read(record["data_ptr"], storage_state)
                out = destination[i]
                if record["mode"] == jpeg:
                    image = decoded[i][: 3 * height * width].reshape(height, width, 3)
                    size = np.uint64(data.size)
                    h, w = np.uint32(height), np.uint32(width)
                    failed = decode(data.ctypes.data, size, h, w, image.ctypes.data, h, w, 0, 0, 1, 1, False, False)
                    if failed != 0:
                        metadata[batch_indices[i]]["failed"] = 1
                else:
                    image = data.reshape(height, width, 3)
                if rows != out_h or cols != out_w:
                    resize(image, top, top + rows, left, left + cols, out)
                    if flip:
                        for y in range(out_h):
                            for x in range(out_w // 2):
                                for c in range(3):
                                    swap = out[y, x, c]
                                    out[y, x, c] = out[y, out_w - 1 - x, c]
                                    out[y, out_w - 1 - x, c] = swap
                    continue
                for y in range(out_h):
                    source_y = top + y
                    if source_y < 0 or source_y >= height:
                        out[y] = 0
                        continue
                    for x in range(out_w):
                        source_x = left + (out_w - 1 - x if flip else x)
                        if source_x < 0 or source_x >= width:
                            out[y, x, 0] = 0
                            out[y, x, 1] = 0
                            out[y, x, 2] = 0
                        else:
                            out[y, x, 0] = image[source_y, source_x, 0]
                            out[y, x, 1] = image[source_y, source_x, 1]
                            out[y, x, 2] = image[source_y, source_x, 2]
            return destination[: len(batch_indices)]

        cut.is_parallel = True  # type: ignore[attr-defined]
        return cut


def normalise(augment: Augment) -> NormalizeImage:
    """FFCV's normalising with the table that the built-in reader uses: its own is made in other steps of rounding."""
    half = augment.dtype == "float16"
    operation = NormalizeImage(np.zeros(3), np.ones(3), np.float16 if half else np.float32)
    table = augment.table()
    operation.lookup_table = table.astype(np.float16).view(np.int16) if half else table
    return operation


class _Epoch(EpochIterator):
    """FFCV's thread, whose failure reaches the one who waits for it: FFCV's own leaves them waiting."""

    failure: Exception | None = None

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            self.failure = error
            self.output_queue.put(None)


class _MappedFile(OSCacheManager):
    """FFCV's reading through the page cache, without the tables of pages that only its other way needs: for millions
    of records they take seconds and gigabytes."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        order = np.argsort(reader.alloc_table["ptr"])
        self.ptrs, self.sizes = (reader.alloc_table[name][order] for name in ("ptr", "size"))
        self.context = OSCacheContext(self)


ffcv.loader.loader.OSCacheManager = _MappedFile


class FFCVReader:
    """Batches of a ``.beton`` file's images."""

    def __init__(
        self, beton: Beton, augment: Augment, output: tuple[int, int], workers: int, os_cache: bool = True
    ) -> None:
        """``os_cache``: read through the system's page cache; else keep only the pages in use, for files larger than
        memory."""
        self.beton, self.augment = beton, augment
        with torch_threads_kept():
            self.loader = Loader(
                str(beton.path),
                batch_size=1,
                num_workers=workers,
                os_cache=os_cache,
                order=OrderOption.SEQUENTIAL,
                drop_last=False,
                pipelines={
                    "image": [WindowDecoder(output), normalise(augment), ToTensor(), ToTorchImage(channels_last=True)],
                    **dict.fromkeys(NUMBERS),
                },
            )

    def _metadata(self, windows: Windows) -> NDArray[Any]:
        """The table of records with the windows of an epoch."""
        image = self.beton.records["f0"]
        table = np.zeros(len(image), np.dtype([("f0", WINDOWED)]))
        for name in IMAGE.names or ():
            table["f0"][name] = image[name]
        for name, column in windows._asdict().items():
            table["f0"][name] = column
        return table

    def read(self, batches: Sequence[NDArray[np.int64]], windows: Windows) -> Iterator[Tensor]:
        """The inputs of each batch in turn, a few batches ahead."""
        size = max(len(rows) for rows in batches)
        # FFCV cuts one long order into equal batches: fill up with a row twice, and cut it off again.
        order = np.concatenate([np.pad(rows, (0, size - len(rows)), mode="edge") for rows in batches])
        table = self.loader.reader.metadata = self._metadata(windows)
        self.loader.batch_size = size
        with torch_threads_kept():
            Compiler.set_num_threads(self.loader.num_workers)
            thread = _Epoch(self.loader, order.astype(np.uint64))
        try:
            for rows, (x,) in zip(batches, thread, strict=False):
                failed = rows[table["f0"]["failed"][rows] == 1]
                if len(failed):
                    row = int(failed[0])
                    raise OwnInputError(
                        f"{self.beton.path}: record {row} ({self.beton.names[row]}) cannot be decoded, wanted an image"
                    )
                yield self._output(x[: len(rows)])
            if thread.failure is not None:
                raise thread.failure
        finally:
            thread.terminate_event.set()
            # It looks at the event only when its queue is full, and may wait to leave a last word in a full one.
            while thread.is_alive():
                thread.join(0.6)
                with suppress(Empty):
                    thread.output_queue.get_nowait()
            thread.close()

    def _output(self, x: Tensor) -> Tensor:
        x = x.to(DTYPES[self.augment.dtype])
        return x if self.augment.channels_last else x.contiguous()
