"""``fastgnl convert``: a data set in its published layout becomes one ``.beton`` file."""

import hashlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from fastgnl.beton import JPEG, PAGE_SIZE, RAW, Beton
from fastgnl.beton_writer import BetonWriter, Blob, Skipped
from fastgnl.errors import InputError, check, check_choice, check_count, check_range
from fastgnl.files import written
from fastgnl.formats.listing import UNKNOWN, Listing
from fastgnl.images import decode, encode_jpeg, resize
from fastgnl.prefetch import prefetched
from fastgnl.report import text_table

CHUNK = 256
"""Samples between two lines of the journal."""
RAW_UP_TO = 64 * 64
"""Pixels up to which ``mode="auto"`` stores an image uncompressed."""


@dataclass(frozen=True)
class Storage:
    """How images are stored."""

    size: int | None = None
    """Shrink images until the shorter side has this many pixels; as they are when not given."""
    square: bool = False
    """With size: to size x size, whatever the proportions."""
    mode: Literal["auto", "raw", "jpeg"] = "auto"
    """Uncompressed, or JPEG; auto stores images of up to 64 x 64 pixels uncompressed."""
    quality: int = 90
    """Of JPEG, 1 to 100."""

    def __post_init__(self) -> None:
        if self.size is not None:
            check_count("size", self.size, 1)
        check(not self.square or self.size is not None, "square was given without size, wanted both")
        check_choice("mode", self.mode, ("auto", "raw", "jpeg"))
        check_range("quality", self.quality, 1, 100)


def encode(listing: Listing, storage: Storage, sample: int) -> Blob:
    """Sample i of a listing as it is stored. ``OSError`` or ``ValueError`` when it cannot be read."""
    value = listing.read(sample)
    if listing.kind == "text":
        return Blob(value.encode())
    if listing.kind == "features":
        return Blob(np.ascontiguousarray(value, "<f4").tobytes())
    pixels = value if isinstance(value, np.ndarray) else decode(value)
    if storage.size is not None:
        pixels = resize(pixels, storage.size, storage.square)
    height, width = pixels.shape[:2]
    if max(height, width) >= 1 << 16:
        raise ValueError(f"{width} x {height} pixels, wanted sides below 65,536")
    raw = storage.mode == "raw" or (storage.mode == "auto" and height * width <= RAW_UP_TO)
    data = np.ascontiguousarray(pixels).tobytes() if raw else encode_jpeg(pixels, storage.quality)
    if len(data) > PAGE_SIZE:
        raise ValueError(f"{len(data):,} bytes when stored, wanted at most {PAGE_SIZE:,}: give size, or mode jpeg")
    return Blob(data, RAW if raw else JPEG, width, height)


def _encode_chunk(chunk: range) -> list[Blob | Skipped]:
    """In a worker: the samples of a chunk, or why one could not be read."""
    listing, storage = _work
    found: list[Blob | Skipped] = []
    for sample in chunk:
        try:
            found.append(encode(listing, storage, sample))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            found.append(Skipped(sample, why.replace("\n", " ")))
    return found


_work: tuple[Listing, Storage]


def _set_work(listing: Listing, storage: Storage) -> None:
    global _work
    _work = listing, storage


def _leave_with_parent(parent: int) -> None:
    """In a worker: end when the conversion was killed, which a pool's workers would not notice."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _encoded(listing: Listing, storage: Storage, first: int, workers: int) -> Iterator[list[Blob | Skipped]]:
    """Chunk after chunk, from sample ``first`` on."""
    chunks = [range(start, min(start + CHUNK, len(listing))) for start in range(first, len(listing), CHUNK)]
    _set_work(listing, storage)
    workers = min(workers, len(chunks))
    if workers <= 1:
        yield from map(_encode_chunk, chunks)
        return
    # Workers inherit the listing: what reads a sample need not be picklable.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, _leave_with_parent, (os.getpid(),)) as pool:
        try:
            yield from prefetched(pool, _encode_chunk, chunks, 3 * workers)
        except BrokenProcessPool as error:
            raise InputError(
                "a worker of the conversion was killed (out of memory?), wanted more memory or fewer workers; the same "
                "command goes on from here"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _digest(listing: Listing) -> str:
    """Of everything that decides what is written, but for the samples' content."""
    found = hashlib.sha256(listing.labels.tobytes())
    found.update(b"" if listing.clean is None else listing.clean.tobytes())
    for text in chain([listing.source], listing.classes, listing.names):
        found.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()


