"""Test accuracy of CE and GNL alone and with NPC on top, on the 20 Newsgroups embeddings of FASTGNL_DATA.

FASTGNL_DATA=... python bench/npc.py
python bench/npc.py --data digits    # needs no data
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from accuracy import LOADERS, Arrays, cross_entropy
from common import show
from tqdm import tqdm

from fastgnl import GNLClassifier
from fastgnl.cli import run_worker
from fastgnl.errors import check_count
from fastgnl.npc import NPC

Name = Literal["digits", "newsgroups20-sn", "newsgroups20-asn", "newsgroups20"]
Classifier = Callable[[Arrays, int, int], tuple[np.ndarray, np.ndarray]]
"""(data, epochs, seed) -> its probabilities for the training and the test samples."""


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


def gnl(d: Arrays, epochs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    clf = GNLClassifier(random_state=seed, epochs=epochs).fit(d.x, d.given)
    return clf.predict_proba(d.x), clf.predict_proba(d.test_x)


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
    show(rows, config.json)


if __name__ == "__main__":
    run_worker(Config, main)
