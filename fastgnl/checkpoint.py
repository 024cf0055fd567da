"""Checkpoints of a run, whole or not at all, through torch.distributed.checkpoint (DCP).

A checkpoint is a folder ``step-00000123``. It is written as ``.step-00000123.part-...`` and renamed once every rank
has written and every byte is on the disk. Its ``manifest.json`` has the size and checksum of each of its files.
"""

import io
import json
import os
import pickle
import re
import shutil
import sys
import tempfile
import uuid
import warnings
import zlib
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as sync_save
from torch.distributed.checkpoint.storage import WriteResult

from fastgnl.distributed import is_distributed, rank, world_size
from fastgnl.errors import InputError, check, check_count, some

FORMAT = 1
MANIFEST, PLAIN, METADATA = "manifest.json", "plain.json", ".metadata"

# DCP's advice to whoever forgot the process group; a run of one process has none on purpose.
warnings.filterwarnings("ignore", "torch.distributed is .*assuming the intent is to save")

T = TypeVar("T")


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _steps(folder: Path) -> list[int]:
    """The steps there are checkpoints of, the newest first."""
    found = (re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _synced(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _measured(path: Path) -> dict[str, int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return {"size": size, "crc32": crc}


def _crc_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _manifest(path: Path) -> dict[str, Any]:
    manifest = json.loads((path / MANIFEST).read_bytes())
    check(isinstance(manifest, dict), "not a manifest")
    check(manifest.get("format") == FORMAT, f"its format is {manifest.get('format')!r}, wanted {FORMAT}")
    check(manifest.pop("crc32", None) == _crc_of(manifest), "its checksum does not fit")
    return manifest


def _damage(path: Path, part: int, parts: int) -> str:
    """What is wrong with one part of a checkpoint's files, or nothing."""
    name = MANIFEST
    try:
        files = _manifest(path)["files"]
        for name in sorted(files)[part::parts]:
            found = _measured(path / name)
            if found["size"] != files[name]["size"]:
                return f"{name}: it has {found['size']} bytes, wanted {files[name]['size']}"
            check(found == files[name], "its checksum does not fit")
    except OSError as error:
        return f"{name}: {error.strerror}"
    except ValueError as error:
        return f"{name}: {error}"
    return ""


def _prepared(folder: Path) -> str:
    """Make the folder and clear it of what killed runs left. What is wrong with it, or nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for replaced in folder.glob(".step-*.replaced"):
            whole = folder / replaced.stem[1:]
            if whole.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                os.rename(replaced, whole)
        for part in folder.glob(".step-*.part-*"):
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        return f"cannot write checkpoints to {folder}: {error.strerror}, wanted a folder that can be written to"
    return ""


class _Writer(FileSystemWriter):
    """Writes into the .part folder; the coordinator makes it the checkpoint once all ranks have written."""

    def __init__(self, part: Path, step: int, plain: str, keep: int) -> None:
        super().__init__(part)
        self.part, self.step, self.plain, self.keep = part, step, plain, keep

    def storage_meta(self) -> None:
        """Nothing: DCP would note the folder's name, which is about to change."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save covers a full disk with an error of its zip file, and only that would reach other ranks.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        part, names = self.part, metadata.state_dict_metadata
        (part / PLAIN).write_text(self.plain, encoding="utf-8")
        files = {METADATA, PLAIN, *(result.storage_data.relative_path for each in results for result in each)}
        manifest = {
            "format": FORMAT,
            "ranks": len(results),
            "shards": [
                [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
                for prefix in (f"rank{r}/" for r in range(len(results)))
            ],
            "files": {name: _measured(part / name) for name in sorted(files)},
        }
        (part / MANIFEST).write_text(json.dumps({**manifest, "crc32": _crc_of(manifest)}, indent=1), encoding="utf-8")
        # Here and not only by DCP, which syncs its metadata before it has flushed them.
        for path in (*part.iterdir(), part):
            _synced(path)
        self._replace()

    def _replace(self) -> None:
        folder = self.part.parent
        whole = _place(folder, self.step)
        replaced = folder / f".{whole.name}.replaced"
        if whole.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(whole, replaced)
        os.rename(self.part, whole)
        _synced(folder)
        with suppress(OSError):  # the new one is there, whatever becomes of the old
            shutil.rmtree(replaced, ignore_errors=True)
            older = [_place(folder, step) for step in _steps(folder) if step < self.step]
            for path in older[self.keep - 1 :]:
                # Renamed first: killed halfway, it is a left-over and not a damaged checkpoint.
                gone = folder / f".{path.name}.part-gone"
                os.rename(path, gone)
                shutil.rmtree(gone, ignore_errors=True)


_KNOWN = {
    (known.__module__, known.__qualname__): known
    for known in (
        Metadata,
        TensorStorageMetadata,
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.StorageMeta,
        dcp_metadata.TensorProperties,
        dcp_metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
} | {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""All that DCP's metadata of tensors are made of."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        check((module, name) in _KNOWN, f"{module}.{name}")
        return _KNOWN[module, name]


def _metadata(path: Path, files: Container[str]) -> Metadata:
    """DCP's own reader would run whatever the file asks it to."""
    try:
        with (path / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        check(type(metadata) is Metadata, type(metadata).__name__)
        for name, value in metadata.state_dict_metadata.items():
            check(type(value) is TensorStorageMetadata, str(name))
        for info in metadata.storage_data.values():
            check(info.relative_path in files and not info.transform_descriptors, str(info.relative_path))
    except Exception as error:  # a pickle can raise anything
        raise InputError(
            f"the checkpoint {path} holds something other than tensors ({error}), wanted one that fastgnl wrote"
        ) from error
    return metadata


class _TensorsOnly(DefaultLoadPlanner):
    """DCP's default unpickles entries that are no tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise InputError(f"the checkpoint holds something other than a tensor as {read_item.dest_index.fqn!r}")


class Saved:
    """A checkpoint that is whole. Reading it is no collective: each rank reads what it needs."""

    def __init__(self, path: Path, step: int) -> None:
        manifest = _manifest(path)
        self.path, self.step = path, step
        self.ranks: int = manifest["ranks"]
        self.plain: dict[str, Any] = json.loads((path / PLAIN).read_bytes())
        self._names: list[list[str]] = manifest["shards"]
        self._metadata = _metadata(path, manifest["files"])

    def _read(self, into: dict[str, Tensor]) -> None:
        planner, reader = _TensorsOnly(flatten_state_dict=False), FileSystemReader(self.path)
        planner.set_up_planner(cast(dict[str, Any], into), self._metadata, True)
        reader.set_up_storage_reader(self._metadata, True)
        try:
            reader.read_data(planner.create_local_plan(), planner).wait()
        except pickle.UnpicklingError as error:  # by torch.load, which DCP calls with weights_only
            raise InputError(
                f"the checkpoint {self.path} holds something other than tensors, wanted one that fastgnl wrote"
            ) from error

    def load_shared(self, into: dict[str, Tensor]) -> None:
        """In place, on whatever device. Nothing is changed unless all names, shapes and types fit."""
        entries = cast(dict[str, TensorStorageMetadata], self._metadata.state_dict_metadata)
        has = {name.removeprefix("shared/"): entry for name, entry in entries.items() if name.startswith("shared/")}
        lacking, unknown = (
            [repr(name) for name in sorted(names)] for names in (into.keys() - has.keys(), has.keys() - into.keys())
        )
        check(
            not lacking,
            f"the checkpoint {self.path} has no {some(lacking)}, wanted {len(into)} tensors with it",
        )
        check(not unknown, f"the checkpoint {self.path} has {some(unknown)}, wanted none of that name")
        for name, tensor in into.items():
            found, wanted = (has[name].size, has[name].properties.dtype), (tensor.shape, tensor.dtype)
            check(
                found == wanted,
                f"the checkpoint {self.path} has {name!r} of shape {list(found[0])} in {found[1]}, "
                f"wanted shape {list(wanted[0])} in {wanted[1]}",
            )
        self._read({f"shared/{name}": tensor.detach() for name, tensor in into.items()})

    def shard(self, rank: int) -> dict[str, Tensor]:
        """What this rank gave as ``mine``."""
        check(0 <= rank < self.ranks, f"rank is {rank}, wanted one below {self.ranks}, which wrote {self.path}")
        shard = {}
        for name in self._names[rank]:
            entry = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[f"rank{rank}/{name}"])
            shard[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        self._read({f"rank{rank}/{name}": tensor for name, tensor in shard.items()})
        return shard

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """The shards of all ranks in their order, one in memory at a time."""
        return (self.shard(r) for r in range(self.ranks))


class Checkpoints:
    """The checkpoints in a folder that all ranks see. Every method is a collective.

    In the background a save copies the state and returns; call ``wait`` before the process group is left.
    """

    def __init__(self, folder: Path, keep: int = 3, background: bool = False) -> None:
        check_count("keep", keep, 1)
        self.folder, self.keep, self.background = Path(folder), keep, background
        # A group of its own: in the background it speaks at the same time as the training, and of CPU memory.
        self._group = dist.new_group(backend="gloo") if is_distributed() else None
        self._pending: tuple[int, Future[Any]] | None = None
        problem, self._run = self._gathered((_prepared(self.folder) if rank() == 0 else "", uuid.uuid4().hex[:8]))[0]
        check(not problem, problem)

    def _gathered(self, value: T) -> list[T]:
        """That of every rank."""
        values = [value] * world_size()
        if self._group is not None:
            dist.all_gather_object(values, value, self._group)
        return values

    def _part(self, step: int) -> Path:
        return self.folder / f".{_place(self.folder, step).name}.part-{self._run}"

    def save(self, step: int, shared: dict[str, Tensor], mine: dict[str, Tensor], plain: dict[str, Any]) -> bool:
        """Save what is equal on all ranks, this rank's shard, and JSON. False if it could not be written.

        In the background True means that it is being written; a failure is reported by the next ``save`` or ``wait``.
        """
        check_count("step", step, 0)
        try:
            text = json.dumps(plain)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"plain holds what JSON cannot ({error}), wanted numbers, strings, lists and dicts"
            ) from error
        self.wait()
        state: dict[str, Any] = {f"shared/{name}": tensor.detach() for name, tensor in shared.items()}
        state.update({f"rank{rank()}/{name}": tensor.detach() for name, tensor in mine.items()})
        writer = _Writer(self._part(step), step, text, self.keep)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        if self.background:
            saving = async_save(state, storage_writer=writer, planner=planner, process_group=self._group)
            self._pending = step, cast(Future[Any], saving)
            return True
        return self._saved(
            step, lambda: sync_save(state, storage_writer=writer, planner=planner, process_group=self._group)
        )

    def wait(self) -> bool:
        """Finish the save that runs in the background, if there is one. False if it could not be written."""
        if self._pending is None:
            return True
        (step, saving), self._pending = self._pending, None
        return self._saved(step, saving.result)

    def _saved(self, step: int, save: Callable[[], object]) -> bool:
        try:
            save()
        except CheckpointException as failure:  # of one rank or more, told to all
            errors = [error for error, _ in failure.failures.values()]
            if rank() == 0:
                shutil.rmtree(self._part(step), ignore_errors=True)
            for error in errors:
                if not isinstance(error, OSError):
                    raise error from failure
            if rank() == 0:
                steps: list[int] = []
                with suppress(OSError):
                    steps = _steps(self.folder)
                stays = f"the one of step {steps[0]} stays" if steps else "there is none yet"
                why = cast(OSError, errors[0]).strerror or errors[0]
                print(f"could not write the checkpoint of step {step}: {why}; {stays}", file=sys.stderr)
            return False
        return True

    def newest(self) -> Saved | None:
        """The newest checkpoint that is whole; those that are not are reported and left alone."""
        self.wait()
        steps = self._gathered(_steps(self.folder) if rank() == 0 else [])[0]
        for number, step in enumerate(steps):
            path = _place(self.folder, step)
            damage = next(filter(None, self._gathered(_damage(path, rank(), world_size()))), "")
            if not damage:
                return Saved(path, step)
            if rank() == 0:
                earlier = steps[number + 1 : number + 2]
                then = f"going back to that of step {earlier[0]}" if earlier else "and there is no earlier one"
                print(f"the checkpoint {path} is damaged ({damage}), {then}", file=sys.stderr)
        return None
