"""A run's folder: its checkpoints, its metrics, and where it goes on."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastgnl.checkpoint import Checkpoints, Saved
from fastgnl.distributed import is_distributed, rank, sum_over_ranks, world_size
from fastgnl.engine import Engine
from fastgnl.errors import check, check_count
from fastgnl.loader import Batch
from fastgnl.metrics import Metrics
from fastgnl.momentum import MomentumEncoder
from fastgnl.tally import Epoch, Tally
from fastgnl.terms import Terms

LOG_EVERY = 20
"""Steps between lines of metrics and of the progress bar."""
ASKED_EVERY = 8
"""Steps after which the ranks ask each other whether one was told to stop."""


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """How often a run is kept and told of."""

    every: int | None = None
    """Steps between checkpoints within an epoch."""
    every_epochs: int = 1
    """Epochs between checkpoints; the last one is always kept."""
    keep: int = 3
    """Checkpoints to keep, the newest."""
    background: bool = False
    """Write checkpoints while training goes on, from a copy."""
    log_every: int = LOG_EVERY
    """Steps between lines of metrics and of the progress bar."""
    wandb: str | None = None
    """A Weights & Biases project to report to as well."""

    def __post_init__(self) -> None:
        if self.every is not None:
            check_count("every", self.every, 1)
        check_count("every_epochs", self.every_epochs, 1)
        check_count("keep", self.keep, 1)
        check_count("log_every", self.log_every, 1)


@dataclass(frozen=True)
class RunConfig(KeepOptions):
    """Where a run is kept, and how often."""

    folder: Path
    """For metrics.jsonl and checkpoints/. A run that is found there goes on."""


@dataclass
class Position:
    """How far a run is."""

    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are over."""
    step: int = 0
    """Batches of all epochs that are over."""
    taken: int = 0
    """Steps of the optimizer."""
    between: bool = False
    """Whether gradients are added up for a step that is still to be taken."""
    skipped: int = 0
    """Steps left out because a loss or gradient was not finite."""
    seconds: float = 0.0
    """Of training in this epoch, and of them those waited for data."""
    waited: float = 0.0
    history: list[Epoch] = field(default_factory=list)


@dataclass(frozen=True)
class Parts:
    """All that a run changes as it goes."""

    net: nn.Module
    engine: Engine
    objective: Any
    encoder: MomentumEncoder | None
    ema: MomentumEncoder | None

    def shared(self) -> dict[str, Tensor]:
        """What is the same on every rank, by name."""
        found = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        found |= {f"optimizer.{name}": value for name, value in self.engine.moments().items()}
        found |= {f"objective.{name}": value for name, value in self.objective.shared_state().items()}
        if self.encoder is not None:
            found |= {f"encoder.{name}": value for name, value in self.encoder.state_dict().items()}
        if self.ema is not None:
            found |= {f"ema.{name}": value for name, value in self.ema.net.state_dict().items()}
        return found

    def load(self, saved: Saved, taken: int) -> None:
        into = self.shared()
        saved.load_shared(into)
        moments = {
            name.removeprefix("optimizer."): value for name, value in into.items() if name.startswith("optimizer.")
        }
        self.engine.load_moments(moments, taken)
        self.objective.load_shards(saved.shards())


