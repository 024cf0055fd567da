"""The noise filter on 2,400,000 losses against scikit-learn's GaussianMixture at equal settings, CPU seconds.

python bench/noise_filter.py
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import Chart, show
from sklearn.mixture import GaussianMixture
from tqdm import tqdm

from fastgnl.cli import run_worker
from fastgnl.errors import check, check_count
from fastgnl.mixture import MAX_ITER, TOLERANCE, VARIANCE_FLOOR, noise_probability


@dataclass(frozen=True)
class Config:
    """The noise filter against scikit-learn's GaussianMixture, CPU seconds in one process."""

    samples: int = 2_400_000
    """Losses, 40% of them of wrong labels."""
    repeats: int = 3
    """Timings of each; the median counts."""
    json: Path | None = None
    """Write the rows here too."""

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 10)
        check_count("repeats", self.repeats, 1)


def make_losses(n: int) -> torch.Tensor:
    """Gamma-distributed losses of right and wrong labels, overlapping."""
    g = np.random.default_rng(0)
    noisy = 2 * n // 5
    losses = np.concatenate([g.gamma(2.0, 0.2, n - noisy), 1.0 + g.gamma(2.0, 0.8, noisy)])
    return torch.from_numpy(g.permutation(losses)).float()


def by_scikit_learn(losses: torch.Tensor) -> np.ndarray:
    x = ((losses - losses.min()) / (losses.max() - losses.min())).numpy().reshape(-1, 1)
    mixture = GaussianMixture(2, max_iter=MAX_ITER, tol=TOLERANCE, reg_covar=VARIANCE_FLOOR, random_state=0).fit(x)
    return mixture.predict_proba(x)[:, mixture.means_.argmax()]


def cpu_seconds(name: str, work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in tqdm(range(repeats), name):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return float(np.median(times))


def main(config: Config) -> None:
    losses = make_losses(config.samples)
    noise_probability(losses[:1000])  # warm-up
    ours = cpu_seconds("fastgnl", lambda: noise_probability(losses), config.repeats)
    theirs = cpu_seconds("scikit-learn", lambda: by_scikit_learn(losses), config.repeats)
    gap = float(np.abs(noise_probability(losses).numpy() - by_scikit_learn(losses)).max())
    check(gap < 0.05, f"the probabilities differ by up to {gap:.2g}, wanted both sides to find the same mixture")
    show(
        [
            {
                "samples": config.samples,
                "fastgnl CPU s": round(ours, 3),
                "scikit-learn CPU s": round(theirs, 3),
                "ratio": round(theirs / ours, 1),
                "largest difference of w": f"{gap:.1e}",
            }
        ],
        config.json,
        Chart("CPU seconds of the noise filter", ("fastgnl CPU s", "scikit-learn CPU s"), ("samples",), log=True),
    )


if __name__ == "__main__":
    run_worker(Config, main)
