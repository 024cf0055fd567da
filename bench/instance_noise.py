"""Seconds to make instance-dependent noise for inputs of CIFAR's size, 50,000 x 3,072.

python bench/instance_noise.py
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import show

from fastgnl.cli import run_worker
from fastgnl.errors import check_count
from fastgnl.noise import instance_dependent


@dataclass(frozen=True)
class Config:
    """Seconds to make instance-dependent noise."""

    samples: int = 50_000
    features: int = 3072
    classes: tuple[int, ...] = (10, 100)
    json: Path | None = None
    """Write the rows here too."""

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 1)
        check_count("features", self.features, 1)


def main(config: Config) -> None:
    g = np.random.default_rng(0)
    x = g.random((config.samples, config.features), dtype=np.float32)
    rows = []
    for classes in config.classes:
        labels = g.integers(classes, size=config.samples)
        start = time.perf_counter()
        noise = instance_dependent(x, labels, 0.4, 0, num_classes=classes)
        rows.append(
            {
                "samples": config.samples,
                "features": config.features,
                "classes": classes,
                "seconds": round(time.perf_counter() - start, 1),
                "wrong labels %": round(100 * float((noise.labels != labels).mean()), 1),
            }
        )
    show(rows, config.json)


if __name__ == "__main__":
    run_worker(Config, main)
