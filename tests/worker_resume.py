"""Run by torchrun in test_resume: small runs that are killed on purpose, each time only once."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastgnl import GNLObjective, checkpoint, with_transition
from fastgnl.distributed import process_group, rank, world_size
from fastgnl.loader import Loader
from fastgnl.optimise import TrainConfig
from fastgnl.run import RunConfig
from fastgnl.samples import Samples
from fastgnl.tally import Epoch
from fastgnl.trainer import train

N, F, C, BATCH, EPOCHS = 96, 6, 4, 16, 4
STEPS = N // BATCH * EPOCHS
CASES: dict[str, dict[str, Any]] = {
    "bank": {"denominator": "bank", "bank": 40, "dropout": 0.3},
    "dataset": {"denominator": "dataset", "dropout": 0.3, "optimizer": "adamw", "lr": 0.01, "loss_source": "eval"},
    "top_k": {"denominator": "dataset", "top_k": 2, "dropout": 0.3, "schedule": "cosine", "lr_warmup": 1},
    "background": {"denominator": "window", "dropout": 0.3, "background": True, "accumulate": 2},
    "zero": {"engine": "deepspeed", "zero": 2, "dropout": 0.3, "optimizer": "adamw", "lr": 0.01, "ema": 0.9},
    "plain bank": {"denominator": "bank", "bank": 40},
    "plain dataset": {"denominator": "dataset"},
    "plain top_k": {"top_k": 2},
}
TRAIN = ("engine", "zero", "optimizer", "lr", "accumulate", "schedule", "lr_warmup", "precision", "epochs", "ema")
RUN = ("background", "every", "keep")


def make(**options: Any) -> tuple[nn.Module, GNLObjective, Loader]:
    g = torch.Generator().manual_seed(0)
    samples = Samples(torch.randn(N, F, generator=g), torch.randint(C, (N,), generator=g))
    torch.manual_seed(1)
    layers = [nn.Linear(F, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(options.pop("dropout", 0.0))]
    net = with_transition(nn.Sequential(*layers), 12, C, seed=1)
    loader = Loader(samples, BATCH, seed=2)
    return net, GNLObjective(N, C, warmup_epochs=2, seed=3, momentum=0.9, ids=loader.shard(), **options), loader


def run_case(
    folder: Path,
    on_step: Callable[[int], None] = lambda step: None,
    on_epoch: Callable[[int], None] = lambda epoch: None,
    **options: Any,
) -> list[Epoch]:
    """The run of a folder; the two are told of each batch and of the epochs whose w was refitted."""
    how = {"epochs": EPOCHS, "lr": 0.05} | {name: options.pop(name) for name in TRAIN if name in options}
    kept = {"every": 4, "keep": 99} | {name: options.pop(name) for name in RUN if name in options}
    net, objective, loader = make(**options)
    real = objective.end_epoch

    def end_epoch(losses: torch.Tensor | None = None) -> None:
        real(losses)
        on_epoch(int(objective.epoch))

    objective.end_epoch = end_epoch  # type: ignore[method-assign]
    return train(
        net,
        objective,
        loader,
        TrainConfig(**how),
        loader.source,
        on_batch=lambda *_: on_step(int(objective.step)),
        run=RunConfig(folder, **kept),
    )


@dataclass(frozen=True)
class Kill:
    """kill -9 at one place of one run."""

    kind: str
    """"worker" or "group" after a step, "save" while a rank writes, "rename" before a checkpoint gets its name,
    "end_epoch" after w was refitted."""
    at: int
    """The step, or the epoch."""
    rank: int = 0

    def now(self, kind: str, at: int, folder: Path) -> None:
        """Die if this is the place, for the first time."""
        if (kind, at) != (self.kind, self.at) or (kind != "group" and rank() != self.rank):
            return
        mark = folder / f"{self.kind}-{self.at}-{rank()}"
        if not mark.exists():
            mark.touch()
            while kind == "group" and len(list(folder.glob(f"{kind}-{at}-*"))) < world_size():
                time.sleep(0.01)  # so that none is spared because torchrun was quick to stop it
            os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(kill: Kill, folder: Path) -> None:
    """Make the checkpoints of this process deadly."""
    write, replace = checkpoint._Writer.write_data, checkpoint._Writer._replace

    def deadly_write(self: Any, *given: Any) -> Any:
        done = write(self, *given)
        kill.now("save", self.step, folder)
        return done

    def deadly_replace(self: Any) -> None:
        kill.now("rename", self.step, folder)
        replace(self)

    checkpoint._Writer.write_data, checkpoint._Writer._replace = deadly_write, deadly_replace


def until_told() -> None:
    """Wait for SIGTERM to arrive."""
    while not signal.getsignal(signal.SIGTERM).__self__.flag:  # type: ignore[union-attr]
        time.sleep(0.01)


def main(folder: Path, plan: dict[str, Any]) -> None:
    kills = {case: Kill(**kill) for case, kill in plan.get("kills", {}).items()}
    for case in plan["cases"]:
        place = folder / case
        place.mkdir(parents=True, exist_ok=True)
        kill = kills.get(case, Kill("never", 0))
        killed_while_saving(kill, place)

        def on_step(step: int, kill: Kill = kill, place: Path = place) -> None:
            kill.now("worker", step, place)
            kill.now("group", step, place)
            if step == plan.get("wait at"):
                (place / f"waits-{rank()}").touch()
                until_told()

        history = run_case(
            place, on_step, lambda epoch, kill=kill, place=place: kill.now("end_epoch", epoch, place), **CASES[case]
        )
        if rank() == 0:
            (place / "history.json").write_text(json.dumps([asdict(epoch) for epoch in history]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group():
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
