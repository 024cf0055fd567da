"""Tables of samples: a CSV file that names images, or the arrays of an .npz file."""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastgnl.errors import InputError, check
from fastgnl.formats.folders import below, of_files, read_classes
from fastgnl.formats.listing import UNKNOWN, Listing, require


def class_order(values: Sequence[str]) -> list[str]:
    """The different values, sorted: as numbers if all of them are whole numbers."""
    different = set(values)
    if all(re.fullmatch(r"-?\d{1,18}", value, re.ASCII) for value in different):
        return sorted(different, key=lambda value: (int(value), value))
    return sorted(different)


def class_numbers(
    places: Sequence[str], given: Sequence[str], clean: Sequence[str] | None, classes: list[str] | None
) -> tuple[list[str], list[int], list[int] | None]:
    """The classes, and labels as numbers of them; an empty clean label is an unknown one."""
    known = class_order([*given, *filter(None, clean or ())]) if classes is None else classes
    number = {name: i for i, name in enumerate(known)}
    for values in (given, clean or ()):
        for where, value in zip(places, values, strict=False):
            if value not in number and not (values is clean and value == ""):
                raise InputError(f"{where} has label {value!r}, wanted one of the {len(known)} classes")
    true = None if clean is None else [number[value] if value else UNKNOWN for value in clean]
    return known, [number[value] for value in given], true


@dataclass(frozen=True)
class ImageCsv:
    """A CSV file with a header, an image a row: SOURCE is the file.

    Paths are below the CSV's folder, or below the folder ``images``. Labels are names or whole numbers; an empty clean
    label is an unknown one. Classes are the labels that occur, sorted, or the lines of the file ``classes``."""

    images: Path | None = None
    """The folder of the images; the CSV's own if not given."""
    file_column: str = "file"
    """The column with the path of the image."""
    label_column: str = "label"
    """The column with the given label."""
    clean_column: str | None = None
    """The column with the true label, if there is one."""
    split_column: str = "split"
    """The column that ``split`` looks at."""
    split: str | None = None
    """Keep only the rows of this split."""
    classes: Path | None = None
    """A text file with a class a line, in order."""

    def listing(self, source: Path) -> Listing:
        require(source, "a CSV file with a header")
        root = source.parent if self.images is None else self.images
        check(root.is_dir(), f"{root} is not a folder, wanted the one with the images of {source}")
        wanted = [self.file_column, self.label_column]
        wanted += [] if self.clean_column is None else [self.clean_column]
        wanted += [] if self.split is None else [self.split_column]
        rows, places = [], []
        try:
            with open(source, encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file)
                header = list(reader.fieldnames or ())
                for column in wanted:
                    check(column in header, f"{source} has no column {column!r}, wanted it among {', '.join(header)}")
                for row in reader:
                    where = f"{source}, line {reader.line_num}"
                    if None in row or None in row.values():
                        raise InputError(f"{where} has not the {len(header)} cells of the header, wanted as many")
                    cells = [row[column].strip() for column in wanted]
                    if self.split is not None and cells[-1] != self.split:
                        continue
                    for column, cell in zip(wanted[:2], cells, strict=False):
                        check(cell != "", f"{where} has nothing in {column!r}, wanted a path and a label")
                    below(where, cells[0])
                    rows.append(cells)
                    places.append(where)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{source} cannot be read ({error}), wanted a CSV file with a header") from error
        clean = None if self.clean_column is None else [cells[2] for cells in rows]
        listed = None if self.classes is None else read_classes(self.classes, "a text file with a class a line")
        known, labels, true = class_numbers(places, [cells[1] for cells in rows], clean, listed)
        return of_files(source, root, known, [cells[0] for cells in rows], labels, true)


@dataclass(frozen=True)
class Npz:
    """An .npz file of arrays: images or features, and their labels.

    Images are uint8 [N, H, W] or [N, H, W, 3], features floats [N, D]. Labels are whole numbers or strings; an array
    ``classes`` of strings, where it is there, names the classes in order. A true label of -1, or "", is unknown."""

    x: str = "x"
    """The array of the samples."""
    labels: str = "y"
    """The array of the given labels."""
    clean: str | None = None
    """The array of the true labels, if there is one."""

    def listing(self, source: Path) -> Listing:
        require(source, "an .npz file of arrays")
        try:
            with np.load(source, allow_pickle=False) as file:
                for name in filter(None, (self.x, self.labels, self.clean)):
                    check(name in file, f"{source} has no array {name!r}, wanted it among {', '.join(file)}")
                x, given = file[self.x], file[self.labels]
                clean = None if self.clean is None else file[self.clean]
                listed = file.get("classes")
        except InputError:
            raise
        except Exception as error:  # zip, header or pickle: numpy raises many kinds
            raise InputError(f"{source} cannot be read ({error}), wanted an .npz file of plain arrays") from error
        names = [f"{source.name}[{i}]" for i in range(len(x) if x.ndim else 0)]
        classes, y, true = self._labels(source, names, given, clean, listed)
        if x.dtype == np.uint8 and 0 not in x.shape[1:] and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3)):
            colour = x if x.ndim == 4 else np.broadcast_to(x[..., None], (*x.shape, 3))
            return Listing(str(source), "image", classes, y, true, names, lambda i: np.ascontiguousarray(colour[i]))
        check(
            x.dtype.kind == "f" and x.ndim == 2 and x.shape[1] > 0,
            f"{source}: {self.x} is {x.dtype} {list(x.shape)}, wanted uint8 [N, H, W] or [N, H, W, 3] or floats [N, D]",
        )
        with np.errstate(over="ignore"):
            features = x.astype(np.float32)
        wrong = np.flatnonzero(~np.isfinite(features).all(1))
        check(len(wrong) == 0, f"{source}: row {wrong[:1].tolist()} of {self.x} has NaN or inf, wanted finite numbers")
        return Listing(str(source), "features", classes, y, true, names, lambda i: features[i])

    def _labels(
        self,
        source: Path,
        names: list[str],
        given: NDArray[np.generic],
        clean: NDArray[np.generic] | None,
        listed: NDArray[np.generic] | None,
    ) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.int64] | None]:
        """Classes, given labels and true ones, from arrays of numbers or of strings."""
        check(
            listed is None
            or (listed.ndim == 1 and listed.dtype.kind == "U" and len(set(listed.tolist())) == len(listed)),
            f"{source}: classes is not a list of different strings, wanted the names of the classes",
        )
        classes = None if listed is None else [str(c) for c in listed]
        arrays = [given] if clean is None else [given, clean]
        text = given.dtype.kind == "U"
        for array in arrays:
            check(
                array.shape == (len(names),) and array.dtype.kind in ("U" if text else "iu"),
                f"{source} has labels {array.dtype} {list(array.shape)} for {len(names)} samples, "
                "wanted a whole number, or a string, for each",
            )
        if text:
            known, labels, true = class_numbers(
                names, given.tolist(), None if clean is None else clean.tolist(), classes
            )
            return tuple(known), np.array(labels, np.int64), None if true is None else np.array(true, np.int64)
        y, t = given.astype(np.int64), None if clean is None else clean.astype(np.int64)
        if classes is None:
            highest = max((int(array.max()) for array in (y, t) if array is not None and len(array)), default=0)
            check(highest < 10**6, f"{source} has label {highest}, wanted whole numbers below a million")
            classes = [str(c) for c in range(highest + 1)]
        return tuple(classes), y, t
