"""The main job on embedded data: CE against GNL on digits with instance-dependent noise.

Run by ``torchrun --standalone --nproc-per-node 2 launchers/digits.py`` or ``fastgnl demo``.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from fastgnl import report
from fastgnl.digits import Digits, noisy_digits
from fastgnl.distributed import is_distributed, process_group, rank, synchronise_batch_norm, world_size
from fastgnl.errors import check_count, check_range, check_seed
from fastgnl.files import check_writable
from fastgnl.loader import Loader
from fastgnl.mixture import noise_probability
from fastgnl.networks import SmallCNN
from fastgnl.noise import class_matrix
from fastgnl.objective import GNLObjective
from fastgnl.progress import Progress
from fastgnl.samples import Samples
from fastgnl.trainer import CrossEntropy, Epoch, Objective, TrainConfig, eval_losses, predict_proba, train
from fastgnl.transition import class_transition, with_transition

NAMES = {"ce": "cross-entropy", "gnl": "GNL"}
PICTURES = 32


@dataclass(frozen=True)
class DemoConfig:
    """CE against GNL on digits with wrong labels."""

    rate: float = 0.4
    """Mean flip rate of the labels, from 0.01 to 0.9."""
    epochs: int = 40
    """Epochs of each method, at least 2."""
    seed: int = 0
    """Fixes split, noise, order, weights and draws."""
    out: Path = Path("runs/demo")
    """Folder for the page."""

    @property
    def page(self) -> Path:
        return self.out / "index.html"

    def __post_init__(self) -> None:
        check_range("rate", self.rate, 0.01, 0.9)
        check_count("epochs", self.epochs, 2)
        check_seed(self.seed, bits=32)


class Result(NamedTuple):
    """What one method reached."""

    history: list[Epoch]
    noise_probability: NDArray[np.float32]
    predicted: NDArray[np.int64]
    """Of the training samples."""
    losses: NDArray[np.float32]
    transition: NDArray[np.float64] | None
    auroc: float

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last epoch."""
        return self.history[-1].test_accuracy or 0.0

    @property
    def epoch_seconds(self) -> float:
        return float(np.median([epoch.seconds for epoch in self.history[1:]]))


