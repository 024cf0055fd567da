"""ANIMAL-10N: torchrun --nproc-per-node 2 launchers/animal10n.py --data DIR."""

from dataclasses import dataclass
from typing import ClassVar

from fastgnl.augment import IMAGENET_MEAN, IMAGENET_STD, Augment
from fastgnl.config import GNLOptions
from fastgnl.experiment import DataFile
from fastgnl.image_experiment import ImageExperiment
from fastgnl.launch import main
from fastgnl.optimise import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Animal10N(ImageExperiment):
    """ANIMAL-10N: ten animals that are taken for one another, images of 64 x 64."""

    name: ClassVar[str] = "animal10n"

    backbone: str = "vgg19-bn"
    images: Augment = Augment(crop="random", padding=8, flip=True, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    gnl: GNLOptions = GNLOptions(warmup_epochs=10)
    train: TrainConfig = TrainConfig(epochs=100, lr=0.02, weight_decay=1e-3, decay_at=0.5)

    def num_classes(self) -> int:
        return 10

    def files(self) -> dict[str, DataFile]:
        return {
            split: DataFile(f"{split}.beton", f"animal10n SOURCE {{folder}}/{split}.beton --split {split}")
            for split in ("train", "test")
        }


if __name__ == "__main__":
    main(Animal10N)
