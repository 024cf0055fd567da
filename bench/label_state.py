"""What the label state of large data sets takes in memory as a top-k store, and what the store does to accuracy.

python bench/label_state.py                               # memory; torchrun is started by this command
FASTGNL_DATA=... python bench/label_state.py --accuracy   # digits, and 20 Newsgroups where FASTGNL_DATA is set

Memory: every rank makes the state of its shard, takes training steps on made-up logits of samples from all over it and
closes an epoch. What it grows by at its peak, all that these need for a moment included, is read from Linux.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from common import Chart, show
from tqdm import tqdm

from fastgnl import GNLObjective, with_transition
from fastgnl.cli import run_worker
from fastgnl.distributed import process_group, rank, sum_over_ranks_, world_size
from fastgnl.errors import check, check_count
from fastgnl.loader import Loader
from fastgnl.optimise import TrainConfig
from fastgnl.samples import Samples
from fastgnl.task import Task, make_task
from fastgnl.trainer import train


class Size(NamedTuple):
    """A data set, the entries to keep a sample, and the bytes that its state may take."""

    samples: int
    classes: int
    top_k: int
    bar: float


SIZES = {"webvision": Size(2_400_000, 1_000, 100, 1.5e9), "imagenet-21k": Size(14_000_000, 21_841, 64, 5e9)}
SCHEDULES = {"digits": (40, 10), "newsgroups20": (20, 5)}
"""Epochs, and those of warm-up."""


@dataclass(frozen=True)
class Config:
    """Memory of the label state of WebVision and ImageNet-21k; or the accuracy that each way to keep it gives."""

    accuracy: bool = False
    """Train on small data with every kind of table, in place of the memory."""
    data: tuple[Literal["webvision", "imagenet-21k"], ...] = ("webvision", "imagenet-21k")
    """Whose state to make."""
    ranks: int = 2
    samples: int | None = None
    """In place of each data set's own."""
    top_k: tuple[int, ...] = ()
    """Entries kept: one for each data set in place of its own; with --accuracy all to try, 1, 2 and 5 if not given."""
    batch_size: int = 128
    """Of all ranks."""
    steps: int = 100
    """The first, which warms up, is not timed."""
    seeds: int = 3
    """Runs of each kind of table, with seeds 0, 1, ..."""
    epochs: int | None = None
    """Of every run, in place of each data set's own."""
    json: Path | None = None
    """Write the rows here too."""
    worker: Path | None = None
    """Set for the processes that this command starts."""

    def __post_init__(self) -> None:
        for name in ("ranks", "seeds"):
            check_count(name, getattr(self, name), 1)
        check_count("steps", self.steps, 2)
        check_count("batch_size", self.batch_size, self.ranks)
        if not self.accuracy and self.top_k:
            check(len(self.top_k) == len(self.data), f"top_k is {self.top_k}, wanted one for each of {self.data}")


# Memory.


