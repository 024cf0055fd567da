"""The main job: CE against GNL, by default on the embedded digits with instance-dependent noise.

Run by ``fastgnl demo``.
"""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from fastgnl import report
from fastgnl.comparison import HEADER, NAMES, Result, result_of, table_rows, write_report
from fastgnl.distributed import on_first_rank, process_group, rank
from fastgnl.errors import check_choice, check_count, check_range, check_seed
from fastgnl.files import check_writable
from fastgnl.loader import Loader
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.objective import GNLObjective
from fastgnl.optimise import TrainConfig
from fastgnl.progress import Progress
from fastgnl.run import RunConfig
from fastgnl.task import NoiseKind, Task, check_data, make_task
from fastgnl.trainer import Objective, train
from fastgnl.transition import with_transition

CHECKPOINT_EVERY = 10
"""Epochs. Workers that torchrun starts again go on from there."""


@dataclass(frozen=True)
class DemoConfig:
    """CE against GNL on data with wrong labels, the embedded digits by default."""

    data: str = "digits"
    """A data set by name (digits, web-2000x10, cifar10n-worst, newsgroups20, omniglot242, ...) or a .beton file."""
    test: Path | None = None
    """The .beton file to test on, when data is a file."""
    noise: NoiseKind = "auto"
    """Noise to add: instance-dependent ("auto") where the given labels are all right, else none."""
    rate: float = 0.4
    """Mean flip rate of added noise, from 0.01 to 0.9."""
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
        check_choice("noise", self.noise, get_args(NoiseKind))
        check_range("rate", self.rate, 0.01, 0.9)
        check_count("epochs", self.epochs, 2)
        check_seed(self.seed, bits=32)


def run_method(method: str, task: Task, config: DemoConfig, folder: Path | None = None) -> Result:
    """Train the task's network with one method, the run kept in a folder if there is one."""
    C, N = len(task.classes), len(task.train.labels)
    torch.manual_seed(config.seed)
    backbone: Any = task.backbone()
    net = with_transition(backbone, backbone.num_features, C, transition_input="logits" if method == "gnl" else "none")
    loader = Loader(task.train, seed=config.seed)
    objective: Objective = CrossEntropy()
    if method == "gnl":
        warmup = min(10, config.epochs // 4)
        objective = GNLObjective(N, C, ids=loader.shard(), warmup_epochs=warmup, seed=config.seed)
    with Progress(NAMES[method].ljust(13), N, config.epochs, enabled=rank() == 0) as progress:
        history = train(
            net,
            objective,
            loader,
            TrainConfig(epochs=config.epochs),
            task.test,
            progress.on_batch,
            progress.on_epoch,
            None if folder is None else RunConfig(folder, every_epochs=CHECKPOINT_EVERY),
        )
    return result_of(net, task, history, method)


def start_anew(config: DemoConfig) -> None:
    """Clear what an earlier demo left in the folder."""
    for method in NAMES:
        shutil.rmtree(config.out / method, ignore_errors=True)


def run(config: DemoConfig) -> dict[str, Result]:
    """Train both methods and, on rank 0, print the table and write the page."""
    check_data(config.data, config.test)
    check_writable(config.page)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        on_first_rank(lambda: start_anew(config))
    start = time.perf_counter()
    task = make_task(config.data, config.test, config.noise, config.rate, config.seed, config.out)
    results = {method: run_method(method, task, config, config.out / method) for method in NAMES}
    if rank() == 0:
        print(f"\n{report.text_table(HEADER, table_rows(results))}", flush=True)
        write_report(config.page, task, results, config.seed, time.perf_counter() - start)
        print(f"\npage: {config.page.resolve()}", flush=True)
        print(
            f"curves as they grow: fastgnl report {' '.join(str(config.out / method) for method in NAMES)}", flush=True
        )
    return results


def main(config: DemoConfig) -> None:
    """One of torchrun's workers, or the only process."""
    with process_group():
        run(config)


if __name__ == "__main__":
    from fastgnl.cli import run_worker

    run_worker(DemoConfig, main)
