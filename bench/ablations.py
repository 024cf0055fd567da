"""Every row of the paper's three ablation tables, on real data small enough for a CPU.

python bench/ablations.py                                    # digits: all tables, IDN 20% and 40%, three seeds
FASTGNL_DATA=... python bench/ablations.py --data digits newsgroups20 --json bench/results/ablations.json

Each run (data, variant, rate, seed) is noted when it ends; the same command goes on where it was interrupted. The
paper's figures stand beside ours: they are of CIFAR-10 with a ResNet-34, so the order of the rows is what compares.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from common import Chart, show
from noted import carried_out
from torch import Tensor

from fastgnl import GNLObjective
from fastgnl.cli import run_worker
from fastgnl.errors import InputError, check, check_choice, check_count, check_range
from fastgnl.loader import Loader
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.optimise import TrainConfig
from fastgnl.tally import best
from fastgnl.task import Task, make_task
from fastgnl.trainer import train
from fastgnl.transition import TransitionNet

Data = Literal["digits", "newsgroups20"]
Table = Literal["hyper", "coverage", "loss"]
FILES = Path("runs/bench/data")
COLLAPSED = "collapsed"
LENGTHS: dict[str, tuple[int, int]] = {"digits": (40, 10), "newsgroups20": (20, 5)}
"""Epochs and warm-up."""


class NoisyHead(TransitionNet):
    """Scored by argmax t, the noisy head's."""

    def forward(self, x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        z_BC, t_BC = super().forward(x, index)
        return (z_BC, t_BC) if self.training or t_BC is None else (t_BC, t_BC)


@dataclass(frozen=True)
class Variant:
    """The method with something changed."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of ``GNLObjective``."""
    transition_input: Literal["logits", "sample", "none"] = "logits"
    draws: int = 1
    net: type[TransitionNet] = TransitionNet


VARIANTS: dict[str, Variant] = {
    "full": Variant(),
    "beta 0.8": Variant({"beta": 0.8}),
    "beta 0.7": Variant({"beta": 0.7}),
    "beta 0.5": Variant({"beta": 0.5}),
    "K=1, drawn": Variant(transition_input="sample"),
    "K=3, drawn": Variant(transition_input="sample", draws=3),
    "coverage only": Variant({"uncertainty": "none"}),
    "no EMA": Variant({"beta": 0.0}),
    "argmax": Variant({"coverage": "argmax"}),
    "argmax, no EMA": Variant({"coverage": "argmax", "beta": 0.0}),
    "uncertainty only": Variant({"coverage": "none"}),
    "random w": Variant({"uncertainty": "random"}),
    "cross-entropy": Variant(transition_input="none"),
    "L_CE, argmax t": Variant({"terms": ("ce",)}, net=NoisyHead),
    "L_CE, argmax z": Variant({"terms": ("ce",)}),
    "L_PRI": Variant({"terms": ("prior",)}),
    "cross-entropy of p": Variant({"prior_kl": "ce"}),
    "KL(q || r)": Variant({"prior_kl": "forward"}),
    "no E-step": Variant({"terms": ("ce", "prior")}),
}


class Row(NamedTuple):
    """A row of a table, and the paper's accuracy on CIFAR-10 with IDN 20, 30, 40 and 50% noise."""

    table: Table
    name: str
    variant: str
    paper: tuple[float | str | None, ...]

    def paper_at(self, rate: float) -> float | str | None:
        """The figure, "collapsed", or None where the paper has none."""
        return dict(zip((0.2, 0.3, 0.4, 0.5), self.paper, strict=True)).get(rate)


FULL = (92.60, 91.96, 91.11, 90.57)
ARGMAX = (20.19, 18.56, 16.09, 15.26)
"""Of M by the name of the row, of the current q by the paper's text."""
UNKNOWN = (None,) * 4
ROWS: tuple[Row, ...] = (
    Row("hyper", "beta=0.9 (full)", "full", FULL),
    Row("hyper", "beta=0.8", "beta 0.8", (92.49, 91.88, 90.83, 88.81)),
    Row("hyper", "beta=0.7", "beta 0.7", (91.55, 90.87, 90.62, 88.40)),
    Row("hyper", "beta=0.5", "beta 0.5", (89.13, 87.98, 87.48, 85.73)),
    Row("hyper", "K=1, drawn", "K=1, drawn", FULL),
    Row("hyper", "K=3, drawn", "K=3, drawn", (92.30, 91.83, 90.83, 89.75)),
    Row("coverage", "coverage + uncertainty (full)", "full", FULL),
    Row("coverage", "coverage only", "coverage only", (84.96, 83.19, 81.88, 78.38)),
    Row("coverage", "no EMA (beta=0)", "no EMA", (84.57, 81.59, 68.88, 61.47)),
    Row("coverage", "no sampling (argmax M)", "argmax", ARGMAX),
    Row("coverage", "no sampling (argmax q)", "argmax, no EMA", ARGMAX),
    Row("coverage", "uncertainty only", "uncertainty only", (85.57, 81.00, 72.42, 66.61)),
    Row("coverage", "random w", "random w", (90.10, 89.66, 86.25, 84.28)),
    Row("coverage", "CE", "cross-entropy", (86.93, 82.42, 76.68, 58.93)),
    Row("loss", "#1 L_CE, argmax t", "L_CE, argmax t", (86.93, 82.43, 76.68, 58.93)),
    Row("loss", "#1 L_CE, argmax z", "L_CE, argmax z", UNKNOWN),
    Row("loss", "#2 L_PRI", "L_PRI", (43.19, COLLAPSED, COLLAPSED, COLLAPSED)),
    Row("loss", "#3 L_CE_PRI, -p log q", "cross-entropy of p", (85.96, 82.74, 78.34, 73.72)),
    Row("loss", "#4 L_PRI = KL(q || r)", "KL(q || r)", (91.36, 90.88, 90.23, 88.47)),
    Row("loss", "#5 without L_KL", "no E-step", (92.40, 90.23, 87.85, 80.46)),
    Row("loss", "#6 L_CE + L_PRI + L_KL (full)", "full", FULL),
)
"""L_CE alone leaves the clean head at its random start, as no gradient passes sg(z) or a drawn label: argmax z is a
guess. The paper's #1 has the figures of its CE, which argmax t can have."""


@dataclass(frozen=True)
class Sizes:
    """What is trained on, and how often."""

    data: tuple[Data, ...] = ("digits",)
    """digits (small CNN, 40 epochs) and newsgroups20 (MiniLM embeddings, one hidden layer, 20 epochs)."""
    rates: tuple[float, ...] = (0.2, 0.4)
    """Of instance-dependent noise; the paper has 0.2, 0.3, 0.4 and 0.5."""
    seeds: int = 3
    """Runs of each, with seeds 0, 1, ..."""
    epochs: int | None = None
    """Epochs of every run, in place of each data set's own; a quarter of them at most is warm-up."""
    jobs: int = 2
    """Runs at a time, a thread each."""
    json: Path | None = None
    """Write the rows here too, with a table and a picture beside it."""

    def __post_init__(self) -> None:
        check_count("seeds", self.seeds, 1)
        check_count("jobs", self.jobs, 1)
        if self.epochs is not None:
            check_count("epochs", self.epochs, 1)
        for rate in self.rates:
            check_range("rates", rate, 0.01, 0.9)


@dataclass(frozen=True)
class Config(Sizes):
    """Test accuracy of every ablation of the paper, in percent, after the last and the best epoch."""

    tables: tuple[Table, ...] = get_args(Table)
    """beta and K; coverage and uncertainty; terms of the loss."""
    rows: tuple[str, ...] = ()
    """Only these variants; the full method is always run."""
    found: Path = Path("runs/bench/ablations.jsonl")
    """Where each run is noted; what is there already is not run again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.rows:
            check_choice("rows", name, VARIANTS)
        check(len(self.data) > 0 and len(self.tables) > 0 and len(self.rates) > 0, "nothing to run, wanted some data")

    @property
    def wanted(self) -> list[Row]:
        names = ("full", *self.rows) if self.rows else tuple(VARIANTS)
        return [row for row in ROWS if row.table in self.tables and row.variant in names]


# Runs.


class Plan(NamedTuple):
    """One run."""

    data: str
    variant: str
    rate: float
    seed: int
    epochs: int


def noisy_task(data: str, rate: float, seed: int) -> Task:
    """The data set with instance-dependent noise."""
    return make_task(data, None, "instance", rate, seed, FILES)


def lengths(data: str, epochs: int | None) -> tuple[int, int]:
    """Epochs and warm-up."""
    own, warmup = LENGTHS[data]
    return (own, warmup) if epochs is None else (epochs, min(warmup, epochs // 4))


def carry_out(plan: Plan) -> dict[str, Any]:
    """Train and test; a run that cannot be trained to its end is noted as failed."""
    torch.set_num_threads(1)
    variant, task = VARIANTS[plan.variant], noisy_task(plan.data, plan.rate, plan.seed)
    N, C = len(task.train.labels), len(task.classes)
    torch.manual_seed(plan.seed)
    backbone: Any = task.backbone()
    net = variant.net(backbone, backbone.num_features, C, variant.transition_input, variant.draws, plan.seed)
    _, warmup = lengths(plan.data, plan.epochs)
    objective: Any = CrossEntropy()
    if variant.transition_input != "none":
        objective = GNLObjective(N, C, warmup_epochs=warmup, seed=plan.seed, **variant.options)
    start = time.perf_counter()
    try:
        how = TrainConfig(epochs=plan.epochs, lr_warmup=0)
        history = train(net, objective, Loader(task.train, 128, plan.seed), how, task.test)
    except InputError as error:
        return {"failed": str(error)}
    return {
        "last": 100 * (history[-1].test_accuracy or 0.0),
        "best": 100 * (best(history).test_accuracy or 0.0),
        "coverage": history[-1].coverage,
        "skipped": history[-1].skipped,
        "seconds": round(time.perf_counter() - start, 1),
    }


# The table.


class Outcome(NamedTuple):
    """Mean and spread over the seeds of one variant."""

    seeds: int
    failed: int
    last: float
    std: float
    best: float

    @property
    def place(self) -> float:
        """By which rows are put in order: one that collapsed is below all others."""
        return -1.0 if self.failed else self.last

    @property
    def shown(self) -> float | str:
        return f"{COLLAPSED} {self.failed}/{self.seeds}" if self.failed else round(self.last, 1)


Key = tuple[str, str, float]
"""Data, variant, rate."""


def outcome(runs: list[dict[str, Any]]) -> Outcome:
    done = [run for run in runs if "failed" not in run]
    last, reached = ([run[name] for run in done] or [np.nan] for name in ("last", "best"))
    return Outcome(len(runs), len(runs) - len(done), *map(float, (np.mean(last), np.std(last), np.mean(reached))))


def problem_of(data: str, rate: float) -> str:
    return f"{data} IDN {rate:.0%}"


def paper_place(figure: float | str) -> float:
    return -1.0 if isinstance(figure, str) else figure


def line(row: Row, data: str, rate: float, outcomes: dict[Key, Outcome]) -> dict[str, Any]:
    """A row of the table, the paper's figure beside it."""
    own, full, paper = outcomes[data, row.variant, rate], outcomes[data, "full", rate], row.paper_at(rate)
    base = dict(zip((0.2, 0.3, 0.4, 0.5), FULL, strict=True)).get(rate)
    number = isinstance(paper, float) and base is not None
    return {
        "problem": problem_of(data, rate),
        "table": row.table,
        "row": row.name,
        "seeds": own.seeds,
        "last epoch": own.shown,
        "std": None if own.failed else round(own.std, 1),
        "best epoch": round(own.best, 1),
        "to full": None if own.failed or full.failed else round(own.last - full.last, 1),
        "paper": paper,
        "paper, to full": round(paper - base, 2) if number else None,  # type: ignore[operator]
    }


def disagreements(rows: list[Row], data: str, rate: float, outcomes: dict[Key, Outcome]) -> Iterator[dict[str, Any]]:
    """Pairs of rows of one table whose order is not the paper's: equal in ours counts as another order."""
    for first, second in combinations(rows, 2):
        theirs = first.paper_at(rate), second.paper_at(rate)
        if first.table != second.table or theirs[0] is None or theirs[1] is None:
            continue
        paper_gap = paper_place(theirs[0]) - paper_place(theirs[1])
        if paper_gap == 0:
            continue
        better, worse = (first, second) if paper_gap > 0 else (second, first)
        ours = [outcomes[data, row.variant, rate] for row in (better, worse)]
        if ours[0].place > ours[1].place:
            continue
        spread = float(np.hypot(ours[0].std, ours[1].std))
        clear = any(one.failed for one in ours) or ours[1].last - ours[0].last > spread
        yield {
            "problem": problem_of(data, rate),
            "table": first.table,
            "better in the paper": better.name,
            "than": worse.name,
            "paper": f"{better.paper_at(rate)} > {worse.paper_at(rate)}",
            "ours": f"{ours[0].shown} <= {ours[1].shown}",
            "beyond the spread": None if ours[0].seeds == 1 else "yes" if clear else "no",
        }


def compared(rows: list[Row], rate: float) -> int:
    """Pairs of rows that the paper puts in an order."""
    figures = [(row.table, row.paper_at(rate)) for row in rows]
    return sum(
        first[0] == second[0] and None not in (first[1], second[1]) and first[1] != second[1]
        for first, second in combinations(figures, 2)
    )


def main(config: Config) -> None:
    rows = config.wanted
    variants = list(dict.fromkeys(["full", *(row.variant for row in rows)]))
    plans = [
        Plan(data, variant, rate, seed, lengths(data, config.epochs)[0])
        for seed in range(config.seeds)
        for data in config.data
        for rate in config.rates
        for variant in variants
    ]
    runs: dict[Key, list[dict[str, Any]]] = {}
    noted = carried_out(plans, carry_out, config.found, config.jobs)
    for run in noted:
        runs.setdefault((run["data"], run["variant"], run["rate"]), []).append(run)
    outcomes = {key: outcome(each) for key, each in runs.items()}
    places = [(data, rate) for data in config.data for rate in config.rates]
    shown = [line(row, data, rate, outcomes) for data, rate in places for row in rows]
    other = [found for data, rate in places for found in disagreements(rows, data, rate, outcomes)]
    pairs = sum(compared(rows, rate) for _, rate in places)
    title = f"Where the paper's order of two rows is not reproduced: {len(other)} of {pairs} pairs"
    chart = Chart("Test accuracy after the last epoch, %", "last epoch", ("table", "row"), "problem", kind="grid")
    show(shown, config.json, chart, {title: other} if other else None, noted)
    if not other:
        print(f"\nThe order of all {pairs} pairs of rows is the paper's.")


if __name__ == "__main__":
    run_worker(Config, main)
