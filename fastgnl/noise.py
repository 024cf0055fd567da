"""Label noise with a known transition (METHOD section 9). A seed fixes all of it."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from scipy.stats import truncnorm

from fastgnl.errors import check, check_count, check_range, check_seed

FLIP_SPREAD = 0.1
"""Standard deviation of the instance-dependent flip rates."""
CHUNK = 4096
"""Samples whose inputs are in memory at a time."""

CIFAR10_PAIRS = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}
"""The usual asymmetric noise of CIFAR-10: truck to automobile, bird to airplane, deer to horse, cat and dog."""
CIFAR100_COARSE = (
    "4 1 14 8 0 6 7 7 18 3 3 14 9 18 7 11 3 9 7 11 6 11 5 10 7 "
    "6 13 15 3 15 0 11 1 10 12 14 16 9 11 5 5 19 8 8 15 13 14 17 18 10 "
    "16 4 17 4 2 0 17 4 18 17 10 3 2 12 12 16 12 1 9 19 2 10 0 1 16 "
    "12 9 13 15 13 16 19 2 4 6 19 5 5 8 19 18 1 2 15 6 0 17 8 14 13"
)
"""The superclass of each of CIFAR-100's classes."""


def cifar100_pairs() -> dict[int, int]:
    """The usual asymmetric noise of CIFAR-100: to the next class of the same superclass, the last to the first."""
    coarse = np.array(CIFAR100_COARSE.split(), int)
    pairs: dict[int, int] = {}
    for group in range(20):
        members = np.flatnonzero(coarse == group)
        pairs |= dict(zip(members.tolist(), np.roll(members, -1).tolist(), strict=True))
    return pairs


class Noise(NamedTuple):
    labels: NDArray[np.int64]
    """The noisy labels, [N]."""
    transition: NDArray[np.float64]
    """The true P(noisy | clean): [C, C] for class-dependent noise, each sample's own row [N, C] otherwise."""


def _check_labels(labels: ArrayLike, rate: float, seed: int, num_classes: int | None) -> tuple[NDArray[np.int64], int]:
    given = np.asarray(labels)
    check(given.ndim == 1 and len(given) > 0, f"labels has shape {given.shape}, wanted (N,) with N >= 1")
    check(np.issubdtype(given.dtype, np.integer), f"labels is {given.dtype}, wanted integers")
    check_range("rate", rate, 0, 1)
    check_seed(seed)
    classes = int(given.max()) + 1 if num_classes is None else num_classes
    check_count("num_classes", classes, 2)
    low, high = int(given.min()), int(given.max())
    check(low >= 0 and high < classes, f"labels holds {low if low < 0 else high}, wanted 0 to {classes - 1}")
    return given.astype(np.int64), classes


def _draw(rows: NDArray[np.float64], u: NDArray[np.float64]) -> NDArray[np.int64]:
    """One class a row from its probabilities, by inverting the cumulative sum at u."""
    cumulative = rows.cumsum(1)
    return (u[:, None] * cumulative[:, -1:] >= cumulative).sum(1)


def symmetric(labels: ArrayLike, rate: float, seed: int = 0, num_classes: int | None = None) -> Noise:
    """With probability ``rate`` a uniformly drawn other class."""
    clean, C = _check_labels(labels, rate, seed, num_classes)
    transition = np.full((C, C), rate / (C - 1))
    np.fill_diagonal(transition, 1 - rate)
    return Noise(_draw(transition[clean], np.random.default_rng(seed).random(len(clean))), transition)


def asymmetric(
    labels: ArrayLike,
    rate: float,
    seed: int = 0,
    num_classes: int | None = None,
    mapping: dict[int, int] | None = None,
) -> Noise:
    """With probability ``rate`` the next class, or the one ``mapping`` names (classes it omits stay clean)."""
    clean, C = _check_labels(labels, rate, seed, num_classes)
    flips = {c: (c + 1) % C for c in range(C)} if mapping is None else mapping
    transition = np.eye(C)
    for source, target in flips.items():
        for value in (source, target):
            check(0 <= value < C, f"mapping holds class {value}, wanted 0 to {C - 1}")
        if source != target:
            transition[source, source], transition[source, target] = 1 - rate, rate
    return Noise(_draw(transition[clean], np.random.default_rng(seed).random(len(clean))), transition)


