"""Training time of GNL and of the systems of the paper's table, as a ratio to cross-entropy.

python bench/training_time.py                            # both backbones, fifteen minutes
python bench/training_time.py --backbones small-cnn

All methods are trained side by side by the same loop, loader and backbone: they take turns, an epoch each, and an epoch
of each is divided by the epoch of cross-entropy next to it. An epoch is what the trainer counts: batches, refits of w,
passes over the training data where a method has them; no tests. The warm-up, in which most systems are still
cross-entropy, is over before anything is timed. Images are 32 x 32 noise of 100 classes, half of the labels wrong: time
does not depend on what is in them, but for the share of rows that DivideMix and InstanceGM take for rightly labelled.
"""

import queue
import statistics
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from common import Chart, show
from tqdm import tqdm

from fastgnl.augment import CIFAR_MEAN, CIFAR_STD, Augment
from fastgnl.backbones import make_backbone
from fastgnl.cli import run_worker
from fastgnl.convert import converted
from fastgnl.errors import check, check_choice, check_count
from fastgnl.formats.embedded import Rows
from fastgnl.formats.listing import Listing
from fastgnl.image_file import ImageFile
from fastgnl.loader import Loader
from fastgnl.methods.base import Setting
from fastgnl.methods.catalogue import METHODS, make_method
from fastgnl.optimise import TrainConfig
from fastgnl.trainer import train

HOURS = {"ce": 2.1, "gnl": 2.3, "causalnl": 3.3, "dividemix": 7.1, "instancegm": 30.5}
"""The paper's, CIFAR-100 with 50% instance-dependent noise."""
BARS = {("resnet34-cifar", "gnl"): 1.05, ("small-cnn", "gnl"): 1.10}
ORDER = ("causalnl", "dividemix", "instancegm")
CLASSES = 100
WARMUP = 1


@dataclass(frozen=True)
class Config:
    """The time of a training epoch of each method, as a ratio to cross-entropy."""

    backbones: tuple[str, ...] = ("resnet34-cifar", "small-cnn")
    """Those of fastgnl.backbones that take images of 32 x 32."""
    methods: tuple[str, ...] = tuple(HOURS)
    steps: int = 2
    """Batches of an epoch on all backbones but small-cnn ..."""
    small_steps: int = 40
    """... and on that."""
    batch: int = 128
    rounds: int = 9
    """Epochs of cross-entropy and of GNL that are timed ..."""
    slow_rounds: int = 3
    """... and of every other method."""
    threads: int = 2
    precision: Literal["float32", "bfloat16"] = "float32"
    json: Path | None = None
    """Write the rows here too, with a table and a picture beside it."""

    def __post_init__(self) -> None:
        for name in ("steps", "small_steps", "batch", "rounds", "slow_rounds", "threads"):
            check_count(name, getattr(self, name), 1)
        for method in self.methods:
            check_choice("methods", method, METHODS)
        check("ce" in self.methods, f"methods are {', '.join(self.methods)}, wanted ce among them: ratios are to it")


def images(count: int, folder: Path) -> ImageFile:
    """Noise of 32 x 32 with 100 classes, half of the labels wrong, cropped and mirrored at random."""
    g = np.random.default_rng(0)
    clean = np.arange(count) % CLASSES
    given = np.where(g.random(count) < 0.5, (clean + g.integers(1, CLASSES, count)) % CLASSES, clean)
    pixels = g.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    names = [str(i) for i in range(count)]
    listing = Listing("noise", "image", tuple(map(str, range(CLASSES))), given, clean, names, Rows(pixels))
    path = folder / f"noise-{count}.beton"
    path.parent.mkdir(parents=True, exist_ok=True)
    converted(listing, path)
    augment = Augment(crop="random", padding=4, flip=True, mean=CIFAR_MEAN, std=CIFAR_STD)
    return ImageFile(path, augment, reader="builtin", workers=1)


