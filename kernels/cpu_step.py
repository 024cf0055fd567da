"""The fused step by the native kernel: a ``Step`` handed to ``step.cpp``."""

import ctypes
import struct
from functools import cache

import torch
from torch import Tensor

from fastgnl.errors import InputError
from fastgnl.kernels import cpu
from fastgnl.kernels.step import Options, Step

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
VARYING, STEADY = struct.Struct("7q 27P 9q 2d"), struct.Struct("9q q 5d")
"""The two halves of struct Step in step.cpp; every field takes eight bytes."""


@cache
def steady(options: Options) -> bytes:
    """The options' half of the arguments."""
    o = options
    codes = (o.cap, o.cover_mode, o.random_labels, o.additive, o.x_to_y, o.prior_kl, o.power, o.network)
    return STEADY.pack(o.warmup_epochs, *codes, o.seed, o.beta, o.mix, *o.weights)


def native(s: Step) -> bytes:
    """The arguments as the native kernel takes them, field by field; ``s`` keeps the tensors alive."""
    state, z, t, work = s.state, s.z, s.t, s.work.data_ptr()
    (B, C), many = z.shape, t.dim() == 3
    sums, through, D, stats, _, bits, _ = s.places
    return VARYING.pack(
        B,
        C,
        t.shape[1] if many else 1,
        state.table.shape[0],
        0 if state.window is None else state.window.shape[0],
        0 if s.cover is None else s.cover.shape[0],
        torch.get_num_threads(),
        z.data_ptr(),
        t.data_ptr(),
        state.table.data_ptr(),
        s.labels.data_ptr(),
        s.ids.data_ptr(),
        s.slots.data_ptr(),
        0 if s.clean is None else s.clean.data_ptr(),
        0 if s.cover is None else s.cover.data_ptr(),
        s.w.data_ptr(),
        state.loss_N.data_ptr(),
        state.now.data_ptr(),
        state.epoch.data_ptr(),
        0 if state.column_sum is None else state.column_sum.data_ptr(),
        0 if state.window is None else state.window.data_ptr(),
        0 if s.denominator is None else s.denominator.data_ptr(),
        0 if s.grad_z is None else s.grad_z.data_ptr(),
        0 if s.grad_t is None else s.grad_t.data_ptr(),
        s.loss.data_ptr(),
        s.terms.data_ptr(),
        s.sample_loss.data_ptr(),
        s.set_size.data_ptr(),
        0 if s.covered is None else s.covered.data_ptr(),
        work + 4 * sums,
        work + 4 * through,
        work + 4 * stats,
        work + 4 * bits,
        work + 4 * D,
        z.stride(0),
        t.stride(0),
        t.stride(1) if many else 0,
        DTYPES[z.dtype],
        DTYPES[state.table.dtype],
        z.dtype == torch.float16,
        s.live,
        state.column_sum is not None,
        s.update,
        s.world,
        s.rows,
    ) + steady(s.options)


def check(s: Step) -> None:
    """Labels and slots in range, no sample twice."""
    s.native = native(s)
    value = ctypes.c_int64()
    fault = cpu.library().fastgnl_check(s.native, value)
    if fault:
        C, N = s.z.shape[1], s.state.table.shape[0]
        raise InputError(
            {
                1: f"labels holds {value.value}, wanted 0 to {C - 1}",
                2: f"index holds {value.value}, wanted 0 to {N - 1}",
                3: "index names a sample twice, wanted each at most once in a batch",
                4: f"clean holds {value.value}, wanted 0 to {C - 1}",
            }[fault]
        )


def column_sums(s: Step) -> None:
    """Phase 1: the column sums."""
    cpu.library().fastgnl_column_sums(s.native)


def rows(s: Step) -> None:
    """Phase 2: everything but the gradient through D."""
    cpu.library().fastgnl_rows(s.native)


def finish(s: Step) -> None:
    """Phase 3: the gradient of z, and the column sums kept for the next step."""
    cpu.library().fastgnl_finish(s.native)


def scale_(grads: tuple[Tensor, ...], factor: Tensor) -> None:
    """The backward: both gradients times the upstream one, in place."""
    if float(factor) != 1.0:
        for grad in grads:
            grad.mul_(factor)
