"""FFCV's file format, version 2: header, field descriptors, a table of records, pages of data, a table of allocations.

A file of fastgnl's is one that FFCV reads, with five fields: the data (``image``, ``text`` or ``features``),
``label``, ``clean`` (-1 where unknown), ``id`` (the sample's, 0 to N - 1) and ``crc`` (CRC-32 of the data). Between the
last page and the allocations, where FFCV does not look, lie the samples' names and a JSON block: class names, where the
data came from, checksums. The descriptor of ``id``, whose arguments FFCV does not use, says where.
"""

import json
import mmap
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastgnl.errors import InputError, check

Kind = Literal["image", "text", "features"]

VERSION = 2
PAGE_SIZE = 1 << 23
RAW, JPEG = 1, 0
"""How an image is stored."""

HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_size", "<u4"),
        ("num_samples", "<u8"),
        ("alloc_table_ptr", "<u8"),
    ],
    align=True,
)
FIELD = np.dtype([("type_id", "<u1"), ("name", ("<u1", 16)), ("arguments", ("<u1", (1024,)))], align=True)
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
TEXT = np.dtype([("ptr", "<u8"), ("size", "<u8")])
FEATURES = np.dtype("<u8")
ARRAY_ARGUMENTS = np.dtype([("shape", "<u8", 32), ("type_length", "<u8")])
LOCATOR = np.dtype([("magic", "S8"), ("offset", "<u8"), ("size", "<u8"), ("crc", "<u4")])
MAGIC = b"fastgnl1"

DATA_FIELD: dict[str, tuple[int, np.dtype[Any]]] = {"image": (2, IMAGE), "text": (3, TEXT), "features": (4, FEATURES)}
"""FFCV's number of the field's type, and its columns in the table of records."""
NUMBERS = ("label", "clean", "id", "crc")
VERIFY_UP_TO = 1 << 30
"""Bytes. Every record of a file up to this size is checked when it is opened."""


def record_type(kind: Kind) -> np.dtype[Any]:
    """A row of the table of records."""
    columns: list[Any] = [("f0", DATA_FIELD[kind][1]), *((f"f{i}", "<i8") for i in range(1, 1 + len(NUMBERS)))]
    return np.dtype(columns, align=True)


def records_start() -> int:
    """Where the table of records begins."""
    return HEADER.itemsize + (1 + len(NUMBERS)) * FIELD.itemsize


def descriptors(kind: Kind, width: int | None, locator: NDArray[Any]) -> NDArray[Any]:
    """The field descriptors; ``width`` of the features."""
    fields = np.zeros(1 + len(NUMBERS), FIELD)
    for i, name in enumerate((kind, *NUMBERS)):
        fields[i]["type_id"] = DATA_FIELD[kind][0] if i == 0 else 1
        fields[i]["name"][: len(name)] = np.frombuffer(name.encode(), "<u1")
    if kind == "features":
        described = json.dumps([["", "<f4"]]).encode()
        arguments = np.zeros(1, ARRAY_ARGUMENTS)
        arguments["shape"][0][0], arguments["type_length"][0] = width, len(described)
        packed = arguments.tobytes() + described
        fields[0]["arguments"][: len(packed)] = np.frombuffer(packed, "<u1")
    packed = locator.tobytes()
    fields[1 + NUMBERS.index("id")]["arguments"][: len(packed)] = np.frombuffer(packed, "<u1")
    return fields


