"""The paper's lemmas, its proposition and what it says around them, checked on small problems by full enumeration.

python bench/theory.py [--draws 300] [--json FILE]

A problem is a joint distribution of the true class y and of a pseudo-label, drawn at random; expectations are sums over
all of it, in float64. The exit code is 1 where a statement turns out otherwise than listed here.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from common import show
from numpy.random import Generator
from numpy.typing import NDArray

from fastgnl.cli import run_worker
from fastgnl.errors import check_count, check_seed
from fastgnl.files import written
from fastgnl.report import axes, run_colour, svg

TOLERANCE = 1e-9
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Config:
    """Which of the paper's statements hold, and how far off the others are."""

    draws: int = 300
    """Random problems for each statement."""
    seed: int = 0
    json: Path | None = None
    """Write the rows here too, with a table and the plot beside it."""

    def __post_init__(self) -> None:
        check_count("draws", self.draws, 1)
        check_seed(self.seed)


@dataclass(frozen=True)
class Claim:
    """A statement, and how far it is off on one random problem: 0 where it holds."""

    statement: str
    checked: str
    violation: Callable[[Generator], float]
    true: bool = True
    """What is expected of it."""


def examine(claim: Claim, draws: int, seed: int) -> dict[str, object]:
    """The largest violation over the draws."""
    g = np.random.default_rng(seed)
    found = [claim.violation(g) for _ in range(draws)]
    largest = max(found) if np.isfinite(found).all() else float("inf")
    return {
        "statement": claim.statement,
        "checked": claim.checked,
        "draws": draws,
        "largest violation": f"{largest:.1e}",
        "holds": "yes" if largest <= TOLERANCE else "NO",
        "as expected": "yes" if (largest <= TOLERANCE) == claim.true else "NO",
    }


# Problems: joint_YS[y, s] is the probability of class y with the pseudo-label label_SC[s].


def classes(g: Generator, least: int = 2) -> int:
    return int(g.integers(least, 8))


def joint(g: Generator, rows: int, columns: int) -> Array:
    """Some of them near to a corner, some near to even."""
    return g.dirichlet(np.full(rows * columns, g.choice([0.1, 1.0, 10.0]))).reshape(rows, columns)


def error(joint_YS: Array, label_SC: Array) -> float:
    """E ||y - label||^2."""
    gap_YSC = np.eye(label_SC.shape[1])[:, None] - label_SC[None]
    return float((joint_YS * (gap_YSC**2).sum(-1)).sum())


def subsets(C: int, K: int) -> NDArray[np.bool_]:
    """All candidate sets of K classes, [S, C]."""
    return np.array([np.isin(np.arange(C), members) for members in combinations(range(C), K)])


def uniform(member_SC: NDArray[np.bool_]) -> Array:
    return member_SC / member_SC.sum(1, keepdims=True)


def covered(joint_YS: Array, member_SC: NDArray[np.bool_]) -> float:
    """p_k."""
    return float((joint_YS * member_SC.T).sum())


def with_coverage(g: Generator, C: int, K: int, p_k: float) -> tuple[Array, NDArray[np.bool_]]:
    """A problem with sets of K < C classes that hold the true one with probability p_k."""
    member_SC = subsets(C, K)
    joint_YS = joint(g, C, len(member_SC)) + 1e-12
    inside = member_SC.T
    joint_YS[inside] *= p_k / joint_YS[inside].sum()
    joint_YS[~inside] *= (1 - p_k) / joint_YS[~inside].sum()
    return joint_YS, member_SC


def formula(p_k: float, K: float) -> float:
    """Lemma 2: 1 + (1 - 2 p_k) / K."""
    return 1 + (1 - 2 * p_k) / K


# What is printed.


def hard(g: Generator) -> float:
    C = classes(g)
    joint_YY = joint(g, C, C)
    return abs(error(joint_YY, np.eye(C)) - 2 * (1 - float(np.trace(joint_YY))))


def partial(g: Generator) -> float:
    C = classes(g)
    K = int(g.integers(1, C + 1))
    member_SC = subsets(C, K)
    joint_YS = joint(g, C, len(member_SC))
    return abs(error(joint_YS, uniform(member_SC)) - formula(covered(joint_YS, member_SC), K))


def slope_in_coverage(g: Generator) -> float:
    """Two problems of one K: the error is a line in p_k, so that a difference is its slope."""
    C = classes(g)
    K = int(g.integers(1, C))
    low, high = 0.5 * g.random(), 0.5 + 0.5 * g.random()
    errors = [error(made[0], uniform(made[1])) for made in (with_coverage(g, C, K, p) for p in (low, high))]
    return abs((errors[1] - errors[0]) / (high - low) + 2 / K)


