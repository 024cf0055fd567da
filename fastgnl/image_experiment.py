"""Experiments on images."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from fastgnl import miniature
from fastgnl.augment import Augment
from fastgnl.backbones import check_backbone, make_backbone, min_side
from fastgnl.backbones.weights import load_weights
from fastgnl.builtin_reader import image_of
from fastgnl.errors import check
from fastgnl.experiment import Data, Experiment, Noise, described, noisy_labels
from fastgnl.formats.listing import UNKNOWN
from fastgnl.image_file import ImageFile
from fastgnl.task import Task, observed

DEMO: dict[str, Any] = {
    "backbone": "small-cnn",
    "images": Augment(crop="random", padding=1),
    "batches.size": 128,
    "batches.order": "random",
    "batches.per_epoch": None,
    "train.epochs": 30,
    "train.lr": 0.02,
    "train.weight_decay": 5e-4,
    "train.decay_at": 2 / 3,
    "gnl.warmup_epochs": 7,
}
"""Eight by eight digits for a small network."""


@dataclass(frozen=True, kw_only=True)
class ImageExperiment(Experiment):
    """An experiment on images in .beton files."""

    variants: ClassVar[dict[str, dict[str, Any]]] = {"data demo": DEMO}
    wrong_in_demo: ClassVar[float | None] = 0.4
    """Share of wrong labels in the embedded data set, or None where ``noise`` makes them."""

    backbone: str
    """resnet34-cifar, preact-resnet18, vgg19-bn, resnet50, inception-resnet-v2, small-cnn; timm:NAME or
    torchvision:NAME where those are installed."""
    weights: Path | None = None
    """Trained weights of the backbone, in torchvision's or timm's naming: a .safetensors or .pth file."""
    images: Augment = Augment()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_backbone(self.backbone)
        check(self.backbone != "mlp", "backbone is 'mlp', which takes features, wanted one for images")
        check(
            self.weights is None or self.weights.exists(),
            f"weights is {self.weights}, which does not exist, wanted a .safetensors or .pth file",
        )
        check(
            self.batches.order != "bucketed",
            "batches.order is 'bucketed', which is for texts, wanted random, quasi-random or balanced",
        )

    @property
    def wrong_labels(self) -> Noise:
        """The noise to add to the labels of the training file."""
        return Noise()

    def make_demo(self, paths: dict[str, Path]) -> None:
        tests = [path for role, path in paths.items() if role != "train"]
        miniature.digits(paths["train"], tests, self.wrong_in_demo, self.seed)

    def _backbone(self) -> nn.Module:
        backbone = make_backbone(self.backbone)
        if self.weights is not None:
            load_weights(backbone, self.weights)
        return backbone

    def _source(self, path: Path, noise: Noise) -> ImageFile:
        labels = noisy_labels(path, noise, self.seed)
        options: Mapping[str, Any] = {
            "reader": self.batches.reader,
            "workers": self.batches.workers,
            "os_cache": self.batches.os_cache,
        }
        return ImageFile(path, self.images, self.seed, labels, **options)

    def open(self, paths: dict[str, Path]) -> Data:
        sources = {
            role: self._source(path, self.wrong_labels if role == "train" else Noise()) for role, path in paths.items()
        }
        train = sources["train"]
        classes = train.beton.classes
        for role, source in sources.items():
            self.check_classes(paths[role], source.beton.classes, classes)
            check(
                min(source.output) >= min_side(self.backbone),
                f"the images of {paths[role]} become {source.output[1]} x {source.output[0]} pixels, wanted at least "
                f"{min_side(self.backbone)} a side for {self.backbone} (--images.size)",
            )
        tests = {role: source for role, source in sources.items() if role != "train"}
        row_of = np.argsort(train.beton.ids)
        clean = np.full(len(train), UNKNOWN) if train.clean is None else train.clean.numpy()
        task = Task(
            "scikit-learn's digits" if self.is_demo else self.name,
            classes,
            train,
            next(iter(tests.values())),
            observed(train.labels.numpy(), clean, len(classes)),
            self._backbone,
            lambda i: np.asarray(image_of(train.beton, int(row_of[i]))) / 255,
        )
        sides = np.minimum(train.heights, train.widths)
        stored = int(np.median(sides))
        network = {
            "kind": "image",
            "backbone": self.backbone,
            "images": asdict(self.images),
            "output": list(train.output),
            "stored_side": stored,
            "stored_square": bool((train.heights == train.widths).all() and (sides == stored).all()),
        }
        return Data(task, tests, network, {role: described(source.beton) for role, source in sources.items()})
