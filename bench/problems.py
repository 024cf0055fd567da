"""What the methods are compared on: real data with wrong labels, a network, and how long to train it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from large_label_sets import Bent, FourBlocks
from torch import nn

from fastgnl.images import open_image
from fastgnl.loader import Source
from fastgnl.named import named
from fastgnl.networks import FastCNN
from fastgnl.noise import asymmetric, instance_dependent, symmetric
from fastgnl.optimise import TrainConfig
from fastgnl.samples import Samples
from fastgnl.task import NoiseKind, make_task

FILES = Path("runs/bench/data")
PIXELS = 25_000
"""Images of CIFAR-10N that are trained on from pixels: the first of them, at half their size, for time."""


class Problem(NamedTuple):
    """One data set with its wrong labels."""

    train: Source
    test: Source
    num_classes: int
    backbone: Callable[[], nn.Module]
    config: TrainConfig
    batch: int
    shape: tuple[int, ...]
    """Of an input."""
    transition: Any = None
    """The true class-level matrix, where it is known."""


@dataclass(frozen=True)
class Kind:
    """How a problem's labels went wrong, and at what rate."""

    data: str
    noise: NoiseKind
    rate: float

    @property
    def counts(self) -> bool:
        """Whether it is one of those with instance-dependent or human noise."""
        return self.noise in ("auto", "instance")


KINDS: dict[str, Kind] = {
    **{f"digits IDN {r}%": Kind("digits", "instance", r / 100) for r in (20, 40, 50)},
    **{f"newsgroups20 IDN {r}%": Kind("newsgroups20", "instance", r / 100) for r in (20, 40, 50)},
    "CIFAR-10N worst, embeddings": Kind("cifar10n-worst-embeddings", "auto", 0.4),
    "CIFAR-10N aggregate, embeddings": Kind("cifar10n-aggregate-embeddings", "auto", 0.09),
    "CIFAR-10N worst, pixels": Kind("cifar10n-worst", "auto", 0.4),
    "CIFAR-10N aggregate, pixels": Kind("cifar10n-aggregate", "auto", 0.09),
    **{f"omniglot242 IDN {r}%": Kind("omniglot242", "instance", r / 100) for r in (20, 40)},
    "digits SN 40%": Kind("digits", "symmetric", 0.4),
    "digits ASN 40%": Kind("digits", "asymmetric", 0.4),
    "newsgroups20 SN 40%": Kind("newsgroups20", "symmetric", 0.4),
    "newsgroups20 ASN 40%": Kind("newsgroups20", "asymmetric", 0.4),
    "omniglot242 SN 40%": Kind("omniglot242", "symmetric", 0.4),
}
"""The first twelve have instance-dependent or human noise."""


def _noisy(noise: NoiseKind, x: np.ndarray, clean: np.ndarray, rate: float, seed: int, C: int) -> np.ndarray:
    if noise == "instance":
        return instance_dependent(x, clean, rate, seed, C).labels
    return (symmetric if noise == "symmetric" else asymmetric)(clean, rate, seed, C).labels


def _omniglot(kind: Kind, seed: int) -> Problem:
    """Four blocks, drawings bent at random; the learning rate rises over the first two epochs, for every method."""
    data = named("omniglot242", seed)
    images = [torch.from_numpy(np.stack([part.read(i)[..., 0] for i in range(len(part))])) for part in data[:2]]
    x, test_x = (part[:, None].float() / 255 for part in images)
    clean = data.train.labels
    given = _noisy(kind.noise, x.flatten(1).numpy(), clean, kind.rate, seed, 242)
    config = TrainConfig(epochs=40, lr=0.05, lr_warmup=2, weight_decay=1e-3, channels_last=True)
    train = Bent(x, torch.from_numpy(given), torch.from_numpy(clean), seed)
    test = Samples(test_x, torch.from_numpy(data.test.labels))
    return Problem(train, test, 242, FourBlocks, config, 64, (1, 32, 32))


def _pixels(kind: Kind, seed: int) -> Problem:
    """The first images, 16 x 16, not augmented: in so few epochs a small network learns nothing by heart that looks
    different each time (docs/results.md)."""
    data = named(kind.data, seed)

    def images(part: Any, count: int) -> torch.Tensor:
        x = torch.from_numpy(np.stack([np.asarray(open_image(part.read(i))) for i in range(count)])).float() / 255
        small = torch.nn.functional.avg_pool2d(((x - 0.45) / 0.25).permute(0, 3, 1, 2), 2)
        return small.contiguous(memory_format=torch.channels_last)

    clean = data.train.clean
    assert clean is not None
    labels, truth = (torch.from_numpy(part[:PIXELS]) for part in (data.train.labels, clean))
    train = Samples(images(data.train, PIXELS), labels, truth)
    test = Samples(images(data.test, len(data.test)), torch.from_numpy(data.test.labels))
    config = TrainConfig(epochs=20, channels_last=True, precision="bfloat16", lr_warmup=0)
    return Problem(train, test, 10, FastCNN, config, 64, (3, 16, 16))


def make_problem(name: str, seed: int) -> Problem:
    kind = KINDS[name]
    if kind.data == "omniglot242":
        return _omniglot(kind, seed)
    if kind.data in ("cifar10n-worst", "cifar10n-aggregate"):
        return _pixels(kind, seed)
    if kind.data == "digits" and kind.noise != "instance":
        instance = make_task("digits", None, "instance", 0.4, seed, FILES)
        train: Any = instance.train
        given = _noisy(kind.noise, train.x, train.clean.numpy(), kind.rate, seed, 10)
        task = instance._replace(train=Samples(train.x, torch.from_numpy(given), train.clean), transition=None)
    else:
        task = make_task(kind.data, None, kind.noise, kind.rate, seed, FILES)
    epochs = {"digits": 40, "newsgroups20": 20}.get(kind.data, 15)
    shape = tuple(next(task.train.load([np.arange(1)])).shape[1:])
    config = TrainConfig(epochs=epochs, lr_warmup=0)
    return Problem(task.train, task.test, len(task.classes), task.backbone, config, 128, shape, task.transition)
