"""The Triton kernels as compiled for GPUs that need not be here: resources, memory traffic, predicted times.

python bench/kernel_report.py
python bench/kernel_report.py --shapes 128 10 1024 1000 --json report.json

Registers, stack and shared memory are read from the machine code. Bytes and instructions are counted by running the
compiled code of a few rows in the ``ptxrun`` emulator, where it is at hand, and scaled to the batch. What grows with
the programs and not with the rows (partial sums) is added for the programs of the whole batch; reads of vectors of C
numbers, which stay in the caches, are left out. The minimum is to read z, t and the rows of M once, and to write
those of M, dz and dt once: 24 bytes an element.

Predicted time: a launch costs ``LAUNCH`` seconds, and then takes what its bytes take at ``REACHED`` of the GPU's
bandwidth, or its instructions at the rate they can be issued, whichever is more. No latency, no occupancy: a bound.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported: its interpreter compiles nothing

import emulator
import torch
from baselines import cap_of
from common import Chart, show
from tqdm import tqdm

from fastgnl import GNLObjective
from fastgnl.cli import run_worker
from fastgnl.kernels.ahead import Compiled, compile_for
from fastgnl.kernels.triton_step import Launch, launches_go_to, programs_of, tile_of

ARCHITECTURES = (80, 86, 90, 100)
Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((128, 10), (128, 100), (1024, 1000), (4096, 1000), (1024, 21841))
MINIMUM = 24
"""Bytes an element."""
ARRAYS = ("z", "t", "M", "grad_z", "grad_t", "bits")
KERNELS = ("column_sums_kernel", "rows_kernel", "finish_kernel")
LAUNCH = 3e-6
REACHED = 0.85


class Processor(NamedTuple):
    """Of a streaming multiprocessor."""

    threads: int
    shared: int
    """Bytes."""


PROCESSORS = {
    80: Processor(2048, 164 << 10),
    86: Processor(1536, 100 << 10),
    90: Processor(2048, 228 << 10),
    100: Processor(2048, 228 << 10),
}


class Gpu(NamedTuple):
    arch: int
    processors: int
    clock: float
    bandwidth: float
    """Bytes a second."""


GPUS = {"A100": Gpu(80, 108, 1.41e9, 2.04e12), "H100": Gpu(90, 132, 1.83e9, 3.35e12)}


@dataclass(frozen=True)
class Config:
    """Registers, spills, shared memory, occupancy, traffic and predicted times of the Triton kernels."""

    shapes: tuple[Shape, ...] = SHAPES
    """Rows and classes of a batch."""
    json: Path | None = None
    """Write the second table here too."""


def occupancy(code: Compiled, arch: int) -> float:
    """The share of a processor's threads that can run at once, bounded by registers, shared memory and threads."""
    processor = PROCESSORS[arch]
    of_a_warp = -(-code.registers * 32 // 256) * 256
    programs = min(
        65536 // (of_a_warp * code.threads // 32),
        processor.shared // (code.shared + 1024),
        processor.threads // code.threads,
        32,
    )
    return programs * code.threads / processor.threads


def step(shape: Shape, given: bool) -> None:
    """One training step of a shape, float32; ``given``: D is known before it."""
    B, C = shape
    g = torch.Generator().manual_seed(0)
    z, t = (torch.randn(B, C, generator=g, requires_grad=True) for _ in range(2))
    objective = GNLObjective(B, C, backend="triton", k_max=cap_of(C), warmup_sets="drawn")
    D = torch.rand(C, generator=g) + 0.1 if given else None
    objective(z, t, torch.arange(B) % C, torch.arange(B), denominator=D)


def compiled(shape: Shape, given: bool) -> list[tuple[str, int, Compiled]]:
    """(kernel, architecture, code) of every launch of a step."""
    found = []

    def compile_only(launch: Launch) -> None:
        for arch in ARCHITECTURES:
            found.append((launch.kernel.__name__, arch, compile_for(launch, arch)))

    with launches_go_to(compile_only):
        step(shape, given)
    return found


class Counts(NamedTuple):
    """Of one launch of a whole batch."""

    kernel: str
    bytes: float
    instructions: float
    """Of warps."""


def counted(shape: Shape, given: bool, arch: int) -> list[Counts]:
    """What each launch of a step moves and issues, from a run of its first rows."""
    B, C = shape
    tile = tile_of(B, C)
    rows = min(B, 2 if tile.STREAMED else max(8, 2 * tile.R))
    inner = emulator.runner(arch)
    found = []

    def count(launch: Launch) -> None:
        moved: Counter[tuple[str, str, str]] = Counter()
        with emulator.counted(moved):
            stats = inner(launch)
        name = launch.kernel.__name__
        bytes_ = sum(n for (tensor, _, unit), n in moved.items() if unit == "bytes" and tensor[8:-1] in ARRAYS)
        total = bytes_ * B / rows
        if not given and name != "finish_kernel":
            total += 2 * 4 * C * programs_of(B, tile)  # partial sums, written and read
        found.append(Counts(name, total, stats.total_instructions * B / rows))

    with launches_go_to(count):
        step((rows, C), given)
    return found


def seconds(counts: list[Counts], gpu: Gpu) -> float:
    """The predicted time of a step."""
    rate = 4 * gpu.processors * gpu.clock
    return sum(LAUNCH + max(c.bytes / (REACHED * gpu.bandwidth), c.instructions / rate) for c in counts)


def resource_rows(shape: Shape, given: bool) -> list[dict[str, Any]]:
    return [
        {
            "shape": f"{shape[0]} x {shape[1]}",
            "D": "given" if given else "live",
            "kernel": kernel.removesuffix("_kernel"),
            "sm": arch,
            "registers": code.registers,
            "stack": code.stack,
            "shared": code.shared,
            "threads": code.threads,
            "occupancy": f"{occupancy(code, arch):.0%}",
        }
        for kernel, arch, code in compiled(shape, given)
    ]


def traffic_row(shape: Shape, given: bool) -> dict[str, Any]:
    B, C = shape
    row: dict[str, Any] = {"B": B, "C": C, "D": "given" if given else "live"}
    for name, gpu in GPUS.items():
        counts = counted(shape, given, gpu.arch)
        moved = sum(c.bytes for c in counts) / (B * C)
        row["launches"] = len(counts)
        row["bytes/element"] = round(moved, 1)
        row["of minimum"] = round(moved / MINIMUM, 2)
        row[f"{name} us"] = round(1e6 * seconds(counts, gpu), 1)
    return row


def main(config: Config) -> None:
    variants = [(shape, given) for shape in config.shapes for given in (False, True)]
    resources = []
    for shape, given in tqdm(variants, "compiling", unit="step"):
        resources += resource_rows(shape, given)
    if emulator.folder() is None:
        show(resources, None)
        print("ptxrun is not here: no traffic is counted and no time predicted. Set PTXRUN to its folder.")
        return
    rows = []
    for shape, given in tqdm(variants, "emulating", unit="step"):
        rows.append(traffic_row(shape, given))
    chart = Chart("Predicted time of a step, microseconds", ("A100 us", "H100 us"), ("B", "C", "D"), log=True)
    show(rows, config.json, chart, {"Resources": resources})


if __name__ == "__main__":
    run_worker(Config, main)
