"""The synthetic web-like images: their labels' law, their seed, and that they can be learned; the embedded digits."""

import pickle

import numpy as np
import pytest
from scipy.stats import chisquare

from fastgnl.digits import noisy_digits
from fastgnl.errors import InputError
from fastgnl.formats.embedded import Digits
from fastgnl.formats.listing import UNKNOWN
from fastgnl.formats.synthetic import FAMILY, Web


def small(listing):
    """All images of 64x64 as mean colours of 16x16 cells, [N, 768]."""
    images = np.stack([listing.read(i) for i in range(len(listing))]).astype(np.float32)
    return images.reshape(len(images), 16, 4, 16, 4, 3).mean((2, 4)).reshape(len(images), -1)


def test_labels_follow_their_law():
    listing = Web(200_000, 23, noise=0.3, out_of_distribution=0.1).listing()  # 23: the last family has three members
    known = listing.clean != UNKNOWN
    assert abs(known.mean() - 0.9) < 0.005
    labels, clean = listing.labels[known], listing.clean[known]
    wrong = labels != clean
    assert abs(wrong.mean() - 0.3) < 0.005
    assert (labels // FAMILY == clean // FAMILY).all()
    for c in (0, 7, 21):
        given = np.bincount(labels[wrong & (clean == c)], minlength=23)
        start = c // FAMILY * FAMILY
        others = [d for d in range(start, min(start + FAMILY, 23)) if d != c]
        assert chisquare(given[others]).pvalue > 1e-4
    for drawn in (clean, listing.labels[~known]):
        assert chisquare(np.bincount(drawn, minlength=23)).pvalue > 1e-4


def test_a_family_of_one_is_taken_for_any_other_class():
    listing = Web(50_000, 6, noise=1, out_of_distribution=0).listing()
    given = listing.labels[listing.clean == 5]
    assert set(given) == {0, 1, 2, 3, 4}
    assert set(listing.labels[listing.clean == 2]) == {0, 1, 3, 4}


def test_the_test_split_is_clean_and_another_draw_of_the_same_classes():
    train = Web(300, 10, noise=0, out_of_distribution=0).listing()
    test = Web(300, 10, noise=0.9, out_of_distribution=0.9, split="test").listing()
    assert np.array_equal(test.labels, test.clean)
    assert test.clean.min() == 0
    assert not np.array_equal(train.clean, test.clean)
    same = np.flatnonzero(train.clean == test.clean)[0]
    assert not np.array_equal(train.read(same), test.read(same))


def test_a_seed_fixes_all_of_it_whatever_the_number_of_samples():
    a, b, c = Web(400, 10, seed=3).listing(), Web(1000, 10, seed=3).listing(), Web(400, 10, seed=4).listing()
    assert np.array_equal(a.labels, b.labels[:400])
    assert np.array_equal(a.clean, b.clean[:400])
    assert not np.array_equal(a.labels, c.labels)
    for i in (0, 17, int(np.flatnonzero(a.clean == UNKNOWN)[0])):
        assert np.array_equal(a.read(i), b.read(i))
        assert not np.array_equal(a.read(i), c.read(i))
        assert np.array_equal(pickle.loads(pickle.dumps(a.read))(i), a.read(i))
    assert not np.array_equal(a.read(0), a.read(1))


@pytest.mark.parametrize("size", [8, 33, 64])
def test_images_are_of_the_size_and_use_the_range(size):
    listing = Web(40, 5, size, out_of_distribution=0.5).listing()
    assert listing.kind == "image"
    for i in range(40):
        image = listing.read(i)
        assert image.shape == (size, size, 3)
        assert image.dtype == np.uint8
        assert image.flags.c_contiguous
        assert image.std() > 5


def test_classes_are_named_in_their_order_in_any_number():
    listing = Web(10, 50).listing()
    assert listing.classes[17] == "class 0017"
    assert listing.names[3] == "web train 3"
    assert list(listing.names[8:]) == ["web train 8", "web train 9"]
    assert listing.names[-1] == "web train 9"
    with pytest.raises(IndexError):
        listing.names[10]
    large = Web(50_000, 21_841).listing()
    assert list(large.classes) == sorted(large.classes)
    assert len(np.unique(large.labels)) > 19_000
    assert large.read(0).shape == (64, 64, 3)


@pytest.mark.parametrize("seed", [0, 1])
def test_classes_can_be_learned_and_similar_ones_are_confused(seed):
    C = 10
    train = Web(300, C, noise=0, out_of_distribution=0, seed=seed).listing()
    test = Web(300, C, seed=seed, split="test").listing()
    x = small(train)
    means = np.stack([x[train.clean == c].mean(0) for c in range(C)])
    found = ((small(test)[:, None] - means) ** 2).sum(2).argmin(1)
    wrong = found != test.clean
    assert 1 - wrong.mean() > 0.55  # chance is 0.1
    assert wrong.sum() > 5
    assert (found[wrong] // FAMILY == test.clean[wrong] // FAMILY).mean() > 0.9  # chance is 4 of 9


def test_images_of_no_class_are_far_from_all_classes():
    listing = Web(600, 5, noise=0, out_of_distribution=0.2).listing()
    x, known = small(listing), listing.clean != UNKNOWN
    means = np.stack([x[listing.clean == c].mean(0) for c in range(5)])
    distance = ((x[:, None] - means) ** 2).mean(2).min(1)
    assert np.median(distance[~known]) > 2 * np.median(distance[known])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"samples": 0}, "samples is 0, wanted a whole number of at least 1"),
        ({"num_classes": 1}, "num_classes is 1, wanted a whole number of at least 2"),
        ({"size": 7}, "size is 7, wanted a whole number of at least 8"),
        ({"noise": 1.5}, "noise is 1.5, wanted a number from 0 to 1"),
        ({"out_of_distribution": -0.1}, "out_of_distribution is -0.1, wanted a number from 0 to 1"),
        ({"seed": -1}, "seed is -1, wanted a whole number"),
        ({"split": "val"}, "split is 'val', wanted one of 'train', 'test'"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        Web(**options)


@pytest.mark.parametrize("seed", [0, 5])
def test_digits_are_those_of_the_demo(seed):
    expected = noisy_digits(seed=seed)
    for split, x, y in (
        ("train", expected.train_x, expected.train_clean),
        ("test", expected.test_x, expected.test_y),
    ):
        listing = Digits(split, seed).listing()
        images = np.stack([listing.read(i) for i in range(len(listing))])
        assert images.shape == (len(y), 8, 8, 3)
        assert images.dtype == np.uint8
        for channel in range(3):
            np.testing.assert_allclose(images[..., channel] / 255, x[:, 0].numpy(), atol=0.5 / 255 + 1e-6)
        assert np.array_equal(listing.labels, y.numpy())
        assert np.array_equal(listing.clean, y.numpy())


def test_digits_refuse_what_they_cannot_split_by():
    with pytest.raises(InputError, match=r"seed is 4294967296, wanted one below 2\*\*32"):
        Digits(seed=2**32)
    with pytest.raises(InputError, match="split is 'val'"):
        Digits("val")
