"""Test accuracy of every method on real data with wrong labels: the shape of the paper's tables.

python bench/accuracy.py                                # digits, three seeds, all methods
FASTGNL_DATA=... python bench/accuracy.py --problems all

Each run (problem, method, seed) is noted when it ends; the same command goes on where it was interrupted. All methods
have the same network, batches, optimizer and epochs. Those that must be told the share of wrong labels (co-teaching,
JoCoR, CausalNL) are told the true one.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cleanlab_peer import pruned_by_cleanlab
from common import Chart, show
from noted import carried_out
from problems import KINDS, Problem, make_problem
from sklearn.metrics import roc_auc_score

from fastgnl.cli import run_worker
from fastgnl.errors import InputError, check, check_choice, check_count
from fastgnl.evaluate import eval_losses
from fastgnl.loader import Loader
from fastgnl.methods.base import Setting
from fastgnl.methods.catalogue import METHODS, make_method
from fastgnl.tally import best
from fastgnl.trainer import train

PEERS = ("cleanlab",)
NAMES = (*METHODS, *PEERS)
SINGLE = tuple(name for name, entry in METHODS.items() if entry.networks == 1)


@dataclass(frozen=True)
class Config:
    """Test accuracy of every method, in percent, after the last and the best epoch."""

    problems: tuple[str, ...] = tuple(name for name in KINDS if name.startswith("digits"))
    """Data sets with their noise, or "all"."""
    methods: tuple[str, ...] = NAMES
    seeds: int = 3
    """Runs of each, with seeds 0, 1, ..."""
    epochs: int | None = None
    """Epochs of every run, in place of each problem's own."""
    jobs: int = 2
    """Runs at a time, a thread each."""
    found: Path = Path("bench/results/accuracy.jsonl")
    """Where each run is noted; what is there already is not run again."""
    run: bool = True
    """Else show what is noted."""
    json: Path | None = None
    """Write the rows here too, with a table and a picture beside it."""

    def __post_init__(self) -> None:
        check_count("seeds", self.seeds, 1)
        check_count("jobs", self.jobs, 1)
        for name in self.problems:
            check_choice("problems", name, ("all", *KINDS))
        for name in self.methods:
            check_choice("methods", name, NAMES)


class Plan(NamedTuple):
    """One run."""

    problem: str
    method: str
    seed: int
    epochs: int | None


