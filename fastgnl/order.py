"""Which samples make up which batch of which epoch, and which rank sees them.

An epoch is a schedule [lanes, batches] of sample rows (``SKIP`` where a lane rests). Batch b is column b. A row stays
in one lane for the whole run and a rank owns a block of lanes, so a rank visits a fixed shard of the samples while the
global batches are the same for any number of ranks.
"""

import numpy as np
from numpy.typing import NDArray

from fastgnl.errors import check

SKIP = -1
TOGETHER = 8
"""Batches of one bucket of lengths: their samples may meet."""


def num_batches(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Batches of an epoch that visits every sample, or of one that has full batches only."""
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def shuffled_lanes(num_samples: int, batch_size: int, drop_last: bool) -> tuple[NDArray[np.int64], int]:
    """The lane of each row for the whole run, and how many there are."""
    count = num_batches(num_samples, batch_size, drop_last)
    check(
        count > 0, f"drop_last leaves no batch of {batch_size} from {num_samples} samples, wanted a smaller batch_size"
    )
    lanes = batch_size if drop_last else -(-num_samples // count)
    return np.arange(num_samples) % lanes, lanes


def balanced_lanes(labels: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    """The same for balanced batches, which have ``batch_size`` lanes: each class is dealt out to them in turn."""
    check(
        len(labels) >= batch_size,
        f"balanced batches of {batch_size} were asked of {len(labels)} samples, wanted as many",
    )
    lane = np.empty(len(labels), np.int64)
    lane[np.argsort(labels, kind="stable")] = np.arange(len(labels)) % batch_size
    return lane


def shuffled(
    num_samples: int,
    batch_size: int,
    seed: int,
    epoch: int,
    drop_last: bool = False,
    windows: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Every sample exactly once, in batches whose sizes differ by one at most.

    ``drop_last``: full batches only; what remains is another part in each epoch. ``windows`` [N]: numbers to visit in
    ascending order."""
    lane, lanes = shuffled_lanes(num_samples, batch_size, drop_last)
    count = num_batches(num_samples, batch_size, drop_last)
    keys = [np.random.default_rng([seed, epoch]).random(num_samples), lane]
    if windows is not None:
        keys.insert(1, windows)
    order = np.lexsort(keys)
    lengths = np.bincount(lane, minlength=lanes)
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    schedule = np.full((lanes, count), SKIP, np.int64)
    batch = np.arange(count)
    short = np.flatnonzero(lengths < count)
    # A lane with one sample too few rests for one batch; the rests are spread over the epoch.
    rest = np.full(lanes, count)
    rest[short] = np.arange(len(short)) * count // max(len(short), 1)
    place = batch - (batch > rest[:, None])
    visits = batch != rest[:, None]
    schedule[visits] = order[(starts[:, None] + place)[visits]]
    return schedule


def page_windows(pages: NDArray[np.int64], in_memory: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Quasi-random reading: pages of the file in random order, ``in_memory`` of them at a time. Each row's window."""
    found, page = np.unique(pages, return_inverse=True)
    rank = np.random.default_rng([seed, epoch, 1]).permutation(len(found))
    return rank[page] // in_memory


def bucketed(
    lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int, drop_last: bool = False
) -> NDArray[np.int64]:
    """Every sample once, like ``shuffled``, in batches whose samples are about as long as each other.

    A lane visits its samples by length, ``TOGETHER`` of them in any order; the batches then come in any order."""
    lane, _ = shuffled_lanes(len(lengths), batch_size, drop_last)
    rng = np.random.default_rng([seed, epoch, 2])
    # Most texts are cut to one length: in the order of the file, often by class, a batch would hold one class alone.
    by_length = np.lexsort((rng.random(len(lengths)), lengths, lane))
    starts = np.concatenate([[0], np.bincount(lane).cumsum()[:-1]])
    place = np.empty(len(lengths), np.int64)
    place[by_length] = np.arange(len(lengths)) - starts[lane[by_length]]
    schedule = shuffled(len(lengths), batch_size, seed, epoch, drop_last, place // TOGETHER)
    return schedule[:, rng.permutation(schedule.shape[1])]


def balanced(labels: NDArray[np.int64], batch_size: int, count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """``count`` batches in which each class has as many rows as any other, to one.

    Lane v takes class (v + b + shift) mod C at batch b, from its own samples of that class in turn. A lane without that
    class (it has fewer samples than the batch has rows) takes the next class it has.
    """
    classes = np.unique(labels)
    C = len(classes)
    label, lane = np.searchsorted(classes, labels), balanced_lanes(labels, batch_size)
    rng = np.random.default_rng([seed, epoch])
    order = np.lexsort((rng.random(len(labels)), label, lane))
    sizes = np.bincount(lane * C + label, minlength=batch_size * C).reshape(batch_size, C)
    starts = np.concatenate([[0], sizes.ravel().cumsum()[:-1]]).reshape(batch_size, C)
    has = sizes > 0
    # The next class that lane v has, counting round from c.
    step = np.zeros_like(sizes)
    for _ in range(C - 1):
        behind = ~np.take_along_axis(has, (np.arange(C) + step) % C, 1)
        if not behind.any():
            break
        step += behind
    stand_in = (np.arange(C) + step) % C
    v, b = np.arange(batch_size)[:, None], np.arange(count)[None]
    wanted = (v + b + int(rng.integers(C))) % C
    c = stand_in[v, wanted]
    turn = np.where(c == wanted, b // C, b)
    return order[starts[v, c] + turn % sizes[v, c]]


def rank_lanes(schedule: NDArray[np.int64], rank: int, ranks: int) -> NDArray[np.int64]:
    """The rows of the schedule that one rank visits: a block of lanes."""
    part = np.array_split(schedule, ranks)[rank]
    rows = int((schedule >= 0).sum(0).min())
    check(
        len(part) > 0 and bool((part >= 0).any(0).all()),
        f"a batch of {rows} rows was split over {ranks} ranks, wanted a row for each",
    )
    return part


def rank_rows(lane: NDArray[np.int64], lanes: int, rank: int, ranks: int) -> NDArray[np.int64]:
    """The rows that one rank visits in every epoch, of all rows' lanes."""
    mine = np.array_split(np.arange(lanes), ranks)[rank]
    return np.flatnonzero(np.isin(lane, mine))


def columns(schedule: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The batches of a schedule."""
    return [column[column >= 0] for column in schedule.T]


def slices(num_samples: int, size: int) -> list[slice]:
    """0 to N in order, in pieces."""
    return [slice(start, min(start + size, num_samples)) for start in range(0, num_samples, size)]
