"""A training step with the fused kernels against PyTorch's: draws, table update, loss and backward, float32.

python bench/kernels.py
python bench/kernels.py --shapes 128 10 1024 1000 --no-threads --json kernels.json

One CPU thread, side by side in one process: rounds of the fused step and of a baseline take turns, each of 20 ms or
more, and the medians are divided. The baselines are those of ``baselines.py``; the floor is the time of plain copies
of the same bytes (read z, t and the rows of M; write these, dz and dt). Compile time is not counted. "eager" is the
faster of the two eager steps, gradients in closed form or by autograd; the other is shown under its name.

The heap keeps what is freed (``keep_heap``): else every array of some MB costs the page faults of fresh memory, in
eager PyTorch many times a step, and the ratios would measure the kernel's memory management (``--no-keep-heap`` does).
"""

import ctypes
import gc
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import baselines
import torch
from common import Chart, show
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from fastgnl import GNLObjective
from fastgnl.cli import run_worker
from fastgnl.errors import check_count
from fastgnl.files import check_writable

CPU = "cpu"
"""The backend timed on the CPU."""
Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((128, 10), (128, 100), (1024, 1000), (256, 21841))
MEMORY_SHAPE: Shape = (1024, 1000)
MEMORY_BAR = 3.0
LARGE = 10_000
"""Beyond so many classes the loop and the compiled step are left out."""
ROUND_SECONDS = 0.02
BARS: dict[str, dict[Shape, float]] = {
    "eager": {(128, 10): 5, (128, 100): 8, (1024, 1000): 15, (256, 21841): 15},
    "loop": {(128, 10): 100, (128, 100): 80, (1024, 1000): 60},
    "compile": {(1024, 1000): 4},
}
"""The ratios wanted."""


@dataclass(frozen=True)
class Config:
    """The fused step against eager, compiled and looped PyTorch and a floor of plain copies, in one process."""

    shapes: tuple[Shape, ...] = SHAPES
    """Rows and classes of a batch."""
    rounds: int = 9
    """Timings of each, of 20 ms or more; the median counts."""
    threads: bool = True
    """Also the fused step on all cores against one."""
    memory: bool = True
    """Also the memory that a step takes."""
    keep_heap: bool = True
    """Keep freed memory in the process."""
    json: Path | None = None
    """Write the ratios here too."""

    def __post_init__(self) -> None:
        check_count("rounds", self.rounds, 7)
        for B, C in self.shapes:
            check_count("shapes", B, 1)
            check_count("shapes", C, 2)


class Row(NamedTuple):
    """One comparison. Times in seconds; ratio = baseline / fused, so of the floor it is the share of it reached."""

    shape: Shape
    backend: str
    against: str
    fused: float
    baseline: float
    low: float
    high: float
    """Quartiles of the ratio over pairs of neighbouring rounds."""

    @property
    def ratio(self) -> float:
        return self.baseline / self.fused


Work = Callable[[], object]
Clock = Callable[[Work, int], float]


def keep_heap() -> None:
    """Tell glibc to hand no freed memory back; other C libraries are left as they are."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most it takes
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


# The work that is timed.


class Batch(NamedTuple):
    z: Tensor
    t: Tensor
    labels: Tensor
    index: Tensor


def make_batch(B: int, C: int, device: str) -> Batch:
    """Random logits, labels and B of the 4 B samples."""
    g = torch.Generator().manual_seed(0)
    z, t = (torch.randn(B, C, generator=g).to(device).requires_grad_() for _ in range(2))
    labels, index = torch.randint(0, C, (B,), generator=g), torch.randperm(4 * B, generator=g)[:B]
    return Batch(z, t, labels.to(device), index.to(device))


def fused_step(batch: Batch, backend: str) -> Work:
    """The user's own call."""
    B, C = batch.z.shape
    options = {"k_max": baselines.cap_of(C), "warmup_sets": "drawn", "seed": 0}
    objective = GNLObjective(4 * B, C, backend=backend, **options).to(batch.z.device)

    def step() -> None:
        batch.z.grad = batch.t.grad = None
        objective(batch.z, batch.t, batch.labels, batch.index).loss.backward()

    return step


