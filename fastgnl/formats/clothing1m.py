"""Clothing1M, with its noisy and its clean labels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastgnl.errors import InputError
from fastgnl.formats.folders import below, first_that_exists, lines, of_files, read_classes, read_pairs
from fastgnl.formats.listing import UNKNOWN, Listing

CLASSES = (
    "T-Shirt",
    "Shirt",
    "Knitwear",
    "Chiffon",
    "Sweater",
    "Hoodie",
    "Windbreaker",
    "Jacket",
    "Downcoat",
    "Suit",
    "Shawl",
    "Dress",
    "Vest",
    "Underwear",
)


@dataclass(frozen=True)
class Clothing1M:
    """Clothing1M: SOURCE/noisy_train_key_list.txt, SOURCE/noisy_label_kv.txt, ..., SOURCE/images/0/00/*.jpg.

    The lists noisy_train_key_list.txt, clean_train_key_list.txt, clean_val_key_list.txt and clean_test_key_list.txt,
    the labels noisy_label_kv.txt and clean_label_kv.txt and, where it is there, category_names_eng.txt lie in SOURCE
    or SOURCE/annotations; keys are paths below SOURCE. A noisy image has a clean label where clean_label_kv.txt has
    one. An image that is listed need not be there until it is read."""

    split: Literal["noisy_train", "clean_train", "clean_val", "clean_test"] = "noisy_train"
    """Which list."""

    def listing(self, source: Path) -> Listing:
        layout = "Clothing1M with its key lists and label_kv files in it or in annotations"
        file = f"{self.split}_key_list.txt"
        keys = first_that_exists([source / file, source / "annotations" / file], layout)
        noisy = self.split == "noisy_train"
        kv = keys.parent / ("noisy_label_kv.txt" if noisy else "clean_label_kv.txt")
        label = dict(read_pairs(kv, layout))
        names = []
        for where, key in lines(keys, layout):
            if key not in label:
                raise InputError(f"{where}: {key} has no label in {kv}, wanted one for each key")
            names.append(below(where, key))
        given = [label[name] for name in names]
        true = dict(read_pairs(keys.parent / "clean_label_kv.txt", layout)) if noisy else label
        english = keys.parent / "category_names_eng.txt"
        classes = read_classes(english, layout) if english.exists() else CLASSES
        return of_files(keys, source, classes, names, given, [true.get(name, UNKNOWN) for name in names])
