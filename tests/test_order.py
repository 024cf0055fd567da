"""Batches of an epoch: every sample once, shards that stay, the same for any number of ranks."""

import numpy as np
import pytest

from fastgnl import order
from fastgnl.errors import InputError

SIZES = [(1437, 128), (5, 128), (129, 128), (128, 128), (7, 2), (50_000, 128), (1001, 100), (1, 1)]


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_an_epoch_visits_every_sample_once_in_nearly_equal_batches(n, size):
    batches = order.columns(order.shuffled(n, size, seed=0, epoch=3))
    np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(n))
    lengths = [len(batch) for batch in batches]
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    assert len(batches) == -(-n // size) == order.num_batches(n, size, drop_last=False)


@pytest.mark.parametrize(("n", "size"), [(1437, 128), (129, 128), (128, 128), (7, 2)])
def test_drop_last_gives_full_batches_and_another_remainder_each_epoch(n, size):
    epochs = [order.columns(order.shuffled(n, size, 0, epoch, drop_last=True)) for epoch in range(8)]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [size] * (n // size)
        assert len(np.unique(np.concatenate(batches))) == n // size * size
    if n % size and n > 2 * size:
        assert len({tuple(sorted(set(range(n)) - set(np.concatenate(batches)))) for batches in epochs}) > 1


def test_the_order_is_keyed_by_seed_and_epoch():
    orders = {(s, e): order.shuffled(50, 8, s, e).tobytes() for s in range(3) for e in range(3)}
    assert len(set(orders.values())) == 9
    assert orders[1, 2] == order.shuffled(50, 8, 1, 2).tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["shuffled", "drop last", "balanced", "quasi-random"])
def test_ranks_share_the_same_batches_and_each_keeps_its_shard(ranks, kind):
    labels = np.random.default_rng(0).integers(5, size=1000)

    def schedule(epoch):
        if kind == "balanced":
            return order.balanced(labels, 32, 40, 0, epoch)
        windows = order.page_windows(np.arange(1000) // 50, 4, 0, epoch) if kind == "quasi-random" else None
        return order.shuffled(1000, 32, 0, epoch, kind == "drop last", windows)

    shards = [set() for _ in range(ranks)]
    for epoch in range(4):
        parts = [order.columns(order.rank_lanes(schedule(epoch), r, ranks)) for r in range(ranks)]
        for batch, *mine in zip(order.columns(schedule(epoch)), *parts, strict=True):
            np.testing.assert_array_equal(np.concatenate(mine), batch)
            assert max(map(len, mine)) - min(map(len, mine)) <= 2
        for shard, part in zip(shards, parts, strict=True):
            shard.update(np.concatenate(part).tolist())
    assert sum(map(len, shards)) == len(set().union(*shards)), "a sample was seen by two ranks"


def test_more_ranks_than_rows_are_refused():
    with pytest.raises(InputError, match="a batch of 2 rows was split over 3 ranks, wanted a row for each"):
        order.rank_lanes(order.shuffled(6, 2, 0, 0), 2, 3)


def test_quasi_random_reading_stays_within_its_pages():
    pages = np.arange(6000) // 100
    batches = order.columns(order.shuffled(6000, 50, 0, 0, windows=order.page_windows(pages, 6, 0, 0)))
    np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(6000))
    touched = [len(set(pages[batch])) for batch in batches]
    assert max(touched) <= 12, "two windows at most"
    last, first = {}, {}
    for number, batch in enumerate(batches):
        for page in pages[batch]:
            first.setdefault(page, number)
            last[page] = number
    assert max(last[page] - first[page] for page in last) < 30, "a page is needed for a tenth of the epoch, not for all"
    other = order.columns(order.shuffled(6000, 50, 0, 1, windows=order.page_windows(pages, 6, 0, 1)))
    assert set(pages[batches[0]]) != set(pages[other[0]])


def test_balanced_batches_hold_as_many_rows_of_each_class():
    labels = np.repeat([0, 1, 2, 7], [2000, 300, 100, 64])
    batches = order.columns(order.balanced(labels, 32, 100, seed=1, epoch=2))
    assert len(batches) == 100
    for batch in batches:
        assert np.bincount(labels[batch], minlength=8)[[0, 1, 2, 7]].tolist() == [8, 8, 8, 8]
        assert len(set(batch)) == 32
    seen = np.bincount(np.concatenate(batches), minlength=len(labels))
    assert seen[:2000].max() == 1, "a large class repeats nothing"
    assert seen[2300:2400].min() >= 6, "a small class is gone through in turn"


def test_balanced_batches_with_a_class_rarer_than_the_batch_has_rows():
    labels = np.repeat([0, 1, 2], [200, 200, 3])
    batches = order.columns(order.balanced(labels, 12, 30, seed=0, epoch=0))
    assert all(len(set(batch)) == 12 for batch in batches)
    counts = np.bincount(labels[np.concatenate(batches)], minlength=3)
    assert counts[2] >= 30
    assert abs(int(counts[0]) - int(counts[1])) < 100
    assert order.balanced(labels, 12, 30, 0, 0).tobytes() != order.balanced(labels, 12, 30, 0, 1).tobytes()


def test_slices_cover_everything_once():
    assert [i for part in order.slices(2500, 1024) for i in range(part.start, part.stop)] == list(range(2500))
