"""What a training command trains on: data by name or file, with wrong labels, a network to fit them."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.preprocessing import StandardScaler
from torch import nn

from fastgnl.augment import IMAGENET_MEAN, IMAGENET_STD, Augment
from fastgnl.beton import Beton
from fastgnl.builtin_reader import image_of
from fastgnl.convert import converted
from fastgnl.digits import noisy_digits
from fastgnl.distributed import on_first_rank
from fastgnl.errors import check
from fastgnl.formats.listing import UNKNOWN
from fastgnl.image_file import ImageFile
from fastgnl.loader import Source
from fastgnl.named import Named, check_name, features, named
from fastgnl.networks import MLP, SmallCNN
from fastgnl.noise import asymmetric, class_matrix, instance_dependent, symmetric
from fastgnl.noise_file import NoiseConfig, load_noise, make_noise
from fastgnl.samples import Samples

NoiseKind = Literal["auto", "none", "instance", "symmetric", "asymmetric"]
LARGEST_SIDE = 32
"""Larger images are cut and resized to this for the small network."""


class Task(NamedTuple):
    """Data and a network for them."""

    title: str
    classes: tuple[str, ...]
    train: Source
    test: Source
    transition: NDArray[np.float64] | None
    """The true P(given | true) of each class, where it is known, [C, C]."""
    backbone: Callable[[], nn.Module]
    """Makes a new network that returns features."""
    picture: Callable[[int], NDArray[np.float64]] | None
    """The picture of a training sample by its id, grey or in colours, in [0, 1]."""


def make_task(data: str, test: Path | None, noise: NoiseKind, rate: float, seed: int, folder: Path) -> Task:
    """``data``: a name (``fastgnl.named.NAMES``) or a .beton file, then with another for testing. ``noise``: what is
    done to right labels; "auto" leaves labels alone that are wrong already. ``folder`` keeps converted files."""
    if test is not None:
        return _images(Path(data), test, noise, rate, seed, flip=True)
    if data == "digits" and noise in ("auto", "instance"):
        return digits(rate, seed)
    found = named(data, seed)
    check(found.train.kind != "text", f"data is {data!r}, which is text, wanted images or features")
    if found.train.kind == "features":
        return _features(data, found, noise, rate, seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{data}-{split}.beton" for split in ("train", "test")]
    for path, listing in zip(paths, (found.train, found.test), strict=True):
        on_first_rank(lambda path=path, listing=listing: converted(listing, path))  # type: ignore[misc]
    return _images(paths[0], paths[1], noise, rate, seed, flip=data not in ("digits", "omniglot242"))


def check_data(data: str, test: Path | None) -> None:
    """Refuse what cannot be trained on, before workers are started for it."""
    if not data.endswith(".beton"):
        check(test is None, f"test is {test} for the data set {data}, which has its own test samples, wanted none")
        check_name(data)
        return
    check(test is not None, f"data is the file {data} without a test file, wanted one (--test FILE.beton)")
    assert test is not None
    files = [Beton(path, verify=False) for path in (Path(data), test)]
    for file in files:
        check(file.kind == "image", f"{file.path} holds {file.kind}, wanted images")
    check(
        files[0].classes == files[1].classes,
        f"{data} and {test} name different classes, wanted the same in both",
    )


def digits(rate: float, seed: int) -> Task:
    """scikit-learn's digits with instance-dependent noise."""
    d = noisy_digits(rate, seed)
    clean = d.train_clean.numpy()
    return Task(
        "scikit-learn's digits",
        tuple(map(str, range(10))),
        Samples(d.train_x, d.train_given, d.train_clean),
        Samples(d.test_x, d.test_y),
        class_matrix(d.noise.transition, clean, 10),
        SmallCNN,
        lambda i: 1 - d.train_x[i, 0].numpy(),
    )


def _resolved(noise: NoiseKind, wrong_already: bool) -> NoiseKind:
    return ("none" if wrong_already else "instance") if noise == "auto" else noise


def observed(labels: NDArray[np.int64], clean: NDArray[np.int64], num_classes: int) -> NDArray[np.float64] | None:
    """The share of each given label among the samples of each true class."""
    known = clean != UNKNOWN
    if not known.any():
        return None
    counts = np.zeros((num_classes, num_classes))
    np.add.at(counts, (clean[known], labels[known]), 1)
    return counts / counts.sum(1, keepdims=True).clip(min=1)


def _features(title: str, data: Named, noise: NoiseKind, rate: float, seed: int) -> Task:
    train, test = data.train, data.test
    assert train.clean is not None
    scaler = StandardScaler().fit(features(train))
    x, test_x = (scaler.transform(features(part)).astype(np.float32) for part in (train, test))
    C, clean = len(train.classes), train.clean
    made = {
        "none": lambda: train.labels,
        "instance": lambda: instance_dependent(x, clean, rate, seed, C).labels,
        "symmetric": lambda: symmetric(clean, rate, seed, C).labels,
        "asymmetric": lambda: asymmetric(clean, rate, seed, C).labels,
    }
    given = made[_resolved(noise, data.human_noise)]()
    return Task(
        title,
        train.classes,
        Samples(*map(torch.from_numpy, (x, given, clean))),
        Samples(*map(torch.from_numpy, (test_x, test.labels))),
        observed(given, clean, C),
        lambda: MLP(x.shape[1]),
        None,
    )


def _images(train: Path, test: Path, noise: NoiseKind, rate: float, seed: int, flip: bool) -> Task:
    beton = Beton(train, verify=False)
    known = beton.clean != UNKNOWN
    right = bool(known.all() and (beton.labels == beton.clean).all())
    kind = _resolved(noise, wrong_already=not right)
    labels, C = None, len(beton.classes)
    if kind != "none":
        config = NoiseConfig(train, kind, rate, seed)  # type: ignore[arg-type]
        on_first_rank(lambda: make_noise(config))
        labels = load_noise(config.target, beton).labels
    image = beton.records["f0"]
    side = min(int(image["height"].min()), int(image["width"].min()))
    one_size = len(np.unique(image["height"])) == len(np.unique(image["width"])) == 1
    norm = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "flip": flip}
    if one_size and max(int(image["height"][0]), int(image["width"][0])) <= LARGEST_SIDE:
        augment = Augment(crop="random", padding=side // 8, **norm)  # type: ignore[arg-type]
    else:
        augment = Augment(LARGEST_SIDE, "resized", **norm)  # type: ignore[arg-type]
    source = ImageFile(train, augment, seed, labels)
    row_of = np.argsort(beton.ids)
    clean = np.full(len(beton), UNKNOWN) if source.clean is None else source.clean.numpy()
    return Task(
        train.stem.removesuffix("-train"),
        beton.classes,
        source,
        ImageFile(test, augment, seed),
        observed(source.labels.numpy(), clean, C),
        lambda: SmallCNN(3, halvings=2 if side > 8 else 1),
        lambda i: np.asarray(image_of(beton, int(row_of[i]))) / 255,
    )