def slope_in_size(g: Generator) -> float:
    """By complex step: no difference is taken, so nothing is lost to rounding."""
    p_k, K, h = g.random(), 1 + 20 * g.random(), 1e-30
    return float(abs(np.imag(1 + (1 - 2 * p_k) / complex(K, h)) / h - (2 * p_k - 1) / K**2))


def next_size(g: Generator) -> float:
    """E(K + 1) - E(K) = (2 p_k - 1) / (K (K + 1)), which has the sign of the derivative."""
    C, p_k = classes(g, 3), g.random()
    K = int(g.integers(1, C - 1))
    errors = [error(made[0], uniform(made[1])) for made in (with_coverage(g, C, k, p_k) for k in (K, K + 1))]
    return abs(errors[1] - errors[0] - (2 * p_k - 1) / (K * (K + 1)))


def no_effect(g: Generator) -> float:
    C = classes(g, 3)
    found = [error(made[0], uniform(made[1])) for made in (with_coverage(g, C, k, 0.5) for k in range(1, C))]
    return max(found) - min(found)


def best_case(g: Generator) -> float:
    """c = y, and the given label is another class."""
    C = classes(g)
    joint_YS, member_SC = with_coverage(g, C, 2, 1.0) if C > 2 else (np.full((2, 1), 0.5), subsets(2, 2))
    return max(abs(error(np.diag(g.dirichlet(np.ones(C))), np.eye(C))), abs(error(joint_YS, uniform(member_SC)) - 0.5))


def worst_case(g: Generator) -> float:
    C = classes(g, 3)
    wrong_YY = joint(g, C, C) + 1e-12
    np.fill_diagonal(wrong_YY, 0)
    joint_YS, member_SC = with_coverage(g, C, C - 1, 0.0)
    hard_error = error(wrong_YY / wrong_YY.sum(), np.eye(C))
    return max(abs(hard_error - 2), abs(error(joint_YS, uniform(member_SC)) - 1 - 1 / (C - 1)))


def kl(a_C: Array, b_C: Array) -> float:
    return float((a_C * (np.log(a_C) - np.log(b_C))).sum())


def implied(g: Generator, prior: Callable[[int], Array]) -> float:
    """|KL(q || r) - KL(r || q)| where the columns of the batch have equal sums: its rows are turns of one q."""
    C = classes(g, 3)
    q_C = g.dirichlet(np.ones(C)) + 1e-6
    q_C /= q_C.sum()
    q_BC = np.array([np.roll(q_C, i) for i in range(C)])
    r_C = prior(C) * q_C / q_BC.sum(0)
    r_C /= r_C.sum()
    return abs(kl(q_C, r_C) - kl(r_C, q_C))


def even(C: int) -> Array:
    return np.full(C, 1 / C)


def floored(C: int) -> Array:
    """Even on two classes, the floor of 1e-9 elsewhere."""
    return np.where(np.arange(C) < 2, 0.5, 1e-9)


# What it needs besides, or would have to say.


def sets_of_all_sizes(C: int) -> NDArray[np.bool_]:
    return np.concatenate([subsets(C, K) for K in range(1, C + 1)])


def mean_size(g: Generator) -> float:
    C = classes(g)
    member_SC = sets_of_all_sizes(C)
    joint_YS = joint(g, C, len(member_SC))
    size = float((joint_YS.sum(0) * member_SC.sum(1)).sum())
    return abs(error(joint_YS, uniform(member_SC)) - formula(covered(joint_YS, member_SC), size))


def each_size(g: Generator) -> float:
    C = classes(g)
    member_SC = sets_of_all_sizes(C)
    joint_YS = joint(g, C, len(member_SC))
    expected = 1 + float((joint_YS * (1 - 2 * member_SC.T) / member_SC.sum(1)).sum())
    return abs(error(joint_YS, uniform(member_SC)) - expected)


def added_up(C: int) -> Array:
    """(y~ + c + u) / Z with one class in u, for all y~, c and u, [C^3, C]."""
    one_CC = np.eye(C)
    return np.array([a + b + c for a in one_CC for b in one_CC for c in one_CC]) / 3


def additive(g: Generator) -> float:
    """The error against that of p even on the classes that are named."""
    C = classes(g, 3)
    label_SC = added_up(C)
    joint_YS = joint(g, C, len(label_SC))
    member_SC = label_SC > 0
    expected = 1 + float((joint_YS * (1 - 2 * member_SC.T) / member_SC.sum(1)).sum())
    return abs(error(joint_YS, label_SC) - expected)


def any_prior(g: Generator) -> float:
    C = classes(g, 3)
    label_SC = added_up(C)
    joint_YS = joint(g, C, len(label_SC))
    expected = 1 + float((joint_YS.sum(0) * (label_SC**2).sum(1)).sum()) - 2 * float((joint_YS * label_SC.T).sum())
    return abs(error(joint_YS, label_SC) - expected)


