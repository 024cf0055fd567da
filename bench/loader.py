"""Images a second of FFCV and the built-in reader against a torch DataLoader with PIL, in one run.

FASTGNL_DATA=... python bench/loader.py           # CIFAR-10, 256-pixel JPEGs, digits
"""

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from common import Chart, show
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from fastgnl import GNLObjective, with_transition
from fastgnl.augment import CIFAR_MEAN, CIFAR_STD, IMAGENET_MEAN, IMAGENET_STD, RATIO, SCALE, Augment
from fastgnl.cli import run_worker
from fastgnl.convert import Storage, convert
from fastgnl.errors import check_count
from fastgnl.formats.listing import Listing
from fastgnl.formats.synthetic import Web
from fastgnl.image_file import ImageFile, ffcv_problem
from fastgnl.images import encode_jpeg
from fastgnl.loader import Loader
from fastgnl.named import named
from fastgnl.networks import SmallCNN
from fastgnl.optimise import TrainConfig
from fastgnl.trainer import train

Name = Literal["cifar10", "jpeg256", "digits"]


@dataclass(frozen=True)
class Config:
    """Images a second, and the ratio to a torch DataLoader with PIL, the same augmentation and workers."""

    data: tuple[Name, ...] = ("cifar10", "jpeg256", "digits")
    """CIFAR-10 with padded random crop and flip; 256-pixel JPEGs with random-resized crop to 224 and flip; digits."""
    workers: int = 2
    """Processes of the DataLoader, threads of the others."""
    epochs: int = 3
    """Timed epochs of each, after one that is not timed; the median counts."""
    jpegs: int = 5000
    """Images of jpeg256."""
    batch_size: int = 128
    json: Path | None = None
    """Write the rows here too."""

    def __post_init__(self) -> None:
        check_count("workers", self.workers, 1)
        check_count("epochs", self.epochs, 1)
        check_count("jpegs", self.jpegs, 1000)
        check_count("batch_size", self.batch_size, 1)


class PILDataset(Dataset[tuple[Tensor, int]]):
    """What a training script without fastgnl does: open, crop, flip, to tensor, normalise, one image at a time."""

    def __init__(self, listing: Listing, augment: Augment) -> None:
        self.listing, self.augment = listing, augment
        self.mean, self.std = (torch.tensor(value).view(3, 1, 1) for value in (augment.mean, augment.std))

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        value = self.listing.read(i)
        image = (
            Image.fromarray(value) if isinstance(value, np.ndarray) else Image.open(io.BytesIO(value)).convert("RGB")
        )
        if self.augment.crop == "random":
            size = self.augment.size or image.width
            image = ImageOps.expand(image, self.augment.padding)
            left, top = (int(torch.randint(side - size + 1, ())) for side in image.size)
            image = image.crop((left, top, left + size, top + size))
        elif self.augment.crop == "resized":
            image = resized_crop(image, self.augment.size or image.width)
        if self.augment.flip and torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return x.sub_(self.mean).div_(self.std), int(self.listing.labels[i])


def resized_crop(image: Image.Image, size: int) -> Image.Image:
    """A random-resized crop, as image libraries do it."""
    low, high = np.log(RATIO)
    for _ in range(10):
        area = image.width * image.height * float(torch.empty(1).uniform_(*SCALE))
        ratio = float(torch.empty(1).uniform_(low, high).exp())
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= image.width and 0 < h <= image.height:
            left, top = int(torch.randint(image.width - w + 1, ())), int(torch.randint(image.height - h + 1, ()))
            return image.crop((left, top, left + w, top + h)).resize((size, size), Image.Resampling.BILINEAR)
    return image.resize((size, size), Image.Resampling.BILINEAR)


class JPEGBytes:
    """Images held as JPEG files are, in memory, so that no side waits for a disk."""

    def __init__(self, listing: Listing, quality: int) -> None:
        self.files = [encode_jpeg(listing.read(i), quality) for i in range(len(listing))]

    def __call__(self, i: int) -> bytes:
        return self.files[i]


