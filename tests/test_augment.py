"""Windows and flips: their law, their key, what they refuse."""

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from fastgnl.augment import RATIO, Augment
from fastgnl.errors import InputError

N = 20_000
IDS = np.arange(N)


def windows(augment, height=32, width=32, epoch=0, seed=0, ids=IDS):
    heights, widths = np.full(len(ids), height), np.full(len(ids), width)
    return augment.windows(ids, heights, widths, augment.output(heights, widths), seed, epoch)


def test_random_crops_are_uniform_over_the_padded_image():
    w = windows(Augment(32, "random", 4))
    for place in (w.top, w.left):
        assert (place.min(), place.max()) == (-4, 4)
        assert chisquare(np.bincount(place + 4)).pvalue > 1e-4
    assert abs(np.corrcoef(w.top, w.left)[0, 1]) < 0.03
    assert (w.rows == 32).all()
    assert (w.cols == 32).all()
    assert not w.flip.any()


def test_half_of_the_images_are_mirrored_whatever_their_window():
    w = windows(Augment(32, "random", 4, flip=True))
    assert abs(w.flip.mean() - 0.5) < 0.015
    assert abs(np.corrcoef(w.flip, w.left)[0, 1]) < 0.03


def test_resized_crops_follow_their_law():
    w = windows(Augment(64, "resized"), 300, 400)
    assert (w.top >= 0).all()
    assert (w.left >= 0).all()
    assert (w.top + w.rows <= 300).all()
    assert (w.left + w.cols <= 400).all()
    ratio = w.cols / w.rows
    assert ratio.min() > RATIO[0] - 0.02
    assert ratio.max() < RATIO[1] + 0.02
    share = w.rows * w.cols / (300 * 400)
    small = share[share < 0.5]  # which always fit: uniform
    assert kstest(small, "uniform", (0.08, 0.42)).pvalue > 1e-4
    assert share.max() > 0.95
    assert chisquare(np.histogram(w.top[w.rows < 100] / (301 - w.rows[w.rows < 100]), 10, (0, 1))[0]).pvalue > 1e-4


def test_a_panorama_still_gives_a_window():
    for height, width in ((10, 1000), (1000, 10), (1, 1)):
        w = windows(Augment(8, "resized"), height, width, ids=IDS[:200])
        assert (w.rows >= 1).all()
        assert (w.cols >= 1).all()
        assert (w.top + w.rows <= height).all()
        assert (w.left + w.cols <= width).all()


def test_draws_belong_to_seed_epoch_and_sample():
    augment = Augment(32, "random", 4, flip=True)

    def key(**options):
        return b"".join(column.tobytes() for column in windows(augment, **options))

    assert key(epoch=1) == key(epoch=1)
    assert len({key(), key(epoch=1), key(seed=1), key(seed=2**63)}) == 4
    part = windows(augment, ids=IDS[[5, 77, 3]])
    whole = windows(augment)
    for column, all_of_it in zip(part, whole, strict=True):
        np.testing.assert_array_equal(column, all_of_it[[5, 77, 3]])


def test_evaluation_takes_the_middle():
    for crop in ("none", "random"):
        w = windows(Augment(24, crop, flip=True), 33, 40, epoch=None, ids=IDS[:3])
        assert (w.top[0], w.left[0], w.rows[0], w.cols[0], bool(w.flip[0])) == (4, 8, 24, 24, False)
    for height, side in ((256, 224), (512, 448)):
        w = windows(Augment(224, "resized", flip=True), height, 600, epoch=None, ids=IDS[:3])
        assert (w.rows[0], w.cols[0], w.top[0], w.left[0]) == (side, side, (height - side) // 2, (600 - side) // 2)
        assert not w.flip.any()


@pytest.mark.parametrize("epoch", [None, 0])
def test_images_smaller_than_the_output_give_their_largest_square(epoch):
    w = windows(Augment(64, "random"), 20, 30, epoch, ids=IDS[:500])
    assert (w.rows == 20).all()
    assert (w.cols == 20).all()
    assert (w.top == 0).all()
    assert w.left.min() >= 0
    assert w.left.max() <= 10
    assert (len(set(w.left)) > 5) == (epoch is not None)


def test_the_table_normalises():
    augment = Augment(mean=(0.1, 0.5, 0.9), std=(0.2, 0.5, 1.0))
    table = augment.table()
    assert table.shape == (256, 3)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table[51], [0.5, -0.6, -0.7], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": 0}, "size is 0, wanted a whole number of at least 1"),
        ({"crop": "middle"}, "crop is 'middle', wanted one of 'none', 'random', 'resized'"),
        ({"padding": -1}, "padding is -1"),
        ({"padding": 4}, "padding is 4, wanted crop='random' with it"),
        ({"crop": "resized"}, "crop is 'resized' without a size, wanted one"),
        ({"mean": (0.5,)}, "mean and std have another length than 3"),
        ({"std": (1.0, 0.0, 1.0)}, "wanted numbers above 0"),
        ({"dtype": "float64"}, "dtype is 'float64', wanted one of 'float32', 'float16', 'bfloat16'"),
    ],
)
def test_bad_settings(options, sentence):
    with pytest.raises(InputError, match=sentence):
        Augment(**options)


def test_images_of_several_sizes_want_one():
    with pytest.raises(InputError, match="the images are 8 to 9 wide and 8 to 8 high, wanted the option size"):
        Augment().output(np.array([8, 8]), np.array([8, 9]))
    assert Augment().output(np.array([8, 8]), np.array([9, 9])) == (8, 9)
