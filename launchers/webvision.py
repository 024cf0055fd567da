"""Mini-WebVision and WebVision 1.0: torchrun --nproc-per-node 8 launchers/webvision.py --data DIR."""

from dataclasses import dataclass, replace
from typing import ClassVar

from fastgnl.augment import IMAGENET_MEAN, IMAGENET_STD, Augment
from fastgnl.config import GNLOptions
from fastgnl.experiment import Batches, DataFile
from fastgnl.image_experiment import ImageExperiment
from fastgnl.launch import main
from fastgnl.optimise import TrainConfig


@dataclass(frozen=True, kw_only=True)
class WebVision(ImageExperiment):
    """Mini-WebVision, the first 50 classes of WebVision 1.0's Google images, or the whole of it; tested on WebVision's
    validation images and on ImageNet's."""

    name: ClassVar[str] = "webvision"

    full: bool = False
    """All 1,000 classes, with the data set's denominators."""
    backbone: str = "inception-resnet-v2"
    images: Augment = Augment(299, "random", flip=True, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    batches: Batches = Batches(size=64)
    gnl: GNLOptions = GNLOptions(direction="x->y", warmup_epochs=1)
    train: TrainConfig = TrainConfig(epochs=100, lr=0.01, weight_decay=1e-4, decay_at=0.8)

    def __post_init__(self) -> None:
        if self.full and self.gnl.denominator == "auto":
            object.__setattr__(self, "gnl", replace(self.gnl, denominator="dataset"))
        super().__post_init__()

    def num_classes(self) -> int:
        return 1000 if self.full else 50

    def files(self) -> dict[str, DataFile]:
        first = "--size 320" if self.full else "--num-classes 50 --size 320"
        return {
            "train": DataFile("train.beton", f"webvision SOURCE {{folder}}/train.beton {first}"),
            "test": DataFile("val.beton", f"webvision SOURCE {{folder}}/val.beton --split val {first}"),
            "imagenet": DataFile(
                "imagenet.beton",
                f"imagenet-val IMAGENET {{folder}}/imagenet.beton --synsets SOURCE/info/synsets.txt {first}",
                needed=False,
            ),
        }


if __name__ == "__main__":
    main(WebVision)
