"""Data sets by name, for every training command: embedded, synthetic, and those of the folder FASTGNL_DATA."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fastgnl.errors import InputError, check
from fastgnl.formats.embedded import Digits, Grey, Rows
from fastgnl.formats.listing import Listing, require
from fastgnl.formats.synthetic import Web
from fastgnl.formats.text import Jsonl, class_names

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_LABELS = {"cifar10": "clean", "cifar10n-worst": "human_worst", "cifar10n-aggregate": "human_aggregate"}
WEB = re.compile("web-([0-9]+)x([0-9]+)")
MOST_TEST = 50_000
"""Test images of a synthetic set: a fifth of its training images, but no more than this."""

NAMES = {
    "digits": "scikit-learn's handwritten digits, 8x8 images, true labels",
    "web-<N>x<C>": "synthetic web-like images, N of C classes (web-10000x50), 30% wrong labels, 10% of no class",
    "cifar10": "CIFAR-10 images, true labels",
    "cifar10n-worst": "CIFAR-10 images, human labels, 40% wrong",
    "cifar10n-aggregate": "CIFAR-10 images, human labels by majority, 9% wrong",
    "cifar10-embeddings": "CIFAR-10 as features of an ImageNet network, true labels",
    "cifar10n-worst-embeddings": "the same features, human labels, 40% wrong",
    "cifar10n-aggregate-embeddings": "the same features, human labels by majority, 9% wrong",
    "newsgroups20": "20 Newsgroups as MiniLM sentence embeddings, true labels",
    "newsgroups20-text": "20 Newsgroups as text, true labels",
    "omniglot242": "242 handwritten characters, 32x32 images, true labels",
}
"""Every name with its description; all but the first two are read from the folder ``FASTGNL_DATA``."""


class Named(NamedTuple):
    train: Listing
    test: Listing
    human_noise: bool
    """Given labels of the training split differ from the true ones already: no noise needs to be added."""


def data_folder() -> Path:
    """The folder ``FASTGNL_DATA`` names, with the real data sets."""
    folder = os.environ.get("FASTGNL_DATA")
    if not folder or not Path(folder).is_dir():
        raise InputError(
            f"FASTGNL_DATA is {folder!r}, wanted the folder that holds newsgroups20/, cifar10/ and omniglot242.npz"
        )
    return Path(folder)


def check_name(name: str) -> None:
    """Refuse a name that belongs to no data set."""
    known = name == "digits" or name in LOADERS or WEB.fullmatch(name)
    check(bool(known), f"data set is {name!r}, wanted one of {', '.join(NAMES)}")


def named(name: str, seed: int = 0) -> Named:
    """The data set called ``name``; the seed splits the digits and makes the synthetic images."""
    if name == "digits":
        return Named(Digits("train", seed).listing(), Digits("test", seed).listing(), False)
    web = WEB.fullmatch(name)
    if web:
        samples, classes = map(int, web.groups())
        train = Web(samples, classes, seed=seed)
        test = replace(train, samples=min(max(1, samples // 5), MOST_TEST), split="test")
        return Named(train.listing(), test.listing(), True)
    check_name(name)
    train_listing, test_listing = LOADERS[name](data_folder())
    assert train_listing.clean is not None
    return Named(train_listing, test_listing, bool((train_listing.labels != train_listing.clean).any()))


def features(listing: Listing) -> NDArray[np.float32]:
    """All features, float32 [N, D]. Not a copy where the listing holds them as one array."""
    check(listing.kind == "features", f"{listing.source} holds {listing.kind}, wanted features")
    if isinstance(listing.read, Rows):
        return listing.read.array
    return np.stack([listing.read(i) for i in range(len(listing))]).astype(np.float32, copy=False)


@dataclass(frozen=True, eq=False)
class Slices:
    """Reads file i of files written one after another, from the mapped bytes of all."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    def __call__(self, i: int) -> bytes:
        return self.data[self.offsets[i] : self.offsets[i + 1]].tobytes()


def _arrays(path: Path, *keys: str) -> list[NDArray[Any]]:
    """These arrays of an .npz file."""
    wanted = f"the arrays {', '.join(keys)} there, in the folder FASTGNL_DATA"
    require(path, wanted)
    try:
        with np.load(path) as file:
            return [file[key] for key in keys]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise InputError(f"{path} cannot be read ({str(error).splitlines()[0]}), wanted {wanted}") from error


