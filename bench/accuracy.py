"""Test accuracy of CE and GNL after the last epoch, on digits and on the embeddings of FASTGNL_DATA.

python bench/accuracy.py                          # digits: the demo's CNN and GNLClassifier, three seeds
FASTGNL_DATA=... python bench/accuracy.py --data newsgroups20 cifar10n-worst-embeddings
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from common import show
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from fastgnl import GNLClassifier, with_transition
from fastgnl.cli import run_worker
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.demo import DemoConfig, run_method
from fastgnl.digits import noisy_digits
from fastgnl.errors import check_count
from fastgnl.evaluate import predict_proba
from fastgnl.loader import Loader
from fastgnl.named import features, named
from fastgnl.networks import MLP
from fastgnl.noise import asymmetric, instance_dependent, symmetric
from fastgnl.optimise import TrainConfig
from fastgnl.samples import Samples
from fastgnl.task import digits as digits_task
from fastgnl.trainer import train

Name = Literal[
    "digits-cnn",
    "digits",
    "newsgroups20",
    "newsgroups20-sn",
    "newsgroups20-asn",
    "cifar10n-worst-embeddings",
    "cifar10n-aggregate-embeddings",
]


@dataclass(frozen=True)
class Config:
    """Test accuracy of CE and GNL after the last epoch, in percent."""

    data: tuple[Name, ...] = ("digits-cnn", "digits")
    """Data sets; 20 Newsgroups has 40% instance-dependent, symmetric (sn) or asymmetric (asn) noise."""
    seeds: int = 3
    """Runs of each, with seeds 0, 1, ..."""
    epochs: int | None = None
    """Epochs of every run, in place of each one's own."""
    json: Path | None = None
    """Write the rows here too."""

    def __post_init__(self) -> None:
        check_count("seeds", self.seeds, 1)


class Arrays(NamedTuple):
    x: np.ndarray
    given: np.ndarray
    clean: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def digits(seed: int) -> Arrays:
    d = noisy_digits(0.4, seed)
    x, test_x = (images.flatten(1).numpy() for images in (d.train_x, d.test_x))
    return Arrays(x, d.train_given.numpy(), d.train_clean.numpy(), test_x, d.test_y.numpy())


def embeddings(name: str, noise: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None) -> Arrays:
    data = named(name)
    x, clean = features(data.train), data.train.clean
    given = data.train.labels if noise is None else noise(StandardScaler().fit_transform(x), clean)
    return Arrays(x, given, clean, features(data.test), data.test.labels)


LOADERS: dict[str, Callable[[int], Arrays]] = {
    "digits": digits,
    "newsgroups20": lambda seed: embeddings("newsgroups20", lambda x, y: instance_dependent(x, y, 0.4, seed).labels),
    "newsgroups20-sn": lambda seed: embeddings("newsgroups20", lambda x, y: symmetric(y, 0.4, seed).labels),
    "newsgroups20-asn": lambda seed: embeddings("newsgroups20", lambda x, y: asymmetric(y, 0.4, seed).labels),
    "cifar10n-worst-embeddings": lambda seed: embeddings("cifar10n-worst-embeddings"),
    "cifar10n-aggregate-embeddings": lambda seed: embeddings("cifar10n-aggregate-embeddings"),
}


def cross_entropy(d: Arrays, epochs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The estimator's network and settings with plain cross-entropy: q of the training and of the test samples."""
    scaler = StandardScaler().fit(d.x)
    samples, test = (
        Samples(torch.from_numpy(scaler.transform(x).astype(np.float32)), torch.from_numpy(labels))
        for x, labels in ((d.x, d.given), (d.test_x, d.test_y))
    )
    torch.manual_seed(seed)
    net = with_transition(MLP(d.x.shape[1]), 512, int(d.clean.max()) + 1, transition_input="none")
    train(net, CrossEntropy(), Loader(samples, seed=seed), TrainConfig(epochs))
    return predict_proba(net, samples).numpy(), predict_proba(net, test).numpy()


def measure(name: str, seed: int, epochs: int | None) -> tuple[float, float, float]:
    """(accuracy of CE, accuracy of GNL, AUROC of GNL's noise probabilities)."""
    if name == "digits-cnn":
        config = DemoConfig(seed=seed) if epochs is None else DemoConfig(seed=seed, epochs=epochs)
        ce, gnl = (run_method(method, digits_task(0.4, seed), config) for method in ("ce", "gnl"))
        return ce.accuracy, gnl.accuracy, gnl.auroc
    d = LOADERS[name](seed)
    clf = GNLClassifier(random_state=seed, epochs="auto" if epochs is None else epochs).fit(d.x, d.given)
    auroc = float(roc_auc_score(d.given != d.clean, clf.noise_probability_))
    _, q_test = cross_entropy(d, len(clf.history_), seed)
    return float((q_test.argmax(1) == d.test_y).mean()), float(clf.score(d.test_x, d.test_y)), auroc


def main(config: Config) -> None:
    rows: list[dict[str, Any]] = []
    bar = tqdm([(name, seed) for name in config.data for seed in range(config.seeds)], unit="run")
    values: dict[str, list[tuple[float, float, float]]] = {}
    for name, seed in bar:
        bar.set_description(f"{name} seed {seed}")
        values.setdefault(name, []).append(measure(name, seed, config.epochs))
    for name, found in values.items():
        ce, gnl, auroc = np.array(found).T
        rows.append(
            {
                "data": name,
                "seeds": config.seeds,
                "CE": round(100 * float(ce.mean()), 1),
                "GNL": round(100 * float(gnl.mean()), 1),
                "GNL std": round(100 * float(gnl.std()), 1),
                "AUROC of w": round(float(auroc.mean()), 3),
            }
        )
    show(rows, config.json)


if __name__ == "__main__":
    run_worker(Config, main)
