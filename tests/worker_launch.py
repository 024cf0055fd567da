"""Run by torchrun in test_launch: demos of the launchers, one after another, in one group of workers."""

import sys
from pathlib import Path

from launcher_files import EXPERIMENTS

from fastgnl.distributed import process_group, rank
from fastgnl.launch import check_new, execute, parse

SHORT = ["--train.epochs", "3", "--gnl.warmup-epochs", "1", "--keep.every", "4", "--keep.log-every", "1"]

RUN = {"ddp": tuple(EXPERIMENTS), "deepspeed": ("webvision", "news")}
"""Launchers by engine."""


def main(engine: str, out: str) -> None:
    with process_group():
        for name in RUN[engine]:
            args = ["--data", "demo", "--out", str(Path(out) / name), "--train.engine", engine, *SHORT]
            if name != "news":
                args += ["--batches.reader", "builtin"]
            experiment = parse(EXPERIMENTS[name], args)
            check_new(experiment)
            execute(experiment)
            if rank() == 0:
                print(f"done: {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
