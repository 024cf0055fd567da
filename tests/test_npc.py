"""NPC restores a classifier that repeats wrong labels; its prior by hand; what it refuses."""

import numpy as np
import pytest
import torch

from fastgnl.errors import InputError
from fastgnl.npc import NPC, neighbour_share

CLASSES = 4


def clusters(n, seed, wrong=0.4):
    """Points around four centres, their classes, and a sure classifier that is wrong for a share of them."""
    g = np.random.default_rng(seed)
    y = g.integers(CLASSES, size=n)
    x = 4 * np.eye(CLASSES, 6)[y] + g.normal(size=(n, 6))
    said = np.where(g.random(n) < wrong, (y + g.integers(1, CLASSES, n)) % CLASSES, y)
    return x, y, 0.9 * np.eye(CLASSES)[said] + 0.1 / CLASSES


@pytest.fixture(scope="module")
def fitted():
    x, _, p = clusters(1000, 0)
    return NPC().fit(x, p)


def test_a_classifier_that_is_wrong_for_two_in_five_is_restored(fitted):
    x, y, p = clusters(1000, 1)
    assert (p.argmax(1) == y).mean() < 0.65
    assert (fitted.predict(x, p) == y).mean() > 0.95


def test_rows_sum_to_one_and_follow_the_classifier(fitted):
    x, _, p = clusters(50, 2)
    q = fitted.predict_proba(x, p)
    assert q.shape == p.shape
    assert (q >= 0).all()
    np.testing.assert_allclose(q.sum(1), 1, atol=1e-12)
    assert np.abs(q - fitted.predict_proba(x, np.roll(p, 1, axis=1))).max() > 1e-3


def test_the_posterior_is_the_mode_of_q_weighted_by_the_probabilities(fitted):
    x, _, p = clusters(3, 3)
    wanted = np.zeros_like(p)
    for said in range(CLASSES):
        alone = np.tile(np.eye(CLASSES)[said], (3, 1))
        wanted += p[:, said : said + 1] * fitted.predict_proba(x, alone)
    np.testing.assert_allclose(fitted.predict_proba(x, p), wanted, atol=1e-6)
    one_hot = torch.eye(CLASSES)[[2, 2, 2]]
    rows = torch.from_numpy(fitted.scaler_.transform(x.astype(np.float32)))
    above = torch.nn.functional.softplus(fitted.encoder_(rows, one_hot).detach()) + 1 / CLASSES
    np.testing.assert_allclose(fitted.predict_proba(x, one_hot), above / above.sum(1, keepdim=True), atol=1e-6)


def test_a_seed_fixes_the_result_and_the_global_generator_is_left_alone():
    x, _, p = clusters(200, 0)
    before = torch.random.get_rng_state()
    first = NPC(epochs=2, seed=3).fit(x, p).predict_proba(x, p)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    np.testing.assert_array_equal(NPC(epochs=2, seed=3).fit(x, p).predict_proba(x, p), first)
    assert not np.array_equal(NPC(epochs=2, seed=4).fit(x, p).predict_proba(x, p), first)


def test_torch_and_half_precision_inputs_give_the_same():
    x, _, p = clusters(60, 0)
    x = x.astype(np.float16)
    by_numpy = NPC(epochs=1).fit(x, p).predict(x, p)
    x, p = torch.from_numpy(x), torch.from_numpy(p).requires_grad_()
    np.testing.assert_array_equal(NPC(epochs=1).fit(x, p).predict(x, p), by_numpy)


def test_the_share_by_hand():
    """Directions at 0, 10, 40 and 90 degrees; lengths do not count."""
    degrees = torch.tensor([0.0, 10.0, 40.0, 90.0]).deg2rad()
    x = torch.stack([degrees.cos(), degrees.sin()], 1) * torch.tensor([[1.0], [50.0], [0.1], [3.0]])
    labels = torch.tensor([0, 1, 1, 2])
    wanted = [[0, 1, 0], [0.5, 0.5, 0], [0.5, 0.5, 0], [0, 1, 0]]
    assert neighbour_share(x, labels, 3, neighbours=2).tolist() == wanted


