"""CIFAR-10 and CIFAR-100 as their python pickles, with people's labels (CIFAR-N) where wanted."""

import codecs
import pickle
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastgnl.errors import InputError, check
from fastgnl.formats.folders import first_that_exists
from fastgnl.formats.listing import Listing, require

# What an array of numbers needs to come out of a pickle, under its names in old and new numpy. Nothing else is loaded.
RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
ALLOWED: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": RECONSTRUCT,
    "numpy._core.multiarray._reconstruct": RECONSTRUCT,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "_codecs.encode": codecs.encode,
}
WHOLE = [type(np.dtype(f"{kind}{size}")) for kind in "iu" for size in (1, 2, 4, 8)]
LABELS = (b"labels", b"fine_labels", b"coarse_labels")


class Plain(pickle.Unpickler):
    """Unpickles numbers, strings, lists, dicts and arrays only."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ALLOWED:
            raise InputError(f"tries to load {module}.{name}")
        return ALLOWED[f"{module}.{name}"]


def unpickle(path: Path, layout: str) -> dict[bytes, Any]:
    """The dict in a CIFAR pickle; a file that holds code is refused before any of it runs."""
    require(path, layout)
    try:
        with open(path, "rb") as file:
            found = Plain(file, encoding="bytes").load()
    except InputError as error:
        raise InputError(f"{path} {error}, wanted {layout} with only lists and arrays in it") from None
    except Exception as error:  # a broken pickle can raise nearly anything
        raise InputError(f"{path} is cut short or not a pickle ({error!r}), wanted {layout}") from error
    check(isinstance(found, dict), f"{path} holds a {type(found).__name__}, wanted {layout}, a dict")
    return found


def whole_numbers(path: Path, name: str, values: object) -> NDArray[np.int64]:
    """Labels as an array; they are a list or an array of whole numbers."""
    try:
        found = np.asarray(values)
    except Exception as error:  # lists of unequal lengths, and whatever else a file may hold
        raise InputError(f"{path}: {name} is no list of numbers ({error})") from error
    check(
        found.ndim == 1 and found.dtype.kind in "iu",
        f"{path}: {name} is {found.dtype} of shape {list(found.shape)}, wanted one whole number a sample",
    )
    return found.astype(np.int64)


def load_batch(path: Path) -> dict[bytes, Any]:
    """A CIFAR batch: ``data`` uint8 [n, 3072] and its label lists, checked and made int64 [n]."""
    batch = unpickle(path, "a batch of CIFAR's python version")
    data = batch.get(b"data")
    if type(data) is not np.ndarray or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        what = f"{data.dtype} {list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
        raise InputError(f"{path}: data is {what}, wanted uint8 [n, 3072]")
    keys = [key for key in LABELS if key in batch]
    check(len(keys) > 0, f"{path} has no labels, wanted labels or fine_labels and coarse_labels")
    for key in keys:
        batch[key] = whole_numbers(path, key.decode(), batch[key])
        n = len(batch[key])
        check(n == len(data), f"{path}: {key.decode()} has {n} labels for {len(data)} images, wanted one each")
    return batch


def read_batches(source: Path, name: str, files: list[str], meta: tuple[str, str], key: str) -> Listing:
    """The samples of the batches in folder ``name``, with the labels of ``key``."""
    layout = f"the folder {name} with {', '.join([*files, meta[0]])}"
    folder = first_that_exists([f / files[0] for f in (source, source / name, source / "data" / name)], layout).parent
    named = unpickle(folder / meta[0], layout).get(meta[1].encode())
    if not isinstance(named, list) or not all(isinstance(c, bytes) for c in named):
        raise InputError(f"{folder / meta[0]} has no list {meta[1]}, wanted the names of the classes")
    images, labels, names = [], [], []
    for file in files:
        batch = load_batch(require(folder / file, layout))
        check(key.encode() in batch, f"{folder / file} has no {key}, wanted {layout}")
        images.append(batch[b"data"])
        labels.append(batch[key.encode()])
        names += [f"{file}[{i}]" for i in range(len(images[-1]))]
    data, y = np.concatenate(images), np.concatenate(labels)

    def read(i: int) -> NDArray[np.uint8]:
        return np.ascontiguousarray(data[i].reshape(3, 32, 32).transpose(1, 2, 0))

    classes = tuple(c.decode("utf-8", "replace") for c in named)
    return Listing(str(folder), "image", classes, y, y, names, read)


def relabel(base: Listing, source: Path, file: str, given: str, clean: str) -> Listing:
    """The samples with the labels people gave them, from a file of CIFAR-N."""
    layout = f"{file} of CIFAR-N in {source}, the folder of the batches or a folder data"
    path = first_that_exists([folder / file for folder in (source, Path(base.source), source / "data")], layout)
    try:
        with torch.serialization.safe_globals([*((value, name) for name, value in ALLOWED.items()), *WHOLE]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and the file decide what it is
        loaded = re.search(r"GLOBAL (\S+)", str(error))
        what = f"tries to load {loaded[1]}" if loaded else "cannot be read as a torch file of labels"
        raise InputError(f"{path} {what}, wanted {layout} with only whole numbers in it") from error
    check(isinstance(found, dict), f"{path} holds a {type(found).__name__}, wanted a dict of labels")
    for key in (given, clean):
        check(key in found, f"{path} has no {key}, wanted it beside {', '.join(map(str, found))}")
    labels, true = whole_numbers(path, given, found[given]), whole_numbers(path, clean, found[clean])
    n = len(base)
    check(len(labels) == len(true) == n, f"{path} labels {len(labels)} images, wanted the {n} of {base.source}")
    differ = int((true != base.labels).sum())
    check(
        differ == 0,
        f"{path}: {clean} differs from the labels of {base.source} at {differ} of {n} images, "
        "wanted the same images in the same order",
    )
    return replace(base, source=str(path), labels=labels, clean=base.labels)


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10, python version: cifar-10-batches-py with data_batch_1 to 5, test_batch, batches.meta.

    SOURCE is that folder or the one above it."""

    split: Literal["train", "test"] = "train"
    """Which images."""

    def listing(self, source: Path) -> Listing:
        files = [f"data_batch_{i}" for i in range(1, 6)] if self.split == "train" else ["test_batch"]
        return read_batches(source, "cifar-10-batches-py", files, ("batches.meta", "label_names"), "labels")


