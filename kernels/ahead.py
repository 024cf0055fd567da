"""Triton launches compiled ahead of time, for GPUs that need not be here: what the machine code uses."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastgnl.kernels.triton_step import OPTIONS, Launch

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


class Compiled(NamedTuple):
    ptx: str
    registers: int
    """Of a thread."""
    stack: int
    """Bytes a thread keeps in memory; 0 is: nothing is spilled."""
    shared: int
    """Bytes of shared memory of a program."""
    threads: int


def type_of(value: Any) -> str:
    """An argument's type in Triton's signature."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"


def specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[Any]]]:
    """Signature, constants and alignments, as Triton chooses them for these arguments when it launches."""
    constants = dict(launch.constexprs)
    constants |= {name: v for name, v in launch.args.items() if v is None or (type(v) is int and v == 1)}
    names = launch.kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(launch.args[name]) for name in names}
    aligned = {}
    for place, name in enumerate(names):
        value = launch.args.get(name)
        where = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if name not in constants and isinstance(where, int) and where % 16 == 0:
            aligned[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned


def compile_for(launch: Launch, arch: int) -> Compiled:
    """The launch as machine code for sm_``arch``."""
    options = {"num_warps": launch.num_warps, "maxnreg": launch.max_registers, **OPTIONS}
    kernel = triton.compile(
        ASTSource(launch.kernel, *specialised(launch)), target=GPUTarget("cuda", arch, 32), options=options
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage of {launch.kernel.__name__} for sm_{arch}")
    registers, stack, local = (int(group) for group in found.groups())
    return Compiled(kernel.asm["ptx"], registers, stack + local, kernel.metadata.shared, 32 * launch.num_warps)
