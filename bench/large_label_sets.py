"""What works for label sets of any size: candidate caps, warm-ups, denominators and their mixture, on real data.

FASTGNL_DATA=... python bench/large_label_sets.py                        # every setting on Omniglot-242, one seed
FASTGNL_DATA=... python bench/large_label_sets.py --warmup 15 --seeds 3 --settings auto "given, cap 10, bank, mix 0.25"
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import Chart, show
from numpy.typing import NDArray
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from tqdm import tqdm

from fastgnl import GNLObjective, with_transition
from fastgnl.cli import run_worker
from fastgnl.errors import check_choice, check_count
from fastgnl.loader import Loader
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.named import features, named
from fastgnl.networks import MLP, SmallCNN
from fastgnl.noise import instance_dependent, symmetric
from fastgnl.optimise import TrainConfig
from fastgnl.samples import Samples
from fastgnl.task import digits
from fastgnl.trainer import train

DRAWN: dict[str, Any] = {"warmup_sets": "drawn", "denominator": "batch"}
GIVEN: dict[str, Any] = {"warmup_sets": "given", "denominator": "batch"}
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {**DRAWN, "k_max": None},
    "cap 20": {**DRAWN, "k_max": 20},
    "cap 10": {**DRAWN, "k_max": 10},
    "cap 20, dataset": {**DRAWN, "k_max": 20, "denominator": "dataset"},
    "cap 20, bank": {**DRAWN, "k_max": 20, "denominator": "bank"},
    "given, no cap": {**GIVEN, "k_max": None},
    "given, cap 20": {**GIVEN, "k_max": 20},
    "given, cap 10": {**GIVEN, "k_max": 10},
    "given, cap 5": {**GIVEN, "k_max": 5},
    "given, cap 10, dataset": {**GIVEN, "k_max": 10, "denominator": "dataset"},
    "given, cap 10, dataset, mix 1": {**GIVEN, "k_max": 10, "denominator": "dataset", "mix": 1.0},
    "given, cap 10, dataset, mix 0.25": {**GIVEN, "k_max": 10, "denominator": "dataset", "mix": 0.25},
    "given, cap 10, dataset, mix 0.05": {**GIVEN, "k_max": 10, "denominator": "dataset", "mix": 0.05},
    "given, cap 10, bank": {**GIVEN, "k_max": 10, "denominator": "bank"},
    "given, cap 10, bank, mix 0.25": {**GIVEN, "k_max": 10, "denominator": "bank", "mix": 0.25},
    "given, cap 10, bank, mix 0.05": {**GIVEN, "k_max": 10, "denominator": "bank", "mix": 0.05},
    "given, no cap, dataset, mix 0.25": {**GIVEN, "k_max": None, "denominator": "dataset", "mix": 0.25},
}
"""What was tried; "ce" is plain cross-entropy, "auto" the default options."""
GROUPS = {"comp": 0, "rec": 1, "sci": 2, "talk": 3}


@dataclass(frozen=True)
class Config:
    """Test accuracy after the last epoch, in percent, for each setting."""

    data: tuple[str, ...] = ("omniglot242",)
    """omniglot242 (242 classes, 40% symmetric noise), newsgroups20 and its four groups newsgroups4 (40%
    instance-dependent), cifar10n-worst-embeddings (people's errors, 40%), digits (40% instance-dependent)."""
    settings: tuple[str, ...] = ("ce", "auto", *SETTINGS)
    """Which of the table's rows."""
    batch: tuple[int, ...] = (64,)
    """Rows of a batch."""
    warmup: tuple[int, ...] = ()
    """Epochs of warm-up; 10, or a quarter of the epochs, when not given."""
    lr_warmup: float | None = None
    """Epochs over which the learning rate rises first, in place of each data set's own: 2 on omniglot242, else 0."""
    seeds: int = 1
    jobs: int = 2
    """Runs at a time, a thread each."""
    found: Path = Path("runs/large-label-sets.jsonl")
    """Where each run is noted; what is there already is not run again."""
    json: Path | None = None
    """Write the rows here too."""

    def __post_init__(self) -> None:
        check_count("seeds", self.seeds, 1)
        check_count("jobs", self.jobs, 1)
        for name in self.settings:
            check_choice("settings", name, ("ce", "auto", *SETTINGS))
        for name in self.data:
            check_choice("data", name, TASKS)


class FourBlocks(nn.Sequential):
    """32, 64, 64 and 128 channels, each a 3x3 convolution, BatchNorm, ReLU and a halving."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 1
        for width in (32, 64, 64, 128):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
            channels = width
        super().__init__(*layers, nn.Flatten())
        self.num_features = 512


@dataclass(frozen=True)
class Bent(Samples):
    """Images turned, sheared, scaled and moved at random in each epoch."""

    seed: int = 0

    def load(self, batches: Sequence[NDArray[np.int64]], epoch: int | None = None, view: int = 0) -> Iterator[Tensor]:
        for number, batch in enumerate(batches):
            x = self.rows(batch)
            yield (
                x
                if epoch is None
                else bent(x, torch.Generator().manual_seed(hash((self.seed, epoch, number, view)) % 2**63))
            )


def bent(x: Tensor, g: torch.Generator) -> Tensor:
    """Up to 15 degrees, a tenth in scale and shear, a twentieth of the side either way."""
    turn, scale, shear, right, down = ((2 * torch.rand(len(x), generator=g) - 1) for _ in range(5))
    turn, scale = turn * math.radians(15), 1 + 0.1 * scale
    c, s = turn.cos() / scale, turn.sin() / scale
    rows = torch.stack([torch.stack([c, 0.1 * shear - s, 0.1 * right], 1), torch.stack([s, c, 0.1 * down], 1)], 1)
    grid = nn.functional.affine_grid(rows, list(x.shape), align_corners=False)
    return nn.functional.grid_sample(x, grid, align_corners=False)


class Task(NamedTuple):
    train: Samples
    test: Samples
    classes: int
    backbone: Callable[[], nn.Module]
    config: TrainConfig


def omniglot(seed: int) -> Task:
    """Four blocks, 40 epochs. The learning rate rises over the first two, for every setting."""
    data = named("omniglot242", seed)
    images = [torch.from_numpy(np.stack([part.read(i)[..., 0] for i in range(len(part))])) for part in data[:2]]
    x, test_x = (part[:, None].float() / 255 for part in images)
    clean, test_y = torch.from_numpy(data.train.labels), torch.from_numpy(data.test.labels)
    given = torch.from_numpy(symmetric(clean.numpy(), 0.4, seed, 242).labels)
    config = TrainConfig(epochs=40, lr=0.05, lr_warmup=2, weight_decay=1e-3, channels_last=True)
    return Task(Bent(x, given, clean, seed), Samples(test_x, test_y), 242, FourBlocks, config)


def vectors(name: str, seed: int) -> Task:
    """Embeddings and one hidden layer; newsgroups4 are the four large groups of newsgroups."""
    data = named("newsgroups20" if name == "newsgroups4" else name)
    (x, clean), (test_x, test_y) = ((features(part), part.clean) for part in data[:2])
    given = data.train.labels
    if name == "newsgroups4":
        group = np.array([GROUPS.get(label.split(".")[0], -1) for label in data.train.classes])
        (x, clean), (test_x, test_y) = (
            (part[group[y] >= 0], group[y][group[y] >= 0]) for part, y in ((x, clean), (test_x, test_y))
        )
    scaler = StandardScaler().fit(x)
    x, test_x = (scaler.transform(part).astype(np.float32) for part in (x, test_x))
    if name.startswith("newsgroups"):
        given = instance_dependent(x, clean, 0.4, seed).labels
    arrays = [torch.from_numpy(np.asarray(part)) for part in (x, given, clean, test_x, test_y)]
    config = TrainConfig(epochs=15 if name.startswith("cifar") else 20, lr_warmup=0)
    return Task(Samples(*arrays[:3]), Samples(*arrays[3:]), int(clean.max()) + 1, lambda: MLP(x.shape[1]), config)


def small_digits(seed: int) -> Task:
    found = digits(0.4, seed)
    return Task(found.train, found.test, 10, SmallCNN, TrainConfig(lr_warmup=0))  # type: ignore[arg-type]


TASKS: dict[str, Callable[[int], Task]] = {
    "omniglot242": omniglot,
    "digits": small_digits,
    "newsgroups20": lambda seed: vectors("newsgroups20", seed),
    "newsgroups4": lambda seed: vectors("newsgroups4", seed),
    "cifar10n-worst-embeddings": lambda seed: vectors("cifar10n-worst-embeddings", seed),
}


class Plan(NamedTuple):
    """One run."""

    data: str
    setting: str
    batch: int
    warmup: int | None
    lr_warmup: float | None
    seed: int


def carry_out(plan: Plan) -> dict[str, Any]:
    """Train, and note the test accuracy after the last epoch and after the best."""
    torch.set_num_threads(1)
    task = TASKS[plan.data](plan.seed)
    torch.manual_seed(plan.seed)
    backbone: Any = task.backbone()
    ce = plan.setting == "ce"
    net = with_transition(backbone, backbone.num_features, task.classes, transition_input="none" if ce else "logits")
    warmup = min(10, task.config.epochs // 4) if plan.warmup is None else plan.warmup
    options = {"warmup_epochs": warmup, "seed": plan.seed, **SETTINGS.get(plan.setting, {})}
    objective = CrossEntropy() if ce else GNLObjective(len(task.train), task.classes, **options)
    how = task.config if plan.lr_warmup is None else replace(task.config, lr_warmup=plan.lr_warmup)
    history = train(net, objective, Loader(task.train, plan.batch, plan.seed), how, task.test)
    reached = [100 * (epoch.test_accuracy or 0.0) for epoch in history]
    return {**plan._asdict(), "last": reached[-1], "best": max(reached), "skipped": history[-1].skipped}


def runs(config: Config) -> list[dict[str, Any]]:
    """The outcome of every run asked for; those not noted yet are carried out, and noted one by one."""
    plans = [
        Plan(data, setting, batch, warmup, config.lr_warmup, seed)
        for data in config.data
        for setting in config.settings
        for batch in config.batch
        for warmup in config.warmup or (None,)
        for seed in range(config.seeds)
    ]
    lines = config.found.read_text().splitlines() if config.found.exists() else []
    known = {Plan(*(row.get(name) for name in Plan._fields)): row for row in map(json.loads, lines)}
    left = [plan for plan in plans if plan not in known]
    config.found.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(config.jobs, get_context("spawn")) as pool:
        waiting = [pool.submit(carry_out, plan) for plan in left]
        for done in tqdm(as_completed(waiting), total=len(waiting), unit="run", disable=not waiting):
            row = done.result()
            known[Plan(*(row[name] for name in Plan._fields))] = row
            with config.found.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print({name: row[name] for name in ("data", "setting", "batch", "warmup", "seed", "last")}, file=sys.stderr)
    return [known[plan] for plan in plans]


def main(config: Config) -> None:
    found: dict[tuple[str, str, int, int | None], list[dict[str, Any]]] = {}
    for row in runs(config):
        found.setdefault((row["data"], row["setting"], row["batch"], row["warmup"]), []).append(row)
    rows = []
    for (data, setting, batch, warmup), each in found.items():
        last = [row["last"] for row in each]
        rows.append(
            {
                "data": data,
                "setting": setting,
                "batch": batch,
                "warm-up": "-" if warmup is None else warmup,
                "seeds": len(each),
                "last epoch": round(float(np.mean(last)), 1),
                "std": round(float(np.std(last)), 1),
                "best epoch": round(float(np.mean([row["best"] for row in each])), 1),
                "skipped": sum(row["skipped"] for row in each),
            }
        )
    label = ("data", "setting", "batch", "warm-up")
    show(rows, config.json, Chart("Test accuracy after the last epoch, %", "last epoch", label))


if __name__ == "__main__":
    run_worker(Config, main)