def enlarged(g: Generator) -> tuple[float, float, float, int]:
    """One class more in each set: (the rise of the error, p_k before, what was gained of it, K)."""
    C = classes(g, 3)
    K = int(g.integers(1, C))
    member_SC = subsets(C, K)
    joint_YS = joint(g, C, len(member_SC))
    larger_SC = member_SC.copy()
    for member_C in larger_SC:
        member_C[g.choice(np.flatnonzero(~member_C))] = True
    before, after = covered(joint_YS, member_SC), covered(joint_YS, larger_SC)
    rise = error(joint_YS, uniform(larger_SC)) - error(joint_YS, uniform(member_SC))
    return rise, before, after - before, K


def grows(g: Generator) -> float:
    rise, p_k, _, _ = enlarged(g)
    return max(-rise, 0.0) if p_k > 0.5 else 0.0


def shrinks(g: Generator) -> float:
    rise, p_k, _, _ = enlarged(g)
    return max(rise, 0.0) if p_k < 0.5 else 0.0


def threshold(g: Generator) -> float:
    """The rise is -2 / (K + 1) times what the gain exceeds (2 p_k - 1) / (2 K) by."""
    rise, p_k, gain, K = enlarged(g)
    return abs(rise + 2 / (K + 1) * (gain - (2 * p_k - 1) / (2 * K)))


def worst_is_large(g: Generator) -> float:
    C = classes(g, 3)
    found = [error(made[0], uniform(made[1])) for made in (with_coverage(g, C, k, 0.0) for k in range(1, C))]
    return max(found) - found[-1]


def worst_is_one(g: Generator) -> float:
    C = classes(g, 3)
    found = [error(made[0], uniform(made[1])) for made in (with_coverage(g, C, k, 0.0) for k in range(1, C))]
    return max(abs(found[0] - 2), max(found) - found[0], abs(min(found) - 1 - 1 / (C - 1)))


def perfect_coverage(g: Generator) -> tuple[float, float]:
    """Sets {given label, c} with c = y: (the error, the share of wrong given labels)."""
    C = classes(g)
    given_YY = joint(g, C, C)
    total = 0.0
    for y in range(C):
        member_SC = (np.eye(C) + np.eye(C)[y]) > 0
        only_YS = np.zeros((C, C))
        only_YS[y] = given_YY[y]
        total += error(only_YS, uniform(member_SC))
    return total, 1 - float(np.trace(given_YY))


def always_half(g: Generator) -> float:
    return abs(perfect_coverage(g)[0] - 0.5)


def half_the_noise(g: Generator) -> float:
    found, wrong = perfect_coverage(g)
    return abs(found - wrong / 2)


def hard_or_partial(g: Generator) -> float:
    """Whether partial labels are the better ones is whether p_c < 1/2 + (2 p_k - 1) / (2 K)."""
    C = classes(g)
    K = int(g.integers(1, C + 1))
    member_SC = subsets(C, K)
    joint_YS, joint_YY = joint(g, C, len(member_SC)), joint(g, C, C)
    p_c, p_k = float(np.trace(joint_YY)), covered(joint_YS, member_SC)
    lead = error(joint_YY, np.eye(C)) - error(joint_YS, uniform(member_SC))
    return abs(lead - 2 * (0.5 + (2 * p_k - 1) / (2 * K) - p_c))


def printed_sign(g: Generator) -> float:
    """How much lower sum_j p_j log q_j is at another q than at q = p."""
    p_C, q_C = g.dirichlet(np.ones(5), 2) + 1e-9
    return max(float((p_C * np.log(p_C)).sum() - (p_C * np.log(q_C)).sum()), 0.0)


def other_sign(g: Generator) -> float:
    p_C, q_C = g.dirichlet(np.ones(5), 2) + 1e-9
    return max(float((p_C * np.log(q_C / q_C.sum())).sum() - (p_C * np.log(p_C / p_C.sum())).sum()), 0.0)


