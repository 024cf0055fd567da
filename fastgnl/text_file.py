"""Texts in a ``.beton`` file as a source of batches of tokens: tokenised once, padded batch by batch."""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from fastgnl.distributed import on_first_rank, rank
from fastgnl.errors import check_count
from fastgnl.file_source import FileSource
from fastgnl.files import written

CHUNK = 1000
"""Texts that are tokenised at a time."""


class TextFile(FileSource):
    """The texts of a ``.beton`` file as token ids, [B, T] int64, padded to the longest text of the batch.

    They are tokenised by the first rank that opens the file and kept beside it, under a name made of the tokenizer and
    ``max_length``."""

    eval_rows = 64

    def __init__(
        self, path: Path | str, tokenizer: Any, max_length: int = 128, labels: NDArray[np.int64] | None = None
    ) -> None:
        """``tokenizer``: one of transformers'. ``labels``: by sample id, in place of those in the file."""
        check_count("max_length", max_length, 4)
        super().__init__(path, "text", "texts", labels)
        self.tokenizer, self.max_length = tokenizer, max_length
        self.pad = int(tokenizer.pad_token_id or 0)
        self.cache = self.beton.path.with_name(f"{self.beton.path.stem}.{self._key()}.tokens.npz")
        on_first_rank(self._tokenise)
        self.tokens, self.offsets = self._kept() or self._tokens()
        self.lengths = np.diff(self.offsets)

    def _key(self) -> str:
        """Of all that decides the tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules: Any = sorted(self.tokenizer.get_vocab().items())
        if backend is not None:
            rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # left by its last call
        found = hashlib.sha256(f"{self.beton.info['records_crc']} {self.max_length} {rules}".encode())
        return found.hexdigest()[:12]

    def _kept(self) -> tuple[NDArray[np.int32], NDArray[np.int64]] | None:
        """What an earlier run kept, if it is whole."""
        try:
            with np.load(self.cache, allow_pickle=False) as kept:
                tokens, offsets = kept["tokens"], kept["offsets"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None
        whole = len(offsets) == len(self) + 1 and offsets[0] == 0 and offsets[-1] == len(tokens)
        return (tokens, offsets) if whole else None

    def _tokenise(self) -> None:
        if self._kept() is not None:
            return
        tokens, offsets = self._tokens()
        with written(self.cache, binary=True) as file:
            np.savez(file, tokens=tokens, offsets=offsets)

    def _tokens(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The tokens of all texts one after another, and where each begins."""
        found: list[list[int]] = []
        bar = tqdm(
            total=len(self),
            desc="tokenising",
            unit=" texts",
            disable=rank() != 0 or not sys.stderr.isatty(),
            dynamic_ncols=True,
        )
        with bar:
            for start in range(0, len(self), CHUNK):
                texts = [self.beton.text(row) for row in range(start, min(start + CHUNK, len(self)))]
                found += self.tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
                bar.update(len(texts))
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in found])]).astype(np.int64)
        return np.concatenate([np.asarray(row, np.int32) for row in found]), offsets

    def load(self, batches: Sequence[NDArray[np.int64]], epoch: int | None = None, view: int = 0) -> Iterator[Tensor]:
        """The tokens of each batch of rows in turn; nothing of them is random."""
        return (self._padded(rows) for rows in batches)

    def _padded(self, rows: NDArray[np.int64]) -> Tensor:
        assert self.lengths is not None
        out = np.full((len(rows), int(self.lengths[rows].max())), self.pad, np.int64)
        for line, row in zip(out, rows, strict=True):
            line[: self.lengths[row]] = self.tokens[self.offsets[row] : self.offsets[row + 1]]
        return torch.from_numpy(out)
