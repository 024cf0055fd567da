"""``fastgnl noise``: wrong labels for a ``.beton`` file, saved beside it with the true transition and the seed."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np
import tyro
from numpy.typing import NDArray
from sklearn.feature_extraction.text import HashingVectorizer
from tqdm import tqdm

from fastgnl.beton import Beton
from fastgnl.builtin_reader import image_of
from fastgnl.errors import InputError, check, check_choice, check_range, check_seed
from fastgnl.files import check_writable, written
from fastgnl.formats.listing import UNKNOWN
from fastgnl.images import window_of
from fastgnl.noise import CIFAR10_PAIRS, asymmetric, cifar100_pairs, instance_dependent_rows, symmetric

Kind = Literal["symmetric", "asymmetric", "instance"]
IMAGE_SIDE = 32
"""Images are shrunk to this side before instance-dependent noise projects them."""
TEXT_FEATURES = 1024
"""Texts are hashed to so many words' counts, of unit length."""
ROWS_UP_TO = 200_000_000
"""Numbers. Each sample's own transition row is saved up to so many of them."""


@dataclass(frozen=True)
class NoiseConfig:
    """Give the samples of a .beton file wrong labels, with a known transition."""

    data: tyro.conf.Positional[Path]
    """The .beton file. Its true labels are flipped; given ones count as true where no true ones are known."""
    kind: Kind = "instance"
    """To any other class, to one other class, or depending on the sample."""
    rate: float = 0.4
    """Share of labels to flip."""
    seed: int = 0
    pairs: Literal["next", "cifar10", "cifar100"] = "next"
    """Where asymmetric noise goes: the next class, or CIFAR's usual similar classes."""
    out: Path | None = None
    """The .npz file; beside the data, named after the noise, when not given."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("symmetric", "asymmetric", "instance"))
        check_range("rate", self.rate, 0, 1)
        check_seed(self.seed)
        check_choice("pairs", self.pairs, ("next", "cifar10", "cifar100"))
        check(
            self.pairs == "next" or self.kind == "asymmetric",
            f"pairs is {self.pairs!r} for {self.kind} noise, wanted kind asymmetric",
        )

    @property
    def target(self) -> Path:
        pairs = "" if self.pairs == "next" else f"-{self.pairs}"
        name = f"{self.data.stem}.{self.kind}{pairs}-{self.rate:g}-seed{self.seed}.npz"
        return self.out or self.data.with_name(name)


class SavedNoise(NamedTuple):
    """Noise for the samples of a file."""

    labels: NDArray[np.int64]
    """The noisy labels, by sample id."""
    transition: NDArray[np.float64]
    """The true P(noisy | clean) of each class, [C, C]; for instance-dependent noise the mean over its samples."""
    described: dict[str, Any]
    """Kind, rate, seed, and which data it was made for."""
    rows: NDArray[np.float32] | None
    """Instance-dependent noise: each sample's own P(noisy), by sample id, [N, C], mapped from its file. None when it
    was too large to keep; the seed makes it again."""


def inputs(beton: Beton) -> tuple[Callable[[NDArray[np.int64]], NDArray[np.float32]], int]:
    """What instance-dependent noise depends on, read a few rows at a time, and its width."""
    if beton.kind == "features":
        return beton.features, int(beton.info["width"])
    if beton.kind == "text":
        hashing = HashingVectorizer(n_features=TEXT_FEATURES, alternate_sign=False, dtype=np.float32)
        return lambda rows: hashing.transform([beton.text(int(row)) for row in rows]).toarray(), TEXT_FEATURES
    image = beton.records["f0"]
    sizes = np.unique(np.stack([image["height"], image["width"]], 1), axis=0)
    height, width = map(int, sizes[0])
    if len(sizes) > 1 or max(height, width) > IMAGE_SIDE:
        height = width = IMAGE_SIDE

    def read(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        found = np.empty((len(rows), height, width, 3), np.float32)
        for i, row in enumerate(rows):
            picture = image_of(beton, int(row))
            found[i] = window_of(picture, 0, 0, picture.height, picture.width, height, width)
        return found.reshape(len(rows), -1) / np.float32(255)

    return read, height * width * 3


def true_labels(beton: Beton) -> NDArray[np.int64]:
    """By sample id: the true labels, or the given ones where none is known."""
    known = beton.clean != UNKNOWN
    check(
        bool(known.all() or not known.any()),
        f"{beton.path} has the true label of {known.mean():.0%} of its samples, wanted that of all or of none",
    )
    labels = np.empty(len(beton), np.int64)
    labels[beton.ids] = beton.clean if known.all() else beton.labels
    return labels


def make_noise(config: NoiseConfig, quiet: bool = False) -> Path:
    """Draw the labels and save them with their transition."""
    check_writable(config.target)
    beton = Beton(config.data)
    clean, C = true_labels(beton), len(beton.classes)
    described = {
        "kind": config.kind,
        "rate": config.rate,
        "seed": config.seed,
        "pairs": config.pairs,
        "data": beton.path.name,
        "records_crc": beton.info["records_crc"],
    }
    if config.kind == "instance":
        labels, transition = _instance(config, beton, clean, quiet)
    elif config.kind == "symmetric":
        labels, transition = symmetric(clean, config.rate, config.seed, C)
    else:
        mapping = {"next": None, "cifar10": CIFAR10_PAIRS, "cifar100": cifar100_pairs()}[config.pairs]
        wanted = {"next": C, "cifar10": 10, "cifar100": 100}[config.pairs]
        check(wanted == C, f"pairs is {config.pairs!r} but {config.data} has {C} classes, wanted {wanted}")
        labels, transition = asymmetric(clean, config.rate, config.seed, C, mapping)
    with written(config.target, binary=True) as file:
        np.savez_compressed(file, labels=labels, transition=transition, described=json.dumps(described))
    return config.target


def _instance(
    config: NoiseConfig, beton: Beton, clean: NDArray[np.int64], quiet: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    C = len(beton.classes)
    read, width = inputs(beton)
    row_of = np.empty(len(beton), np.int64)
    row_of[beton.ids] = np.arange(len(beton))
    labels, total = np.empty_like(clean), np.eye(C)
    count = np.bincount(clean, minlength=C)
    total[count > 0] = 0
    rows_file, part = rows_path(config.target), None
    P_rows = None
    if len(beton) * C <= ROWS_UP_TO:
        part = rows_file.with_name(f".{rows_file.name}.{os.getpid()}.part")
        P_rows = np.lib.format.open_memmap(part, "w+", np.float32, (len(beton), C))
    bar = tqdm(total=len(beton), desc="noise", unit=" samples", disable=quiet, dynamic_ncols=True)
    try:
        with bar:
            for ids, P, noisy in instance_dependent_rows(
                lambda ids: read(row_of[ids]), width, clean, C, config.rate, config.seed
            ):
                labels[ids] = noisy
                np.add.at(total, clean[ids], P / count[clean[ids], None])
                if P_rows is not None:
                    P_rows[ids] = P
                bar.update(len(ids))
        if P_rows is not None and part is not None:
            P_rows.flush()
            os.replace(part, rows_file)
        else:
            rows_file.unlink(missing_ok=True)
    except BaseException:
        if part is not None:
            part.unlink(missing_ok=True)
        raise
    return labels, total


def rows_path(path: Path) -> Path:
    """Where each sample's own transition row lies."""
    return path.with_suffix(".rows.npy")