def run_method(method: str, digits: Digits, config: DemoConfig) -> Result:
    """Train the small CNN with one method."""
    samples = Samples(digits.train_x, digits.train_given, digits.train_clean)
    torch.manual_seed(config.seed)
    backbone = SmallCNN()
    net = with_transition(backbone, backbone.num_features, 10, transition_input="logits" if method == "gnl" else "none")
    if is_distributed():
        synchronise_batch_norm(net)
    objective: Objective = CrossEntropy()
    if method == "gnl":
        objective = GNLObjective(len(samples), 10, warmup_epochs=min(10, config.epochs // 4), seed=config.seed)
    with Progress(NAMES[method].ljust(13), len(samples), config.epochs, enabled=rank() == 0) as progress:
        history = train(
            net,
            objective,
            Loader(samples, seed=config.seed),
            TrainConfig(epochs=config.epochs),
            Samples(digits.test_x, digits.test_y),
            progress.on_batch,
            progress.on_epoch,
        )
    losses = eval_losses(net, samples)
    w = noise_probability(losses)
    wrong = digits.train_given != digits.train_clean
    matrix = None
    if method == "gnl":
        matrix = class_transition(net, samples).numpy()
    return Result(
        history,
        w.numpy(),
        predict_proba(net, samples).argmax(1).numpy(),
        losses.numpy(),
        matrix,
        float(roc_auc_score(wrong, w)),
    )


HEADER = ("", "test accuracy", "epoch", "time / CE", "AUROC of wrong labels")


def table_rows(results: dict[str, Result]) -> list[tuple[str, ...]]:
    """The closing table, a row a method."""
    return [
        (
            NAMES[method],
            f"{100 * result.accuracy:.1f}%",
            f"{1000 * result.epoch_seconds:.0f} ms",
            f"{result.epoch_seconds / results['ce'].epoch_seconds:.2f}",
            f"{result.auroc:.3f}",
        )
        for method, result in results.items()
    ]


def _curves(results: dict[str, Result]) -> str:
    figure, (left, right) = report.axes(2)
    for method, colour in (("ce", report.CE_COLOUR), ("gnl", report.GNL_COLOUR)):
        history = results[method].history
        x = [epoch.number + 1 for epoch in history]
        report.line(left, x, [100 * (epoch.test_accuracy or 0) for epoch in history], colour, NAMES[method])
    left.set(title="test accuracy, %", xlabel="epoch")
    history = results["gnl"].history
    x = [epoch.number + 1 for epoch in history]
    for term, name, colour in zip(
        ("ce", "prior", "estep"), ("L_CE", "L_PRI", "L_KL"), report.TERM_COLOURS, strict=True
    ):
        right.plot(x, [getattr(epoch, term) for epoch in history], color=colour, linewidth=1.8, label=name)
    right.set(title="GNL, loss terms", xlabel="epoch")
    right.legend(frameon=False, fontsize=9)
    return report.svg(figure)


def _label_prior(history: list[Epoch]) -> str:
    figure, (left, right) = report.axes(2)
    x = [epoch.number + 1 for epoch in history]
    report.line(left, x, [100 * epoch.coverage for epoch in history], report.GNL_COLOUR, "")
    left.set(title="coverage: sets that hold the true label, %", xlabel="epoch")
    report.line(right, x, [epoch.noisy_size for epoch in history], report.CE_COLOUR, "wrong labels")
    report.line(right, x, [epoch.clean_size for epoch in history], report.GNL_COLOUR, "right labels")
    right.set(title="uncertainty: labels in the set", xlabel="epoch", ylim=(0, 10.5))
    return report.svg(figure)


def _matrices(true: NDArray[np.float64], estimate: NDArray[np.float64]) -> str:
    figure, (left, right) = report.axes(2, 4.2)
    names = [str(c) for c in range(10)]
    report.heatmap(left, true, "true, %", names)
    report.heatmap(right, estimate, "estimated, %", names)
    return report.svg(figure)


def _suspects(digits: Digits, result: Result) -> str:
    order = np.lexsort((-result.losses, -result.noise_probability))[:PICTURES]
    tiles = []
    for i in order:
        given, true = int(digits.train_given[i]), int(digits.train_clean[i])
        lines = [f"given {given}", f"suggested {result.predicted[i]}", f"truly {true}"]
        tiles.append(report.tile(digits.train_x[i, 0].numpy(), lines))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def write_report(path: Path, digits: Digits, results: dict[str, Result], config: DemoConfig, seconds: float) -> None:
    """The page: table, curves, coverage and uncertainty, transition matrices, suspicious digits."""
    gnl, ce = results["gnl"], results["ce"]
    true = class_matrix(digits.noise.transition, digits.train_clean.numpy(), 10)
    assert gnl.transition is not None
    error = float(((gnl.transition - true) ** 2).mean())
    wrong = float((digits.train_given != digits.train_clean).double().mean())
    body = "".join(
        [
            report.table(HEADER, table_rows(results)),
            report.section(
                "Training",
                "Test accuracy of both methods and the three terms of GNL's loss, epoch by epoch.",
                _curves(results),
            ),
            report.section(
                "The label prior",
                "Each sample is taught a set of candidate labels. The sets come to hold the true label (coverage) and "
                "shrink to one label where the given one is right, and stay large where it is wrong (uncertainty).",
                _label_prior(gnl.history),
            ),
            report.section(
                "How labels went wrong",
                f"Probability of each given label for each true one. Mean squared error of the estimate: {error:.4f}.",
                _matrices(true, gnl.transition),
            ),
            report.section(
                "Most suspicious labels",
                f"The {PICTURES} of {len(digits.train_given):,} training digits whose given label GNL doubts most.",
                _suspects(digits, gnl),
            ),
        ]
    )
    report.write_page(
        path,
        f"With {100 * wrong:.0f}% wrong labels: {100 * ce.accuracy:.1f}% with cross-entropy, "
        f"{100 * gnl.accuracy:.1f}% with GNL",
        f"scikit-learn's digits, instance-dependent noise at rate {config.rate:g}, {config.epochs} epochs of a small "
        f"CNN, accuracy on {len(digits.test_y)} clean test digits after the last epoch.",
        body,
        f"fastgnl demo, seed {config.seed}, {world_size()} worker(s), {seconds:.0f} s",
    )


def run(config: DemoConfig) -> dict[str, Result]:
    """Train both methods and, on rank 0, print the table and write the page."""
    check_writable(config.page)
    start = time.perf_counter()
    digits = noisy_digits(config.rate, config.seed)
    results = {method: run_method(method, digits, config) for method in NAMES}
    if rank() == 0:
        print(f"\n{report.text_table(HEADER, table_rows(results))}", flush=True)
        write_report(config.page, digits, results, config, time.perf_counter() - start)
        print(f"\npage: {config.page.resolve()}", flush=True)
    return results


def main(config: DemoConfig) -> None:
    """One of torchrun's workers, or the only process."""
    with process_group():
        run(config)


if __name__ == "__main__":
    from fastgnl.cli import run_worker

    run_worker(DemoConfig, main)
