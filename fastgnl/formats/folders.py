"""Folders of image files, and lists of "path label" lines that number them."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fastgnl.errors import InputError, check, check_count
from fastgnl.formats.listing import UNKNOWN, Listing, check_labels, require

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
ANIMALS = ("Cat", "Lynx", "Wolf", "Coyote", "Cheetah", "Jaguar", "Chimpanzee", "Orangutan", "Hamster", "Guinea pig")
RATE = Literal["0.0", "0.05", "0.1", "0.15", "0.2", "0.3", "0.4", "0.5", "0.6", "0.8"]


def lines(path: Path, layout: str) -> Iterator[tuple[str, str]]:
    """The lines that hold something, each with its place for messages."""
    require(path, layout)
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if text := line.strip():
                    yield f"{path}, line {number}", text
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text ({error}), wanted {layout}") from error


def read_classes(path: Path, layout: str) -> list[str]:
    """A class a line, each once."""
    classes: dict[str, None] = {}
    for where, text in lines(path, layout):
        check(text not in classes, f"{where} repeats the class {text!r}, wanted each once")
        classes[text] = None
    return list(classes)


def below(where: str, path: str) -> str:
    """The path, which must not lead out of its folder."""
    if os.path.isabs(path) or ".." in path.replace("\\", "/").split("/"):
        raise InputError(f"{where} names {path!r}, wanted a path that stays below the folder of the images")
    return path


def read_pairs(path: Path, layout: str) -> list[tuple[str, int]]:
    """Lines "path label": the label is what follows the last space, for a path may hold spaces."""
    pairs = []
    for where, text in lines(path, layout):
        parts = re.fullmatch(r"(.*\S)\s+(\d{1,9})", text, re.ASCII)
        if parts is None:
            raise InputError(f"{where} is {text!r}, wanted a path, a space and a whole number")
        pairs.append((below(where, parts[1]), int(parts[2])))
    return pairs


def of_files(
    source: Path,
    root: Path,
    classes: Sequence[str],
    names: Sequence[str],
    labels: Sequence[int],
    clean: Sequence[int] | None = None,
    num_classes: int | None = None,
) -> Listing:
    """Image files below ``root``; only those of the first ``num_classes`` where that is given."""
    if num_classes is not None:
        check_count("num_classes", num_classes, 2)
        known = len(classes)
        check(num_classes <= known, f"num_classes is {num_classes}, wanted at most the {known} classes of {source}")
        check_labels(str(source), np.array(labels, np.int64), known, names)
        keep = [i for i, label in enumerate(labels) if label < num_classes]
        classes, names, labels = classes[:num_classes], [names[i] for i in keep], [labels[i] for i in keep]
        clean = None if clean is None else [clean[i] for i in keep]

    def read(i: int) -> bytes:
        return (root / names[i]).read_bytes()

    y = np.array(labels, np.int64)
    return Listing(
        str(source), "image", tuple(classes), y, None if clean is None else np.array(clean, np.int64), names, read
    )


def first_that_exists(paths: Sequence[Path], layout: str) -> Path:
    """The first of the paths that is there."""
    for path in paths:
        if path.exists():
            return path
    raise InputError(f"{paths[0]} does not exist, wanted {layout}")


def folders_in(folder: Path, layout: str) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    check(folder.is_dir(), f"{folder} is not a folder, wanted {layout}")
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def images_in(root: Path, folder: str) -> list[str]:
    """The image files anywhere below a folder, sorted, as paths below ``root``."""
    found = []
    for parent, inner, files in os.walk(root / folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in files:
            if name.lower().endswith(IMAGES) and not name.startswith("."):
                found.append(Path(parent, name).relative_to(root).as_posix())
    return sorted(found)


@dataclass(frozen=True)
class ImageFolder:
    """A folder a class: SOURCE/CLASS/**/IMAGE.

    Classes are the names of the folders, sorted; hidden files are passed over."""

    trusted: bool = False
    """Whether the folders are the true classes."""

    def listing(self, source: Path) -> Listing:
        classes = folders_in(source, "a folder of folders, one a class")
        found = [(name, label) for label, c in enumerate(classes) for name in images_in(source, c)]
        check(len(found) > 0, f"{source} holds no image below its folders, wanted CLASS/IMAGE with {' '.join(IMAGES)}")
        names, labels = zip(*found, strict=True)
        return of_files(source, source, classes, names, labels, labels if self.trusted else None)


@dataclass(frozen=True)
class Animal10N:
    """ANIMAL-10N: SOURCE/training and SOURCE/testing with files LABEL_ID.jpg, labels 0 to 9.

    The labels of the training images come from people and may be wrong; those of the test images are clean."""

    split: Literal["train", "test"] = "train"
    """Which images."""

    def listing(self, source: Path) -> Listing:
        name = "training" if self.split == "train" else "testing"
        layout = "ANIMAL-10N's folders training and testing, of files LABEL_ID.jpg"
        require(source / name, layout)
        names = images_in(source, name)
        labels = []
        for path in names:
            parts = re.fullmatch(rf"{name}/(\d)_[^/]+", path, re.ASCII)
            if parts is None:
                raise InputError(f"{source / path} has no label in its name, wanted {layout}")
            labels.append(int(parts[1]))
        return of_files(source / name, source, ANIMALS, names, labels, labels if self.split == "test" else None)


@dataclass(frozen=True)
class RedMiniImageNet:
    """Red mini-ImageNet of the Controlled Noisy Web Labels: SOURCE/split/red_noise_nl_RATE and its images.

    SOURCE is the folder mini-imagenet (or the one above it). Lists hold "IMAGE.jpg LABEL" lines. Training images are
    all_images/IMAGE.jpg or training/red_noise_nl_RATE/LABEL/IMAGE.jpg; test images, of split/clean_validation, are
    validation/LABEL/IMAGE.jpg or validation/IMAGE.jpg. class_name.txt, where it is there, names the 100 classes.
    Images named after a synset are mini-ImageNet's own and clean; the true class of the others, from the web, is
    not known."""

    rate: RATE = "0.2"
    """The rate of wrong labels."""
    split: Literal["train", "test"] = "train"
    """Which images."""

    def listing(self, source: Path) -> Listing:
        name = f"red_noise_nl_{self.rate}" if self.split == "train" else "clean_validation"
        layout = f"mini-imagenet with split/{name} of the Controlled Noisy Web Labels"
        path = first_that_exists([source / "split" / name, source / "mini-imagenet" / "split" / name], layout)
        root = path.parent.parent
        pairs = read_pairs(path, layout)
        check(len(pairs) > 0, f"{path} lists no samples, wanted {layout}")
        patterns = {
            "train": ["all_images/{0}", "training/" + name + "/{1}/{0}"],
            "test": ["validation/{1}/{0}", "validation/{0}"],
        }[self.split]
        found = [pattern for pattern in patterns if (root / pattern.format(*pairs[0])).parent.is_dir()]
        wanted = " or ".join(pattern.format("IMAGE", "LABEL") for pattern in patterns)
        check(len(found) > 0, f"{root} has no folder for the images of {name}, wanted {wanted}")
        named = root / "class_name.txt"
        classes = read_classes(named, layout) if named.exists() else [str(c) for c in range(100)]
        labels = [label for _, label in pairs]
        own = [self.split == "test" or re.match(r"n\d{8}", image) is not None for image, _ in pairs]
        clean = [label if known else UNKNOWN for label, known in zip(labels, own, strict=True)]
        below_source = root.relative_to(source)
        names = [(below_source / found[0].format(*pair)).as_posix() for pair in pairs]
        return of_files(path, source, classes, names, labels, clean)


@dataclass(frozen=True)
class ImageNetVal:
    """ImageNet's validation images, by class folder or flat with a list of labels.

    Images lie in SOURCE or SOURCE/val. Layouts, tried in this order: folders nXXXXXXXX, a class each; val.txt or
    val_list.txt with lines "ILSVRC2012_val_00000001.JPEG 65", the labels counted from 0 in the order of the sorted
    synsets; ILSVRC2012_validation_ground_truth.txt (also in the devkit's folder), the labels being the devkit's
    ILSVRC2012_ID, which are not in the order of the synsets."""

    layout: Literal["auto", "folders", "list", "devkit"] = "auto"
    """Which layout; auto takes the first that is there."""
    synsets: Path | None = None
    """A file whose lines begin with a synset: the classes and their order (WebVision's info/synsets.txt)."""
    num_classes: int | None = None
    """Keep only the first classes (50 for mini-WebVision)."""

    def listing(self, source: Path) -> Listing:
        images = source / "val" if (source / "val").is_dir() else source
        folders = [name for name in folders_in(images, "ImageNet's validation images") if re.fullmatch(r"n\d{8}", name)]
        listed = [path for path in (source / "val.txt", source / "val_list.txt") if path.exists()]
        layout = self.layout if self.layout != "auto" else "folders" if folders else "list" if listed else "devkit"
        if layout == "folders":
            return self._folders(source, images, folders)
        return self._list(source, images, listed) if layout == "list" else self._devkit(source, images)

    def _classes(self) -> list[str] | None:
        return None if self.synsets is None else read_classes(self.synsets, "a file with a synset a line")

    def _folders(self, source: Path, images: Path, folders: list[str]) -> Listing:
        classes = (self._classes() or folders)[: self.num_classes]
        found = []
        for label, synset in enumerate(c.split()[0] for c in classes):
            require(images / synset, f"a folder for each of the {len(classes)} classes")
            prefix = (images / synset).relative_to(source).as_posix()
            found += [(name, label) for name in images_in(source, prefix)]
        check(len(found) > 0, f"{images} holds no images, wanted nXXXXXXXX/*.JPEG")
        names, labels = zip(*found, strict=True)
        return of_files(images, source, classes, names, labels, labels, self.num_classes)

    def _list(self, source: Path, images: Path, listed: list[Path]) -> Listing:
        layout = 'val.txt or val_list.txt with lines "ILSVRC2012_val_00000001.JPEG 65"'
        path = first_that_exists(listed or [source / "val.txt"], layout)
        pairs = read_pairs(path, layout)
        check(len(pairs) > 0, f"{path} lists no samples, wanted {layout}")
        classes = self._classes() or [str(c) for c in range(1000)]
        labels = [label for _, label in pairs]
        if self.synsets is not None:
            check(
                max(labels) < len(classes),
                f"{path} has label {max(labels)} and {self.synsets} {len(classes)} synsets, wanted one for each label",
            )
            order = sorted(range(len(classes)), key=lambda c: classes[c].split()[0])
            labels = [order[label] for label in labels]
        root = first_that_exists([source / pairs[0][0], images / pairs[0][0]], layout + " and its images")
        prefix = root.relative_to(source).as_posix()[: -len(pairs[0][0])]
        return of_files(path, source, classes, [prefix + name for name, _ in pairs], labels, labels, self.num_classes)

    def _devkit(self, source: Path, images: Path) -> Listing:
        file = "ILSVRC2012_validation_ground_truth.txt"
        layout = f"folders nXXXXXXXX, val.txt or {file} beside ImageNet's validation images"
        path = first_that_exists(
            [source / file, source / "data" / file, source / "ILSVRC2012_devkit_t12" / "data" / file], layout
        )
        check(
            self.synsets is None,
            f"{path} numbers classes by the devkit's ILSVRC2012_ID, which {self.synsets} cannot order: "
            "wanted folders nXXXXXXXX or val.txt, or no synsets",
        )
        labels = []
        for where, text in lines(path, layout):
            check(
                re.fullmatch(r"\d{1,4}", text, re.ASCII) is not None and 1 <= int(text) <= 1000,
                f"{where} is {text!r}, wanted an ILSVRC2012_ID from 1 to 1000",
            )
            labels.append(int(text) - 1)
        prefix = images.relative_to(source)
        names = [(prefix / f"ILSVRC2012_val_{i + 1:08d}.JPEG").as_posix() for i in range(len(labels))]
        classes = [f"ILSVRC2012_ID {c + 1}" for c in range(1000)]
        return of_files(path, source, classes, names, labels, labels, self.num_classes)
