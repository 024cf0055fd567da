"""Red Mini-ImageNet: torchrun --nproc-per-node 2 launchers/red_mini_imagenet.py --data DIR --rate 0.4."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastgnl.augment import IMAGENET_MEAN, IMAGENET_STD, Augment
from fastgnl.config import GNLOptions
from fastgnl.experiment import DataFile
from fastgnl.image_experiment import ImageExperiment
from fastgnl.launch import main
from fastgnl.optimise import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RedMiniImageNet(ImageExperiment):
    """Red Mini-ImageNet of the Controlled Noisy Web Labels, 100 classes, images of 32 x 32."""

    name: ClassVar[str] = "red_mini_imagenet"

    rate: Literal["0.2", "0.4", "0.6", "0.8"] = "0.4"
    """Share of wrong labels."""
    backbone: str = "preact-resnet18"
    images: Augment = Augment(crop="random", padding=4, flip=True, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    gnl: GNLOptions = GNLOptions(direction="x->y", warmup_epochs=10)
    train: TrainConfig = TrainConfig(epochs=150, lr=0.02, weight_decay=5e-4, decay_at=100 / 150)

    def num_classes(self) -> int:
        return 100

    def files(self) -> dict[str, DataFile]:
        train, size = f"train-{self.rate}.beton", "--size 32 --square"
        return {
            "train": DataFile(train, f"red-mini-imagenet SOURCE {{folder}}/{train} --rate {self.rate} {size}"),
            "test": DataFile("test.beton", f"red-mini-imagenet SOURCE {{folder}}/test.beton --split test {size}"),
        }


if __name__ == "__main__":
    main(RedMiniImageNet)
