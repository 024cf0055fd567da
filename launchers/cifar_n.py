"""CIFAR-10N and CIFAR-100N: torchrun --nproc-per-node 2 launchers/cifar_n.py --data DIR --labels worst."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastgnl.augment import CIFAR_MEAN, CIFAR_STD, Augment
from fastgnl.config import GNLOptions
from fastgnl.experiment import DataFile
from fastgnl.image_experiment import ImageExperiment
from fastgnl.launch import main
from fastgnl.optimise import TrainConfig


@dataclass(frozen=True, kw_only=True)
class CifarN(ImageExperiment):
    """CIFAR-10N, with the labels of three people, or CIFAR-100N, with those of one."""

    name: ClassVar[str] = "cifar_n"

    labels: Literal["worst", "aggregate", "random1", "random2", "random3", "noisy100"] = "worst"
    """CIFAR-10N: a wrong one if any of three people gave one, their majority, or one person's. noisy100 is
    CIFAR-100N."""
    backbone: str = "resnet34-cifar"
    images: Augment = Augment(crop="random", padding=4, flip=True, mean=CIFAR_MEAN, std=CIFAR_STD)
    gnl: GNLOptions = GNLOptions(warmup_epochs=10)
    train: TrainConfig = TrainConfig(epochs=120, lr=0.02, weight_decay=5e-4, decay_at=80 / 120)

    def num_classes(self) -> int:
        return 100 if self.labels == "noisy100" else 10

    def files(self) -> dict[str, DataFile]:
        images = f"cifar{self.num_classes()}"
        train = f"{images}n-{self.labels}.beton"
        which = "" if self.labels == "noisy100" else f" --labels {self.labels}"
        return {
            "train": DataFile(train, f"{images}n SOURCE {{folder}}/{train}{which}"),
            "test": DataFile(f"{images}-test.beton", f"{images} SOURCE {{folder}}/{images}-test.beton --split test"),
        }


if __name__ == "__main__":
    main(CifarN)
