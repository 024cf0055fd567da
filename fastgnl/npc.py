"""``NPC``: noisy prediction calibration, which corrects the outputs of any trained classifier after the event.

Bae et al. 2022, "From Noisy Prediction to True Label". A classifier trained on wrong labels repeats part of them:
its prediction ŷ is itself noisy. NPC models how the true label y gave ŷ, and turns that round.

Prior: y, a point of the simplex, is near the labels of the k nearest training samples (cosine, never the sample
itself), of which share_ij have label j:

    p(y | x_i) = Dirichlet(a_i),    a_ij = delta + rho share_ij,    delta = 1 + 1/C

Model and inference network, one MLP each, on [x ; y] and [x ; one-hot ŷ]:

    p(ŷ | y, x) = softmax(decoder(x, y)),    q(y | ŷ, x) = Dirichlet(delta + softplus(encoder(x, ŷ)))

trained on the classifier's predictions for the training samples by the ELBO, with y drawn once a step from q:

    maximise  E_q[log p(ŷ_i | y, x_i)] - beta KL(q(y | ŷ_i, x_i) || p(y | x_i))

A new sample takes the mode of q for every ŷ, weighted by the classifier's probabilities. As delta > 1 the mode is
inside the simplex:

    p(y = j | x) = sum_ŷ p(ŷ | x) (b_j - 1) / sum_k (b_k - 1),    b = concentrations of q(y | ŷ, x)

Axes: N samples, B rows of a batch, F features, C classes.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.distributions import Dirichlet, kl_divergence
from torch.nn import functional

from fastgnl.errors import check, check_count, check_range, check_seed

ROOM = 2**24
"""Numbers in the largest table held at a time, in the search for neighbours and in prediction."""
OFF = 1e-2
"""How far from 1 the probabilities of a row may sum: those of a bfloat16 network pass."""


def neighbour_share(features: Tensor, labels: Tensor, num_classes: int, neighbours: int) -> Tensor:
    """share_ij: how many of the ``neighbours`` samples nearest to i by cosine, i left out, have label j. [N, C]."""
    unit_NF = functional.normalize(features, dim=1)
    one_hot_NC = functional.one_hot(labels, num_classes).float()
    N = len(features)
    share_NC = torch.empty(N, num_classes)
    for rows in torch.arange(N).split(max(1, ROOM // N)):
        cosine_BN = unit_NF[rows] @ unit_NF.T
        cosine_BN[torch.arange(len(rows)), rows] = -torch.inf
        nearest = cosine_BN.topk(neighbours, sorted=False).indices
        share_NC[rows] = one_hot_NC[nearest].mean(1)
    return share_NC


class Conditional(nn.Module):
    """One hidden layer on [x ; y], C outputs. Axes before the last broadcast."""

    def __init__(self, num_features: int, num_classes: int, hidden: int) -> None:
        super().__init__()
        self.from_x = nn.Linear(num_features, hidden)
        self.from_y = nn.Linear(num_classes, hidden, bias=False)
        self.out = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.relu(self.from_x(x) + self.from_y(y)))


def _array(name: str, value: Any, ndim: int) -> NDArray[Any]:
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    axes = "(samples, features)" if name == "features" else "(samples, classes)" if ndim == 2 else "(samples,)"
    check(array.ndim == ndim, f"{name} has shape {array.shape}, wanted {axes}")
    real = np.issubdtype(array.dtype, np.number) and np.isrealobj(array)
    check(real, f"{name} is {array.dtype}, wanted numbers")
    return array


def _floats(name: str, value: Any) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        array = _array(name, value, 2).astype(np.float32)
    check(bool(np.isfinite(array).all()), f"{name} holds NaN or what is infinite in float32, wanted finite numbers")
    return array


def _inputs(features: Any, probabilities: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Checked features [N, F], and probabilities [N, C] whose rows sum to one."""
    x_NF, p_NC = _floats("features", features), _floats("probabilities", probabilities)
    check(len(x_NF) == len(p_NC), f"probabilities has {len(p_NC)} rows, wanted {len(x_NF)} as features has")
    check(min(x_NF.shape) >= 1, f"features has shape {x_NF.shape}, wanted at least 1 row and 1 column")
    check(p_NC.shape[1] >= 2, f"probabilities has {p_NC.shape[1]} columns, wanted at least 2 classes")
    check(bool((p_NC >= 0).all()), f"probabilities holds {p_NC.min(initial=0):g}, wanted none below 0")
    sums = p_NC.sum(1, keepdims=True)
    off = np.flatnonzero(np.abs(sums - 1) > OFF)
    check(len(off) == 0, f"probabilities has a row that sums to {sums[off[:1]].sum():g}, wanted rows that sum to 1")
    return x_NF, p_NC / sums