PRINTED = (
    Claim("Lemma 1: E|y - y^|^2 = 2(1 - p_c)", "random p(y, y^)", hard),
    Claim("Lemma 2: E|y - y-|^2 = 1 + (1 - 2 p_k)/K", "random p(y, S), all S of one size K", partial),
    Claim("Proposition: dE/dp_k = -2/K", "two problems of one K", slope_in_coverage),
    Claim("Proposition: dE/dK = (2 p_k - 1)/K^2", "complex step, K real", slope_in_size),
    Claim("Proposition: E falls with K if p_k < 1/2, rises if p_k > 1/2", "K to K + 1 at equal p_k < 1", next_size),
    Claim("Proposition: K has no first-order effect at p_k = 1/2 (it has none at all)", "all K < C", no_effect),
    Claim("Best case, every given label wrong: 0 (hard), 1/2 (partial)", "p_c = p_k = 1, K = 2", best_case),
    Claim("p_c = 0, p_k = 0, K = C - 1: 2 (hard), 1 + 1/K (partial)", "random wrong labels", worst_case),
    Claim(
        "KL = reverse KL for even sum_j g(x_j) and p_i (both are 0)",
        "p_i even on all classes",
        lambda g: implied(g, even),
    ),
)
LIMITS = (
    Claim("Lemma 2 where sizes vary, with K = E|S|", "random p(y, S), S of any size", mean_size, true=False),
    Claim("... instead: E = 1 + E[(1 - 2 [y in S])/|S|]", "the same problems", each_size),
    Claim(
        "Lemma 2 for the prior (y~ + c + u)/Z as it is printed", "all y~, c, u of one class each", additive, true=False
    ),
    Claim("... instead: E = 1 + E|p|^2 - 2 E[p_y]", "the same problems", any_prior),
    Claim("One class more in each set raises E if p_k > 1/2", "sets that grow, so p_k may rise", grows, true=False),
    Claim("... instead: if and only if p_k rises by less than (2 p_k - 1)/(2K)", "the same problems", threshold),
    Claim("One class more in each set lowers E if p_k < 1/2", "sets that grow", shrinks),
    Claim("Of sets without y, those of C - 1 classes are the worst", "p_k = 0, all K < C", worst_is_large, true=False),
    Claim(
        "... instead: they are the best, 1 + 1/(C - 1); the worst is K = 1, with 2", "the same problems", worst_is_one
    ),
    Claim("Best case of {y~, c}, c = y: E = 1/2", "any share of wrong labels", always_half, true=False),
    Claim("... instead: E = half the share of wrong labels", "the same problems", half_the_noise),
    Claim("Partial beats hard if and only if p_c < 1/2 + (2 p_k - 1)/(2K)", "random pairs", hard_or_partial),
    Claim(
        "KL = reverse KL for p_i even on its set only", "two classes in it", lambda g: implied(g, floored), true=False
    ),
    Claim("L_CE_PRI as printed, sum_j p_j log g_j, is least at g = p", "random g", printed_sign, true=False),
    Claim("... instead: -sum_j p_j log g_j is", "random g", other_sign),
)
"""Readings of the text that are not true as they stand, each with what is."""


def plot(seed: int, samples: int = 4000) -> str:
    """Left: Lemma 2 as lines, the mean over samples of real sets as points. Right: the p_c up to which partial labels
    are the better ones."""
    g, C = np.random.default_rng(seed), 10
    figure, (left, right) = axes(2, 3.6)
    shares = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
    sizes = np.arange(1, C)
    for i, p_k in enumerate(shares):
        left.plot(sizes, [formula(p_k, K) for K in sizes], color=run_colour(i), label=f"p_k = {p_k:g}")
        drawn = [sampled(g, C, int(K), p_k, samples) for K in sizes]
        left.scatter(sizes, drawn, color=run_colour(i), s=10)
        right.plot(sizes, [0.5 + (2 * p_k - 1) / (2 * K) for K in sizes], color=run_colour(i))
    left.set_title("E|y - partial label|² for each p_k; points: sampled", fontsize=10, loc="left")
    right.set_title("partial labels are better than hard ones below this p_c", fontsize=10, loc="left")
    for ax in (left, right):
        ax.set_xlabel("K, classes in the set")
    left.legend(frameon=False, fontsize=8)
    return svg(figure)


def sampled(g: Generator, C: int, K: int, p_k: float, samples: int) -> float:
    """The mean over drawn classes and sets, without the formula."""
    key_NC = g.random((samples, C))
    y_N = g.integers(0, C, samples)
    key_NC[np.arange(samples), y_N] = np.where(g.random(samples) < p_k, -1, 2)
    member_NC = key_NC <= np.sort(key_NC, 1)[:, K - 1 : K]
    return float(((np.eye(C)[y_N] - member_NC / K) ** 2).sum(1).mean())


def main(config: Config) -> None:
    printed, limits = ([examine(claim, config.draws, config.seed) for claim in part] for part in (PRINTED, LIMITS))
    show(printed, config.json, more={"What the statements need besides, and what the text around them misses": limits})
    place = Path("runs/bench/theory.svg") if config.json is None else config.json.with_suffix(".svg")
    with written(place) as file:
        file.write(plot(config.seed))
    print(f"picture: {place}")
    if config.json is not None:
        with config.json.with_suffix(".md").open("a") as file:
            file.write(f"\n![Error of partial labels]({place.name})\n")
    wrong = [row["statement"] for row in [*printed, *limits] if row["as expected"] == "NO"]
    if wrong:
        print("not as expected: " + "; ".join(map(str, wrong)), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_worker(Config, main)
