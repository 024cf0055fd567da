"""Run by test_compiled in processes of their own: Triton compiles there, and here it interprets."""

import multiprocessing
import os
import sys
from collections import Counter
from pathlib import Path

if multiprocessing.parent_process() is not None:
    os.environ["TRITON_INTERPRET"] = "0"
sys.path.append(str(Path(__file__).parents[1] / "bench"))

from fused_cases import Case, differences, run

ARCHITECTURES = (80, 86, 90, 100)


def resources(case: Case) -> list[tuple[str, int, int, int]]:
    """(kernel, architecture, registers, bytes of stack) of every launch of a case, for every architecture."""
    from fastgnl.kernels.ahead import compile_for
    from fastgnl.kernels.triton_step import Launch, launches_go_to

    found = []

    def compile_only(launch: Launch) -> None:
        for arch in ARCHITECTURES:
            code = compile_for(launch, arch)
            found.append((launch.kernel.__name__, arch, code.registers, code.stack))

    with launches_go_to(compile_only):
        run(case, "triton")
    return found


def emulated(case: Case, arch: int, hints: bool, schedule: str) -> list[str]:
    """``differences`` of the compiled kernels from the reference."""
    import emulator

    from fastgnl.kernels.triton_step import launches_go_to

    with launches_go_to(emulator.runner(arch, hints, schedule)):
        return differences(case, "triton")


def traffic(case: Case) -> list[tuple[str, dict[tuple[str, str, str], int]]]:
    """Each launch of a case and its global memory traffic, as ``emulator.counted`` has it."""
    import emulator

    from fastgnl.kernels.triton_step import Launch, launches_go_to

    inner = emulator.runner(90)
    found = []

    def count(launch: Launch) -> None:
        moved: Counter[tuple[str, str, str]] = Counter()
        with emulator.counted(moved):
            inner(launch)
        found.append((launch.kernel.__name__, dict(moved)))

    with launches_go_to(count):
        run(case, "triton")
    return found
