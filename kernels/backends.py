"""Which implementation of the step runs, and why."""

import os
import sys
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

Backend = Literal["auto", "reference", "triton", "cpu"]
RESIDENT = 1024
"""The longest row the Triton kernels keep in registers."""


@cache
def notice(line: str) -> None:
    """Say something once, on stderr."""
    print(f"fastgnl: {line}", file=sys.stderr)


emulated = False
"""Set while Triton's launches go to an emulator."""


def interpreting() -> bool:
    """Whether Triton kernels run on the CPU, in Triton's interpreter or an emulator."""
    return emulated or os.environ.get("TRITON_INTERPRET") == "1"


def problem(backend: str, device: str) -> str | None:
    """Why a backend cannot run tensors of a device here, or None."""
    if backend == "triton":
        if find_spec("triton") is None:
            return "triton is not installed"
        if device != "cuda" and not interpreting():
            return (
                f"Triton kernels need tensors on a GPU, these are on {device} (TRITON_INTERPRET=1 runs them on the CPU)"
            )
    if backend == "cpu":
        if device != "cpu":
            return f"the native kernel needs tensors on the CPU, these are on {device}"
        from fastgnl.kernels import cpu

        return cpu.problem()
    return None


def unsupported(
    backend: str,
    estep: str,
    tau: float,
    classes: int,
    draws: int,
    logits: torch.dtype,
    table: torch.dtype,
    state: torch.dtype,
) -> str | None:
    """What a fused kernel leaves to the reference, or None."""
    if estep == "literal":
        return "estep='literal'"
    if 1 / tau != int(1 / tau):
        return f"tau={tau:g}: 1/tau is no whole number, and other powers round differently everywhere"
    for name, dtype in (("logits", logits), ("a table", table)):
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"{name} of {dtype}"
    if state != torch.float32:
        return f"losses kept as {state}"
    if backend == "triton" and draws > 1 and classes > RESIDENT:
        return f"{draws} draws of more than {RESIDENT} classes"
    return None


def choose(device: str) -> tuple[str, str | None]:
    """What ``auto`` takes on a device, and what stood in the way of a faster one."""
    wanted = "triton" if device == "cuda" else "cpu"
    if device not in ("cpu", "cuda"):
        return "reference", f"there is no fused kernel for {device}"
    reason = problem(wanted, device)
    return (wanted, None) if reason is None else ("reference", reason)
