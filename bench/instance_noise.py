"""Seconds and memory to make instance-dependent noise for inputs of CIFAR's size, 50,000 x 3,072.

python bench/instance_noise.py
"""

import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Chart, show
from numpy.typing import NDArray
from tqdm import tqdm

from fastgnl.beton import Beton
from fastgnl.cli import run_worker
from fastgnl.convert import convert
from fastgnl.errors import check_count
from fastgnl.formats.listing import Listing
from fastgnl.noise import instance_dependent
from fastgnl.noise_file import NoiseConfig, load_noise, make_noise


@dataclass(frozen=True)
class Config:
    """Seconds and memory to make instance-dependent noise, for a file that is streamed and for an array."""

    samples: int = 50_000
    features: int = 3072
    classes: tuple[int, ...] = (10, 100)
    json: Path | None = None
    """Write the rows here too."""

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 1)
        check_count("features", self.features, 1)


def row(i: int, features: int) -> NDArray[np.float32]:
    return np.random.default_rng(i).random(features, dtype=np.float32)


def measured(source: str, classes: int, work: Callable[[], tuple[NDArray[Any], NDArray[Any]]]) -> dict[str, Any]:
    """``work`` gives (noisy, true labels). Memory: the peak of what it allocates, in a second run."""
    start = time.perf_counter()
    noisy, true = work()
    seconds = time.perf_counter() - start
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "from": source,
        "classes": classes,
        "seconds": round(seconds, 1),
        "peak MB": round(peak / 1e6),
        "wrong labels %": round(100 * float((noisy != true).mean()), 1),
    }


def from_file(config: Config, classes: int, labels: NDArray[np.int64], folder: Path) -> dict[str, Any]:
    path = folder / f"{classes}.beton"
    names = [str(i) for i in range(config.samples)]
    listing = Listing(
        "bench",
        "features",
        tuple(map(str, range(classes))),
        labels,
        labels,
        names,
        lambda i: row(i, config.features),
    )
    beton = convert(listing, path, quiet=True)

    def work() -> tuple[NDArray[Any], NDArray[Any]]:
        return load_noise(make_noise(NoiseConfig(path), quiet=True), Beton(path, verify=False)).labels, labels

    found = measured("file", classes, work)
    del beton
    path.unlink()
    return found


def main(config: Config) -> None:
    labels = {c: np.random.default_rng(0).integers(c, size=config.samples) for c in config.classes}
    with tempfile.TemporaryDirectory() as folder:
        rows = [from_file(config, c, labels[c], Path(folder)) for c in tqdm(config.classes, "from a file")]
    x = np.random.default_rng(1).random((config.samples, config.features), dtype=np.float32)
    for c in tqdm(config.classes, "from an array"):
        rows.append(measured("array", c, lambda c=c: (instance_dependent(x, labels[c], 0.4, 0, c).labels, labels[c])))  # type: ignore[misc]
    show(rows, config.json, Chart("Seconds to make instance-dependent noise", "seconds", ("classes",), "from"))


if __name__ == "__main__":
    run_worker(Config, main)
