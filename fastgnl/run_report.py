"""``fastgnl report``: the curves of one or several runs side by side on one page, from their ``metrics.jsonl``."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fastgnl import report
from fastgnl.errors import InputError, check
from fastgnl.files import check_writable
from fastgnl.metrics import FILE

POINTS = 300
"""Of a curve over steps, at most: each is the mean of its neighbours."""


@dataclass(frozen=True)
class ReportConfig:
    """Show the curves of one or several runs side by side, on one page."""

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...", help_behavior_hint="(required)")
    ]
    """Folders of runs, or their metrics.jsonl files."""
    out: Path = Path("report.html")
    """The page."""

    def __post_init__(self) -> None:
        check(bool(self.runs), "no run is given, wanted the folder of at least one")
        check(self.out.suffix == ".html", f"out is {self.out}, wanted a name that ends in .html")


TOP1 = " top1"
"""How the name of an accuracy ends."""
Values = dict[str, float]


@dataclass
class Run:
    """What the lines of a file say. Where a restart went back, what was measured last counts."""

    name: str
    epochs: dict[int, Values] = field(default_factory=dict)
    """By number from 0, in order."""
    steps: dict[int, Values] = field(default_factory=dict)
    """By number, in order."""
    starts: list["Start"] = field(default_factory=list)
    planned: int | None = None
    """Epochs wanted at the last start, if it told."""
    ended: str | None = None
    """Finished or stopped, if nothing was measured since."""
    skipped: int = 0

    @property
    def done(self) -> int:
        return max(self.epochs, default=-1) + 1

    @property
    def reached(self) -> float:
        """Epochs, the part of one that is under way included."""
        return max([self.done, *self.in_epochs(np.array([*self.steps][-1:], dtype=np.float64))])

    @property
    def seconds(self) -> float:
        """From each start to its last line, in total."""
        return sum(start.seconds for start in self.starts)

    @property
    def state(self) -> str:
        if self.planned is not None and self.done >= self.planned:
            return "finished"
        return self.ended or "still running or killed"

    @property
    def restarts(self) -> list["Start"]:
        return [start for i, start in enumerate(self.starts) if i > 0 or start.resumed]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Epochs, counted from 1, and the values at their ends where they are known."""
        known = {number + 1: values[name] for number, values in self.epochs.items() if name in values}
        return list(known), list(known.values())

    def fine_curve(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The same over steps, thinned out."""
        known = [(step, values[name]) for step, values in self.steps.items() if name in values]
        if not known or not self.epochs:
            return np.zeros(0), np.zeros(0)
        parts = np.array_split(np.array(known, dtype=np.float64), min(len(known), POINTS))
        steps, values = np.stack([part.mean(0) for part in parts]).T
        return self.in_epochs(steps), values

    def in_epochs(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Steps as epochs: those of an epoch lie evenly between its ends."""
        ends = [(values["step"], number + 1.0) for number, values in self.epochs.items()]
        x, y = np.array([(0.0, 0.0), *ends]).T
        per_step = y[-1] / x[-1] if x[-1] else 0.0
        return np.interp(steps, x, y) + np.maximum(steps - x[-1], 0) * per_step

    def measured(self, kind: str, numbers: Values) -> None:
        """Take in a line; later ones that are there already are of a process whose work was lost."""
        step, epoch = int(numbers["step"]), int(numbers["epoch"])
        while self.steps and next(reversed(self.steps)) > step:
            self.steps.popitem()
        while self.epochs and next(reversed(self.epochs.values()))["step"] > step:
            self.epochs.popitem()
        if kind == "step":
            self.steps[step] = numbers
        else:
            while self.epochs and next(reversed(self.epochs)) > epoch:
                self.epochs.popitem()
            self.epochs[epoch] = numbers
        self.ended = None
        self.skipped = int(numbers.get("skipped", self.skipped))


@dataclass
class Start:
    """One process of a run, from its first line to its last."""

    first: float | None = None
    last: float | None = None
    resumed: bool = False
    at: Values = field(default_factory=dict)
    """The first line that tells the step or epoch it went on from."""
    measured: bool = False

    @property
    def seconds(self) -> float:
        return 0.0 if self.first is None or self.last is None else max(0.0, self.last - self.first)

    def where(self, run: Run) -> float | None:
        """In epochs."""
        if "step" in self.at:
            return float(run.in_epochs(np.array([self.at["step"]]))[0])
        return self.at.get("epoch")


def _file_of(given: Path) -> Path:
    check(given.exists(), f"{given} does not exist, wanted the folder of a run")
    path = given / FILE if given.is_dir() else given
    check(path.is_file(), f"{given} holds no {FILE}, wanted the folder of a run")
    return path


def names_of(files: Sequence[Path]) -> list[str]:
    """The ends of the runs' paths, as long as it takes to tell them apart."""
    paths = [Path(os.path.abspath(file)) for file in files]
    parts = [(path.parent if path.name == FILE else path).parts for path in paths]

    lengths = range(1, max(map(len, parts)))
    length = next((n for n in lengths if len({part[-n:] for part in parts}) == len(parts)), len(lengths) + 1)
    return [str(Path(*part[-length:])) for part in parts]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; what follows the last newline was cut short when its process was killed."""
    try:
        *whole, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}, wanted a {FILE} that can be read") from error
    check(bool(whole), f"{path} holds no whole line, wanted one for each epoch")
    found = []
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        check(_is_line(line), f"{path} is damaged in line {number}, wanted a line as training writes it")
        found.append(line)
    return found


def _is_line(line: Any) -> bool:
    """Whether it has a kind, and whole numbers where they are needed."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return False
    counts = ("step", "epoch") if line["kind"] in ("step", "epoch") else ()
    return all(type(line.get(name)) is int and 0 <= line[name] < 2**53 for name in counts)


def _is_accuracy(name: str) -> bool:
    return name.endswith(TOP1)


def load(path: Path, name: str) -> Run:
    """The run that a file tells of."""
    run = Run(name)
    start = Start()
    for line in _lines(path):
        kind, event = line["kind"], line.get("event")
        numbers = {k: float(v) for k, v in line.items() if isinstance(v, int | float) and abs(v) < 1e300}
        resumed = kind == "event" and event == "resumed"
        if not run.starts or kind == "run" or (resumed and (start.measured or start.resumed)):
            start = Start(first=numbers.get("time"))
            run.starts.append(start)
        start.last = numbers.get("time", start.last)
        start.resumed |= resumed
        if not start.at and (resumed or kind in ("step", "epoch")):
            start.at = {name: numbers[name] for name in ("step", "epoch") if name in numbers}
        if kind == "run":
            run.planned = line["epochs"] if type(line.get("epochs")) is int else None
            run.ended = None
        elif kind == "event" and event in ("finished", "stopped"):
            run.ended = event
        elif kind in ("step", "epoch"):
            start.measured = True
            if "test_accuracy" in numbers and not any(map(_is_accuracy, numbers)):  # an older run
                numbers[f"test{TOP1}"] = numbers["test_accuracy"]
            run.measured(kind, numbers)
    return run


def load_all(given: Sequence[Path]) -> list[Run]:
    """Every run, named; one sentence on what cannot be shown."""
    files = [_file_of(path) for path in given]
    seen: set[Path] = set()
    for path, file in zip(given, files, strict=True):
        check(file.resolve() not in seen, f"{path} is given twice, wanted each run once")
        seen.add(file.resolve())
    runs = [load(file, name) for file, name in zip(files, names_of(files), strict=True)]
    no_epochs = f"{given[0]} has no epoch" if len(runs) == 1 else f"none of the {len(runs)} runs has an epoch"
    check(any(run.epochs for run in runs), f"{no_epochs} yet, wanted one that is through")
    return runs


class Panel(NamedTuple):
    """A chart: a colour a run, a style a value."""

    title: str
    values: tuple[str, ...]
    """Without any, every top-1 score of the runs, named in a legend where there are several."""
    scale: float = 1.0
    from_zero: bool = False
    steps: Literal["", "pale", "curve"] = ""
    """How the values of single steps are drawn: not, behind those of the epochs, or in their place."""


SECTIONS: tuple[tuple[str, str, tuple[Panel, ...]], ...] = (
    (
        "Accuracy and loss",
        "Accuracy on the test samples after each epoch, and the mean loss of its training samples.",
        (Panel("test accuracy, %", (), 100), Panel("loss", ("loss",), steps="pale")),
    ),
    (
        "Terms of the loss",
        "L_CE fits the noisy head to the given labels, L_PRI the clean head to the candidate sets, and L_KL, the "
        "E-step, pulls the noisy head towards the clean one.",
        (
            Panel("L_CE", ("ce",), steps="pale"),
            Panel("L_PRI", ("prior",), steps="pale"),
            Panel("L_KL", ("estep",), steps="pale"),
        ),
    ),
    (
        "The label prior",
        "Coverage is the share of candidate sets that hold the true label, uncertainty the labels in a set: solid "
        "where the given label is right, dashed where it is wrong.",
        (
            Panel("coverage, %", ("coverage",), 100),
            Panel("uncertainty, labels in the set", ("clean_size", "noisy_size"), from_zero=True),
        ),
    ),
    (
        "Speed and schedule",
        "Images of all workers a second, the share of the time that training waited for data, and the learning rate.",
        (
            Panel("images a second", ("images_per_second",), from_zero=True),
            Panel("waited for data, %", ("wait",), 100, from_zero=True),
            Panel("learning rate", ("lr",), steps="curve"),
        ),
    ),
)
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (4, 1, 1, 1, 1, 1)), (0, (1, 4)))
PALE = 4
"""Runs. The steps of more would hide one another."""