class Run:
    """The run of a folder; without one nothing is kept."""

    def __init__(self, config: RunConfig | None, parts: Parts, facts: dict[str, Any], epochs: int) -> None:
        self.config, self.parts, self.facts, self.epochs = config, parts, facts, epochs
        self.metrics: Metrics | None = None
        self.checkpoints: Checkpoints | None = None
        if config is not None:
            self.checkpoints = Checkpoints(config.folder / "checkpoints", config.keep, config.background)
            self.metrics = Metrics(config.folder, rank() == 0, config.wandb)
        self.log_every = LOG_EVERY if config is None else config.log_every
        self.rows, self.since, self.skipped = 0, time.perf_counter(), 0
        self.saved = 0
        """The step of the last checkpoint."""

    def resume(self) -> tuple[Position, Tally]:
        """Where the run stands: at its beginning, or where its newest whole checkpoint was made."""
        at, tally = Position(), Tally()
        saved = None if self.checkpoints is None else self.checkpoints.newest()
        if saved is not None:
            self._check_same(saved.plain["facts"])
            at = Position(**saved.plain["position"])
            at.history = [Epoch(**epoch) for epoch in saved.plain["position"]["history"]]
            self.parts.load(saved, at.taken)
            if rank() == 0:
                tally.sums = torch.tensor(saved.plain["tally"], dtype=torch.float64)
        if self.metrics is not None:
            self.metrics.run(ranks=world_size(), epochs=self.epochs, **self.facts)
            if saved is not None:
                self.metrics.event("resumed", step=saved.step, epoch=at.epoch, ranks=saved.ranks)
        self.skipped, self.saved = at.skipped, at.step
        return at, tally

    def _check_same(self, facts: dict[str, Any]) -> None:
        assert self.config is not None
        for name, value in self.facts.items():
            check(
                facts.get(name) == value,
                f"the run in {self.config.folder} has {name} {facts.get(name)}, this one {value}, wanted the same or "
                "another folder",
            )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due within an epoch, after so many steps."""
        if self.config is None or self.config.every is None:
            return False
        # Not only at a multiple: no checkpoint is made between the batches of a step, nor after one that was skipped.
        return step // self.config.every > self.saved // self.config.every

    def due_after(self, epochs: int) -> bool:
        """Whether one is due after so many epochs."""
        return self.config is not None and (epochs == self.epochs or epochs % self.config.every_epochs == 0)

    def save(self, at: Position, tally: Tally) -> bool:
        """Write a checkpoint of everything: whether it was written, or is being written."""
        if self.checkpoints is None:
            return False
        start = time.perf_counter()
        plain = {"facts": self.facts, "position": asdict(at), "tally": sum_over_ranks(tally.own_sums()).tolist()}
        done = self.checkpoints.save(at.step, self.parts.shared(), self.parts.objective.shard_state(), plain)
        if self.metrics is not None:
            self.metrics.event("checkpoint" if done else "checkpoint failed", step=at.step)
        self.saved = at.step
        if at.batch > 0:  # between two batches, whose seconds are being counted
            at.seconds -= time.perf_counter() - start
        return done

    def leave(self, at: Position, tally: Tally) -> NoReturn:
        """Write a checkpoint and end the process, as SIGTERM asked."""
        assert self.checkpoints is not None
        done = self.save(at, tally) and self.checkpoints.wait()
        if rank() == 0:
            told = (
                "a checkpoint is written, the same command goes on from it"
                if done
                else "its checkpoint could not be written"
            )
            print(f"fastgnl: stopped by SIGTERM after step {at.step}; {told}", file=sys.stderr, flush=True)
        if is_distributed():
            dist.barrier()
        sys.exit(0 if done else 1)

    def watch(self, terms: Terms, batch: Batch, at: Position, lr: float) -> dict[str, float] | None:
        """Every few steps, what this rank's rows show, also written to the metrics."""
        self.rows += batch.global_rows
        if at.skipped > self.skipped and self.metrics is not None:
            self.metrics.event("skipped step", step=at.step, epoch=at.epoch)
        self.skipped = at.skipped
        if at.step % self.log_every:
            return None
        now = time.perf_counter()
        loss, (ce, prior, estep) = float(terms.loss.detach()), terms.means[:3].tolist()
        shown = {
            "loss": loss,
            "ce": ce,
            "prior": prior,
            "estep": estep,
            "set_size": float(terms.set_size.float().mean()),
        }
        shown["wait"] = at.waited / at.seconds if at.seconds > 0 else 0.0
        if terms.covered is not None and batch.clean is not None and bool((batch.clean >= 0).all()):
            shown["coverage"] = float(terms.covered.float().mean())
        if self.metrics is not None:
            rate = self.rows / (now - self.since)
            self.metrics.step(step=at.step, epoch=at.epoch, lr=lr, images_per_second=rate, skipped=at.skipped, **shown)
        self.rows, self.since = 0, now
        return shown

    def end_epoch(self, at: Position, tally: Tally, lr: float, scores: dict[str, float]) -> None:
        """Add what an epoch showed to the run's history, and go to the next. The first score, if any, is the test
        accuracy."""
        means = tally.means()
        epoch = Epoch(
            at.epoch,
            at.seconds,
            at.waited / at.seconds,
            means.rows / at.seconds,
            lr,
            at.skipped,
            means.loss,
            means.ce,
            means.prior,
            means.estep,
            means.coverage,
            means.clean_size,
            means.noisy_size,
            next(iter(scores.values()), None),
            scores,
        )
        at.history.append(epoch)
        at.epoch, at.batch, at.seconds, at.waited = at.epoch + 1, 0, 0.0, 0.0
        if self.metrics is not None:
            shown = {name: value for name, value in asdict(epoch).items() if name not in ("number", "scores")}
            self.metrics.epoch(step=at.step, epoch=epoch.number, **shown | scores)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.checkpoints is not None:
            # What is being written in the background was good: it is finished, unless other ranks are gone.
            with nullcontext() if kind is None else suppress(Exception):
                self.checkpoints.wait()
        if self.metrics is not None:
            self.metrics.event("finished" if kind is None else "stopped")
            self.metrics.close()


class Told:
    """Whether this process, or any other rank's, was sent SIGTERM."""

    def __init__(self, listen: bool) -> None:
        self.listen, self.flag, self.asked = listen, False, 0

    def on_signal(self, *_: object) -> None:
        self.flag = True

    def anyone(self, step: int) -> bool:
        """Asked by all ranks after the same step."""
        if not is_distributed():
            return self.flag
        if not self.listen or step // ASKED_EVERY == self.asked // ASKED_EVERY:
            return False
        self.asked = step
        flag = torch.tensor(int(self.flag))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


@contextmanager
def told_to_stop(listen: bool) -> Iterator[Told]:
    """SIGTERM, which asks for the machine back, raises a flag instead of ending the process. A run that keeps nothing
    does not ``listen``: it ends as any process would."""
    told = Told(listen)
    if not listen or threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = signal.signal(signal.SIGTERM, told.on_signal)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)
