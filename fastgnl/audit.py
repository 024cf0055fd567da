"""Find the wrong labels of a data set: train on it, rank its labels by the probability that they are wrong."""

import csv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray
from scipy.sparse import issparse, load_npz

from fastgnl import report
from fastgnl.errors import InputError, check, check_range, check_seed
from fastgnl.estimator import GNLClassifier
from fastgnl.files import check_writable, written

COLUMNS = ("rank", "index", "given_label", "suggested_label", "noise_probability", "suggested_probability")
SHOWN = 100
"""Suspects listed on the page; the CSV has all."""


@dataclass(frozen=True)
class AuditConfig:
    """Rank the labels of a data set by the probability that they are wrong."""

    x: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="X.npy")]
    """Features or embeddings, one row a sample: .npy, or .npz of a SciPy sparse matrix."""
    y: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="y.npy")]
    """Given labels, whole numbers or strings: .npy, or a text file with one label a line."""
    out: Path = Path("suspects.csv")
    """The ranked list; a page with the same name and .html goes beside it."""
    threshold: float = 0.5
    """List labels that are wrong with at least this probability."""
    seed: int = 0
    """Fixes the result."""

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0, 1)
        check_seed(self.seed, bits=32)
        check(self.out.suffix == ".csv", f"out is {self.out}, wanted a name that ends in .csv")

    @property
    def page(self) -> Path:
        return self.out.with_suffix(".html")


def _load(path: Path) -> Any:
    check(path.is_file(), f"{path} does not exist, wanted a .npy file")
    try:
        if path.suffix == ".npz":
            return load_npz(path)
        if path.suffix != ".npy":
            return np.array(path.read_text(encoding="utf-8").splitlines())
        with path.open("rb") as file:  # numpy.load would also take an archive by this name
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} cannot be read as plain numbers or strings ({str(error).splitlines()[0]}), wanted an array saved "
            "with numpy.save and no Python objects in it"
        ) from error


def load_inputs(x_path: Path, y_path: Path) -> tuple[Any, NDArray[Any]]:
    """Features and labels, checked before anything is trained."""
    X, y = _load(x_path), _load(y_path)
    check(X.ndim == 2 and min(X.shape) > 0, f"{x_path} has shape {X.shape}, wanted (samples, features)")
    check(np.isrealobj(X) and np.issubdtype(X.dtype, np.number), f"{x_path} holds {X.dtype}, wanted real numbers")
    check(y.shape == X.shape[:1], f"{y_path} has shape {y.shape}, wanted ({X.shape[0]},) as {x_path} has rows")
    if y.dtype.kind == "S":
        y = np.char.decode(y, "utf-8")
    check(
        np.issubdtype(y.dtype, np.integer) or y.dtype.kind == "U",
        f"{y_path} holds {y.dtype}, wanted whole numbers or strings",
    )
    values = X.data if issparse(X) else X
    check(bool(np.isfinite(values).all()), f"{x_path} holds NaN or infinity, wanted finite features")
    check(len(np.unique(y)) >= 2, f"{y_path} holds one class, wanted at least 2")
    return X, y


def suspects(clf: GNLClassifier, X: Any, y: NDArray[Any], threshold: float) -> list[tuple[Any, ...]]:
    """The rows of the CSV, most suspicious first; a tie of probabilities is broken by the loss.

    A label the model would give itself is no suspect, however unsure the model is of it."""
    q_NC = clf.predict_proba(X)
    given = q_NC[np.arange(len(y)), np.searchsorted(clf.classes_, y)]
    order = np.lexsort((given, -clf.noise_probability_))
    order = order[(clf.noise_probability_[order] >= threshold) & (clf.suggested_labels_[order] != y[order])]
    return [
        (n + 1, int(i), y[i], clf.suggested_labels_[i], f"{clf.noise_probability_[i]:.4f}", f"{q_NC[i].max():.4f}")
        for n, i in enumerate(order)
    ]


def _page(path: Path, clf: GNLClassifier, y: NDArray[Any], rows: list[tuple[Any, ...]], config: AuditConfig) -> None:
    names = [str(c) for c in clf.classes_]
    figure, (left, right) = report.axes(2, 3.8 if len(names) <= 20 else 4.6)
    left.hist(clf.noise_probability_, bins=40, range=(0, 1), color=report.GNL_COLOUR)
    left.set(title="samples by probability of a wrong label", xlabel="probability", yscale="log")
    report.heatmap(right, clf.transition_matrix_, "given label for each true one, %", names if len(names) <= 40 else [])
    right.tick_params(axis="x", rotation=90 if max(map(len, names)) > 2 else 0)
    doubtful = (clf.noise_probability_ >= config.threshold) & (clf.suggested_labels_ != y)
    per_class = sorted(
        ((float(doubtful[y == c].mean()), str(c), int((y == c).sum())) for c in clf.classes_), reverse=True
    )
    body = (
        report.svg(figure)
        + report.section(
            "By given label",
            "Which classes the doubtful labels are in.",
            report.table(
                ("given label", "samples", "doubtful"),
                [(c, f"{n:,}", f"{100 * share:.1f}%") for share, c, n in per_class[:SHOWN]],
            ),
        )
        + report.section(
            "Most suspicious labels",
            f"The first {min(SHOWN, len(rows))} of {len(rows):,}; all are in {config.out.name}.",
            report.table(COLUMNS, [tuple(str(cell) for cell in row) for row in rows[:SHOWN]]),
        )
    )
    report.write_page(
        path,
        f"{len(rows):,} of {len(y):,} labels look wrong",
        f"{config.x.name} with the labels of {config.y.name}: {len(names)} classes; listed are labels that are wrong "
        f"with a probability of at least {config.threshold:g}. Even flawless data have a few: look before you change.",
        body,
        f"fastgnl audit, seed {config.seed}",
    )


def run(config: AuditConfig) -> None:
    """Train, then write the list and its page."""
    X, y = load_inputs(config.x, config.y)
    check_writable(config.out)
    check_writable(config.page)
    clf = GNLClassifier(random_state=config.seed, verbose=True).fit(X, y)
    rows = suspects(clf, X, y, config.threshold)
    with written(config.out) as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    _page(config.page, clf, y, rows, config)
    print(f"{len(rows):,} of {len(y):,} labels look wrong\nlist: {config.out.resolve()}\npage: {config.page.resolve()}")