def _values(panel: Panel, runs: Sequence[Run]) -> list[str]:
    """What a chart shows of these runs."""
    found = (name for run in runs for values in run.epochs.values() for name in values if _is_accuracy(name))
    return list(panel.values or dict.fromkeys(found))


def _draw(ax: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    pale = []
    values = _values(panel, runs)
    named = not panel.values and len(values) > 1
    by_value = named and len(runs) == 1
    for i, run in enumerate(runs):
        for j, value in enumerate(values):
            colour = report.run_colour(j if by_value else i)
            x, y = (np.array(values, dtype=np.float64) for values in run.curve(value))
            x_steps, y_steps = run.fine_curve(value)
            if panel.steps == "curve" and len(x_steps):
                x, y = x_steps, y_steps
            elif panel.steps == "pale" and len(runs) <= PALE:
                pale.append((x_steps, panel.scale * y_steps, colour))
            style, dot = STYLES[j % len(STYLES)], "o" if len(x) == 1 else None
            ax.plot(x, panel.scale * y, linestyle=style, color=colour, linewidth=1.6, marker=dot)
        for start in run.restarts:
            if (at := start.where(run)) is not None:
                ax.axvline(at, color=report.run_colour(i), linewidth=0.7, alpha=0.7, zorder=1)
    if panel.from_zero:
        ax.set_ylim(bottom=0)
    limits = ax.get_ylim()
    for x, y, colour in pale:
        ax.plot(x, y, color=colour, linewidth=0.8, alpha=0.3, zorder=1)
    if any(len(run.epochs) > 1 for run in runs):  # single steps scatter: they must not flatten the curves of epochs
        ax.set_ylim(limits)
    ax.set_xlim(0, 1.02 * max(run.reached for run in runs))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.set(title=panel.title, xlabel="epoch")
    if named:
        keys = [
            Line2D([], [], color=report.run_colour(j) if by_value else report.QUIET, linestyle=STYLES[j % len(STYLES)])
            for j in range(len(values))
        ]
        ax.legend(keys, [value.removesuffix(TOP1) for value in values], frameon=False, fontsize=7.5, handlelength=3)


def _section(title: str, text: str, panels: Sequence[Panel], runs: Sequence[Run]) -> str:
    shown = [panel for panel in panels if any(run.curve(value)[1] for run in runs for value in _values(panel, runs))]
    if not shown:
        return ""
    figure, grid = report.axes(len(shown))
    for ax, panel in zip(grid, shown, strict=True):
        _draw(ax, panel, runs)
    return report.section(title, text, report.svg(figure))


HEADER = (
    *("run", "epochs", "last test", "best test", "time", "an epoch", "images/s"),
    *("waited", "skipped", "restarts", "state"),
)


def duration(seconds: float) -> str:
    """In the two units that matter."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def table_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """The closing table, a row a run; of epochs the median."""

    def middle(values: list[float], show: Callable[[float], str]) -> str:
        return show(float(np.median(values))) if values else "-"

    def row(run: Run) -> tuple[str, ...]:
        accuracy = run.curve("test_accuracy")[1]
        return (
            run.name,
            f"{run.done}" if run.planned is None else f"{run.done} of {run.planned}",
            f"{accuracy[-1]:.1%}" if accuracy else "-",
            f"{max(accuracy):.1%}" if accuracy else "-",
            duration(run.seconds or sum(run.curve("seconds")[1])),
            middle(run.curve("seconds")[1], duration),
            middle(run.curve("images_per_second")[1], "{:,.0f}".format),
            middle(run.curve("wait")[1], "{:.1%}".format),
            f"{run.skipped}",
            f"{len(run.restarts)}",
            run.state,
        )

    return [row(run) for run in runs]


def _title(runs: Sequence[Run]) -> str:
    tested = [(run.curve("test_accuracy")[1][-1], run) for run in runs if run.curve("test_accuracy")[1]]
    if len(runs) == 1:
        after = f"{runs[0].done} epoch{'s' if runs[0].done > 1 else ''}"
        return f"{runs[0].name}: {tested[0][0]:.1%} after {after}" if tested else f"{runs[0].name}: {after}"
    if not tested:
        return f"{len(runs)} runs"
    accuracy, best = max(tested, key=lambda pair: pair[0])
    return f"{len(runs)} runs, the best at its end: {best.name} with {accuracy:.1%}"


def write_report(path: Path, runs: Sequence[Run]) -> None:
    """The page: a legend that stays in sight, the curves, the table."""
    colours = [report.run_colour(i) for i in range(len(runs))]
    lead = "Curves by epoch."
    if len(runs) <= PALE and any(run.steps for run in runs):
        lead = "Curves by epoch, the pale ones by step."
    if any(run.restarts for run in runs):
        lead += " A thin vertical line marks where a run was started again."
    report.write_page(
        path,
        _title(runs),
        lead,
        (report.legend([run.name for run in runs], colours) if len(runs) > 1 else "")
        + "".join(_section(title, text, panels, runs) for title, text, panels in SECTIONS)
        + report.section(
            "All runs" if len(runs) > 1 else "The run",
            "Accuracy on the test samples after the last epoch and at its best; time from each start to its last sign "
            "of life; time, images and share waited for data of a median epoch.",
            f'<div class="wide">{report.table(HEADER, table_rows(runs), colours)}</div>',
        ),
        f"fastgnl report of {len(runs)} run{'s' if len(runs) > 1 else ''}",
    )


def run(config: ReportConfig) -> None:
    """Read the runs, print the table, write the page."""
    check_writable(config.out)
    runs = load_all(config.runs)
    write_report(config.out, runs)
    print(f"{report.text_table(HEADER, table_rows(runs))}\n\npage: {config.out.resolve()}")
