"""The noise filter against scikit-learn's GaussianMixture, and where the losses say nothing."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from sklearn.mixture import GaussianMixture

from fastgnl.mixture import MAX_ITER, TOLERANCE, VARIANCE_FLOOR, noise_probability


def by_scikit_learn(losses, **options):
    x = (losses - losses.min()) / (losses.max() - losses.min())
    x = x.double().numpy().reshape(-1, 1)
    settings = {"max_iter": MAX_ITER, "tol": TOLERANCE, "reg_covar": VARIANCE_FLOOR, **options}
    mixture = GaussianMixture(2, random_state=0, n_init=5, **settings).fit(x)
    return mixture.predict_proba(x)[:, mixture.means_.argmax()]


def two_groups(n, noisy, gap, seed, shape=2.0):
    g = np.random.default_rng(seed)
    losses = np.concatenate([g.gamma(shape, 0.1, n - noisy), gap + g.gamma(shape, 0.4, noisy)])
    return torch.from_numpy(losses).float(), np.arange(n) >= n - noisy


@pytest.mark.parametrize(
    ("n", "noisy", "gap"), [(3000, 1200, 2.0), (3000, 300, 3.0), (500, 250, 1.0), (20_000, 8000, 1.5), (60, 20, 2.0)]
)
def test_equals_scikit_learn(n, noisy, gap):
    losses, wrong = two_groups(n, noisy, gap, seed=n)
    w = noise_probability(losses)
    np.testing.assert_allclose(w.numpy(), by_scikit_learn(losses), atol=2e-3)
    assert roc_auc_score(wrong, w) > 0.9


def test_equals_scikit_learn_run_to_convergence():
    losses, _ = two_groups(4000, 1500, 0.8, seed=5)
    w = noise_probability(losses, max_iter=500, tolerance=1e-9)
    np.testing.assert_allclose(w.numpy(), by_scikit_learn(losses, max_iter=500, tol=1e-9), atol=2e-3)


def test_the_order_and_scale_of_the_losses_do_not_matter():
    losses, _ = two_groups(2000, 800, 2.0, seed=1)
    w = noise_probability(losses)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise_probability(losses[order]), w[order])
    torch.testing.assert_close(noise_probability(losses * 8 + 32), w, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "losses",
    [
        torch.full((100,), 0.7),
        torch.zeros(5),
        torch.cat([torch.full((50,), 0.7), torch.full((50,), 0.7).nextafter(torch.tensor(1.0))]),
        torch.tensor([1.0]),
        torch.tensor([]),
        torch.full((9,), float("nan")),
        torch.tensor([0.1, 0.1, float("nan")]),
        torch.tensor([2.0, 2.0, 2.0, float("inf")]),
    ],
)
def test_losses_that_say_nothing_give_zero(losses):
    assert torch.equal(noise_probability(losses), torch.zeros(len(losses)))


def test_a_sample_never_visited_gets_zero_and_leaves_the_others_alone():
    losses, _ = two_groups(1000, 400, 2.0, seed=2)
    with_gaps = torch.cat([losses, torch.full((50,), float("nan"))])
    w = noise_probability(with_gaps)
    assert torch.equal(w[:1000], noise_probability(losses))
    assert (w[1000:] == 0).all()


@pytest.mark.parametrize("losses", [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 0.0, 9.0]), torch.rand(3)])
def test_tiny_sets_stay_probabilities(losses):
    w = noise_probability(losses)
    assert torch.isfinite(w).all()
    assert ((w >= 0) & (w <= 1)).all()


@pytest.mark.parametrize("outliers", [1, 50])
@pytest.mark.parametrize("size", [14.0, 16.0, 25.0])
def test_a_few_outliers_do_not_hide_the_noisy_labels(outliers, size):
    g = np.random.default_rng(0)
    losses = np.concatenate([g.exponential(0.15, 6000), g.normal(4, 1, 4000), np.full(outliers, size)])
    losses = torch.from_numpy(losses).float()
    w = noise_probability(losses)
    np.testing.assert_allclose(w.numpy(), by_scikit_learn(losses), atol=2e-3)
    assert abs(float((w > 0.5).float().mean()) - 0.4) < 0.01


def test_one_wild_loss_is_no_reason_for_nan():
    w = noise_probability(torch.cat([torch.rand(999), torch.tensor([1e30])]))
    assert torch.isfinite(w).all()
    assert w[-1] > 0.5
    assert w[:-1].max() < 0.5