def baseline_step(batch: Batch, baseline: baselines.Step) -> Work:
    B, C = batch.z.shape
    device = batch.z.device
    # The default device is set once, outside what is timed: the baselines name none.
    torch.set_default_device(device if device.type != "cpu" else None)
    state = baselines.fresh_state(4 * B, C)

    def step() -> None:
        batch.z.grad = batch.t.grad = None
        baseline(*batch, state)

    return step


def floor_step(batch: Batch) -> Work:
    """Three reads and three writes of a B by C array."""
    sources = [batch.z.detach(), batch.t.detach(), torch.rand_like(batch.z)]
    targets = [torch.empty_like(source) for source in sources]

    def step() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return step


def rivals(batch: Batch) -> dict[str, Work]:
    steps: dict[str, baselines.Step] = {"closed form": baselines.eager, "autograd": baselines.autograd}
    if batch.z.shape[1] <= LARGE:
        steps |= {"compile": baselines.compiled, "loop": baselines.loop}
    return {name: baseline_step(batch, step) for name, step in steps.items()} | {"floor": floor_step(batch)}


# Timing.


def cpu_clock(work: Work, times: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def cuda_clock(work: Work, times: int) -> float:
    """Seconds of one call, by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def calls_a_round(work: Work, clock: Clock) -> int:
    """Warm up (and compile), then the calls that fill a round."""
    clock(work, 3)
    seconds = min(clock(work, 1) for _ in range(3))
    return max(1, int(1.2 * ROUND_SECONDS / seconds) + 1)


def take_turns(works: list[Work], rounds: int, clock: Clock) -> list[list[float]]:
    """Seconds a call of each, round by round."""
    calls = [calls_a_round(work, clock) for work in works]
    gc.collect()
    gc.disable()  # a collection would fall on one of them
    try:
        turns = [[clock(work, n) for work, n in zip(works, calls, strict=True)] for _ in range(rounds)]
    finally:
        gc.enable()
    return [list(times) for times in zip(*turns, strict=True)]


def compare(shape: Shape, backend: str, rounds: int) -> list[Row]:
    """The fused step of a shape against each baseline."""
    device, clock = ("cuda", cuda_clock) if backend == "triton" else ("cpu", cpu_clock)
    batch = make_batch(*shape, device)
    fused = fused_step(batch, backend)
    rows = []
    for against, work in tqdm(rivals(batch).items(), f"{shape} {backend}", unit="rival"):
        ours, theirs = take_turns([fused, work], rounds, clock)
        pairs = [b / a for a, b in zip(ours, theirs, strict=True)]
        low, _, high = statistics.quantiles(pairs, n=4)
        rows.append(Row(shape, backend, against, statistics.median(ours), statistics.median(theirs), low, high))
    torch.set_default_device(None)
    fastest = min((row for row in rows if row.against in ("closed form", "autograd")), key=lambda row: row.baseline)
    return [row._replace(against="eager") if row is fastest else row for row in rows]


def thread_scaling(shape: Shape, rounds: int) -> tuple[float, float]:
    """Seconds of the fused step on one thread and on all cores, in turns."""
    fused = fused_step(make_batch(*shape, "cpu"), CPU)

    def on(threads: int) -> Clock:
        def clock(work: Work, times: int) -> float:
            torch.set_num_threads(threads)
            work()  # the pool of threads settles
            return cpu_clock(work, times)

        return clock

    clocks = [on(1), on(os.cpu_count() or 1)]
    calls = [calls_a_round(fused, clock) for clock in clocks]
    turns = [[clock(fused, n) for clock, n in zip(clocks, calls, strict=True)] for _ in range(rounds)]
    torch.set_num_threads(1)
    one, all_cores = (statistics.median(times) for times in zip(*turns, strict=True))
    return one, all_cores


# Memory.


def warm_up(batch: Batch, step: Work) -> None:
    """A step, its gradients dropped: the next one must not find them to free."""
    step()
    batch.z.grad = batch.t.grad = None
    gc.collect()


def tensor_peak(batch: Batch, step: Work) -> int:
    """Bytes of tensors at the peak of a step above those before it, by the profiler's record of the allocator.

    Not seen: what the native kernel allocates itself, at most a row a thread and the partial sums of its chunks.
    """
    warm_up(batch, step)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    # record.events() folds allocations into operators; the running sum needs each of them in order of time.
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    running = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(running, default=0)


def status_bytes(field: str) -> int:
    """A field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def resident_peak(batch: Batch, step: Work) -> int | None:
    """Bytes the process grows by in a step, native scratch included; None where the system does not tell.

    The heap is handed back before, so that what a step takes from it shows.
    """
    if platform.libc_ver()[0] != "glibc" or not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    warm_up(batch, step)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = status_bytes("VmRSS")
    step()
    return status_bytes("VmHWM") - before


def memory_rows(shape: Shape) -> list[dict[str, Any]]:
    """Peak extra memory of a step, gradients included: fused, eager, their ratio, the bar."""
    batch = make_batch(*shape, "cpu")
    steps = {
        "fused": fused_step(batch, CPU),
        "eager": baseline_step(batch, baselines.eager),
        "autograd": baseline_step(batch, baselines.autograd),
    }
    rows = []
    for how, measure in (("tensors", tensor_peak), ("resident", resident_peak)):
        peaks = {name: measure(batch, step) for name, step in steps.items()}
        for against in ("eager", "autograd"):
            ours, theirs = peaks["fused"] or 0, peaks[against] or 0
            measured = min(ours, theirs) > 0  # else there is no ratio
            megabytes = (
                {"fused MB": round(ours / 2**20, 2), "baseline MB": round(theirs / 2**20, 2)} if measured else {}
            )
            bar = MEMORY_BAR if against == "eager" else None
            ratio = judged(theirs / ours, bar) if measured else {}
            rows.append({"peak extra memory": how, "against": against, **megabytes, **ratio})
    return rows


# What is shown.


def judged(ratio: float, bar: float | None) -> dict[str, Any]:
    met = "" if bar is None else ("yes" if ratio >= bar else "NO")
    return {"ratio": round(ratio, 3), "bar": "" if bar is None else bar, "met": met}


def shown(row: Row) -> dict[str, Any]:
    B, C = row.shape
    return {
        "B": B,
        "C": C,
        "backend": row.backend,
        "against": row.against,
        "fused ms": round(1e3 * row.fused, 3),
        "baseline ms": round(1e3 * row.baseline, 3),
        **judged(row.ratio, BARS.get(row.against, {}).get(row.shape)),
        "quartiles": f"{row.low:.2f} to {row.high:.2f}",
    }


def thread_rows(shapes: tuple[Shape, ...], rounds: int) -> list[dict[str, Any]]:
    cores = os.cpu_count() or 1
    rows = []
    for B, C in tqdm(shapes, f"{cores} threads", unit="shape"):
        one, all_cores = thread_scaling((B, C), rounds)
        row = {"fused step": f"{B} x {C}", "1 thread ms": round(1e3 * one, 3)}
        rows.append(row | {f"{cores} threads ms": round(1e3 * all_cores, 3), "times faster": round(one / all_cores, 2)})
    return rows


def main(config: Config) -> None:
    if config.json is not None:
        check_writable(config.json)  # before minutes of timing
    if config.keep_heap:
        keep_heap()
    torch.set_num_threads(1)
    backends = [CPU, "triton"] if torch.cuda.is_available() else [CPU]
    rows = [row for backend in backends for shape in config.shapes for row in compare(shape, backend, config.rounds)]
    more = {}
    if config.threads:
        more["On all cores"] = thread_rows(config.shapes, config.rounds)
    if config.memory:
        more[f"Memory of a step of {MEMORY_SHAPE}, its gradients included"] = memory_rows(MEMORY_SHAPE)
    title = "Time of a step, fused = 1; of the floor, the share of it reached"
    show([shown(row) for row in rows], config.json, Chart(title, "ratio", ("B", "C"), "against", log=True), more)
    print(
        "ratio: baseline time / fused time; of the floor, the share of it reached. eager: the faster of the two ways."
    )


if __name__ == "__main__":
    run_worker(Config, main)
