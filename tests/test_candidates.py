"""Candidate sets: the sampling law, and every set against a loop over samples written from the specification."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fastgnl.kernels import philox
from fastgnl.kernels.candidates import FLOOR, candidate_sets, coverage_label

ROWS = 40_000


def draw(C, w=None, *, labels=None, table=None, rows=ROWS, k_max=None, coverage="sample", step=0, tau=0.5, **options):
    """Candidate sets of ``rows`` samples with ids 0, 1, ...; returns (coverage labels, Candidates)."""
    ids = torch.arange(rows)
    words = philox.words(11, ids, C, step, [philox.COVERAGE, philox.FREE, philox.WARMUP])
    labels = torch.zeros(rows, dtype=torch.int64) if labels is None else labels
    table = torch.full((C,), 1 / C) if table is None else table
    named = [] if coverage == "none" else [coverage_label(table.expand(rows, C), words[0], tau, coverage)]
    probability = None if w is None else torch.as_tensor(w, dtype=torch.float32).expand(rows)
    return named, candidate_sets(labels, named, words[1], words[2, :, 0], probability, k_max=k_max, **options)


@pytest.mark.parametrize(("tau", "power"), [(0.5, 2), (1.0, 1), (0.25, 4), (0.8, 1.25)])
def test_coverage_labels_follow_the_sharpened_table(tau, power):
    table = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02])
    (coverage,), _ = draw(5, table=table, tau=tau)
    expected = table.double() ** power
    counts = np.bincount(coverage.numpy(), minlength=5)
    assert chisquare(counts, (expected / expected.sum() * ROWS).numpy()).pvalue > 1e-4


def test_coverage_draws_of_two_steps_are_independent():
    (first,), _ = draw(4)
    (second,), _ = draw(4, step=1)
    pairs = np.bincount((first * 4 + second).numpy(), minlength=16)
    assert chisquare(pairs).pvalue > 1e-4


def test_argmax_coverage():
    (coverage,), _ = draw(3, table=torch.tensor([0.2, 0.5, 0.3]), rows=10, coverage="argmax")
    assert coverage.tolist() == [1] * 10


@pytest.mark.parametrize("w", [0.0, 0.1, 0.37, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("k_max", [None, 3])
def test_set_sizes_are_exact(w, k_max):
    C = 9
    (coverage,), sets = draw(C, w, k_max=k_max, rows=500)
    base = 1 + (coverage != 0).long()
    free = C - base
    cap = free if k_max is None else free.clamp(max=k_max)
    expected = base + torch.tensor([round(np.float32(w) * int(n)) for n in cap])
    assert torch.equal(sets.member_BC.sum(1), expected)


def test_free_classes_are_uniform_and_never_the_named_ones():
    labels = torch.full((ROWS,), 2)
    _, sets = draw(7, 0.5, labels=labels, coverage="none")
    counts = sets.member_BC.sum(0)
    assert counts[2] == ROWS
    free = torch.cat([counts[:2], counts[3:]]).numpy()
    assert free.sum() == 3 * ROWS
    assert chisquare(free).pvalue > 1e-4
    # And so is each of the 20 sets of three.
    member = sets.member_BC[:, [0, 1, 3, 4, 5, 6]].long()
    triples = (member * 2 ** torch.arange(6)).sum(1)
    pattern_counts = np.bincount(triples.numpy(), minlength=64)
    assert chisquare(pattern_counts[pattern_counts > 0]).pvalue > 1e-4
    assert (pattern_counts > 0).sum() == 20


@pytest.mark.parametrize(
    ("C", "k_max", "most"), [(10, None, 7), (10, 4, 3), (4, None, 1), (3, None, 0), (2, None, 0), (10, 0, 0)]
)
def test_warm_up_counts_are_uniform(C, k_max, most):
    (coverage,), sets = draw(C, None, k_max=k_max)
    extra = sets.member_BC.sum(1) - 1 - (coverage != 0).long()
    counts = np.bincount(extra.numpy())
    assert len(counts) == most + 1
    assert most == 0 or chisquare(counts).pvalue > 1e-4


def test_prior_is_uniform_on_the_set_and_floored_elsewhere():
    _, sets = draw(6, 0.4, rows=200)
    p = sets.log_prior_BC.double().exp()
    size = sets.member_BC.sum(1, keepdim=True)
    expected = torch.where(sets.member_BC, 1 / size.double(), torch.full_like(p, FLOOR))
    torch.testing.assert_close(p, expected, rtol=1e-5, atol=0)


def test_additive_prior_weighs_a_label_named_twice_double():
    (coverage,), sets = draw(6, 0.0, rows=300, form="additive")
    p = sets.log_prior_BC.exp()
    twice = coverage == 0
    assert twice.any()
    assert (~twice).any()
    torch.testing.assert_close(p[twice, 0], torch.ones(int(twice.sum())))
    torch.testing.assert_close(p[~twice, 0], torch.full((int((~twice).sum()),), 0.5))
    _, with_free = draw(6, 0.5, rows=300, form="additive")
    size = with_free.member_BC[twice].sum(1)
    torch.testing.assert_close(with_free.log_prior_BC[twice, 0].exp(), 2 / (size + 1))


def test_without_random_labels_only_named_ones_are_members():
    (coverage,), sets = draw(6, 1.0, rows=300, random_labels=False)
    expected = torch.zeros(300, 6, dtype=torch.bool)
    expected[:, 0] = True
    expected[torch.arange(300), coverage] = True
    assert torch.equal(sets.member_BC, expected)


def one_sample(seed, sample, C, step, y, M, w, k_max):
    """One candidate set, written down from the specification with plain integers."""

    def word(c, stream):
        counter = tuple(torch.tensor(v) for v in (sample, c // 4, step, stream))
        return int(philox.philox_4x32_10(counter, seed)[c % 4])

    race = [-math.log((2 * (word(j, philox.COVERAGE) >> 9) + 1) / 2**24) / float(M[j]) ** 2 for j in range(C)]
    chosen = {y, race.index(min(race))}
    free = [j for j in range(C) if j not in chosen]
    if w is None:
        most = max(min(C - 3, C if k_max is None else k_max - 1), 0)
        k = word(0, philox.WARMUP) * (most + 1) >> 32
    else:
        k = round(np.float32(w) * min(len(free), C if k_max is None else k_max))
    free.sort(key=lambda j: (word(j, philox.FREE), j))
    return chosen | set(free[:k])


@settings(max_examples=60, deadline=None)
@given(
    C=st.integers(2, 40),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**31),
    w=st.none() | st.floats(0, 1, width=32),
    k_max=st.none() | st.integers(1, 25),
    data=st.randoms(use_true_random=False),
)
def test_sets_equal_a_loop_over_samples(C, seed, step, w, k_max, data):
    rows = 4
    ids = torch.tensor([data.randrange(2**32) for _ in range(rows)])
    labels = torch.tensor([data.randrange(C) for _ in range(rows)])
    table = torch.tensor([[data.uniform(1e-4, 1) for _ in range(C)] for _ in range(rows)])
    table = table / table.sum(1, keepdim=True)
    words = philox.words(seed, ids, C, step, [philox.COVERAGE, philox.FREE, philox.WARMUP])
    coverage = coverage_label(table, words[0], 0.5, "sample")
    probability = None if w is None else torch.full((rows,), w)
    sets = candidate_sets(labels, [coverage], words[1], words[2, :, 0], probability, k_max=k_max)
    for i in range(rows):
        members = set(sets.member_BC[i].nonzero().flatten().tolist())
        assert members == one_sample(seed, int(ids[i]), C, step, int(labels[i]), table[i], w, k_max)
