"""How much faster two processes train than one, one thread each: one with the same global batches, and one with
batches of as many rows as each of the two has (small batches are faster a row, which the first ratio includes).

python bench/scaling.py        # a small CNN on 32 x 32 colour images; torchrun is started by this command
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from common import Chart, show
from tqdm import tqdm

from fastgnl import GNLObjective, with_transition
from fastgnl.cli import run_worker
from fastgnl.distributed import process_group, rank, world_size
from fastgnl.errors import check, check_count
from fastgnl.loader import Loader
from fastgnl.networks import SmallCNN
from fastgnl.optimise import TrainConfig
from fastgnl.samples import Samples
from fastgnl.trainer import train

CLASSES = 10


@dataclass(frozen=True)
class Config:
    """Images a second of one process and of two, in turns."""

    engines: tuple[Literal["ddp", "deepspeed"], ...] = ("ddp",)
    processes: int = 2
    """To compare with one."""
    batch: int = 128
    """Rows of a global batch."""
    steps: int = 12
    """Of each epoch."""
    epochs: int = 4
    """Of each measurement; the first, which warms up, is not counted."""
    rounds: int = 5
    """Measurements of each, in turns; the median ratio is what counts."""
    json: Path | None = None
    """Write the rows here too."""
    worker: Path | None = None
    """Set for the processes that this command starts."""

    def __post_init__(self) -> None:
        check_count("processes", self.processes, 2)
        check_count("batch", self.batch, 2 * self.processes)  # BatchNorm wants two rows
        check_count("epochs", self.epochs, 2)
        check_count("rounds", self.rounds, 1)


def work(config: Config, out: Path) -> None:
    """Train, and note the images a second of every epoch but the first."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    samples = Samples(
        torch.randn(config.steps * config.batch, 3, 32, 32, generator=g),
        torch.randint(CLASSES, (config.steps * config.batch,), generator=g),
    )
    with process_group():
        torch.manual_seed(0)
        backbone = SmallCNN(3)
        net = with_transition(backbone, backbone.num_features, CLASSES)
        loader = Loader(samples, config.batch)
        objective = GNLObjective(len(samples), CLASSES, ids=loader.shard(), warmup_epochs=1)
        engine = config.engines[0] if world_size() > 1 else "ddp"
        history = train(net, objective, loader, TrainConfig(epochs=config.epochs, engine=engine))
        if rank() == 0:
            out.write_text(json.dumps([epoch.images_per_second for epoch in history[1:]]))


def measure(config: Config, processes: int, batch: int, engine: str) -> float:
    """Images a second of so many processes on global batches of so many rows: the median over the epochs."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rates.json"
        launch = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
        )
        options = {"worker": out, "engines": engine, "batch": batch, "steps": config.steps, "epochs": config.epochs}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *launch, __file__, *words], env=env, stderr=subprocess.PIPE, text=True)
        check(done.returncode == 0, f"a run failed, wanted it to end well: {done.stderr[-2000:]}")
        return float(np.median(json.loads(out.read_text())))


def main(config: Config) -> None:
    if config.worker is not None:
        work(config, config.worker)
        return
    rows = []
    for engine in config.engines:
        sides = ((1, config.batch), (1, config.batch // config.processes), (config.processes, config.batch))
        found = np.empty((0, len(sides)))
        bar = tqdm(range(config.rounds), engine, unit="round")
        for _ in bar:
            found = np.vstack([found, [measure(config, count, batch, engine) for count, batch in sides]])
            bar.set_postfix_str(f"{', '.join(f'{rate:.0f}' for rate in found[-1])} images a second")
        same, equal_rows = np.sort(found[:, 2] / found[:, 0]), np.sort(found[:, 2] / found[:, 1])
        rows.append(
            {
                "engine": engine,
                "processes": config.processes,
                "one, images/s": round(float(np.median(found[:, 0]))),
                "one, its share of the rows": round(float(np.median(found[:, 1]))),
                "all, images/s": round(float(np.median(found[:, 2]))),
                "ratio": round(float(np.median(same)), 2),
                "from": round(float(same[0]), 2),
                "to": round(float(same[-1]), 2),
                "ratio, equal rows each": round(float(np.median(equal_rows)), 2),
            }
        )
    values = ("one, images/s", "one, its share of the rows", "all, images/s")
    show(rows, config.json, Chart("Images a second of one process and of all", values, ("engine",)))


if __name__ == "__main__":
    run_worker(Config, main)
