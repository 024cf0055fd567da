"""The loop: accuracy on digits, what an epoch reports, the order of samples."""

import math

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from fastgnl import GNLObjective, GNLPair, with_transition
from fastgnl.demo import DemoConfig, run_method
from fastgnl.errors import InputError
from fastgnl.evaluate import accuracy
from fastgnl.loader import Loader
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.networks import MLP
from fastgnl.optimise import TrainConfig
from fastgnl.samples import Samples
from fastgnl.task import digits
from fastgnl.trainer import train


@pytest.fixture(scope="module")
def digits_results():
    """GNL on digits with 40% instance-dependent noise, the demo's network, two seeds; CE once."""
    gnl = [run_method("gnl", digits(0.4, seed), DemoConfig(seed=seed)) for seed in range(2)]
    return gnl, run_method("ce", digits(0.4, 0), DemoConfig())


def test_accuracy_on_noisy_digits(digits_results):
    gnl, ce = digits_results
    assert np.mean([result.accuracy for result in gnl]) >= 0.96
    assert ce.accuracy < 0.8


def test_noise_is_detected(digits_results):
    gnl, ce = digits_results
    assert min(result.auroc for result in gnl) > 0.98
    assert ce.auroc < 0.8


def test_coverage_grows_and_uncertainty_parts(digits_results):
    """The paper's figure of coverage and uncertainty."""
    for result in digits_results[0]:
        first, last = result.history[0], result.history[-1]
        assert last.coverage > 0.95 > first.coverage
        assert last.clean_size < 1.5
        assert last.noisy_size > 8


def small(seed=0, n=120):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    x = torch.randn(n, 5, generator=g) + 4 * torch.nn.functional.one_hot(labels, 5)
    return Samples(x, labels, labels)


def fit(objective, samples, transition_input="logits", networks=1, **options):
    torch.manual_seed(0)
    backbone = MLP(5, 16) if networks == 1 else (MLP(5, 16), MLP(5, 16))
    net = with_transition(backbone, 16, 3, transition_input=transition_input)
    return net, train(net, objective, Loader(samples, 32), TrainConfig(**{"epochs": 8, **options}), samples)


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (lambda n: GNLObjective(n, 3, warmup_epochs=2), {}),
        (lambda n: GNLObjective(n, 3, warmup_epochs=2, loss_source="eval"), {}),
        (lambda n: GNLObjective(n, 3, warmup_epochs=2, direction="x->y", prior_kl="forward"), {}),
        (lambda n: GNLObjective(n, 3, warmup_epochs=2), {"transition_input": "sample"}),
        (lambda n: GNLPair(n, 3, warmup_epochs=2), {"networks": 2}),
        (lambda n: GNLPair(n, 3, warmup_epochs=2, loss_source="eval"), {"networks": 2}),
        (lambda n: CrossEntropy(), {"transition_input": "none"}),
    ],
)
def test_every_variant_learns_an_easy_task(objective, options):
    samples = small()
    net, history = fit(objective(len(samples)), samples, **options)
    assert history[-1].test_accuracy > 0.9
    assert accuracy(net, samples) == history[-1].test_accuracy
    assert not net.training
    assert len(history) == 8
    assert all(math.isfinite(e.loss) and e.seconds > 0 and 0 < e.wait < 1 for e in history)


def test_without_clean_labels_coverage_is_not_a_number():
    samples = small()
    _, history = fit(GNLObjective(len(samples), 3), Samples(samples.x, samples.labels))
    assert math.isnan(history[-1].coverage)
    assert math.isnan(history[-1].clean_size)


def test_learning_rate_drops_after_its_share_of_the_epochs():
    samples = small()
    rates = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    original, torch.optim.SGD = torch.optim.SGD, Spy
    try:
        fit(CrossEntropy(), samples, transition_input="none", epochs=6, lr=0.5)
    finally:
        torch.optim.SGD = original
    assert [round(rate, 6) for rate in rates[::4]] == [0.5] * 4 + [0.05] * 2


def test_sparse_rows_are_the_same_rows():
    samples = small()
    sparse = Samples(csr_array(samples.x.numpy()), samples.labels)
    index = torch.tensor([5, 2, 9])
    assert torch.equal(sparse.rows(index), samples.rows(index))
    assert torch.equal(sparse.rows(slice(3, 8)), samples.rows(slice(3, 8)))


def test_training_sets_both_to_training():
    samples = small()
    objective = GNLObjective(len(samples), 3).eval()
    fit(objective, samples, epochs=2)
    assert int(objective.step) == 8


def test_a_diverged_run_is_not_passed_off_as_a_result():
    samples = small()
    wild = Samples(samples.x * 1e30, samples.labels)
    torch.manual_seed(0)
    net = with_transition(torch.nn.Linear(5, 4), 4, 3)
    with pytest.raises(InputError, match=r"no step of epoch 1 had a finite loss and gradient, wanted a lower lr"):
        train(net, GNLObjective(len(wild), 3), Loader(wild), TrainConfig(epochs=3))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epochs": 0}, "epochs is 0, wanted a whole number of at least 1"),
        ({"lr": -1}, "lr is -1, wanted a number from 0"),
        ({"momentum": 2}, "momentum is 2"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"decay_at": 1.5}, "decay_at is 1.5"),
    ],
)
def test_bad_settings(options, sentence):
    with pytest.raises(InputError, match=sentence):
        TrainConfig(**options)
