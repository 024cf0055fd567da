"""Test accuracy of CE and GNL alone and with NPC on top, on the 20 Newsgroups embeddings of FASTGNL_DATA.

FASTGNL_DATA=... python bench/npc.py
python bench/npc.py --data digits    # needs no data
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from common import Chart, show
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from fastgnl import GNLClassifier, with_transition
from fastgnl.cli import run_worker
from fastgnl.digits import noisy_digits
from fastgnl.errors import check_count
from fastgnl.evaluate import predict_proba
from fastgnl.loader import Loader
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.named import features, named
from fastgnl.networks import MLP
from fastgnl.noise import asymmetric, instance_dependent, symmetric
from fastgnl.npc import NPC
from fastgnl.optimise import TrainConfig
from fastgnl.samples import Samples
from fastgnl.trainer import train

Name = Literal["digits", "newsgroups20-sn", "newsgroups20-asn", "newsgroups20"]


@dataclass(frozen=True)
class Config:
    """Test accuracy of CE and GNL, alone and with NPC, in percent."""

    data: tuple[Name, ...] = ("newsgroups20-sn", "newsgroups20-asn", "newsgroups20")
    """Data sets; 20 Newsgroups has 40% symmetric (sn), asymmetric (asn) or instance-dependent noise."""
    seeds: int = 3
    """Runs of each, with seeds 0, 1, ..."""
    epochs: int = 20
    """Epochs of the classifiers."""
    json: Path | None = None
    """Write the rows here too."""

    def __post_init__(self) -> None:
        check_count("seeds", self.seeds, 1)
        check_count("epochs", self.epochs, 1)


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


def newsgroups(noise: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Arrays:
    data = named("newsgroups20")
    x, clean = features(data.train), data.train.clean
    given = noise(StandardScaler().fit_transform(x), clean)
    return Arrays(x, given, clean, features(data.test), data.test.labels)


LOADERS: dict[str, Callable[[int], Arrays]] = {
    "digits": digits,
    "newsgroups20": lambda seed: newsgroups(lambda x, y: instance_dependent(x, y, 0.4, seed).labels),
    "newsgroups20-sn": lambda seed: newsgroups(lambda x, y: symmetric(y, 0.4, seed).labels),
    "newsgroups20-asn": lambda seed: newsgroups(lambda x, y: asymmetric(y, 0.4, seed).labels),
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


def gnl(d: Arrays, epochs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    clf = GNLClassifier(random_state=seed, epochs=epochs).fit(d.x, d.given)
    return clf.predict_proba(d.x), clf.predict_proba(d.test_x)


Classifier = Callable[[Arrays, int, int], tuple[np.ndarray, np.ndarray]]
"""(data, epochs, seed) -> its probabilities for the training and the test samples."""
CLASSIFIERS: dict[str, Classifier] = {"CE": cross_entropy, "GNL": gnl}


def measure(d: Arrays, classifier: Classifier, epochs: int, seed: int) -> tuple[float, float]:
    """(accuracy alone, with NPC), in percent."""
    p_train, p_test = classifier(d, epochs, seed)
    calibrated = NPC(seed=seed).fit(d.x, p_train).predict(d.test_x, p_test)
    return 100 * float((p_test.argmax(1) == d.test_y).mean()), 100 * float((calibrated == d.test_y).mean())


def main(config: Config) -> None:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, seed in tqdm([(name, seed) for name in config.data for seed in range(config.seeds)], unit="run"):
        d = LOADERS[name](seed)
        for label, classifier in CLASSIFIERS.items():
            found.setdefault((name, label), []).append(measure(d, classifier, config.epochs, seed))
    rows: list[dict[str, Any]] = []
    for (name, label), values in found.items():
        alone, with_npc = np.array(values).T
        rows.append(
            {
                "data": name,
                "seeds": config.seeds,
                "classifier": label,
                "alone": round(float(alone.mean()), 1),
                "with NPC": round(float(with_npc.mean()), 1),
                "std of the gain": round(float((with_npc - alone).std()), 1),
            }
        )
    label = ("data", "classifier")
    show(rows, config.json, Chart("Test accuracy alone and with NPC, %", ("alone", "with NPC"), label))


if __name__ == "__main__":
    run_worker(Config, main)
