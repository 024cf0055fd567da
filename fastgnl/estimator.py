"""``GNLClassifier``: the method as a scikit-learn estimator, for arrays and embeddings with doubtful labels."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import nn

from fastgnl.config import Denominator
from fastgnl.errors import check, check_choice, check_count, check_range
from fastgnl.evaluate import eval_losses, predict_proba
from fastgnl.kernels.terms import Direction, PriorKL
from fastgnl.loader import Loader
from fastgnl.mixture import noise_probability
from fastgnl.networks import MLP
from fastgnl.objective import GNLObjective
from fastgnl.optimise import TrainConfig
from fastgnl.pair import GNLPair
from fastgnl.progress import Progress
from fastgnl.samples import Samples
from fastgnl.tally import Epoch
from fastgnl.trainer import train
from fastgnl.transition import PairNet, TransitionNet, class_transition, with_transition

LEAST_STEPS = 600
"""epochs="auto" trains for this many steps where 20 epochs are fewer."""
MOST_EPOCHS = 60
LARGEST = 1e18
INPUT: dict[str, Any] = {"accept_sparse": "csr", "dtype": [np.float32, np.float64], "allow_nd": True}


def _check_size(X: Any) -> None:
    """float32 and the squares of variances must hold the features."""
    values = X.data if issparse(X) else X
    largest = float(np.abs(values).max()) if values.size else 0.0
    check(largest <= LARGEST, f"X holds a value of size {largest:.1e}, wanted at most {LARGEST:.0e}")


def _scaled(scaler: StandardScaler | None, X: Any) -> torch.Tensor | csr_array:
    """Standardised float32 rows, a tensor or CSR."""
    _check_size(X)
    if issparse(X) and scaler is not None and scaler.with_mean:
        X = X.toarray()
    if scaler is not None:
        X = scaler.transform(X if issparse(X) else X.reshape(len(X), -1)).reshape(X.shape)
    return csr_array(X, dtype=np.float32) if issparse(X) else torch.from_numpy(np.ascontiguousarray(X, np.float32))


class GNLClassifier(ClassifierMixin, BaseEstimator):
    """Train on labels that are partly wrong; predict the right ones, and say which were wrong.

    >>> clf = GNLClassifier().fit(X, y_noisy)
    >>> clf.score(X_test, y_test)
    >>> clf.noise_probability_, clf.suggested_labels_, clf.transition_matrix_

    Parameters
    ----------
    backbone : a torch module that returns features, or a function (X.shape[1]) -> such a module;
        None is one hidden layer of ``hidden`` units with BatchNorm, ReLU and ``dropout``. The module itself is
        left as it is: ``fit`` trains a copy.
    epochs, batch_size, lr, weight_decay : as in ``TrainConfig``; epochs="auto" is 20, more for small data.
    warmup_epochs : epochs before labels are doubted; "auto" is a quarter of the epochs, at most 10.
    direction, denominator, prior_kl, k_max : as in ``GNLObjective``.
    networks : 1, or 2 that teach each other (twice the time; ``backbone`` is then a function, or None).
    standardise : scale each feature to mean 0 and variance 1 first (sparse input is scaled, not centred).
    random_state : an int fixes the result (on the same machine and number of threads).
    verbose : show a progress bar.

    Attributes (N training samples, C classes)
    ----------
    noise_probability_ : [N], the probability that the given label is wrong.
    suggested_labels_ : [N], the label the model would give.
    transition_matrix_ : [C, C], p(given label | true label).
    classes_, n_features_in_, net_, history_ : the classes, the width of X, the trained network, one ``Epoch`` each.
    """

    def __init__(
        self,
        backbone: nn.Module | Callable[[int], nn.Module] | None = None,
        *,
        hidden: int = 512,
        dropout: float = 0.2,
        epochs: int | str = "auto",
        batch_size: int = 128,
        lr: float = 0.02,
        weight_decay: float = 5e-4,
        warmup_epochs: int | str = "auto",
        direction: Direction = "y->x",
        denominator: Denominator = "auto",
        prior_kl: PriorKL = "reverse",
        k_max: int | str | None = "auto",
        networks: int = 1,
        standardise: bool = True,
        random_state: int | np.random.RandomState | None = 0,
        verbose: bool = False,
    ) -> None:
        self.backbone = backbone
        self.hidden = hidden
        self.dropout = dropout
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_epochs = warmup_epochs
        self.direction = direction
        self.denominator = denominator
        self.prior_kl = prior_kl
        self.k_max = k_max
        self.networks = networks
        self.standardise = standardise
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _more_inputs(self, X: Any) -> torch.Tensor | csr_array:
        """Rows to predict, checked and scaled like those of ``fit``."""
        check_is_fitted(self, "net_")
        return _scaled(self.scaler_, validate_data(self, X, reset=False, **INPUT))

    def _backbone(self, inputs: int) -> nn.Module:
        if self.backbone is None:
            check_count("hidden", self.hidden, 1)
            check_range("dropout", self.dropout, 0, 1)
            return MLP(inputs, self.hidden, self.dropout)
        if isinstance(self.backbone, nn.Module):
            return copy.deepcopy(self.backbone)
        check(
            callable(self.backbone),
            f"backbone is a {type(self.backbone).__name__}, wanted a torch module or a function that makes one",
        )
        return self.backbone(inputs)

    def _net(self, rows: Samples, num_classes: int, seed: int) -> TransitionNet | PairNet:
        """One network, or two; their width is what the backbone returns for a row."""
        check(
            self.networks == 1 or not isinstance(self.backbone, nn.Module),
            "backbone is one module for networks=2, wanted a function that makes a new one each time",
        )
        backbones = tuple(self._backbone(self.n_features_in_).eval() for _ in range(self.networks))
        with torch.no_grad():
            features = backbones[0](rows.rows(slice(0, 1)))
        given = tuple(features.shape) if isinstance(features, torch.Tensor) else type(features).__name__
        check(
            isinstance(given, tuple) and len(given) == 2,
            f"the backbone returned {given}, wanted shape (rows, features)",
        )
        both = backbones if self.networks == 2 else backbones[0]
        return with_transition(both, features.shape[1], num_classes, seed=seed)  # type: ignore[arg-type]

    def _schedule(self, num_samples: int) -> tuple[TrainConfig, int]:
        """How to train, and the epochs of warm-up."""
        check_count("batch_size", self.batch_size, 3)  # BatchNorm wants two rows, and batches may be one row shorter
        steps = -(-num_samples // self.batch_size)
        epochs = min(MOST_EPOCHS, max(20, -(-LEAST_STEPS // steps))) if self.epochs == "auto" else self.epochs
        config = TrainConfig(epochs, self.lr, weight_decay=self.weight_decay)  # type: ignore[arg-type]
        warmup = max(1, min(10, config.epochs // 4)) if self.warmup_epochs == "auto" else self.warmup_epochs
        return config, warmup  # type: ignore[return-value]

    def fit(self, X: Any, y: Any, eval_set: tuple[Any, Any] | None = None) -> "GNLClassifier":
        """Train on X and the given labels y; ``eval_set=(X, y)`` adds a test accuracy to each ``history_`` entry."""
        X, y = validate_data(self, X, y, **INPUT)
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        N, C = len(labels), len(classes)
        check(C >= 2, f"y holds {C} class, wanted at least 2 classes")
        check(
            X.ndim == 2 or self.backbone is not None,
            f"X has shape {X.shape}, wanted (samples, features), or a backbone that takes such rows",
        )
        check_choice("networks", self.networks, (1, 2))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        config, warmup = self._schedule(N)
        objective = (GNLPair if self.networks == 2 else GNLObjective)(
            N,
            C,
            warmup_epochs=warmup,
            direction=self.direction,
            denominator=self.denominator,
            prior_kl=self.prior_kl,
            k_max=self.k_max,
            seed=seed,
        )
        _check_size(X)
        scaler = StandardScaler(with_mean=not issparse(X)).fit(X.reshape(N, -1)) if self.standardise else None
        samples = Samples(_scaled(scaler, X), torch.from_numpy(labels))
        test = None if eval_set is None else self._eval_samples(eval_set, classes, scaler)
        with torch.random.fork_rng(devices=[]), Progress("GNL", N, config.epochs, self.verbose) as progress:
            torch.manual_seed(seed)
            net = self._net(samples, C, seed)
            loader = Loader(samples, self.batch_size, seed)
            history = train(net, objective, loader, config, test, progress.on_batch, progress.on_epoch)
        losses = eval_losses(net, samples)
        self.classes_, self.scaler_, self.net_ = classes, scaler, net
        self.history_: list[Epoch] = history
        self.noise_probability_ = noise_probability(losses if losses.dim() == 1 else losses.mean(0)).numpy()
        self.suggested_labels_ = classes[predict_proba(net, samples).argmax(1).numpy()]
        self.transition_matrix_ = class_transition(net, samples).numpy()
        return self

    def _eval_samples(self, eval_set: Any, classes: NDArray[Any], scaler: StandardScaler | None) -> Samples:
        check(
            isinstance(eval_set, tuple | list) and len(eval_set) == 2,
            f"eval_set is a {type(eval_set).__name__}, wanted the pair (X, y)",
        )
        X, y = validate_data(self, eval_set[0], reset=False, **INPUT), np.asarray(eval_set[1])
        check(y.shape == (X.shape[0],), f"eval_set has {X.shape[0]} rows and labels of shape {y.shape}, wanted as many")
        unknown = np.setdiff1d(y, classes)
        check(len(unknown) == 0, f"eval_set holds the label {unknown[:1].tolist()}, wanted only labels that y holds")
        return Samples(_scaled(scaler, X), torch.from_numpy(np.searchsorted(classes, y)))

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """p(true label | x), [rows, C]."""
        rows = self._more_inputs(X)
        q_NC = predict_proba(self.net_, Samples(rows, torch.zeros(rows.shape[0]))).double()
        return (q_NC / q_NC.sum(1, keepdim=True)).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]
