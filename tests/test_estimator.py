"""GNLClassifier: scikit-learn's contract, its inputs, what it finds."""

import pickle

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from fastgnl import GNLClassifier, GNLObjective
from fastgnl.digits import noisy_digits
from fastgnl.errors import InputError
from fastgnl.networks import SmallCNN
from fastgnl.noise import symmetric


@parametrize_with_checks([GNLClassifier(hidden=64, epochs=20)])
def test_scikit_learn_contract(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    """The demo's split as flat arrays: X, given, clean, X_test, y_test."""

    def make(seed):
        d = noisy_digits(0.4, seed)
        flat = [x.flatten(1).numpy() for x in (d.train_x, d.test_x)]
        return flat[0], d.train_given.numpy(), d.train_clean.numpy(), flat[1], d.test_y.numpy()

    return make


@pytest.fixture(scope="module")
def fitted(digits):
    X, y, _, _, _ = digits(0)
    return GNLClassifier().fit(X, y)


def test_default_network_on_noisy_digits(digits, fitted):
    scores = []
    for seed in range(3):
        X, y, _, X_test, y_test = digits(seed)
        clf = fitted if seed == 0 else GNLClassifier(random_state=seed).fit(X, y)
        scores.append(clf.score(X_test, y_test))
    assert np.mean(scores) >= 0.94


def test_finds_the_wrong_labels_and_mends_them(digits, fitted):
    X, y, clean, _, _ = digits(0)
    wrong = y != clean
    assert fitted.noise_probability_.shape == y.shape
    assert roc_auc_score(wrong, fitted.noise_probability_) > 0.95
    assert (fitted.suggested_labels_ == clean).mean() > 0.92 > (y == clean).mean()
    assert np.array_equal(fitted.suggested_labels_, fitted.predict(X))


def test_transition_matrix_names_the_main_confusion(digits, fitted):
    _, y, clean, _, _ = digits(0)
    np.testing.assert_allclose(fitted.transition_matrix_.sum(1), 1, atol=1e-6)
    true = np.array([[np.mean(y[clean == a] == b) for b in range(10)] for a in range(10)])
    off_true, off = true * (1 - np.eye(10)), fitted.transition_matrix_ * (1 - np.eye(10))
    assert (off.argmax(1) == off_true.argmax(1)).sum() >= 8


def small(kind=np.float64, seed=0, n=240):
    g = np.random.default_rng(seed)
    y = np.arange(n) % 3
    X = g.standard_normal((n, 6)) + 3 * np.eye(6)[y]
    return X.astype(kind), y


QUICK = {"hidden": 64, "epochs": 60}


def test_string_labels():
    X, y = small()
    names = np.array(["bird", "cat", "dog"])
    clf = GNLClassifier(**QUICK).fit(X, names[symmetric(y, 0.2, 0).labels])
    assert clf.score(X, names[y]) > 0.9
    assert clf.classes_.tolist() == ["bird", "cat", "dog"]
    assert set(clf.suggested_labels_) <= set(names)
    assert clf.predict_proba(X).shape == (240, 3)


@pytest.mark.parametrize(
    "convert",
    [lambda X: X.astype(np.float32), csr_matrix, lambda X: csr_matrix(X.astype(np.float32)), lambda X: X.tolist()],
)
def test_kinds_of_input(convert):
    X, y = small()
    clf = GNLClassifier(**QUICK).fit(convert(X), y)
    assert clf.score(convert(X), y) > 0.9


def test_constant_features_do_no_harm():
    X, y = small()
    X = np.hstack([X, np.full((240, 2), 7.0)])
    clf = GNLClassifier(**QUICK).fit(X, y)
    assert np.isfinite(clf.predict_proba(X)).all()
    assert clf.score(X, y) > 0.9


def test_pipeline_and_grid_search():
    X, y = small()
    pipeline = make_pipeline(MinMaxScaler(), GNLClassifier(**QUICK))
    search = GridSearchCV(pipeline, {"gnlclassifier__direction": ["y->x", "x->y"]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.8


def test_eval_set_is_followed():
    X, y = small()
    clf = GNLClassifier(**QUICK).fit(X, y, eval_set=(X[:30], y[:30]))
    assert [e.number for e in clf.history_] == list(range(60))
    assert clf.history_[-1].test_accuracy == clf.score(X[:30], y[:30])
    assert GNLClassifier(**QUICK).fit(X, y).history_[-1].test_accuracy is None


def test_any_backbone():
    X, y = small()
    module = nn.Sequential(nn.Linear(6, 9), nn.Tanh())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for backbone in (module, lambda inputs: nn.Sequential(nn.Linear(inputs, 9), nn.Tanh())):
        clf = GNLClassifier(backbone, epochs=20, lr=0.1).fit(X, y)
        assert clf.net_.num_features == 9
        assert clf.score(X, y) > 0.9
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])  # a copy was trained
    assert clone(GNLClassifier(module)).backbone is not module


def test_images_with_a_convolutional_backbone(digits):
    X, _, clean, X_test, y_test = digits(0)
    clf = GNLClassifier(SmallCNN(width=8), epochs=20, standardise=False, lr=0.1)
    clf.fit(X.reshape(-1, 1, 8, 8), clean)
    assert clf.score(X_test.reshape(-1, 1, 8, 8), y_test) > 0.9


def test_two_networks():
    X, y = small()
    clf = GNLClassifier(networks=2, **QUICK).fit(X, symmetric(y, 0.2, 0).labels)
    assert clf.score(X, y) > 0.9
    assert clf.noise_probability_.shape == (240,)


def test_a_random_state_fixes_the_result_and_leaves_torch_alone():
    X, y = small()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = GNLClassifier(**QUICK, random_state=1).fit(X, y).predict_proba(X)
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(first, GNLClassifier(**QUICK, random_state=1).fit(X, y).predict_proba(X))
    assert not np.array_equal(first, GNLClassifier(**QUICK, random_state=2).fit(X, y).predict_proba(X))


def test_survives_pickling():
    X, y = small()
    clf = GNLClassifier(**QUICK).fit(X, y)
    again = pickle.loads(pickle.dumps(clf))
    assert np.array_equal(again.predict_proba(X), clf.predict_proba(X))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"direction": "up"}, "direction is 'up', wanted one of"),
        ({"epochs": 0}, "epochs is 0, wanted a whole number"),
        ({"epochs": "many"}, "epochs is 'many', wanted a whole number"),
        ({"batch_size": 2}, "batch_size is 2, wanted a whole number of at least 3"),
        ({"networks": 2, "backbone": nn.Linear(6, 4)}, "backbone is one module for networks=2"),
        ({"k_max": -1}, "k_max is -1"),
        ({"lr": 1e3, "standardise": False}, "lr is 1000.0, wanted a number from 0 to 100"),
        ({"networks": 3}, "networks is 3, wanted one of 1, 2"),
        ({"backbone": 5}, "backbone is a int, wanted a torch module"),
        ({"backbone": nn.Flatten(0)}, "the backbone returned"),
        ({"warmup_epochs": -1}, "warmup_epochs is -1"),
        ({"hidden": 0}, "hidden is 0, wanted a whole number"),
        ({"dropout": 1.5}, "dropout is 1.5, wanted a number from 0 to 1"),
    ],
)
def test_bad_parameters(options, sentence):
    X, y = small()
    with pytest.raises(InputError, match=sentence):
        GNLClassifier(**options).fit(X, y)


