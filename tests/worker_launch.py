"""Run by torchrun in test_launch: the demo of every launcher, one after another, in one group of workers."""

import sys
from pathlib import Path

from launcher_files import EXPERIMENTS

from fastgnl.distributed import process_group, rank
from fastgnl.launch import check_new, execute, parse

SHORT = ["--train.epochs", "3", "--gnl.warmup-epochs", "1", "--keep.every", "4", "--keep.log-every", "1"]


def main(engine: str, out: str) -> None:
    with process_group():
        for name, cls in EXPERIMENTS.items():
            args = ["--data", "demo", "--out", str(Path(out) / name), "--train.engine", engine, *SHORT]
            if name != "news":
                args += ["--batches.reader", "builtin"]
            experiment = parse(cls, args)
            check_new(experiment)
            execute(experiment)
            if rank() == 0:
                print(f"done: {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
