"""Does a run that is killed end as one that was not? kill -9 at random places, torchrun --max-restarts, bit by bit.

python bench/faults.py        # 4 runs of two workers with 5 kills each; torchrun is started by this command
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Chart, show
from torch import Tensor, nn

from fastgnl import GNLObjective, checkpoint, with_transition
from fastgnl.cli import run_worker
from fastgnl.distributed import process_group, rank
from fastgnl.errors import check_count
from fastgnl.loader import Loader
from fastgnl.optimise import TrainConfig
from fastgnl.run import RunConfig
from fastgnl.samples import Samples
from fastgnl.trainer import train

SAMPLES, CLASSES, BATCH, EPOCHS, EVERY, WORKERS = 160, 5, 16, 4, 4, 2
PER_EPOCH = SAMPLES // BATCH
STEPS = PER_EPOCH * EPOCHS
KINDS = ("one worker", "whole group", "checkpoint write", "end_epoch")


@dataclass(frozen=True)
class Config:
    """Kills at random places of small runs, and how many of them were recovered from."""

    runs: int = 4
    kills: int = 5
    """Of each run."""
    seed: int = 0
    """Key of the places."""
    json: Path | None = None
    """Write the rows here too."""
    worker: Path | None = None
    """Set for the processes that this command starts."""

    def __post_init__(self) -> None:
        check_count("runs", self.runs, 1)
        check_count("kills", self.kills, 1)


class Kill(NamedTuple):
    """kill -9 at a step (the end of an epoch is the step it ends with), of one rank or of all."""

    kind: str
    step: int
    rank: int

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}" + ("" if self.kind == "whole group" else f" (rank {self.rank})")


def places(config: Config, run: int) -> list[Kill]:
    """Where a run is to be killed."""
    rng = random.Random(f"{config.seed} {run}")
    ends = range(PER_EPOCH, STEPS + 1, PER_EPOCH)
    steps = {
        "one worker": range(1, STEPS + 1),
        "whole group": range(1, STEPS + 1),
        "checkpoint write": sorted({*range(EVERY, STEPS + 1, EVERY), *ends}),
        "end_epoch": ends,
    }
    everywhere = [Kill(kind, step, rng.randrange(WORKERS)) for kind in KINDS for step in steps[kind]]
    kinds = [rng.choice(KINDS) for _ in range(config.kills)]
    found: list[Kill] = []
    for kind in kinds:
        found.append(rng.choice([kill for kill in everywhere if kill.kind == kind and kill not in found]))
    return found


class Killer:
    """Carries out the kills of a run, each of them once: what was done is remembered in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kills = [Kill(*kill) for kill in json.loads((folder / "kills.json").read_text())]
        write = checkpoint._Writer.write_data

        def deadly(writer: Any, *given: Any) -> Any:
            done = write(writer, *given)
            self.reached("checkpoint write", writer.step)
            return done

        checkpoint._Writer.write_data = deadly  # type: ignore[method-assign]

    def reached(self, kind: str, step: int) -> None:
        for number, kill in enumerate(self.kills):
            mark = self.folder / f"killed-{number}-{rank()}"
            mine = kind == "whole group" or kill.rank == rank()
            if (kill.kind, kill.step) == (kind, step) and mine and not mark.exists():
                mark.touch()
                while kind == "whole group" and len(list(self.folder.glob(f"killed-{number}-*"))) < WORKERS:
                    time.sleep(0.01)  # so that none is spared because torchrun was quick to stop it
                os.kill(os.getpid(), signal.SIGKILL)


def work(folder: Path) -> None:
    """Train, die where it is wanted, and note what was learned."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    samples = Samples(torch.randn(SAMPLES, 8, generator=g), torch.randint(CLASSES, (SAMPLES,), generator=g))
    with process_group():
        killer = Killer(folder)
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        net = with_transition(backbone, 16, CLASSES)
        loader = Loader(samples, BATCH)
        objective = GNLObjective(
            SAMPLES, CLASSES, ids=loader.shard(), denominator="bank", bank=48, momentum=0.9, warmup_epochs=2
        )
        end_epoch = objective.end_epoch

        def deadly_end(losses: Tensor | None = None) -> None:
            end_epoch(losses)
            killer.reached("end_epoch", int(objective.step))

        def on_batch(*_: object) -> None:
            for kind in ("one worker", "whole group"):
                killer.reached(kind, int(objective.step))

        objective.end_epoch = deadly_end  # type: ignore[method-assign]
        run = RunConfig(folder / "run", every=EVERY)
        train(net, objective, loader, TrainConfig(epochs=EPOCHS), on_batch=on_batch, run=run)
        torch.save({**net.state_dict(), **objective.state_dict()}, folder / f"learned-{rank()}.pt")


def learned(folder: Path, kills: list[Kill]) -> list[dict[str, Tensor]] | None:
    """Weights and label state of each rank after a run with so many kills and as many restarts; None if it failed."""
    folder.mkdir()
    (folder / "kills.json").write_text(json.dumps(kills))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    command = [*launch, f"--max-restarts={len(kills)}", __file__, "--worker", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        if subprocess.run([sys.executable, *command], env=env, stderr=log).returncode:
            return None
    return [torch.load(folder / f"learned-{number}.pt", weights_only=True) for number in range(WORKERS)]


def equal(found: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> bool:
    """Bit by bit."""
    return all(
        torch.equal(value.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for a, b in zip(found, wanted, strict=True)
        for name, value in a.items()
    )


def main(config: Config) -> None:
    if config.worker is not None:
        work(config.worker)
        return
    rows = [{"kill": kind, "kills": 0, "recovered": 0} for kind in KINDS]
    with tempfile.TemporaryDirectory() as temporary:
        print("a run that is not killed ...", file=sys.stderr, flush=True)
        wanted = learned(Path(temporary) / "whole", [])
        if wanted is None:
            sys.exit((Path(temporary) / "whole" / "log").read_text())
        for run in range(config.runs):
            kills, folder = places(config, run), Path(temporary) / str(run)
            print(f"run {run + 1} of {config.runs}: {', '.join(map(str, kills))} ...", file=sys.stderr, flush=True)
            found = learned(folder, kills)
            good = found is not None and equal(found, wanted)
            print(f"  {'ended bit-equal' if good else 'NOT RECOVERED'}", file=sys.stderr, flush=True)
            if found is None:
                print((folder / "log").read_text(), file=sys.stderr)
            for number, kill in enumerate(kills):
                row = rows[KINDS.index(kill.kind)]
                row["kills"] += 1
                # One that never came is not one that was recovered from.
                row["recovered"] += good and any(folder.glob(f"killed-{number}-*"))
    total = {"kill": "all", **{name: sum(row[name] for row in rows) for name in ("kills", "recovered")}}
    failed = total["recovered"] != total["kills"]
    # What failed must not take the place of rows that were kept before.
    file = None if failed else config.json
    show([*rows, total], file, Chart("Kills, and those recovered from", ("kills", "recovered"), ("kill",)))
    sys.exit(failed)


if __name__ == "__main__":
    run_worker(Config, main)
