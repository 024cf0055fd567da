"""Runs compiled Triton launches on the CPU, where the ``ptxrun`` emulator is at hand, and counts their memory traffic.

``PTXRUN`` names its folder; else it is looked for beside the project, in ``../shared/tools/ptxrun``.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fastgnl.kernels.triton_step import OPTIONS, Launch

SECTOR = 32
"""Bytes a GPU moves at once."""


def folder() -> Path | None:
    """Where the emulator is, or None."""
    named = os.environ.get("PTXRUN")
    place = Path(named) if named else Path(__file__).resolve().parents[2] / "shared/tools/ptxrun"
    return place if (place / "triton_bridge.py").is_file() else None


def bridge() -> Any:
    """The emulator's module that takes Triton kernels."""
    place = folder()
    if place is None:
        raise FileNotFoundError("ptxrun is not here")
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    import triton_bridge

    return triton_bridge


def runner(arch: int, hints: bool = True, schedule: str = "lockstep") -> Callable[[Launch], Any]:
    """What runs a launch compiled for sm_``arch``, with or without what is known of its arguments; gives its counts."""
    run_triton = bridge().run_triton

    def run(launch: Launch) -> Any:
        return run_triton(
            launch.kernel,
            (launch.programs,),
            launch.args,
            launch.constexprs,
            arch=arch,
            num_warps=launch.num_warps,
            hints=hints,
            schedule=schedule,
            maxnreg=launch.max_registers,
            **OPTIONS,
        )

    return run


@contextmanager
def counted(traffic: Counter[tuple[str, str, str]]) -> Iterator[None]:
    """Adds up global memory traffic: of each (tensor, "load" or "store", "bytes" or "sectors").

    "bytes" are those the threads ask for, "sectors" the bytes of the distinct sectors one instruction of a program
    touches: a number that all its threads read counts once.
    """
    bridge()
    import ptxrun

    inner = ptxrun.Space.locate

    def locate(self: Any, addr: Any, nbytes: int, sel: Any, what: str) -> Any:
        parts = inner(self, addr, nbytes, sel, what)
        if self.label == "global":
            for region, _, offset in parts:
                traffic[region.name, what, "bytes"] += len(offset) * nbytes
                traffic[region.name, what, "sectors"] += len(np.unique(offset // SECTOR)) * SECTOR
        return parts

    ptxrun.Space.locate = locate
    try:
        yield
    finally:
        ptxrun.Space.locate = inner
