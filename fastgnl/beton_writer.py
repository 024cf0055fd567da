"""Writes a ``.beton`` file so that a killed run goes on where it was and nothing half written gets the final name.

Data are appended to ``NAME.part``; after each chunk, once the data are on disk, a line of ``NAME.journal`` says what
the chunk holds and where the data end. To go on: cut the data at the journal's last whole line. At the end the tables
are written and the file is renamed.
"""

import fcntl
import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastgnl.beton import (
    ALLOCATION,
    HEADER,
    LOCATOR,
    MAGIC,
    NUMBERS,
    PAGE_SIZE,
    VERSION,
    Kind,
    descriptors,
    record_type,
    records_start,
)
from fastgnl.errors import InputError, check
from fastgnl.files import check_writable


class Blob(NamedTuple):
    """A sample as it is stored."""

    data: bytes
    mode: int = 0
    width: int = 0
    height: int = 0


class Entry(NamedTuple):
    """A stored sample: its place in the listing, where its data lie."""

    sample: int
    mode: int
    width: int
    height: int
    pointer: int
    size: int
    crc: int


class Skipped(NamedTuple):
    """A sample that could not be read, and why."""

    sample: int
    why: str


class BetonWriter:
    """One conversion. ``plan`` is what must be equal for a started one to be continued."""

    def __init__(self, target: Path, capacity: int, plan: dict[str, Any]) -> None:
        check_writable(target)
        self.target = target
        self.part = target.with_name(target.name + ".part")
        self.journal = target.with_name(target.name + ".journal")
        table = records_start() + capacity * record_type("image").itemsize
        self.start = -(-table // PAGE_SIZE) * PAGE_SIZE
        self.entries: list[Entry] = []
        self.skipped: list[Skipped] = []
        self.done = 0
        """Samples of the listing dealt with, from the first on."""
        self.end = self.start
        try:
            self.file = open(self.part, "r+b" if self.part.exists() else "w+b")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"cannot write {self.part}: {error.strerror}, wanted a folder with room") from error
        try:
            # A lock of this process alone: one that forked workers share would outlive it in them.
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise InputError(f"{self.part} is being written by another conversion, wanted another target") from error
        first = json.dumps(plan, sort_keys=True)
        self.resumed = self._read_journal(first)
        if not self.resumed:
            with open(self.journal, "w", encoding="utf-8") as journal:
                journal.write(first + "\n")
        self.file.truncate(self.end)

    def __enter__(self) -> "BetonWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()

    def _read_journal(self, plan: str) -> bool:
        """Whether there is something to go on with."""
        if not self.journal.exists():
            return False
        raw = self.journal.read_bytes()
        lines = raw[: raw.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()
        if not lines or lines[0] != plan:
            return False
        for line in lines[1:]:
            chunk = json.loads(line)
            if chunk["end"] > os.fstat(self.file.fileno()).st_size:
                return False
            self.entries += [Entry(*entry) for entry in chunk["entries"]]
            self.skipped += [Skipped(*entry) for entry in chunk["skipped"]]
            self.done, self.end = chunk["done"], chunk["end"]
        with open(self.journal, "rb+") as journal:
            journal.truncate(raw.rfind(b"\n") + 1)
        return self.done > 0

    def _place(self, size: int) -> int:
        """Where the next ``size`` bytes go: no sample lies in two pages."""
        page_left = -self.end % PAGE_SIZE
        return self.end if size <= page_left or page_left == 0 else self.end + page_left

    def append(self, chunk: list[Blob | Skipped]) -> None:
        """The next samples of the listing, written and noted."""
        entries, skipped = [], []
        try:
            for sample, blob in enumerate(chunk, self.done):
                if isinstance(blob, Skipped):
                    skipped.append(blob)
                    continue
                pointer = self._place(len(blob.data))
                self.file.seek(pointer)
                self.file.write(blob.data)
                self.end = pointer + len(blob.data)
                crc = zlib.crc32(blob.data)
                entries.append(Entry(sample, blob.mode, blob.width, blob.height, pointer, len(blob.data), crc))
            self.file.flush()
            os.fdatasync(self.file.fileno())
            self.done += len(chunk)
            line = json.dumps({"done": self.done, "end": self.end, "entries": entries, "skipped": skipped})
            with open(self.journal, "a", encoding="utf-8") as journal:
                journal.write(line + "\n")
        except OSError as error:
            raise InputError(
                f"cannot write {self.part}: {error.strerror}, wanted room on that disk; the same command goes on from "
                "here"
            ) from error
        self.entries += entries
        self.skipped += skipped

    def finish(
        self, kind: Kind, width: int | None, labels: Any, clean: Any, names: list[str], info: dict[str, Any]
    ) -> None:
        """Write the tables and give the file its name. ``labels``, ``clean``, ``names``: of the whole listing."""
        check(len(self.entries) > 0, f"none of the {self.done} samples could be read, wanted at least one")
        count = len(self.entries)
        columns = np.array([entry[1:] for entry in self.entries], np.int64)
        kept = np.array([entry.sample for entry in self.entries])
        mode, w, h, pointer, size, crc = columns.T
        records = np.zeros(count, record_type(kind))
        data = {
            "image": {"mode": mode, "width": w, "height": h, "data_ptr": pointer},
            "text": {"ptr": pointer, "size": size},
        }
        if kind == "features":
            records["f0"] = pointer
        else:
            for name, column in data[kind].items():
                records["f0"][name] = column
        numbers = {
            "label": labels[kept],
            "clean": -1 if clean is None else clean[kept],
            "id": np.arange(count),
            "crc": crc,
        }
        for i, name in enumerate(NUMBERS, 1):
            records[f"f{i}"] = numbers[name]
        allocations = np.zeros(count, ALLOCATION)
        allocations["sample_id"], allocations["ptr"], allocations["size"] = np.arange(count), pointer, size
        packed_names = zlib.compress(json.dumps([names[i] for i in kept]).encode())
        header = np.zeros(1, HEADER)
        info = {
            **info,
            "kind": kind,
            "width": width,
            "names_offset": self.end,
            "names_size": len(packed_names),
            "names_crc": zlib.crc32(packed_names),
            "records_crc": zlib.crc32(records.tobytes()),
            "allocations_crc": zlib.crc32(allocations.tobytes()),
        }
        # The description holds checksum of the header and size of the file, which depend on where it ends: pad it.
        offset = self.end + len(packed_names)
        room = len(json.dumps(info).encode()) + 96
        header["version"], header["num_fields"], header["page_size"] = VERSION, 1 + len(NUMBERS), PAGE_SIZE
        header["num_samples"], header["alloc_table_ptr"] = count, offset + room
        info |= {"header_crc": zlib.crc32(header.tobytes()), "file_size": offset + room + allocations.nbytes}
        text = json.dumps(info).encode().ljust(room)
        assert len(text) == room
        locator = np.array([(MAGIC, offset, room, zlib.crc32(text))], LOCATOR)
        try:
            self.file.seek(self.end)
            self.file.write(packed_names + text + allocations.tobytes())
            self.file.seek(0)
            self.file.write(header.tobytes() + descriptors(kind, width, locator).tobytes() + records.tobytes())
            self.file.truncate(info["file_size"])
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.part}: {error.strerror}, wanted room on that disk") from error
        os.replace(self.part, self.target)
        self.journal.unlink()
