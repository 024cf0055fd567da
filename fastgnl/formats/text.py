"""Text data sets: AG News, 20 Newsgroups, and JSON lines of one's own."""

import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastgnl.errors import InputError, check, check_choice
from fastgnl.formats.listing import UNKNOWN, Listing, require

AG_NEWS_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
MOST_CLASSES = 2**20
"""Labels that are numbers make classes 0 to their largest: one absurd number must not make billions."""


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, with their ends. Only a newline ends one: texts may hold the other line breaks."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, line {number} is not UTF-8, wanted text in UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        wanted = "a gzip file" if path.suffix == ".gz" else "a file"
        raise InputError(f"{path} cannot be read after line {number} ({error}), wanted {wanted} of lines") from error


def class_names(path: Path) -> tuple[str, ...]:
    """A JSON list of names where the file is called .json, else a name a line."""
    text = "".join(_lines(require(path, "a file that names the classes")))
    if path.suffix == ".json":
        try:
            names = json.loads(text)
        except (ValueError, RecursionError):
            names = None
        good = isinstance(names, list) and all(isinstance(name, str) for name in names)
        check(good, f"{path} is not a JSON list of strings, wanted the names of the classes")
    else:
        names = [name.strip() for name in text.strip().split("\n")]
    check("" not in names, f"{path} holds an empty name, wanted a name for each class")
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    check(times < 2, f"{path} names {name!r} {times} times, wanted each class once")
    return tuple(names)


@dataclass(frozen=True)
class AGNews:
    """AG News: a folder with train.csv, test.csv and maybe classes.txt; lines "class from 1","title","description"."""

    split: Literal["train", "test"] = "train"
    """Which of the two files."""

    def __post_init__(self) -> None:
        check_choice("split", self.split, ("train", "test"))

    def listing(self, source: Path) -> Listing:
        path = require(source / f"{self.split}.csv", "the AG News folder with train.csv and test.csv")
        named = source / "classes.txt"
        classes = class_names(named) if named.exists() else AG_NEWS_CLASSES
        texts, labels, names = [], [], []
        for line, row in self._rows(path):
            place = f"{path}, line {line}"
            check(len(row) == 3, f"{place} has {len(row)} column(s), wanted 3: class, title, description")
            label, title, description = row
            number = int(label) if re.fullmatch("[0-9]{1,9}", label.strip()) else 0
            check(1 <= number <= len(classes), f"{place} has class {label!r}, wanted 1 to {len(classes)}")
            labels.append(number - 1)
            # A line break is written \n by the publisher's rule, and in most places as a backslash alone.
            texts.append(re.sub(r"\\n|\\", " ", f"{title} {description}"))
            names.append(f"{path.name}:{line}")
        given = np.array(labels, dtype=np.int64)
        return Listing(str(path), "text", classes, given, given, names, texts.__getitem__)

    @staticmethod
    def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
        """Each row with the line it starts on, without blank lines and the header of the Kaggle copy."""
        reader = csv.reader(_lines(path), strict=True)
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise InputError(f"{path}, line {line} is not CSV ({error}), wanted quotes that close") from error
            if row and not (line == 1 and row[0].strip().lower() == "class index"):
                yield line, row


@dataclass(frozen=True)
class Posts:
    """Reads post i from its file."""

    paths: Sequence[Path]
    strip: bool

    def __call__(self, i: int) -> str:
        text = self.paths[i].read_text(encoding="latin-1")
        return f"\n{text}".partition("\n\n")[2] if self.strip else text


@dataclass(frozen=True)
class Newsgroups20:
    """20 Newsgroups by date: 20news-bydate-train/ and 20news-bydate-test/, a folder a class, numbered files in it."""

    split: Literal["train", "test"] = "train"
    """Which of the two folders."""
    strip: Literal["headers", "none"] = "headers"
    """Leave out the headers, which give the class away: all up to the first blank line."""

    def __post_init__(self) -> None:
        check_choice("split", self.split, ("train", "test"))
        check_choice("strip", self.strip, ("headers", "none"))

    def listing(self, source: Path) -> Listing:
        folders = {split: source / f"20news-bydate-{split}" for split in ("train", "test")}
        folder = require(
            folders[self.split], "the 20 Newsgroups folder with 20news-bydate-train and 20news-bydate-test"
        )
        # Of both splits: a class that one of them lacks must not shift the numbers of the others.
        found = {path.name for each in folders.values() if each.is_dir() for path in each.iterdir() if path.is_dir()}
        classes = tuple(sorted(name for name in found if not name.startswith(".")))
        paths: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            files = (folder / name).iterdir() if (folder / name).is_dir() else ()
            posts = sorted(
                (path for path in files if path.name.isdecimal()), key=lambda path: (int(path.name), path.name)
            )
            paths += posts
            labels += [label] * len(posts)
        given = np.array(labels, dtype=np.int64)
        names = [path.relative_to(source).as_posix() for path in paths]
        return Listing(str(folder), "text", classes, given, given, names, Posts(paths, self.strip == "headers"))


