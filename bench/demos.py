"""Does every launcher's demo run to its end, with either engine, and after a kill? Two workers, FFCV files.

python bench/demos.py        # each demo with DDP and with DeepSpeed, and once killed (-9) in the middle and resumed
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Chart, show
from safetensors.torch import load_file
from tqdm import tqdm

from fastgnl.cli import run_worker
from fastgnl.errors import check

LAUNCHERS = Path(__file__).parents[1] / "launchers"
NAMES = ("cifar", "cifar_n", "red_mini_imagenet", "animal10n", "clothing1m", "webvision", "news")
ENGINES = ("ddp", "deepspeed")


@dataclass(frozen=True)
class Config:
    """The demos of the launchers, whole and killed."""

    launchers: tuple[str, ...] = NAMES
    engines: tuple[str, ...] = ENGINES
    options: str = "--train.epochs 6 --gnl.warmup-epochs 2"
    """Of every run; empty for the demos' own length."""
    json: Path | None = None
    """Write the rows here too."""

    def __post_init__(self) -> None:
        check(len(self.engines) > 0, f"engines is empty, wanted some of {', '.join(ENGINES)}")
        for name in self.launchers:
            check(name in NAMES, f"launchers holds {name!r}, wanted some of {', '.join(NAMES)}")
        for engine in self.engines:
            check(engine in ENGINES, f"engines holds {engine!r}, wanted some of {', '.join(ENGINES)}")


def start(name: str, *args: object, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*command, str(LAUNCHERS / f"{name}.py"), *map(str, args)]
    with open(log, "ab") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env)


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    check(process.wait() == 0, f"a run failed, wanted it to end well: {log.read_text()[-2000:]}")


def steps(run: Path) -> int:
    """How far a run is."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)


def kill_amid(process: subprocess.Popen[bytes], run: Path, after: int, log: Path) -> None:
    """kill -9 of the workers and torchrun once so many steps are over."""
    while steps(run) < after:
        check(process.poll() is None, f"a run ended before it was killed: {log.read_text()[-2000:]}")
        time.sleep(0.05)
    for pid in subprocess.run(["pgrep", "-f", str(run)], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    process.wait()


def measured(name: str, config: Config, folder: Path) -> list[dict[str, Any]]:
    """A launcher's demo with each engine, the last of them also killed and resumed."""
    rows: list[dict[str, Any]] = []
    for engine in config.engines:
        run, log = folder / f"{name}-{engine}", folder / f"{name}-{engine}.log"
        options = ["--data", "demo", "--train.engine", engine, "--keep.every", 4, "--keep.log-every", 1]
        options += config.options.split()
        begin = time.perf_counter()
        finish(start(name, *options, "--out", run, log=log), log)
        seconds = time.perf_counter() - begin
        found = json.loads((run / "results.json").read_text())
        row = {"launcher": name, "engine": engine, "test top-1": f"{found['last']['test top1']:.1%}"}
        rows.append(row | {"seconds": round(seconds, 1), "killed, resumed": "", "same bits": ""})
    killed = folder / f"{name}-killed"
    begin = time.perf_counter()
    kill_amid(start(name, *options, "--out", killed, log=log), killed, steps(run) // 2, log)
    finish(start(name, "--resume", killed, log=log), log)
    states = [load_file(each / "model.safetensors") for each in (run, killed)]
    same = states[0].keys() == states[1].keys() and all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    rows[-1] |= {"killed, resumed": round(time.perf_counter() - begin, 1), "same bits": "yes" if same else "NO"}
    return rows


def main(config: Config) -> None:
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in tqdm(config.launchers, unit="launcher"):
            rows += measured(name, config, Path(folder))
    show(rows, config.json, Chart("A demo to its end, seconds", ("seconds", "killed, resumed"), ("launcher", "engine")))
    print(f"all of them: {(time.perf_counter() - begin) / 60:.1f} minutes")


if __name__ == "__main__":
    run_worker(Config, main)