def resident(field: Literal["VmRSS", "VmHWM"]) -> int:
    """Bytes of this process in memory, now or at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def bytes_a_sample(objective: GNLObjective) -> float:
    """Of M, w, the losses and the ids."""
    rows = objective.shard_state()
    return sum(value.nbytes for value in rows.values()) / len(rows["ids"])


def steps_a_second(objective: GNLObjective, config: Config) -> float:
    """Of training steps on samples spread evenly over the shard, others in each step."""
    B, C, ids = config.batch_size // world_size(), objective.config.num_classes, objective.own_ids
    g = torch.Generator().manual_seed(rank())
    z, t = (torch.randn(B, C, generator=g).requires_grad_() for _ in range(2))
    stride, start = len(ids) // B, 0.0
    for step in range(config.steps):
        if step == 1:
            start = time.perf_counter()
        index = ids[torch.arange(B) * stride + step * stride // config.steps]
        objective(z, t, torch.randint(C, (B,), generator=g), index).loss.backward()
        z.grad = t.grad = None
    return (config.steps - 1) / (time.perf_counter() - start)


def work(config: Config, size: Size, out: Path) -> None:
    """One rank: make the state, train, close the epoch; note what it took."""
    torch.set_num_threads(1)
    with process_group():
        before = resident("VmRSS")
        nothing = Samples(torch.empty(size.samples, 0), torch.zeros(1, dtype=torch.int64).expand(size.samples))
        objective = GNLObjective(
            size.samples,
            size.classes,
            ids=Loader(nothing, config.batch_size).shard(),
            top_k=size.top_k,
            denominator="dataset",
            warmup_epochs=0,
        )
        rate = steps_a_second(objective, config)
        objective.loss_N.exponential_()  # as if every sample had been visited
        start = time.perf_counter()
        objective.end_epoch()
        seconds = time.perf_counter() - start
        check(bool(objective.w_N.any()), "no label was found wrong, wanted the mixture to be fitted")
        tensors = sum(value.nbytes for value in objective.buffers())
        total, kept, peak = sum_over_ranks_(
            torch.tensor([tensors, resident("VmRSS") - before, resident("VmHWM") - before])
        ).tolist()
        if rank() == 0:
            found = {
                "bytes a sample": round(bytes_a_sample(objective), 1),
                "tensors, GB": round(total / 1e9, 3),
                "resident, GB": round(kept / 1e9, 3),
                "peak, GB": round(peak / 1e9, 3),
                "bar, GB": size.bar / 1e9,
                "met": "yes" if peak <= size.bar else "NO",
                "dense float32, GB": round(4e-9 * size.samples * size.classes, 1),
                "steps/s": round(rate, 1),
                "end of epoch, s": round(seconds, 1),
            }
            out.write_text(json.dumps(found))


def sized(config: Config, name: str) -> Size:
    """The data set as the options have it."""
    size = SIZES[name]
    k = config.top_k[config.data.index(name)] if config.top_k else size.top_k
    return size._replace(samples=config.samples or size.samples, top_k=k)


def memory(config: Config) -> list[dict[str, Any]]:
    """A row for each data set, each made by processes of its own."""
    rows = []
    for name in tqdm(config.data, unit="data set"):
        size = sized(config, name)
        options = {"data": name, "samples": size.samples, "top-k": size.top_k, "ranks": config.ranks}
        options |= {"batch-size": config.batch_size, "steps": config.steps}
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.ranks}"]
        words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, *launch, __file__, *words, "--worker", str(out)]
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
            found = json.loads(out.read_text())
        described = {"data": name, "samples": size.samples, "classes": size.classes}
        rows.append({**described, "ranks": config.ranks, "top-k": size.top_k, **found})
    return rows


# Accuracy.


def train_once(task: Task, epochs: int, warmup: int, seed: int, table: dict[str, Any]) -> tuple[float, float]:
    """(test accuracy after the last epoch, bytes a sample)."""
    C, loader = len(task.classes), Loader(task.train, seed=seed)
    torch.manual_seed(seed)
    backbone: Any = task.backbone()
    net = with_transition(backbone, backbone.num_features, C, seed=seed)
    objective = GNLObjective(len(task.train.labels), C, ids=loader.shard(), warmup_epochs=warmup, seed=seed, **table)
    history = train(net, objective, loader, TrainConfig(epochs), task.test)
    return history[-1].test_accuracy or 0.0, bytes_a_sample(objective)


def accuracy(config: Config) -> list[dict[str, Any]]:
    """A row for each data set and kind of table, with the difference to the dense float32 table."""
    torch.set_num_threads(1)  # these networks are too small for more
    tables: dict[str, dict[str, Any]] = {kind: {"table_dtype": kind} for kind in ("float32", "float16", "bfloat16")}
    tables |= {f"top-{k}": {"top_k": k} for k in config.top_k or (1, 2, 5)}
    names = [name for name in SCHEDULES if name == "digits" or "FASTGNL_DATA" in os.environ]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    bar = tqdm(total=len(names) * config.seeds * len(tables), unit="run")
    for name in names:
        epochs, warmup = SCHEDULES[name] if config.epochs is None else (config.epochs, max(1, config.epochs // 4))
        for seed in range(config.seeds):
            task = make_task(name, None, "instance", 0.4, seed, Path())
            for kind, table in tables.items():
                bar.set_description(f"{name} seed {seed} {kind}")
                found.setdefault((name, kind), []).append(train_once(task, epochs, warmup, seed, table))
                bar.update()
    bar.close()
    rows = []
    for (name, kind), runs in found.items():
        reached = 100 * np.array([share for share, _ in runs])
        dense = 100 * np.array([share for share, _ in found[name, "float32"]])
        rows.append(
            {
                "data": name,
                "table": kind,
                "seeds": config.seeds,
                "bytes a sample": round(runs[0][1], 1),
                "accuracy": round(float(reached.mean()), 2),
                "std": round(float(reached.std()), 2),
                "against float32": f"{float((reached - dense).mean()):+.2f}",
                "worst seed": f"{float((reached - dense).min()):+.2f}",
            }
        )
    return rows


def main(config: Config) -> None:
    if config.worker is not None:
        work(config, sized(config, config.data[0]), config.worker)
        return
    if config.accuracy:
        show(accuracy(config), config.json, Chart("Test accuracy, %", "accuracy", ("data", "table")))
    else:
        values = ("peak, GB", "dense float32, GB")
        show(memory(config), config.json, Chart("Memory of the label state, GB", values, ("data",), log=True))


if __name__ == "__main__":
    run_worker(Config, main)