class Beton:
    """A ``.beton`` file: its tables in memory, its data mapped. Refuses one that was truncated or altered."""

    def __init__(self, path: Path, verify: bool | None = None) -> None:
        """``verify``: check every record (by default in files up to 1 GiB)."""
        self.path = Path(path)
        check(self.path.exists(), f"{path} does not exist, wanted a .beton file (fastgnl convert makes one)")
        check(self.path.is_file(), f"{path} is no file, wanted a .beton file (fastgnl convert makes one)")
        try:
            with open(self.path, "rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}, wanted a .beton file") from error
        except ValueError as error:
            raise InputError(f"{path} is empty, wanted a .beton file") from error
        self._read_info()
        self._read_tables()
        self._check_tables()
        if verify if verify is not None else len(self.map) <= VERIFY_UP_TO:
            for row in range(len(self)):
                self.verify(row)

    def __len__(self) -> int:
        return len(self.records)

    def _refuse(self, why: str, wanted: str = "the file that fastgnl convert wrote") -> None:
        raise InputError(f"{self.path} {why}, wanted {wanted}")

    def _read_info(self) -> None:
        start = records_start()
        if len(self.map) < start:
            self._refuse(f"has {len(self.map)} bytes, fewer than a .beton file's header")
        self.header = np.frombuffer(self.map, HEADER, 1)[0]
        fields = np.frombuffer(self.map, FIELD, 1 + len(NUMBERS), HEADER.itemsize)
        if self.header["version"] != VERSION or self.header["num_fields"] != 1 + len(NUMBERS):
            self._refuse("is no .beton file of fastgnl's, or its header was altered")
        (locator,) = fields[1 + NUMBERS.index("id")]["arguments"][: LOCATOR.itemsize].copy().view(LOCATOR)
        if locator["magic"] != MAGIC:
            self._refuse("is no .beton file of fastgnl's, or its header was altered")
        begin, end = int(locator["offset"]), int(locator["offset"]) + int(locator["size"])
        if end > len(self.map):
            self._refuse(f"is truncated: it has {len(self.map):,} bytes and names a place at {end:,}")
        text = self.map[begin:end]
        if zlib.crc32(text) != locator["crc"]:
            self._refuse("was altered: the checksum of its description is wrong")
        self.info: dict[str, Any] = json.loads(text)
        if len(self.map) != self.info["file_size"]:
            self._refuse(f"is truncated: it has {len(self.map):,} bytes", f"{self.info['file_size']:,}")
        self.kind: Kind = self.info["kind"]
        self.classes: tuple[str, ...] = tuple(self.info["classes"])
        wanted = descriptors(self.kind, self.info["width"], np.array([locator], LOCATOR))
        if fields.tobytes() != wanted.tobytes() or zlib.crc32(self.map[: HEADER.itemsize]) != self.info["header_crc"]:
            self._refuse("was altered: its header is not the one that was written")

    def _read_tables(self) -> None:
        count = int(self.header["num_samples"])
        self.records = np.frombuffer(self.map, record_type(self.kind), count, records_start())
        self.allocations = np.frombuffer(self.map, ALLOCATION, count, int(self.header["alloc_table_ptr"]))
        for name, table in (("records", self.records), ("allocations", self.allocations)):
            if zlib.crc32(table.tobytes()) != self.info[f"{name}_crc"]:
                self._refuse(f"was altered: the checksum of its table of {name} is wrong")
        self.labels, self.clean, self.ids, self.crc = (self.records[f"f{i}"] for i in range(1, 1 + len(NUMBERS)))
        self.sizes = self.allocations["size"]
        self.pointers = self.allocations["ptr"]

    def _check_tables(self) -> None:
        """What a writer with correct checksums could still have got wrong."""
        classes = len(self.classes)
        for name, labels, least in (("label", self.labels, 0), ("clean label", self.clean, -1)):
            wrong = np.flatnonzero((labels < least) | (labels >= classes))
            if len(wrong):
                self._refuse(f"has {name} {labels[wrong[0]]} in record {wrong[0]}", f"{least} to {classes - 1}")
        wrong = np.flatnonzero((self.ids < 0) | (self.ids >= len(self)))
        if len(wrong):
            self._refuse(f"has sample id {self.ids[wrong[0]]} in record {wrong[0]}", f"0 to {len(self) - 1}")
        first = np.full(len(self), -1)
        first[self.ids[::-1]] = np.arange(len(self))[::-1]
        again = np.flatnonzero(first[self.ids] != np.arange(len(self)))
        if len(again):
            row = int(again[0])
            self._refuse(
                f"has sample id {self.ids[row]} twice, in records {first[self.ids[row]]} and {row}", "each id once"
            )

    def verify(self, row: int) -> None:
        """Refuse a record whose data are not those that were written."""
        if zlib.crc32(self.data(row)) != self.crc[row]:
            self._refuse(f"was altered: record {row} ({self.names[row]}) has a wrong checksum")

    def data(self, row: int) -> memoryview:
        """The stored bytes of a record."""
        start = int(self.pointers[row])
        return memoryview(self.map)[start : start + int(self.sizes[row])]

    def text(self, row: int) -> str:
        return str(self.data(row), "utf-8")

    def features(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """[rows, width]."""
        return np.stack([np.frombuffer(self.data(int(row)), "<f4") for row in rows])

    @property
    def pages(self) -> NDArray[np.int64]:
        """The page that each record lies in."""
        return (self.pointers // self.header["page_size"]).astype(np.int64)

    @cached_property
    def names(self) -> list[str]:
        """Where each sample came from."""
        begin, size = self.info["names_offset"], self.info["names_size"]
        text = self.map[begin : begin + size]
        if zlib.crc32(text) != self.info["names_crc"]:
            self._refuse("was altered: the checksum of its samples' names is wrong")
        names: list[str] = json.loads(zlib.decompress(text))
        return names