def load_noise(path: Path, beton: Beton) -> SavedNoise:
    """The noise saved at ``path``, which must have been made for this file."""
    check(path.exists(), f"{path} does not exist, wanted the labels that fastgnl noise saved")
    try:
        with np.load(path, allow_pickle=False) as saved:
            labels, transition = saved["labels"], saved["transition"]
            described = json.loads(str(saved["described"]))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise InputError(f"{path} cannot be read ({error}), wanted the labels that fastgnl noise saved") from error
    check(
        described.get("records_crc") == beton.info["records_crc"],
        f"{path} was made for {described.get('data')}, wanted noise made for {beton.path} as it is now",
    )
    rows = rows_path(path)
    return SavedNoise(
        labels, transition, described, np.load(rows, mmap_mode="r", allow_pickle=False) if rows.exists() else None
    )


def run(config: NoiseConfig) -> None:
    """The command."""
    path = make_noise(config, quiet=not sys.stderr.isatty())
    beton = Beton(config.data, verify=False)
    noise = load_noise(path, beton)
    wrong = (noise.labels != true_labels(beton)).mean()
    print(f"{wrong:.1%} of {len(beton):,} labels are wrong now: {path}")
    if noise.rows is not None:
        print(f"each sample's own transition: {rows_path(path)}")
    elif config.kind == "instance":
        print("each sample's own transition is too large to keep; the seed makes it again")
