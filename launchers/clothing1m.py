"""Clothing1M: torchrun --nproc-per-node 8 launchers/clothing1m.py --data DIR --weights resnet50.safetensors."""

from dataclasses import dataclass
from typing import ClassVar

from fastgnl.augment import IMAGENET_MEAN, IMAGENET_STD, Augment
from fastgnl.config import GNLOptions
from fastgnl.experiment import Batches, DataFile
from fastgnl.image_experiment import ImageExperiment
from fastgnl.launch import main
from fastgnl.optimise import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Clothing1M(ImageExperiment):
    """Clothing1M: a million photos of 14 kinds of clothes, labelled by their shops' texts. The paper begins with
    ImageNet's weights (--weights); 1,000 balanced batches make an epoch."""

    name: ClassVar[str] = "clothing1m"

    backbone: str = "resnet50"
    images: Augment = Augment(224, "random", flip=True, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    batches: Batches = Batches(size=64, order="balanced", per_epoch=1000)
    gnl: GNLOptions = GNLOptions(warmup_epochs=1)
    train: TrainConfig = TrainConfig(epochs=80, lr=2e-3, weight_decay=1e-3, decay_at=0.5)

    def num_classes(self) -> int:
        return 14

    def files(self) -> dict[str, DataFile]:
        return {
            role: DataFile(f"{role}.beton", f"clothing1m SOURCE {{folder}}/{role}.beton --split {split} --size 256")
            for role, split in (("train", "noisy_train"), ("test", "clean_test"))
        }


if __name__ == "__main__":
    main(Clothing1M)
