"""What ``--data demo`` trains on: small real data that every installation holds, as ``.beton`` files."""

import ast
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from fastgnl.beton import Beton
from fastgnl.convert import convert
from fastgnl.distributed import on_first_rank
from fastgnl.errors import check
from fastgnl.formats.embedded import Digits
from fastgnl.formats.listing import Listing
from fastgnl.noise import instance_dependent

PACKAGES = ("matplotlib", "networkx", "sklearn", "sympy")
TEXTS = 500
"""Docstrings of each package, drawn from twice as many."""
WORDS = 3000
"""The vocabulary of the tiny encoder."""
LEAST = 80
"""Characters that make one worth classifying."""


def digits(train: Path, tests: list[Path], rate: float | None, seed: int) -> None:
    """scikit-learn's handwritten digits; with a ``rate``, that share of the training labels is wrong, depending on the
    image. Each of ``tests`` gets the test images."""
    on_first_rank(lambda: _write_digits(train, tests, rate, seed))


def _write_digits(train: Path, tests: list[Path], rate: float | None, seed: int) -> None:
    listing = Digits("train", seed).listing()
    if rate is not None:
        pixels = np.stack([listing.read(i)[:, :, 0].ravel() for i in range(len(listing))]) / np.float32(255)
        noise = instance_dependent(pixels, listing.labels, rate, seed, num_classes=10)
        listing = replace(listing, labels=noise.labels)
    _write(train, listing)
    for path in tests:
        _write(path, Digits("test", seed).listing())


def _write(path: Path, listing: Listing) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        convert(listing, path, quiet=True)


def _docstrings(package: str) -> Iterator[str]:
    """The docstrings of a package's functions and classes, file by file, its own name left out of them."""
    root = Path(sysconfig.get_path("purelib")) / package
    for path in sorted(root.rglob("*.py")):
        if "tests" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= LEAST:
                    yield text.replace(package, "package")


def docstrings(train: Path, test: Path, seed: int) -> None:
    """Docstrings of four packages that come with fastgnl; the class is the package. A fifth is for testing."""
    on_first_rank(lambda: _write_docstrings(train, test, seed))


def _write_docstrings(train: Path, test: Path, seed: int) -> None:
    texts, labels = [], []
    for label, package in enumerate(PACKAGES):
        found = list(islice(dict.fromkeys(_docstrings(package)), 2 * TEXTS))
        check(len(found) >= TEXTS, f"{package} has {len(found)} docstrings, wanted at least {TEXTS} for the demo")
        texts += random.Random(seed).sample(found, TEXTS)
        labels += [label] * TEXTS
    order = np.random.default_rng(seed).permutation(len(texts))
    for path, rows in ((train, order[len(order) // 5 :]), (test, order[: len(order) // 5])):
        given = np.array(labels, np.int64)[rows]
        names = [f"docstring {row}" for row in rows]
        read = [texts[row] for row in rows].__getitem__
        _write(path, Listing("docstrings", "text", PACKAGES, given, given, names, read))


def tiny_encoder(folder: Path, train: Path) -> None:
    """A BERT of one small layer at random weights, whose vocabulary is the commonest words of the training texts."""
    on_first_rank(lambda: _make_encoder(folder, train))


def _make_encoder(folder: Path, train: Path) -> None:
    if (folder / "model.safetensors").exists():
        return
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    beton = Beton(train)
    split = pre_tokenizers.BertPreTokenizer()
    counts = Counter(word for row in range(len(beton)) for word, _ in split.pre_tokenize_str(beton.text(row).lower()))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    number = {word: i for i, word in enumerate(dict.fromkeys([*special.values(), *words]))}
    tokenizer = Tokenizer(models.WordLevel(number, "[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), split
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", number["[SEP]"]), ("[CLS]", number["[CLS]"]))
    config = BertConfig(
        vocab_size=len(number),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