def _listing(
    path: Path, kind: Any, classes: tuple[str, ...], count: int, given: Any, clean: Any, read: Callable[[int], Any]
) -> Listing:
    names = [f"{path.name}:{i}" for i in range(count)]
    return Listing(str(path), kind, classes, given.astype(np.int64), clean.astype(np.int64), names, read)


def _features(
    path: Path, part: str, classes: tuple[str, ...], x: NDArray[Any], given: NDArray[Any], clean: NDArray[Any]
) -> Listing:
    check(x.ndim == 2, f"{path} has {part}_x of shape {x.shape}, wanted (samples, features)")
    return _listing(path, "features", classes, len(x), given, clean, Rows(x.astype(np.float32)))


def _cifar10_labels(folder: Path, key: str) -> list[list[NDArray[Any]]]:
    """(offsets, given, clean) of the training images, then of the test images, whose labels are true."""
    return [
        _arrays(folder / "cifar10" / "train_labels.npz", "offsets", key, "clean"),
        _arrays(folder / "cifar10" / "test_labels.npz", "offsets", "clean", "clean"),
    ]


def _cifar10(folder: Path, key: str) -> list[Listing]:
    found = []
    for part, (offsets, given, clean) in zip(("train", "test"), _cifar10_labels(folder, key), strict=True):
        path = require(folder / "cifar10" / f"{part}.jpegs", "images one after another, in the folder FASTGNL_DATA")
        size = path.stat().st_size
        whole = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == size and bool((np.diff(offsets) > 0).all())
        check(whole, f"{path} has {size} bytes, wanted as many as the offsets of {part}_labels.npz say")
        read = Slices(np.memmap(path, np.uint8, "r"), offsets)
        found.append(_listing(path, "image", CIFAR10_CLASSES, len(offsets) - 1, given, clean, read))
    return found


def _cifar10_embeddings(folder: Path, key: str) -> list[Listing]:
    path = folder / "cifar10" / "embeddings.npz"
    train, test = _cifar10_labels(folder, key)
    train_x, test_x = _arrays(path, "train_x", "test_x")
    return [
        _features(path, "train", CIFAR10_CLASSES, train_x, *train[1:]),
        _features(path, "test", CIFAR10_CLASSES, test_x, *test[1:]),
    ]


def _newsgroups20(folder: Path) -> list[Listing]:
    path = folder / "newsgroups20" / "embeddings.npz"
    classes = class_names(folder / "newsgroups20" / "classes.json")
    train_x, train_y, test_x, test_y = _arrays(path, "train_x", "train_y", "test_x", "test_y")
    return [
        _features(path, "train", classes, train_x, train_y, train_y),
        _features(path, "test", classes, test_x, test_y, test_y),
    ]


def _newsgroups20_text(folder: Path) -> list[Listing]:
    home = folder / "newsgroups20"
    found = [Jsonl(classes=home / "classes.json").listing(home / f"{part}.jsonl.gz") for part in ("train", "test")]
    return [replace(listing, clean=listing.labels) for listing in found]


def _omniglot242(folder: Path) -> list[Listing]:
    path = folder / "omniglot242.npz"
    names, train_x, train_y, test_x, test_y = _arrays(path, "classes", "train_x", "train_y", "test_x", "test_y")
    found = []
    for part, x, y in zip(("train", "test"), (train_x, test_x), (train_y, test_y), strict=True):
        good = x.ndim == 3 and x.dtype == np.uint8
        check(good, f"{path} has {part}_x of {x.dtype} and shape {x.shape}, wanted uint8 (samples, height, width)")
        found.append(_listing(path, "image", tuple(map(str, names)), len(x), y, y, Grey(x)))
    return found


LOADERS: dict[str, Callable[[Path], list[Listing]]] = {
    **{name: partial(_cifar10, key=key) for name, key in CIFAR10_LABELS.items()},
    **{f"{name}-embeddings": partial(_cifar10_embeddings, key=key) for name, key in CIFAR10_LABELS.items()},
    "newsgroups20": _newsgroups20,
    "newsgroups20-text": _newsgroups20_text,
    "omniglot242": _omniglot242,
}


@dataclass(frozen=True)
class NamedData:
    """Data by name (the source): digits, web-10000x50, and those of the folder FASTGNL_DATA."""

    split: Literal["train", "test"] = "train"

    def listing(self, source: Path) -> Listing:
        train, test, _ = named(str(source))
        return train if self.split == "train" else test