class NPC(BaseEstimator):
    """Correct a classifier's probabilities; it need not be trained again, nor be a network.

    >>> npc = NPC().fit(X, clf.predict_proba(X))
    >>> npc.predict(X_test, clf.predict_proba(X_test))

    Parameters
    ----------
    neighbours : k of the prior.
    rho : weight of the neighbours in the prior's concentrations (5 in the published code).
    beta : weight of the KL term (1 in the published code); less keeps nearer to the classifier.
    hidden : units of the hidden layer of each of the two MLPs.
    epochs, batch_size, lr : of training by Adam.
    seed : fixes the result (on the same machine and number of threads).

    Attributes
    ----------
    prior_ : [N, C], the concentrations a of the prior for the training samples.
    scaler_, encoder_, decoder_ : how features are standardised, and the two trained MLPs.
    """

    def __init__(
        self,
        neighbours: int = 10,
        *,
        rho: float = 20.0,
        beta: float = 0.1,
        hidden: int = 128,
        epochs: int = 10,
        batch_size: int = 128,
        lr: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self.neighbours = neighbours
        self.rho = rho
        self.beta = beta
        self.hidden = hidden
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.seed = seed

    def _check_options(self) -> None:
        for name in ("neighbours", "hidden", "epochs", "batch_size"):
            check_count(name, getattr(self, name), 1)
        for name in ("rho", "beta", "lr"):
            check_range(name, getattr(self, name), 0, 1e6)
        check_seed(self.seed)

    def fit(self, features: Any, probabilities: Any, labels: Any = None) -> "NPC":
        """Learn from the training samples of the classifier and its probabilities for them.

        The prior counts the classifier's predictions, or the ``labels`` [N] where they are given.
        """
        self._check_options()
        x_NF, p_NC = _inputs(features, probabilities)
        (N, F), C = x_NF.shape, p_NC.shape[1]
        check(self.neighbours < N, f"features has {N} rows, wanted at least {self.neighbours + 1}: neighbours and one")
        predicted_N = torch.from_numpy(p_NC.argmax(1))
        counted_N = predicted_N if labels is None else self._labels(labels, N, C)
        self.scaler_ = StandardScaler().fit(x_NF)
        x = self._scaled(x_NF)
        self.prior_ = 1 + 1 / C + self.rho * neighbour_share(x, counted_N, C, self.neighbours)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.encoder_, self.decoder_ = Conditional(F, C, self.hidden), Conditional(F, C, self.hidden)
            self._train(x, predicted_N)
        return self

    @staticmethod
    def _labels(labels: Any, N: int, C: int) -> Tensor:
        given_N = _array("labels", labels, 1)
        check(np.issubdtype(given_N.dtype, np.integer), f"labels is {given_N.dtype}, wanted integers")
        check(len(given_N) == N, f"labels has {len(given_N)} rows, wanted {N} as features has")
        low, high = int(given_N.min()), int(given_N.max())
        check(low >= 0 and high < C, f"labels holds {low if low < 0 else high}, wanted 0 to {C - 1}")
        return torch.from_numpy(given_N.astype(np.int64))

    def _scaled(self, x_NF: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(self.scaler_.transform(x_NF).astype(np.float32))

    def _concentrations(self, x: Tensor, y: Tensor) -> Tensor:
        return 1 + 1 / y.shape[-1] + functional.softplus(self.encoder_(x, y))

    def _train(self, x_NF: Tensor, predicted_N: Tensor) -> None:
        one_hot_NC = functional.one_hot(predicted_N, self.prior_.shape[1]).float()
        optimizer = torch.optim.Adam([*self.encoder_.parameters(), *self.decoder_.parameters()], self.lr)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(x_NF)).split(self.batch_size):
                x_BF = x_NF[rows]
                q = Dirichlet(self._concentrations(x_BF, one_hot_NC[rows]))
                log_likelihood = -functional.cross_entropy(self.decoder_(x_BF, q.rsample()), predicted_N[rows])
                elbo = log_likelihood - self.beta * kl_divergence(q, Dirichlet(self.prior_[rows])).mean()
                optimizer.zero_grad()
                (-elbo).backward()
                optimizer.step()

    @torch.no_grad()
    def predict_proba(self, features: Any, probabilities: Any) -> NDArray[np.float64]:
        """p(true label | x), [rows, C], of samples with the classifier's probabilities for them."""
        check_is_fitted(self, "encoder_")
        x_NF, p_NC = _inputs(features, probabilities)
        F, C = self.scaler_.n_features_in_, self.prior_.shape[1]
        check(x_NF.shape[1] == F, f"features has {x_NF.shape[1]} columns, wanted {F} as in fit")
        check(p_NC.shape[1] == C, f"probabilities has {p_NC.shape[1]} columns, wanted {C} as in fit")
        result_NC = torch.empty(len(x_NF), C, dtype=torch.float64)
        every_CC = torch.eye(C)
        for rows in torch.arange(len(x_NF)).split(max(1, ROOM // (C * max(C, self.hidden)))):
            weight_BCC = self._concentrations(self._scaled(x_NF[rows])[:, None], every_CC) - 1
            mode_BCC = (weight_BCC / weight_BCC.sum(-1, keepdim=True)).double()
            result_NC[rows] = torch.einsum("bp,bpc->bc", torch.from_numpy(p_NC[rows]).double(), mode_BCC)
        return (result_NC / result_NC.sum(1, keepdim=True)).numpy()

    def predict(self, features: Any, probabilities: Any) -> NDArray[np.int64]:
        """The most probable class of each row."""
        return self.predict_proba(features, probabilities).argmax(1)