def jpeg256(count: int) -> Listing:
    made = Web(samples=count, num_classes=50, size=256).listing(None)
    read = JPEGBytes(made, 90)
    return Listing("256-pixel JPEGs", "image", made.classes, made.labels, made.clean, made.names, read)


def images_per_second(name: str, epoch: Callable[[int], Iterable[int]], epochs: int) -> float:
    """Median over epochs, after one that warms up; ``epoch`` yields the rows of each batch."""
    rates = []
    for number in tqdm(range(epochs + 1), name, unit="epoch"):
        start = time.perf_counter()
        rows = sum(epoch(number))
        rates.append(rows / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def data(name: Name, config: Config) -> tuple[Listing, Augment, Storage]:
    if name == "cifar10":
        return named("cifar10").train, Augment(32, "random", 4, True, CIFAR_MEAN, CIFAR_STD), Storage()
    if name == "digits":
        return named("digits").train, Augment(), Storage()
    return jpeg256(config.jpegs), Augment(224, "resized", 0, True, IMAGENET_MEAN, IMAGENET_STD), Storage(mode="jpeg")


def measure(name: Name, config: Config, folder: Path) -> list[tuple[str, float]]:
    """(loader, images a second)."""
    listing, augment, storage = data(name, config)
    beton = folder / f"{name}.beton"
    convert(listing, beton, storage, quiet=True)
    batches = dataloader(PILDataset(listing, augment), config)
    found = [("dataloader", images_per_second(f"{name} dataloader", batches, config.epochs))]
    for reader in readers():
        source = ImageFile(beton, augment, reader=reader, workers=config.workers)  # type: ignore[arg-type]
        batches = fastgnl_loader(source, config)
        found.append((reader, images_per_second(f"{name} {reader}", batches, config.epochs)))
    if name == "digits":
        found.append(("demo network", consumption(source)))
    return found


def readers() -> tuple[str, ...]:
    """Both, or the built-in one where FFCV cannot be used."""
    return ("builtin",) if ffcv_problem() else ("ffcv", "builtin")


def dataloader(dataset: PILDataset, config: Config) -> Callable[[int], Iterator[int]]:
    batches = DataLoader(dataset, config.batch_size, shuffle=True, num_workers=config.workers, persistent_workers=True)
    return lambda epoch: (len(labels) for _, labels in batches)


def fastgnl_loader(source: ImageFile, config: Config) -> Callable[[int], Iterator[int]]:
    loader = Loader(source, config.batch_size)
    return lambda epoch: (len(batch.labels) for batch in loader.epoch(epoch))


def consumption(source: ImageFile) -> float:
    """Images a second that the demo's network trains on with GNL, fed by that reader; waiting for data not counted."""
    torch.manual_seed(0)
    net = with_transition(SmallCNN(3), 128, 10)
    history = train(net, GNLObjective(len(source), 10), Loader(source), TrainConfig(epochs=5))
    return statistics.median(len(source) / (epoch.seconds * (1 - epoch.wait)) for epoch in history[1:])


def main(config: Config) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in config.data:
            found = measure(name, config, Path(folder))
            rows += [
                {
                    "data": name,
                    "loader": loader,
                    "images_per_second": round(rate),
                    "ratio_to_dataloader": round(rate / found[0][1], 2),
                }
                for loader, rate in found
            ]
    show(rows, config.json, Chart("Images a second", "images_per_second", ("data",), "loader", log=True))
    rates = {row["loader"]: row["images_per_second"] for row in rows if row["data"] == "digits"}
    if rates:
        for reader in readers():
            print(
                f"{reader} delivers {rates[reader] / rates['demo network']:.0f} times what the demo's network consumes"
            )


if __name__ == "__main__":
    run_worker(Config, main)