def test_a_sample_is_not_its_own_neighbour():
    x = torch.eye(5)
    labels = torch.arange(5)
    share = neighbour_share(x, labels, 5, neighbours=4)
    assert torch.equal(share, (1 - torch.eye(5)) / 4)


def test_chunks_do_not_change_the_share(monkeypatch):
    x, y, _ = clusters(50, 0)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    whole = neighbour_share(x, y, CLASSES, 10)
    monkeypatch.setattr("fastgnl.npc.ROOM", 7 * 50)
    assert torch.equal(neighbour_share(x, y, CLASSES, 10), whole)


def test_the_prior_counts_predictions_or_the_given_labels():
    x = np.array([[-1.0], [-1.0], [1.0], [1.0]])
    p = np.eye(2)[[0, 0, 1, 1]]
    by_predictions = NPC(neighbours=1, rho=5.0, epochs=1).fit(x, p)
    assert by_predictions.prior_.tolist() == [[6.5, 1.5], [6.5, 1.5], [1.5, 6.5], [1.5, 6.5]]
    by_labels = NPC(neighbours=1, rho=5.0, epochs=1).fit(x, p, labels=[0, 1, 1, 1])
    assert by_labels.prior_.tolist() == [[1.5, 6.5], [6.5, 1.5], [1.5, 6.5], [1.5, 6.5]]


GOOD_X, GOOD_P = np.ones((20, 3)), np.full((20, 2), 0.5)


@pytest.mark.parametrize(
    ("x", "p", "labels", "message"),
    [
        (GOOD_X[0], GOOD_P, None, r"features has shape \(3,\), wanted \(samples, features\)"),
        (GOOD_X, GOOD_P[:, 0], None, r"probabilities has shape \(20,\), wanted \(samples, classes\)"),
        (GOOD_X, GOOD_P[:5], None, "probabilities has 5 rows, wanted 20 as features has"),
        (GOOD_X[:0], GOOD_P[:0], None, r"features has shape \(0, 3\), wanted at least 1 row and 1 column"),
        (GOOD_X[:10], GOOD_P[:10], None, "features has 10 rows, wanted at least 11"),
        (GOOD_X * np.nan, GOOD_P, None, "features holds NaN"),
        (GOOD_X, GOOD_P * np.nan, None, "probabilities holds NaN"),
        (GOOD_X, GOOD_P * 3, None, "probabilities has a row that sums to 3, wanted rows that sum to 1"),
        (GOOD_X, GOOD_P + np.array([1, -1]), None, "probabilities holds -0.5, wanted none below 0"),
        (GOOD_X, GOOD_P[:, :1] * 2, None, "probabilities has 1 columns, wanted at least 2 classes"),
        (GOOD_X.astype(str), GOOD_P, None, "features is <U32, wanted numbers"),
        (GOOD_X, GOOD_P, np.zeros(20), "labels is float64, wanted integers"),
        (GOOD_X, GOOD_P, np.zeros(3, int), "labels has 3 rows, wanted 20 as features has"),
        (GOOD_X, GOOD_P, np.full(20, 2), "labels holds 2, wanted 0 to 1"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(x, p, labels, message):
    with pytest.raises(InputError, match=message):
        NPC().fit(x, p, labels)


@pytest.mark.parametrize(
    "options", [{"neighbours": 0}, {"hidden": 0}, {"epochs": 1.5}, {"lr": float("nan")}, {"rho": -1}, {"seed": -1}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        NPC(**options).fit(GOOD_X, GOOD_P)


def test_rows_to_predict_must_be_like_those_of_fit(fitted):
    with pytest.raises(InputError, match="features has 5 columns, wanted 6 as in fit"):
        fitted.predict(np.ones((2, 5)), np.full((2, CLASSES), 1 / CLASSES))
    with pytest.raises(InputError, match="probabilities has 2 columns, wanted 4 as in fit"):
        fitted.predict(np.ones((2, 6)), np.full((2, 2), 0.5))
