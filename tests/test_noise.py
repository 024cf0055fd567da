"""Noise models: their law, their seed, what they refuse."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.stats import chisquare, kstest, truncnorm

from fastgnl.errors import InputError
from fastgnl.noise import asymmetric, class_matrix, instance_dependent, symmetric

N, C = 30_000, 6
LABELS = np.random.default_rng(0).integers(C, size=N)
X = np.random.default_rng(1).random((N, 12))


def test_symmetric_flips_uniformly_to_other_classes():
    noise = symmetric(LABELS, 0.3, seed=1)
    flipped = noise.labels != LABELS
    assert abs(flipped.mean() - 0.3) < 0.01
    shift = (noise.labels[flipped] - LABELS[flipped]) % C
    assert chisquare(np.bincount(shift, minlength=C)[1:]).pvalue > 1e-4
    np.testing.assert_allclose(noise.transition.sum(1), 1)
    np.testing.assert_allclose(np.diag(noise.transition), 0.7)


def test_asymmetric_flips_to_the_next_class_or_the_given_one():
    noise = asymmetric(LABELS, 0.4, seed=1)
    flipped = noise.labels != LABELS
    assert abs(flipped.mean() - 0.4) < 0.01
    assert ((noise.labels[flipped] - LABELS[flipped]) % C == 1).all()
    mapped = asymmetric(LABELS, 0.4, seed=1, mapping={0: 3})
    changed = mapped.labels != LABELS
    assert set(LABELS[changed]) == {0}
    assert set(mapped.labels[changed]) == {3}
    assert mapped.transition[0, 3] == 0.4
    np.testing.assert_array_equal(mapped.transition[1:], np.eye(C)[1:])


def test_instance_dependent_transition_is_the_law_of_the_labels():
    noise = instance_dependent(X, LABELS, 0.3, seed=2)
    np.testing.assert_allclose(noise.transition.sum(1), 1)
    flip_rate = 1 - noise.transition[np.arange(N), LABELS]
    assert kstest(flip_rate, truncnorm(-3, 7, loc=0.3, scale=0.1).cdf).pvalue > 1e-4
    assert abs((noise.labels != LABELS).mean() - flip_rate.mean()) < 0.01
    # Labels occur as often as their probabilities say, in every band of probability.
    drawn = np.eye(C)[noise.labels]
    for low, high in ((0.01, 0.1), (0.1, 0.2), (0.2, 0.4), (0.5, 0.9)):
        band = (noise.transition > low) & (noise.transition < high)
        assert abs(drawn[band].mean() - noise.transition[band].mean()) < 0.01


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.95])
def test_flip_rates_are_truncated_not_clipped(rate):
    P = instance_dependent(X, LABELS, rate, seed=4).transition
    law = truncnorm((0 - rate) / 0.1, (1 - rate) / 0.1, loc=rate, scale=0.1)
    assert kstest(1 - P[np.arange(N), LABELS], law.cdf).pvalue > 1e-4


def test_projections_are_standard_normal_and_each_class_has_its_own():
    """log P_ij - log P_ik = x (W_j - W_k) off the diagonal: recover the differences of W's columns."""
    noise = instance_dependent(X, LABELS, 0.3, seed=2)
    found = []
    for c in range(C):
        rows = c == LABELS
        first, *others = (j for j in range(C) if j != c)
        log_P = np.log(noise.transition[rows])
        odds = log_P[:, others] - log_P[:, [first]]
        W, residual, *_ = np.linalg.lstsq(X[rows], odds, rcond=None)
        assert (residual < 1e-6).all()  # linear in x, without an offset
        found.append(W)
    differences = np.concatenate([W.ravel() for W in found])
    assert abs(differences.std() - np.sqrt(2)) < 0.2  # 288 differences of two standard normals
    # Differences of two of them are normal again with variance 2, and 4 columns less one are independent.
    pairs = np.concatenate([(W[:, 0] - W[:, 1]).ravel() for W in found] + [(W[:, 2] - W[:, 3]).ravel() for W in found])
    assert kstest(pairs / np.sqrt(2), "norm").pvalue > 1e-3
    # The same two columns, 4 and 5, of the W of classes 0 to 3: one W for all would make these equal.
    same_columns = [W[:, -1] - W[:, -2] for W in found[:4]]
    for a in range(4):
        for b in range(a):
            assert np.abs(same_columns[a] - same_columns[b]).max() > 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda s: symmetric(LABELS, 0.3, s),
        lambda s: asymmetric(LABELS, 0.3, s),
        lambda s: instance_dependent(X, LABELS, 0.3, s),
    ],
)
def test_a_seed_fixes_all_of_it(make):
    a, b, c = make(3), make(3), make(4)
    assert np.array_equal(a.labels, b.labels)
    assert np.array_equal(a.transition, b.transition)
    assert not np.array_equal(a.labels, c.labels)
    assert a.labels.dtype == np.int64