def test_bad_data():
    X, y = small()
    with pytest.raises(ValueError, match="NaN"):
        GNLClassifier().fit(X * np.nan, y)
    with pytest.raises(InputError, match="y holds 1 class, wanted at least 2"):
        GNLClassifier().fit(X, y * 0)
    with pytest.raises(InputError, match=r"eval_set has 240 rows and labels of shape \(3,\)"):
        GNLClassifier().fit(X, y, eval_set=(X, y[:3]))
    with pytest.raises(InputError, match=r"eval_set holds the label \[9\]"):
        GNLClassifier().fit(X, y, eval_set=(X[:1], [9]))
    with pytest.raises(InputError, match=r"eval_set is a list|eval_set is a tuple"):
        GNLClassifier().fit(X, y, eval_set=[(X, y)])
    with pytest.raises(InputError, match=r"X holds a value of size \d.\de\+200, wanted at most 1e\+18"):
        GNLClassifier(standardise=False).fit(X * 1e200, y)
    with pytest.raises(InputError, match=r"X has shape \(240, 2, 3\), wanted \(samples, features\)"):
        GNLClassifier().fit(X.reshape(240, 2, 3), y)
    with pytest.raises(NotFittedError):
        GNLClassifier().predict(X)


def test_a_failed_fit_leaves_no_half_fitted_model():
    X, y = small()
    clf = GNLClassifier(**QUICK, direction="up")
    with pytest.raises(InputError):
        clf.fit(X, y)
    with pytest.raises(NotFittedError):
        clf.predict(X)
    clf.set_params(direction="y->x").fit(X, y)
    before = clf.predict_proba(X)
    with pytest.raises(InputError):
        clf.set_params(direction="up").fit(X, y[::-1].copy())
    assert np.array_equal(clf.predict_proba(X), before)


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({"denominator": "dataset", "k_max": 3}, {"denominator": "dataset", "k_max": 3}),
        ({"direction": "x->y", "prior_kl": "forward"}, {"direction": "x->y", "prior_kl": "forward"}),
        ({"epochs": 12}, {"warmup_epochs": 3, "denominator": "batch"}),
        ({"epochs": 12, "warmup_epochs": 7}, {"warmup_epochs": 7}),
    ],
)
def test_parameters_reach_the_objective(monkeypatch, given, settled):
    made = []

    class Spy(GNLObjective):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self.config)

    monkeypatch.setattr("fastgnl.estimator.GNLObjective", Spy)
    X, y = small(n=60)
    GNLClassifier(hidden=8, **{"epochs": 2, **given}).fit(X, y)
    assert {name: getattr(made[0], name) for name in settled} == settled


def test_dense_then_sparse():
    X, y = small()
    clf = GNLClassifier(**QUICK).fit(X, y)
    np.testing.assert_allclose(clf.predict_proba(csr_matrix(X)), clf.predict_proba(X), atol=1e-6)


def test_numpy_numbers_are_numbers():
    X, y = small(n=60)
    search = GridSearchCV(GNLClassifier(hidden=8, lr=np.float32(0.01)), {"epochs": np.arange(2, 4)}, cv=2).fit(X, y)
    assert search.best_params_["epochs"] in (2, 3)
