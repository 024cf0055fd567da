"""CE against GNL on the embedded digits: ``torchrun --standalone --nproc-per-node 2 launchers/digits.py``."""

from fastgnl.cli import run_worker
from fastgnl.demo import DemoConfig, main

if __name__ == "__main__":
    run_worker(DemoConfig, main)