@pytest.mark.parametrize("make", [symmetric, asymmetric, lambda y, r, s: instance_dependent(X, y, r, s)])
def test_rate_zero_changes_nothing(make):
    assert np.array_equal(make(LABELS, 0.0, 0).labels, LABELS)


def test_rate_one_leaves_no_label():
    assert (symmetric(LABELS, 1.0, 0).labels != LABELS).all()


def test_images_are_flattened():
    flat = instance_dependent(X, LABELS, 0.3, 1)
    images = instance_dependent(X.reshape(N, 1, 3, 4), LABELS, 0.3, 1)
    assert np.array_equal(flat.labels, images.labels)


def test_class_matrix_is_the_mean_row():
    noise = instance_dependent(X, LABELS, 0.3, 1, num_classes=C + 1)
    matrix = class_matrix(noise.transition, LABELS, C + 1)
    np.testing.assert_allclose(matrix.sum(1), 1)
    np.testing.assert_allclose(matrix[2], noise.transition[LABELS == 2].mean(0))
    assert matrix[C, C] == 1  # a class absent from the data


BAD = [
    (lambda: symmetric(LABELS, 1.5), "rate is 1.5, wanted a number from 0 to 1"),
    (lambda: symmetric(LABELS, -0.1), "rate is -0.1, wanted a number from 0 to 1"),
    (lambda: asymmetric(LABELS, float("nan")), "rate is nan, wanted a number from 0 to 1"),
    (lambda: symmetric(LABELS, 0.1, -1), "seed is -1, wanted a whole number"),
    (lambda: symmetric(LABELS, 0.1, num_classes=3), "labels holds 5, wanted 0 to 2"),
    (lambda: symmetric(LABELS - 2, 0.1), "labels holds -2, wanted 0 to"),
    (lambda: symmetric(LABELS.astype(float), 0.1), "labels is float64, wanted integers"),
    (lambda: symmetric([], 0.1), r"labels has shape \(0,\), wanted \(N,\)"),
    (lambda: symmetric([[1]], 0.1), r"labels has shape \(1, 1\), wanted \(N,\)"),
    (lambda: asymmetric(LABELS, 0.1, mapping={0: 9}), "mapping holds class 9, wanted 0 to 5"),
    (lambda: instance_dependent(X[:9], LABELS, 0.1), "x has 9 rows, wanted 30000"),
    (lambda: instance_dependent(X * np.nan, LABELS, 0.1), "x holds NaN or what is infinite in float32"),
    (lambda: instance_dependent(X * 1e200, LABELS, 0.1), "x holds NaN or what is infinite in float32"),
    (lambda: instance_dependent(X.astype(str), LABELS, 0.1), "wanted numbers"),
    (lambda: instance_dependent(X * 1j, LABELS, 0.1), "wanted numbers"),
    (lambda: instance_dependent(csr_matrix(X), LABELS, 0.1), "x is a sparse matrix, wanted a dense array"),
    (lambda: instance_dependent(X[:, 0], LABELS, 0.1), r"x has shape \(30000,\), wanted \(samples, features\)"),
    (lambda: symmetric(LABELS, "a"), "rate is 'a', wanted a number from 0 to 1"),
]


@pytest.mark.parametrize(("call", "sentence"), BAD)
def test_bad_input_is_refused_in_one_sentence(call, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        call()
    assert "\n" not in str(error.value)