@dataclass(frozen=True)
class Jsonl:
    """JSON lines: a .jsonl or .jsonl.gz file with an object a line that holds a text and its label."""

    text: str = "text"
    """Key of the text."""
    label: str = "label"
    """Key of the given label: the name of a class, or its number from 0."""
    clean: str | None = None
    """Key of the true label, which is null where it is not known; without one no true label is known."""
    classes: Path | None = None
    """File that names the classes, a name a line or (.json) a JSON list; found in the data without one."""

    def listing(self, source: Path) -> Listing:
        require(source, "a .jsonl or .jsonl.gz file")
        texts: list[str] = []
        labels: list[str | int] = []
        clean: list[str | int | None] = []
        numbers: list[int] = []
        for number, line in enumerate(_lines(source), 1):
            if not line.strip():
                continue
            place = f"{source}, line {number}"
            item = self._object(line, place)
            texts.append(self._text(item, place))
            labels.append(self._label(item, self.label, place))
            if self.clean is not None:
                unknown = self.clean in item and item[self.clean] is None
                clean.append(None if unknown else self._label(item, self.clean, place))
            numbers.append(number)
        values = [*labels, *clean]
        places = numbers + numbers[: len(clean)]
        classes = self._found(values, places, source) if self.classes is None else class_names(self.classes)
        codes = _codes(values, classes, places, source)
        truth = None if self.clean is None else codes[len(labels) :]
        names = [f"{source.name}:{number}" for number in numbers]
        return Listing(str(source), "text", classes, codes[: len(labels)], truth, names, texts.__getitem__)

    @staticmethod
    def _object(line: str, place: str) -> dict[str, Any]:
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place} is not JSON, wanted a JSON object") from error
        check(isinstance(item, dict), f"{place} is {type(item).__name__} in JSON, wanted an object")
        return item

    def _text(self, item: dict[str, Any], place: str) -> str:
        check(self.text in item, f"{place} has no key {self.text!r}, wanted the text there")
        text = item[self.text]
        check(isinstance(text, str), f"{place} has {self.text!r} of type {type(text).__name__}, wanted a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{place} has half a surrogate pair in {self.text!r}, wanted whole characters") from error
        return text

    @staticmethod
    def _label(item: dict[str, Any], key: str, place: str) -> str | int:
        check(key in item, f"{place} has no key {key!r}, wanted the label there")
        label = item[key]
        good = isinstance(label, str) or (isinstance(label, int) and not isinstance(label, bool))
        kind = type(label).__name__
        check(good, f"{place} has {key!r} of type {kind}, wanted a string or a whole number")
        return label

    @staticmethod
    def _found(values: Sequence[str | int | None], lines: Sequence[int], source: Path) -> tuple[str, ...]:
        """Names, sorted; or where labels are numbers, all from 0 to the largest."""
        first = next((type(value) for value in values if value is not None), str)
        for line, value in zip(lines, values, strict=True):
            sort = "a string" if first is str else "a whole number"
            check(
                value is None or type(value) is first,
                f"{source}, line {line} has label {value!r}, wanted {sort} as before it",
            )
        strings = {value for value in values if isinstance(value, str)}
        largest = max((value for value in values if isinstance(value, int)), default=-1)
        check(largest < MOST_CLASSES, f"{source} has label {largest}, wanted numbers below {MOST_CLASSES}")
        return tuple(sorted(strings)) if first is str else tuple(map(str, range(largest + 1)))


def _codes(
    values: Sequence[str | int | None], classes: tuple[str, ...], lines: Sequence[int], source: Path
) -> NDArray[np.int64]:
    """Names and numbers of classes as their numbers, None as ``UNKNOWN``."""
    number = {name: i for i, name in enumerate(classes)}
    codes = np.full(len(values), UNKNOWN, dtype=np.int64)
    for i, value in enumerate(values):
        if isinstance(value, str):
            check(
                value in number, f"{source}, line {lines[i]} has label {value!r}, which is none of the classes' names"
            )
            codes[i] = number[value]
        elif value is not None:
            wanted = f"wanted 0 to {len(classes) - 1}"
            check(0 <= value < len(classes), f"{source}, line {lines[i]} has label {value}, {wanted}")
            codes[i] = value
    return codes
