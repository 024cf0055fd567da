"""The phases of the fused step as launches of the Triton kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastgnl.kernels import backends
from fastgnl.kernels.backends import RESIDENT
from fastgnl.kernels.step import Step
from fastgnl.kernels.triton_kernels import column_sums_kernel, finish_kernel, rows_kernel, scale_kernel

STREAMED_BLOCK = 2048
MAX_REGISTERS = 255
"""Left alone, ptxas gives up a few registers to the stack for one more program on a processor."""
GROUP = 16
"""Partial sums a program adds in one go."""


class Tile(NamedTuple):
    """How a [B, C] step is cut: R rows of BLOCK classes at a time, by so many warps."""

    R: int
    BLOCK: int
    num_warps: int
    STREAMED: bool


def tile_of(B: int, C: int) -> Tile:
    """Four elements a thread: more would not leave the registers for a row's words, logits and table at once."""
    if C > RESIDENT:
        return Tile(1, STREAMED_BLOCK, 8, True)
    block = max(32, triton.next_power_of_2(C))
    rows = min(max(1, 512 // block), triton.next_power_of_2(B))
    return Tile(rows, block, max(4, block // 128), False)


def programs_of(B: int, tile: Tile) -> int:
    """Programs that add over rows: enough to fill a GPU, few enough that their sums stay small beside the batch.

    It depends on the shape alone, never on the device, so that the sums have one order.
    """
    return min(triton.cdiv(B, tile.R), max(16, B // 4), 256)


class Launch(NamedTuple):
    """One kernel launch, spelled out: what runs it, here or in a test, needs nothing else."""

    kernel: Any
    programs: int
    args: dict[str, Any]
    constexprs: dict[str, Any]
    num_warps: int
    max_registers: int


OPTIONS = {"enable_fp_fusion": False}
"""Of every compilation: fusing a product and a sum would change the last bit of the coverage race."""


def run_on_device(given: Launch) -> None:
    grid = (given.programs,)
    given.kernel[grid](
        **given.args, **given.constexprs, num_warps=given.num_warps, maxnreg=given.max_registers, **OPTIONS
    )


runner: Callable[[Launch], None] = run_on_device


@contextmanager
def launches_go_to(other: Callable[[Launch], None]) -> Iterator[None]:
    """Hand every launch to an emulator or a compiler instead of a GPU, and take tensors on the CPU."""
    global runner
    runner, backends.emulated = other, True
    try:
        yield
    finally:
        runner, backends.emulated = run_on_device, False


def launch(kernel: Any, programs: int, tile: Tile, args: dict[str, Any], constexprs: dict[str, Any]) -> Launch:
    """What all launches share put in."""
    cut = {"ALIGN": alignment(args), "STREAMED": tile.STREAMED, "R": tile.R, "BLOCK": tile.BLOCK}
    return Launch(
        kernel,
        programs,
        {**args, "programs": programs},
        {**constexprs, **cut},
        tile.num_warps,
        MAX_REGISTERS,
    )


def partials(s: Step, programs: int) -> tuple[Tensor, Tensor]:
    """Room for the column sums of each program and of each group of them."""
    width = len(s.through)
    return s.through.new_empty(programs, width), s.through.new_empty(triton.cdiv(programs, GROUP), width)


def kept(s: Step) -> tuple[Tensor, Tensor, Tensor]:
    """D [C], stats [8, B] and the coverage labels [2, B]."""
    (B, C), (_, _, D, stats, picked, *_) = s.z.shape, s.places
    return s.work[D:][:C], s.work[stats:][: 8 * B], s.work[picked:][: 2 * B].view(torch.int32)


def alignment(args: dict[str, Any]) -> int:
    """How many numbers of a row may be moved at once: 4 where every row starts at a multiple of 4."""
    steps = [value for name, value in args.items() if name == "C" or "_stride" in name]
    return 4 if all(step % 4 == 0 for step in steps) else 1


def column_sums_launch(s: Step) -> Launch:
    B, C = s.z.shape
    tile, (_, stats, _) = tile_of(B, C), kept(s)
    programs = programs_of(B, tile)
    partial, group = partials(s, programs)
    args = {
        "z": s.z,
        "z_stride": s.z.stride(0),
        "M": s.state.table,
        "slots": s.slots,
        "stats": stats,
        "partial": partial,
    }
    args |= {"group": group, "sums": s.sums, "tickets": s.state.tickets, "B": B, "C": C}
    return launch(column_sums_kernel, programs, tile, args, {"DATASET": s.dataset, "GROUP": GROUP})


def rows_launch(s: Step) -> Launch:
    B, C = s.z.shape
    tile, (D, stats, picked) = tile_of(B, C), kept(s)
    programs = programs_of(B, tile) if s.live else triton.cdiv(B, tile.R)
    partial, group = partials(s, programs) if s.live else (s.through, s.through)
    args = {
        "z": s.z,
        "z_stride": s.z.stride(0),
        "t": s.t,
        "t_stride_b": s.t.stride(0),
        "t_stride_k": s.t.stride(1) if s.t.dim() == 3 else 0,
        "M": s.state.table,
        "labels": s.labels,
        "ids": s.ids,
        "slots": s.slots,
        "clean": s.clean,
        "cover": s.cover,
        "w": s.w,
        "loss": s.state.loss_N,
        "step": s.state.now,
        "epoch": s.state.epoch,
        "column_sum": s.state.column_sum,
        "window": s.state.window,
        "given": s.denominator,
        "sums": s.sums,
        "D_out": D,
        "partial": partial,
        "group": group,
        "through": s.through,
        "tickets": s.state.tickets,
        "grad_z": s.grad_z,
        "grad_t": s.grad_t,
        "bits": s.bits,
        "stats": stats,
        "total": s.loss,
        "terms": s.terms,
        "sample_loss": s.sample_loss,
        "set_size": s.set_size,
        "picked": picked,
        "covered": None if s.covered is None else s.covered.view(torch.uint8),
        "B": B,
        "C": C,
        "K": s.t.shape[1] if s.t.dim() == 3 else 1,
        "L": 0 if s.state.window is None else len(s.state.window),
        "rows": s.rows,
        "world": s.world,
        "seed": s.options.seed % 2**64,
        "network": s.options.network,
        "cap": s.options.cap,
        "warmup_epochs": s.options.warmup_epochs,
        "beta": s.options.beta,
        "mix": s.options.mix,
        "weight_ce": s.options.weights[0],
        "weight_prior": s.options.weights[1],
        "weight_estep": s.options.weights[2],
    }
    constexprs = {
        "X": 0 if s.cover is None else len(s.cover),
        "LIVE": s.live,
        "DATASET": s.dataset,
        "UPDATE": s.update,
        "HALF": s.half,
        "COVER": s.options.cover_mode,
        "RANDOM": s.options.random_labels,
        "ADDITIVE": s.options.additive,
        "X_TO_Y": s.options.x_to_y,
        "PRIOR": s.options.prior_kl,
        "POWER": s.options.power,
        "GROUP": GROUP,
    }
    return launch(rows_kernel, programs, tile, args, constexprs)


def finish_launch(s: Step) -> Launch:
    B, C = s.z.shape
    tile, (D, stats, picked) = tile_of(B, C), kept(s)
    args = {
        "z": s.z,
        "z_stride": s.z.stride(0),
        "bits": s.bits,
        "stats": stats,
        "labels": s.labels,
        "cover": picked,
        "set_size": s.set_size,
        "sums": s.sums,
        "D_in": D,
        "through": s.through,
        "column_sum": s.state.column_sum,
        "window": s.state.window,
        "grad_z": s.grad_z,
        "B": B,
        "C": C,
        "L": 0 if s.state.window is None else len(s.state.window),
        "world": s.world,
        "weight_prior": s.options.weights[1],
    }
    constexprs: dict[str, Any] = {"DATASET": s.dataset, "UPDATE": s.update, "HALF": s.half}
    constexprs |= {"ADDITIVE": s.options.additive, "PRIOR": s.options.prior_kl}
    return launch(finish_kernel, triton.cdiv(B, tile.R), tile, args, constexprs)


def check(s: Step) -> None:
    """Labels and slots are not looked at here: that would stall the device."""


def column_sums(s: Step) -> None:
    """Phase 1: ``s.sums``."""
    runner(column_sums_launch(s))


def rows(s: Step) -> None:
    """Phase 2: everything but the gradient through D."""
    runner(rows_launch(s))


def finish(s: Step) -> None:
    """Phase 3: the gradient of z, and the column sums kept for the next step."""
    runner(finish_launch(s))


def scale_(grads: tuple[Tensor, ...], factor: Tensor) -> None:
    """The backward: both gradients times the upstream one, in place."""
    block = 1024
    for grad in grads:
        args = {"grad": grad, "factor": factor, "n": grad.numel()}
        runner(Launch(scale_kernel, triton.cdiv(grad.numel(), block), args, {"BLOCK": block}, 4, MAX_REGISTERS))