def _plan(listing: Listing, storage: Storage, described: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for a started conversion to be continued."""
    plan = {"listing": _digest(listing), "storage": asdict(storage), "kind": listing.kind, "described": described}
    plain: dict[str, Any] = json.loads(json.dumps(plan, default=str))
    return plain


def converted(listing: Listing, target: Path) -> None:
    """Make sure that ``target`` holds the listing: it is written unless it does already."""
    if target.exists():
        try:
            if Beton(target).info["plan"] == _plan(listing, Storage(), {}):
                return
        except InputError:
            pass  # it is written anew
    convert(listing, target)


def _write(
    writer: BetonWriter,
    listing: Listing,
    storage: Storage,
    unreadable: Literal["refuse", "skip"],
    workers: int,
    quiet: bool,
) -> None:
    """Encode and append what the writer does not hold yet."""
    if writer.resumed and not quiet:
        print(f"going on after {writer.done:,} of {len(listing):,} samples", file=sys.stderr)
    bar = tqdm(
        total=len(listing),
        initial=writer.done,
        desc="converting",
        unit=" samples",
        disable=quiet,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 5.0,
    )
    with bar:
        for chunk in _encoded(listing, storage, writer.done, workers):
            bad = next((blob for blob in chunk if isinstance(blob, Skipped)), None)
            if bad is not None and unreadable == "refuse":
                raise InputError(
                    f"{listing.source}: {listing.names[bad.sample]} cannot be read ({bad.why}), wanted a readable "
                    "file, or the option --unreadable skip; the same command goes on from here"
                )
            writer.append(chunk)
            bar.update(len(chunk))


def convert(
    listing: Listing,
    target: Path,
    storage: Storage | None = None,
    unreadable: Literal["refuse", "skip"] = "refuse",
    workers: int | None = None,
    described: dict[str, Any] | None = None,
    quiet: bool = False,
) -> Beton:
    """Write a listing as a ``.beton`` file and open it. A run that was killed goes on where it was, if ``described``
    (what the listing was made from, kept in the file) is the same."""
    storage = storage or Storage()
    check_choice("unreadable", unreadable, ("refuse", "skip"))
    check(target.suffix == ".beton", f"the target is {target}, wanted a name that ends in .beton")
    plan = _plan(listing, storage, described or {})
    with BetonWriter(target, len(listing), plan) as writer:
        _write(writer, listing, storage, unreadable, workers or os.cpu_count() or 1, quiet)
        width = len(listing.read(writer.entries[0].sample)) if listing.kind == "features" and writer.entries else None
        writer.finish(
            listing.kind,
            width,
            listing.labels,
            listing.clean,
            list(listing.names),
            {
                "classes": listing.classes,
                "source": listing.source,
                "plan": plan,
                "skipped": [[listing.names[sample], why] for sample, why in writer.skipped],
            },
        )
    return Beton(target, verify=False)


def summary(beton: Beton) -> str:
    """What a file holds, for people."""
    count, known = len(beton), beton.clean != UNKNOWN
    bytes_a_sample = beton.sizes.sum() / count
    lines = [
        f"{count:,} samples of {len(beton.classes):,} classes, {len(beton.map) / 1e6:,.1f} MB "
        f"({bytes_a_sample:,.0f} bytes a sample)"
    ]
    if beton.kind == "image":
        image = beton.records["f0"]
        sides = [f"{image[side].min()} to {image[side].max()}" for side in ("width", "height")]
        lines.append(f"images: width {sides[0]}, height {sides[1]}, {(image['mode'] == RAW).mean():.0%} uncompressed")
    if known.any():
        wrong = (beton.labels != beton.clean)[known].mean()
        lines.append(f"true label known of {known.mean():.0%}; the given one is wrong for {wrong:.1%} of these")
    else:
        lines.append("true labels: unknown")
    counts = np.bincount(beton.labels, minlength=len(beton.classes))
    lines.append(f"samples a class: {counts.min():,} to {counts.max():,}, median {np.median(counts):,.0f}")
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        lines.append(f"classes without a sample: {len(empty):,} (the first is {beton.classes[empty[0]]!r})")
    if len(beton.classes) <= 20:
        rows = [(name, f"{n:,}") for name, n in zip(beton.classes, counts.tolist(), strict=True)]
        lines.append("\n" + text_table(("class", "samples"), rows))
    return "\n".join(lines)


def list_skipped(beton: Beton) -> str | None:
    """Write the files that could not be read beside the data; a sentence about them."""
    skipped = beton.info["skipped"]
    if not skipped:
        return None
    path = beton.path.with_suffix(".unreadable.txt")
    with written(path) as file:
        file.writelines(f"{name}\t{why}\n" for name, why in skipped)
    shown = "".join(f"\n  {name}: {why}" for name, why in skipped[:10])
    more = f"\n  and {len(skipped) - 10:,} more" if len(skipped) > 10 else ""
    return f"{len(skipped):,} unreadable file(s) skipped, listed in {path}{shown}{more}"


def report(beton: Beton) -> None:
    """Print what a conversion wrote."""
    print(f"\n{beton.path}: {summary(beton)}")
    sentence = list_skipped(beton)
    if sentence:
        print(f"\n{sentence}")


def check_file(path: Path) -> None:
    """``fastgnl check``: refuse a file in which anything was altered, or print what it holds."""
    beton = Beton(path, verify=False)
    for row in tqdm(range(len(beton)), desc="checking", unit=" records", disable=not sys.stderr.isatty()):
        beton.verify(row)
    print(f"{path} is whole: {summary(beton)}")