def instance_dependent(
    x: ArrayLike, labels: ArrayLike, rate: float, seed: int = 0, num_classes: int | None = None
) -> Noise:
    """Flips that depend on the input: P_i = rho_i softmax_{j != y_i}(x_i W[y_i]), P_i[y_i] = 1 - rho_i.

    rho_i ~ TruncNormal(rate, 0.1^2, [0, 1]); W[c] standard normal, [features, C]. Truncation pulls the share of
    wrong labels inwards within 0.2 of either end (0.05 flips a tenth). A rate of 0 flips nothing.
    """
    clean, C = _check_labels(labels, rate, seed, num_classes)
    check(not issparse(x), "x is a sparse matrix, wanted a dense array")
    inputs = np.asarray(x)
    check(inputs.ndim >= 2, f"x has shape {inputs.shape}, wanted (samples, features)")
    check(len(inputs) == len(clean), f"x has {len(inputs)} rows, wanted {len(clean)} as labels has")
    inputs = inputs.reshape(len(inputs), -1)
    check(np.isrealobj(inputs) and np.issubdtype(inputs.dtype, np.number), f"x is {inputs.dtype}, wanted numbers")
    with np.errstate(over="ignore"):
        inputs = inputs.astype(np.float32, copy=False)
    check(bool(np.isfinite(inputs).all()), "x holds NaN or what is infinite in float32, wanted finite features")
    transition = np.empty((len(clean), C))
    labels_N = np.empty_like(clean)
    for rows, P, noisy in instance_dependent_rows(lambda rows: inputs[rows], inputs.shape[1], clean, C, rate, seed):
        transition[rows], labels_N[rows] = P, noisy
    return Noise(labels_N, transition)


def instance_dependent_rows(
    read: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    num_features: int,
    clean: NDArray[np.int64],
    num_classes: int,
    rate: float,
    seed: int,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]]:
    """The same, class by class and a few thousand samples at a time: (rows, their P, their noisy labels).

    ``read(rows)`` gives their inputs, [rows, features]: neither inputs nor P need fit in memory.
    """
    rates_seed, labels_seed, *class_seeds = np.random.SeedSequence(seed).spawn(2 + num_classes)
    rho = np.zeros(len(clean))
    if rate > 0:
        low, high = (0 - rate) / FLIP_SPREAD, (1 - rate) / FLIP_SPREAD
        u = np.random.default_rng(rates_seed).random(len(clean))
        rho = truncnorm.ppf(u, low, high, loc=rate, scale=FLIP_SPREAD)
    u = np.random.default_rng(labels_seed).random(len(clean))
    for c in np.unique(clean):
        W = np.random.default_rng(class_seeds[c]).standard_normal((num_features, num_classes), dtype=np.float32)
        of_class = np.flatnonzero(clean == c)
        for start in range(0, len(of_class), CHUNK):
            rows = of_class[start : start + CHUNK]
            a = (read(rows) @ W).astype(np.float64)
            a[:, c] = -np.inf
            a = np.exp(a - a.max(1, keepdims=True))
            P = rho[rows, None] * a / a.sum(1, keepdims=True)
            P[:, c] = 1 - rho[rows]
            yield rows, P, _draw(P, u[rows])


def class_matrix(transition: NDArray[np.float64], clean: ArrayLike, num_classes: int) -> NDArray[np.float64]:
    """The class-level matrix of an instance transition: mean row of the samples of each class."""
    given = np.asarray(clean)
    matrix = np.eye(num_classes)
    for c in np.unique(given):
        matrix[c] = transition[given == c].mean(0)
    return matrix
