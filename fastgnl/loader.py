"""Batches for training, visited in an order keyed by (seed, epoch), and every sample once for evaluation.

A source holds labels and delivers inputs; the order is made here, once for all of them, so that two sources of the same
data give the same batches in the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgnl import order
from fastgnl.distributed import rank, world_size
from fastgnl.errors import check, check_choice, check_count, check_seed

Order = Literal["random", "quasi-random", "balanced", "bucketed"]


@dataclass(frozen=True)
class Batch:
    """This rank's rows of a global batch. ``x`` may be overwritten once the next batch is asked for."""

    x: Tensor
    labels: Tensor
    index: Tensor
    """The ids of the samples."""
    clean: Tensor | None
    """The true labels where known: None, or ``UNKNOWN`` (-1) for single samples."""
    global_rows: int
    """Rows of the batch over all ranks."""
    others: tuple[Tensor, ...] = ()
    """The same samples, augmented anew, where more views than one were asked for."""


class Source(Protocol):
    """Samples by row: in memory (``Samples``), or in a file that FFCV or the built-in reader decodes."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def clean(self) -> Tensor | None: ...

    @property
    def ids(self) -> Tensor:
        """The sample id of each row: 0 to N - 1 in any order."""
        ...

    @property
    def pages(self) -> NDArray[np.int64] | None:
        """The page of its file that each row lies in."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """How long the input of each row is, where inputs of a batch are padded to the longest."""
        ...

    @property
    def eval_rows(self) -> int:
        """Rows to evaluate at a time."""
        ...

    def load(self, batches: Sequence[NDArray[np.int64]], epoch: int | None = None, view: int = 0) -> Iterator[Tensor]:
        """The inputs of each batch of rows in turn: augmented as that epoch wants it, or as they are without one. Views
        are augmented each in its own way, and may be loaded side by side."""
        ...


@dataclass(frozen=True)
class Loader:
    """Batches of a source for this rank."""

    source: Source
    batch_size: int = 128
    """Rows of the global batch, over all ranks, at most."""
    seed: int = 0
    """Key of the order, with the epoch."""
    order: Order = "random"
    """Every sample once in any order; once, page by page of the file (for files larger than memory); batches with as
    many rows of each class; or every sample once, in batches of texts that are about as long as each other."""
    drop_last: bool = False
    """Full batches only."""
    batches_per_epoch: int | None = None
    """How many, for ``order="balanced"``; as many as make up the data when not given."""
    pages_in_memory: int = 64
    """How much of the file a quasi-random order draws from at a time."""

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, 1)
        check_seed(self.seed)
        check_choice("order", self.order, get_args(Order))
        check_count("pages_in_memory", self.pages_in_memory, 1)
        if self.batches_per_epoch is not None:
            check_count("batches_per_epoch", self.batches_per_epoch, 1)
            check(
                self.order == "balanced",
                f"batches_per_epoch is {self.batches_per_epoch} with order={self.order!r}, wanted order='balanced'",
            )
        check(
            self.order != "quasi-random" or self.source.pages is not None,
            "order is 'quasi-random' for samples in memory, wanted a .beton file",
        )
        check(
            self.order != "bucketed" or self.source.lengths is not None,
            "order is 'bucketed' for samples of one length, wanted texts",
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self.batches_per_epoch is not None:
            return self.batches_per_epoch
        return order.num_batches(len(self.source.labels), self.batch_size, self.drop_last)

    def schedule(self, epoch: int) -> NDArray[np.int64]:
        """The rows of every lane and batch, [lanes, batches]."""
        labels = self.source.labels
        if self.order == "balanced":
            return order.balanced(labels.numpy(), self.batch_size, len(self), self.seed, epoch)
        if self.order == "bucketed":
            assert self.source.lengths is not None
            return order.bucketed(self.source.lengths, self.batch_size, self.seed, epoch, self.drop_last)
        windows = None
        if self.order == "quasi-random":
            assert self.source.pages is not None
            windows = order.page_windows(self.source.pages, self.pages_in_memory, self.seed, epoch)
        return order.shuffled(len(labels), self.batch_size, self.seed, epoch, self.drop_last, windows)

    def shard(self) -> Tensor:
        """The ids of the samples that this rank visits, the same in every epoch, in ascending order."""
        labels = self.source.labels
        if self.order == "balanced":
            lane, lanes = order.balanced_lanes(labels.numpy(), self.batch_size), self.batch_size
        else:
            lane, lanes = order.shuffled_lanes(len(labels), self.batch_size, self.drop_last)
        return self.source.ids[order.rank_rows(lane, lanes, rank(), world_size())].sort().values

    def epoch(self, number: int, start: int = 0, views: int = 1) -> Iterator[Batch]:
        """This rank's part of every batch of an epoch, augmented, from batch ``start`` on; with more ``views``, each
        sample augmented in so many ways."""
        schedule = self.schedule(number)
        sizes = (schedule >= 0).sum(0).tolist()[start:]
        parts = order.columns(order.rank_lanes(schedule, rank(), world_size()))[start:]
        loads = [self.source.load(parts, number, view) for view in range(views)]
        for rows, size, x, *others in zip(parts, sizes, *loads, strict=True):
            yield _batch(self.source, rows, x, size, tuple(others))


def _batch(source: Source, rows: NDArray[np.int64], x: Tensor, size: int, others: tuple[Tensor, ...] = ()) -> Batch:
    index = torch.from_numpy(rows)
    clean = None if source.clean is None else source.clean[index]
    return Batch(x, source.labels[index], source.ids[index], clean, size, others)


def once(source: Source) -> Iterator[Batch]:
    """Every sample exactly once over all ranks, as it is: for evaluation. In order, or the shortest first."""
    count = len(source.labels)
    rows = np.arange(count) if source.lengths is None else np.argsort(source.lengths, kind="stable")
    parts = [rows[part] for part in order.slices(count, source.eval_rows)][rank() :: world_size()]
    for rows, x in zip(parts, source.load(parts), strict=True):
        yield _batch(source, rows, x, len(rows))
