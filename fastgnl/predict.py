"""``fastgnl predict``: what a trained model says of new images or texts."""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from fastgnl.errors import InputError, check, check_count
from fastgnl.files import check_writable, written
from fastgnl.formats.folders import IMAGES
from fastgnl.model import Model, load_model
from fastgnl.report import text_table


@dataclass(frozen=True)
class PredictConfig:
    """Classify new images, or texts, with the model of a finished run."""

    model: tyro.conf.Positional[Path]
    """The run's folder, with model.safetensors and model.json."""
    inputs: tyro.conf.Positional[tuple[Path, ...]]
    """Image files, and folders of them; for a model of texts, text files, each one text."""
    top: int = 1
    """How many classes to give for each, the likeliest first."""
    out: Path | None = None
    """Write a .csv file, in place of a table."""

    def __post_init__(self) -> None:
        check_count("top", self.top, 1)
        check(len(self.inputs) > 0, "no files were given, wanted at least one")


def _files(inputs: tuple[Path, ...], suffixes: tuple[str, ...]) -> list[Path]:
    """The files, and those of the folders."""
    found: list[Path] = []
    for path in inputs:
        check(path.exists(), f"{path} does not exist, wanted a file or a folder")
        below = (
            sorted(each for each in path.rglob("*") if each.name.lower().endswith(suffixes))
            if path.is_dir()
            else [path]
        )
        check(len(below) > 0, f"{path} holds no file that ends in {', '.join(suffixes)}, wanted some")
        found += below
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text ({error}), wanted text in UTF-8") from error


def _inputs(model: Model, config: PredictConfig) -> tuple[list[Path], list[Any]]:
    kind = model.network["kind"]
    check(kind != "features", f"the model in {config.model} takes features, wanted one of images or texts")
    files = _files(config.inputs, IMAGES if kind == "image" else (".txt",))
    return files, [_read(path) for path in files] if kind == "text" else files


def run(config: PredictConfig) -> None:
    """The command."""
    if config.out is not None:
        check_writable(config.out)
    model = load_model(config.model)
    check(
        config.top <= len(model.classes),
        f"top is {config.top} of {len(model.classes)} classes, wanted no more than there are",
    )
    files, inputs = _inputs(model, config)
    probabilities = model.predict_proba(inputs)
    rows = [
        (str(path), model.classes[c], f"{row[c]:.4f}")
        for path, row in zip(files, probabilities, strict=True)
        for c in row.argsort()[::-1][: config.top]
    ]
    header = ("file", "class", "probability")
    if config.out is None:
        print(text_table(header, rows))
        return
    with written(config.out) as file:
        csv.writer(file).writerows([header, *rows])
    print(f"{len(files):,} files classified: {config.out}", file=sys.stderr)
