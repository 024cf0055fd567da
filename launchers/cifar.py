"""CIFAR-10 and CIFAR-100: torchrun --nproc-per-node 2 launchers/cifar.py --data DIR --noise.rate 0.4."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastgnl.augment import CIFAR_MEAN, CIFAR_STD, Augment
from fastgnl.config import GNLOptions
from fastgnl.experiment import DataFile, Noise
from fastgnl.image_experiment import ImageExperiment
from fastgnl.launch import main
from fastgnl.optimise import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Cifar(ImageExperiment):
    """CIFAR-10 or CIFAR-100, instance-dependent noise at the paper's rates 0.2 to 0.5."""

    name: ClassVar[str] = "cifar"
    wrong_in_demo: ClassVar[float | None] = None

    dataset: Literal["cifar10", "cifar100"] = "cifar10"
    """Which of the two."""
    noise: Noise = Noise("instance")
    backbone: str = "resnet34-cifar"
    images: Augment = Augment(crop="random", padding=4, flip=True, mean=CIFAR_MEAN, std=CIFAR_STD)
    gnl: GNLOptions = GNLOptions(warmup_epochs=10)
    train: TrainConfig = TrainConfig(epochs=150, lr=0.02, weight_decay=5e-4, decay_at=100 / 150)

    @property
    def wrong_labels(self) -> Noise:
        return self.noise

    def num_classes(self) -> int:
        return {"cifar10": 10, "cifar100": 100}[self.dataset]

    def files(self) -> dict[str, DataFile]:
        return {
            split: DataFile(
                f"{self.dataset}-{split}.beton",
                f"{self.dataset} SOURCE {{folder}}/{self.dataset}-{split}.beton --split {split}",
            )
            for split in ("train", "test")
        }


if __name__ == "__main__":
    main(Cifar)