def setting_of(problem: Problem, plan: Plan) -> Setting:
    """What a method is told; the noise rate is the true share of wrong labels."""
    assert problem.train.clean is not None
    wrong = float((problem.train.labels != problem.train.clean).double().mean())
    epochs = problem.config.epochs
    return Setting(
        len(problem.train.labels),
        problem.num_classes,
        epochs,
        min(10, max(epochs // 4, 1)),
        wrong,
        plan.seed,
        shape=problem.shape,
    )


def train_one(problem: Problem, plan: Plan) -> tuple[Any, Any, list[Any]]:
    """The network, the objective and the history of one run."""
    net, objective = make_method(plan.method, problem.backbone, setting_of(problem, plan))
    history = train(net, objective, Loader(problem.train, problem.batch, plan.seed), problem.config, problem.test)
    return net, objective, history


def carry_out(plan: Plan) -> dict[str, Any]:
    """Train and test; a run that cannot be trained to its end is noted as failed."""
    torch.set_num_threads(1)
    problem = make_problem(plan.problem, plan.seed)
    if plan.epochs is not None:
        problem = problem._replace(config=replace(problem.config, epochs=plan.epochs, lr_warmup=0))
    start = time.perf_counter()
    try:
        if plan.method == "cleanlab":
            history, doubt_N = pruned_by_cleanlab(problem, plan.seed)
        else:
            net, objective, history = train_one(problem, plan)
            losses = eval_losses(net, problem.train)
            w_N = getattr(objective, "w_N", None)  # GNL's own; the loss of all others
            doubt_N = ((losses if losses.dim() == 1 else losses.mean(0)) if w_N is None else w_N).numpy()
    except InputError as error:
        return {"failed": str(error)}
    assert problem.train.clean is not None
    wrong_N = (problem.train.labels != problem.train.clean).numpy()
    return {
        "last": 100 * (history[-1].test_accuracy or 0.0),
        "best": 100 * (best(history).test_accuracy or 0.0),
        "auroc": float(roc_auc_score(wrong_N, doubt_N[problem.train.ids.numpy()])),
        "seconds": round(time.perf_counter() - start, 1),
    }


def title(method: str) -> str:
    return METHODS[method].title if method in METHODS else method


def summary(problem: str, method: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and, of several seeds, standard deviation; nothing where one of them failed."""
    failed = [row["failed"] for row in rows if "failed" in row]
    shown: dict[str, Any] = {"problem": problem, "method": title(method), "seeds": len(rows)}
    for name, column in (("last", "last epoch"), ("best", "best epoch"), ("auroc", "AUROC")):
        digits = 3 if name == "auroc" else 1
        values = [] if failed else [row[name] for row in rows]
        shown[column] = round(float(np.mean(values)), digits) if values else "failed"
        if name != "auroc":
            shown[f"{column}, std"] = round(float(np.std(values)), digits) if len(values) > 1 else "-"
    return shown


def pivot(rows: list[dict[str, Any]], column: str) -> list[dict[str, str]]:
    """A line a method, a column a problem."""
    lines: dict[str, dict[str, str]] = {row["method"]: {"method": row["method"]} for row in rows}
    for row in rows:
        spread = row.get(f"{column}, std", "-")
        lines[row["method"]][row["problem"]] = str(row[column]) + ("" if spread == "-" else f" ± {spread}")
    return list(lines.values())


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What the bars ask: GNL against the other methods of one network, and against cleanlab; what is not above CE."""
    told = []
    value = {(row["problem"], row["method"]): row for row in rows}
    ours = [title(name) for name in ("gnl", "gnl-xy")]
    others = [title(name) for name in SINGLE if title(name) not in ours]
    ahead = []
    for problem, kind in KINDS.items():
        reached = {name: value[problem, name]["last epoch"] for name in (*ours, *others) if (problem, name) in value}
        known = {name: last for name, last in reached.items() if last != "failed"}
        rivals = [name for name in others if name in known]
        if not kind.counts or not rivals or not any(name in known for name in ours):
            continue
        leader = max(rivals, key=known.__getitem__)
        ahead.append([known.get(name, 0.0) > known[leader] for name in ours])
        shown = ", ".join(f"{name} {reached[name]}" for name in ours if name in reached)
        told.append(f"{problem}: {shown}; the best other single network: {leader} {known[leader]}")
    if ahead:
        first, second, either = (sum(each) for each in (*zip(*ahead, strict=True), map(any, ahead)))
        told.append(
            f"of {len(ahead)} problems with IDN or human noise, first among single networks: GNL on {either}, in one "
            f"direction or the other; {ours[0]} on {first}, {ours[1]} on {second}"
        )
    worst = "CIFAR-10N worst, embeddings"
    if (worst, "cleanlab") in value and (worst, title("gnl")) in value:
        own, theirs = value[worst, title("gnl")]["AUROC"], value[worst, "cleanlab"]["AUROC"]
        told.append(f"AUROC of wrong labels on {worst}: GNL's w {own}, cleanlab's score {theirs}")
    for problem in dict.fromkeys(row["problem"] for row in rows):
        ce = value.get((problem, title("ce")), {}).get("last epoch")
        if ce is None:
            continue
        below = [
            f"{row['method']} ({row['last epoch']})"
            for row in rows
            if row["problem"] == problem
            and row["method"] != title("ce")
            and (row["last epoch"] == "failed" or row["last epoch"] <= ce)
        ]
        if below:
            told.append(f"{problem}, failing, not above CE ({ce}): {', '.join(below)}")
    return told


def main(config: Config) -> None:
    problems = tuple(KINDS) if "all" in config.problems else config.problems
    plans = [
        Plan(problem, method, seed, config.epochs)
        for seed in range(config.seeds)
        for problem in problems
        for method in config.methods
    ]
    runs = carried_out(plans, carry_out, config.found, config.jobs, config.run)
    check(len(runs) > 0, f"nothing of that is noted in {config.found}, wanted runs that were carried out")
    of: dict[tuple[str, str], list[dict[str, Any]]] = {
        (problem, method): [] for problem in problems for method in config.methods
    }
    for run in runs:
        of[run["problem"], run["method"]].append(run)
    rows = [summary(*key, each) for key, each in of.items() if each]
    chart = Chart("Test accuracy after the last epoch, %", "last epoch", ("method",), "problem", kind="grid")
    tables = {
        "Last epoch": pivot(rows, "last epoch"),
        "Best epoch": pivot(rows, "best epoch"),
        "AUROC of wrong labels": pivot(rows, "AUROC"),
        "Verdicts": [{"what was found": verdict} for verdict in verdicts(rows)],
    }
    show(rows, config.json, chart, tables, runs)


if __name__ == "__main__":
    run_worker(Config, main)