@dataclass(frozen=True)
class Cifar100:
    """CIFAR-100, python version: cifar-100-python with train, test, meta.

    SOURCE is that folder or the one above it."""

    split: Literal["train", "test"] = "train"
    """Which images."""
    labels: Literal["fine", "coarse"] = "fine"
    """The 100 classes or the 20 groups of them."""

    def listing(self, source: Path) -> Listing:
        meta = ("meta", f"{self.labels}_label_names")
        return read_batches(source, "cifar-100-python", [self.split], meta, f"{self.labels}_labels")


@dataclass(frozen=True)
class Cifar10N:
    """CIFAR-10N: the training images of CIFAR-10 and people's labels, CIFAR-10_human.pt.

    SOURCE holds cifar-10-batches-py, and CIFAR-10_human.pt beside it, in it or in a folder data."""

    labels: Literal["worst", "aggregate", "random1", "random2", "random3"] = "worst"
    """Whose labels: a wrong one if any of three people gave one, their majority, or one person's."""

    def listing(self, source: Path) -> Listing:
        key = {"worst": "worse_label", "aggregate": "aggre_label"}.get(self.labels, f"random_label{self.labels[-1]}")
        return relabel(Cifar10().listing(source), source, "CIFAR-10_human.pt", key, "clean_label")


@dataclass(frozen=True)
class Cifar100N:
    """CIFAR-100N: the training images of CIFAR-100 and people's labels, CIFAR-100_human.pt.

    SOURCE holds cifar-100-python, and CIFAR-100_human.pt beside it, in it or in a folder data."""

    labels: Literal["noisy_fine", "noisy_coarse"] = "noisy_fine"
    """The 100 classes or the 20 groups of them."""

    def listing(self, source: Path) -> Listing:
        if self.labels == "noisy_fine":
            base, given, clean = Cifar100(labels="fine"), "noisy_label", "clean_label"
        else:
            base, given, clean = Cifar100(labels="coarse"), "noisy_coarse_label", "clean_coarse_label"
        return relabel(base.listing(source), source, "CIFAR-100_human.pt", given, clean)
