"""What a run measures, as it goes: a JSONL file always, TensorBoard where it is installed, wandb when asked for."""

import importlib
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fastgnl.errors import InputError, check

FILE = "metrics.jsonl"
TAIL = 1 << 16
"""Bytes read at a time in search of the last line's end."""


def _plain(value: Any) -> Any:
    """The same in strict JSON: NaN and infinity as null, arrays as lists, what is not known as its text."""
    if hasattr(value, "tolist"):  # NumPy's and torch's numbers and arrays
        value = value.tolist()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value)


def _cut_torn_line(file: int) -> None:
    """Take away what a killed process left after the last whole line."""
    end = size = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - TAIL)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        _cut_torn_line(file)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}, wanted a folder that can be written to") from error
    return file


def _import_tensorboard() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        return None


def _start_wandb(project: str, folder: Path) -> Any:
    """A run of wandb, the same one when training resumes in the same folder."""
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise InputError(f"wandb is {project!r} but wandb is not installed, wanted pip install wandb") from error
    kept = folder / "wandb_id"
    try:
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex)
        run = wandb.init(
            project=project, dir=str(folder), name=folder.resolve().name, id=kept.read_text(), resume="allow"
        )
        # Not wandb's own step: it may not fall, as ours does when a run resumes from an earlier checkpoint.
        run.define_metric("*", step_metric="step")
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"wandb is {project!r} and cannot start ({reason}), wanted a project to log to") from error
    return run


class Metrics:
    """Rank 0 writes a line for each start, a few steps, each epoch and each event; elsewhere this does nothing.

    No failure to write stops training: it is told once on standard error.
    """

    def __init__(self, folder: Path, enabled: bool = True, wandb: str | None = None) -> None:
        self.folder = folder
        self._told: set[str] = set()
        self._file: int | None = None
        self._tensorboard: Any = None
        self._writer: Any = None
        self._wandb: Any = None
        if not enabled:
            return
        self._file = _open(folder / FILE)
        try:
            self._wandb = None if wandb is None else _start_wandb(wandb, folder)
        except InputError:
            self.close()
            raise
        self._guarded("TensorBoard", self._find_tensorboard)

    def run(self, **facts: Any) -> None:
        """The process starts or starts again: its options and what it runs on."""
        if (line := self._line("run", facts)) is not None and self._wandb is not None:
            self._guarded("wandb", lambda: self._wandb.config.update(line, allow_val_change=True))

    def step(self, step: int, epoch: int, **values: Any) -> None:
        """After some steps of training."""
        self._chart("step", {"step": step, "epoch": epoch} | values)

    def epoch(self, step: int, epoch: int, **values: Any) -> None:
        """At an epoch's end."""
        self._chart("epoch", {"step": step, "epoch": epoch} | values)

    def event(self, name: str, /, **values: Any) -> None:
        """Something that happens now and then: "resumed", "checkpoint", "skipped step", "stopped", "finished"."""
        self._line("event", {"event": name} | values)

    def close(self) -> None:
        if self._file is None:
            return
        os.close(self._file)
        self._file = None
        if self._writer is not None:
            self._guarded("TensorBoard", self._writer.close)
        if self._wandb is not None:
            self._guarded("wandb", self._wandb.finish)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _line(self, kind: str, values: dict[str, Any]) -> dict[str, Any] | None:
        """Append a line and give its values back, as JSON has them."""
        check(
            not {"kind", "time"} & values.keys(), "a value is named kind or time, wanted another name: a line has these"
        )
        if self._file is None:
            return None
        plain: dict[str, Any] = _plain(values)
        self._guarded(
            str(self.folder / FILE), lambda: self._append({"kind": kind, "time": round(time.time(), 3)} | plain)
        )
        return plain

    def _append(self, line: dict[str, Any]) -> None:
        """One write, so that a process that is killed leaves whole lines."""
        assert self._file is not None
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        done = os.write(self._file, data)
        if done < len(data):  # the disk is full; the next line must not be glued to this piece
            os.ftruncate(self._file, os.fstat(self._file).st_size - done)
            raise OSError(None, "No space left on device")

    def _chart(self, kind: str, values: dict[str, Any]) -> None:
        plain = self._line(kind, values)
        if plain is None:
            return
        numbers = {
            f"{kind}/{name}": value
            for name, value in plain.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
        }
        if self._tensorboard is not None:
            self._guarded("TensorBoard", lambda: self._summarise(numbers, plain["step"], flush=kind == "epoch"))
        if self._wandb is not None:
            self._guarded("wandb", lambda: self._wandb.log(numbers | {"step": plain["step"]}))

    def _find_tensorboard(self) -> None:
        self._tensorboard = _import_tensorboard()

    def _summarise(self, numbers: dict[str, float], step: int, flush: bool) -> None:
        if self._writer is None:
            # Made only now that its first step is known: later ones of an earlier process are hidden.
            self._writer = self._tensorboard.SummaryWriter(str(self.folder / "tensorboard"), purge_step=step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        if flush:
            self._writer.flush()

    def _guarded(self, what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, it is not worth a training run
            if what not in self._told:
                self._told.add(what)
                reason = (
                    error.strerror
                    if isinstance(error, OSError) and error.strerror
                    else f"{type(error).__name__} {error}"
                )
                print(
                    f"fastgnl: metrics are missing from {what} ({' '.join(reason.split())}), training goes on",
                    file=sys.stderr,
                    flush=True,
                )