class Turns(threading.Thread):
    """A training run that waits for its turn before each epoch, and leaves the epoch's seconds, or why it failed."""

    def __init__(self, method: str, backbone: str, source: ImageFile, epochs: int, config: Config) -> None:
        super().__init__(daemon=True, name=method)
        self.method, self.backbone, self.source, self.epochs, self.config = method, backbone, source, epochs, config
        self.go: queue.Queue[None] = queue.Queue()
        self.done: queue.Queue[float | BaseException] = queue.Queue()

    def run(self) -> None:
        try:
            torch.set_num_threads(self.config.threads)  # of this thread's own products
            self.go.get()
            setting = Setting(len(self.source), CLASSES, self.epochs, WARMUP, 0.5, shape=(3, 32, 32))
            net, objective = make_method(self.method, lambda: make_backbone(self.backbone), setting)
            options = TrainConfig(
                epochs=self.epochs, lr=0.01, lr_warmup=0, channels_last=True, precision=self.config.precision
            )
            train(net, objective, Loader(self.source, self.config.batch), options, on_epoch=self._on_epoch)
        except BaseException as error:
            self.done.put(error)

    def _on_epoch(self, epoch: Any) -> None:
        self.done.put(epoch.seconds)
        if epoch.number + 1 < self.epochs:
            self.go.get()

    def epoch(self) -> float:
        """Let it train for one epoch: its seconds."""
        self.go.put(None)
        found = self.done.get()
        if isinstance(found, BaseException):
            raise found
        return found


def ratios(backbone: str, config: Config, bar: "tqdm[Any]") -> dict[str, list[tuple[float, float]]]:
    """For each method the pairs (its ratio to the cross-entropy next to it, its seconds)."""
    steps = config.small_steps if backbone == "small-cnn" else config.steps
    source = images(steps * config.batch, Path("runs/bench/data"))
    rounds = {name: config.rounds if name in ("ce", "gnl") else config.slow_rounds for name in config.methods}
    turns = sum(rounds.values())
    workers = {
        name: Turns(name, backbone, source, WARMUP + 1 + (turns if name == "ce" else rounds[name]), config)
        for name in config.methods
    }
    for worker in workers.values():
        worker.start()
    # The warm-up, and one epoch more in which memory is found and code is compiled.
    for name, worker in workers.items():
        for _ in range(WARMUP + 1):
            bar.set_description(f"{backbone} {name}, not timed yet")
            worker.epoch()
            bar.update()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in config.methods}
    for turn in range(config.rounds):
        for name in config.methods:
            if turn >= rounds[name]:
                continue
            bar.set_description(f"{backbone} {name}")
            base = workers["ce"].epoch()
            seconds = base if name == "ce" else workers[name].epoch()
            found[name].append((seconds / base, seconds))
            bar.update()
    return found


def main(config: Config) -> None:
    rows: list[dict[str, Any]] = []
    turns = sum(config.rounds if name in ("ce", "gnl") else config.slow_rounds for name in config.methods)
    bar = tqdm(total=len(config.backbones) * (turns + (WARMUP + 1) * len(config.methods)), unit="epoch")
    for backbone in config.backbones:
        for name, pairs in ratios(backbone, config, bar).items():
            values = [ratio for ratio, _ in pairs]
            rows.append(
                {
                    "backbone": backbone,
                    "method": name,
                    "ratio_to_ce": round(statistics.median(values), 3),
                    "paper_ratio": round(HOURS[name] / HOURS["ce"], 2) if name in HOURS else "-",
                    "least": round(min(values), 3),
                    "most": round(max(values), 3),
                    "epochs timed": len(values),
                    "seconds an epoch": round(statistics.median(seconds for _, seconds in pairs), 2),
                }
            )
    bar.close()
    show(
        rows,
        config.json,
        Chart("Training time of an epoch, cross-entropy = 1", "ratio_to_ce", ("backbone", "method"), log=True),
    )
    ratio = {(row["backbone"], row["method"]): row["ratio_to_ce"] for row in rows}
    for key, most in BARS.items():
        if key in ratio:
            print(f"{key[0]}: GNL {ratio[key]} of CE, wanted at most {most}: {'yes' if ratio[key] <= most else 'NO'}")
    for backbone in config.backbones:
        found = [ratio[backbone, name] for name in ORDER if (backbone, name) in ratio]
        if len(found) == len(ORDER):
            same = found == sorted(found)
            print(f"{backbone}: CausalNL, DivideMix, InstanceGM in the paper's order: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    run_worker(Config, main)
