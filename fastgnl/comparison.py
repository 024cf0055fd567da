"""Cross-entropy against GNL on one task: what each reached, the closing table, the page."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from fastgnl import report
from fastgnl.distributed import world_size
from fastgnl.evaluate import eval_losses, predict_proba
from fastgnl.formats.listing import UNKNOWN
from fastgnl.mixture import noise_probability
from fastgnl.tally import Epoch
from fastgnl.task import Task
from fastgnl.transition import PairNet, TransitionNet, class_transition

NAMES = {"ce": "cross-entropy", "gnl": "GNL"}
PICTURES = 32


class Result(NamedTuple):
    """What one method reached."""

    history: list[Epoch]
    noise_probability: NDArray[np.float32]
    predicted: NDArray[np.int64]
    """Of the training samples."""
    losses: NDArray[np.float32]
    transition: NDArray[np.float64] | None
    auroc: float | None

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last epoch."""
        return self.history[-1].test_accuracy or 0.0

    @property
    def wait(self) -> float:
        """Share of the time that training waited for data."""
        return float(np.median([epoch.wait for epoch in self.history[1:]]))

    @property
    def epoch_seconds(self) -> float:
        return float(np.median([epoch.seconds for epoch in self.history[1:]]))


def result_of(net: TransitionNet | PairNet, task: Task, history: list[Epoch], method: str) -> Result:
    """What a trained network says of the training samples."""
    losses = eval_losses(net, task.train)
    w = noise_probability(losses if losses.dim() == 1 else losses.mean(0))
    return Result(
        history,
        w.numpy(),
        predict_proba(net, task.train).argmax(1).numpy(),
        (losses if losses.dim() == 1 else losses.mean(0)).numpy(),
        class_transition(net, task.train).numpy() if method == "gnl" else None,
        detection(task, w.numpy()),
    )


def detection(task: Task, w: NDArray[np.float32]) -> float | None:
    """AUROC of the noise probabilities against what is truly wrong, where that is known."""
    if task.train.clean is None:
        return None
    known = task.train.clean != UNKNOWN
    wrong = (task.train.labels != task.train.clean)[known]
    if wrong.all() or not wrong.any():
        return None
    return float(roc_auc_score(wrong, w[task.train.ids[known]]))


HEADER = ("", "test accuracy", "epoch", "time / CE", "waited for data", "AUROC of wrong labels")


def table_rows(results: dict[str, Result]) -> list[tuple[str, ...]]:
    """The closing table, a row a method."""
    return [
        (
            NAMES[method],
            f"{100 * result.accuracy:.1f}%",
            f"{1000 * result.epoch_seconds:.0f} ms",
            f"{result.epoch_seconds / results['ce'].epoch_seconds:.2f}",
            f"{result.wait:.1%}",
            "-" if result.auroc is None else f"{result.auroc:.3f}",
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


def _label_prior(history: list[Epoch], num_classes: int) -> str:
    figure, (left, right) = report.axes(2)
    x = [epoch.number + 1 for epoch in history]
    report.line(left, x, [100 * epoch.coverage for epoch in history], report.GNL_COLOUR, "")
    left.set(title="coverage: sets that hold the true label, %", xlabel="epoch")
    report.line(right, x, [epoch.noisy_size for epoch in history], report.CE_COLOUR, "wrong labels")
    report.line(right, x, [epoch.clean_size for epoch in history], report.GNL_COLOUR, "right labels")
    right.set(title="uncertainty: labels in the set", xlabel="epoch")
    if num_classes <= 20:
        right.set_ylim(0, 1.05 * num_classes)
    return report.svg(figure)


def _matrices(true: NDArray[np.float64], estimate: NDArray[np.float64], classes: tuple[str, ...]) -> str:
    figure, (left, right) = report.axes(2, 4.2)
    short = max(map(len, classes)) <= 3
    names = [name if short else str(c) for c, name in enumerate(classes)] if len(classes) <= 20 else []
    report.heatmap(left, true, "true, %", names)
    report.heatmap(right, estimate, "estimated, %", names)
    return report.svg(figure)


def _suspects(task: Task, result: Result) -> str:
    assert task.picture is not None
    order = np.lexsort((-result.losses, -result.noise_probability))[:PICTURES]
    rows = np.argsort(task.train.ids.numpy())
    tiles = []
    for i in order:
        given = task.classes[int(task.train.labels[rows[i]])]
        lines = [f"given {given}", f"suggested {task.classes[result.predicted[i]]}"]
        if task.train.clean is not None:
            clean = int(task.train.clean[rows[i]])
            lines.append("truly of no class" if clean == UNKNOWN else f"truly {task.classes[clean]}")
        tiles.append(report.tile(task.picture(int(i)), lines))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def wrong_share(task: Task) -> float | None:
    """Share of wrong labels among the samples whose true one is known."""
    if task.train.clean is None:
        return None
    known = task.train.clean != UNKNOWN
    return float((task.train.labels != task.train.clean)[known].double().mean())


def _sections(task: Task, results: dict[str, Result]) -> list[str]:
    gnl = results["gnl"]
    found = [
        report.section(
            "Training",
            "Test accuracy of both methods and the three terms of GNL's loss, epoch by epoch.",
            _curves(results),
        )
    ]
    if task.train.clean is not None:
        found.append(
            report.section(
                "The label prior",
                "Each sample is taught a set of candidate labels. The sets come to hold the true label (coverage) and "
                "shrink to one label where the given one is right, and stay large where it is wrong (uncertainty).",
                _label_prior(gnl.history, len(task.classes)),
            )
        )
    if task.transition is not None and gnl.transition is not None:
        error = float(((gnl.transition - task.transition) ** 2).mean())
        found.append(
            report.section(
                "How labels went wrong",
                f"Probability of each given label for each true one. Mean squared error of the estimate: {error:.4f}.",
                _matrices(task.transition, gnl.transition, task.classes),
            )
        )
    if task.picture is not None:
        found.append(
            report.section(
                "Most suspicious labels",
                f"The {PICTURES} of {len(task.train.labels):,} training images whose given label GNL doubts most.",
                _suspects(task, gnl),
            )
        )
    return found


def write_report(path: Path, task: Task, results: dict[str, Result], seed: int, seconds: float) -> None:
    """The page: table, curves, coverage and uncertainty, transition matrices, suspicious images."""
    gnl, ce, wrong = results["gnl"], results["ce"], wrong_share(task)
    with_wrong = "With doubtful labels" if wrong is None else f"With {100 * wrong:.0f}% wrong labels"
    report.write_page(
        path,
        f"{with_wrong}: {100 * ce.accuracy:.1f}% with cross-entropy, {100 * gnl.accuracy:.1f}% with GNL",
        f"{task.title}, {len(task.train.labels):,} training samples of {len(task.classes)} classes, "
        f"{len(gnl.history)} epochs of {type(task.backbone()).__name__}, accuracy on {len(task.test.labels):,} test "
        "samples after the last epoch.",
        report.table(HEADER, table_rows(results)) + "".join(_sections(task, results)),
        f"fastgnl, seed {seed}, {world_size()} worker(s), {seconds:.0f} s",
    )
