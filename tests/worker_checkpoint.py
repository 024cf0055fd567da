"""Run by torchrun in test_checkpoint: saves checkpoints on several ranks, and reads them."""

import errno
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fastgnl.checkpoint import Checkpoints
from fastgnl.distributed import process_group, rank, world_size
from fastgnl.errors import InputError


def shared_state(step: int) -> dict[str, Tensor]:
    """Tensors of every kind that training has, and some that it has not."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(2, 3, 4, 5, generator=g)
    return {
        "float": x,
        "net.channels_last": x.to(memory_format=torch.channels_last),
        "transposed": x[0, 0].T,
        "every other": x.flatten()[::2],
        "expanded": x[:1, 0, 0, :1].expand(3, 4),
        "double": x.double(),
        "half": x.half(),
        "bfloat16": x.bfloat16(),
        "bool": x > 0,
        "bytes": (x * 9).to(torch.uint8),
        "long": (x * 1e9).long(),
        "scalar": x.sum(),
        "scalar long": torch.tensor(step),
        "scalar bool": torch.tensor(True),
        "empty": torch.zeros(0, 4),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "parameter": torch.nn.Parameter(x[0].clone()),
    }


def shard_state(step: int, of_rank: int) -> dict[str, Tensor]:
    """Of another shape on each rank, and one name that only some have."""
    rows = torch.arange(step, step + (3 + of_rank) * 4).reshape(-1, 4)
    return {"rows": rows, "none": torch.zeros(0, of_rank), **({"extra": rows[0] > 0} if of_rank else {})}


def plain_state(step: int) -> dict[str, object]:
    return {"step": step, "lr": 0.1, "text": "žluťoučký", "nested": [1, None, {"a": [True, 1e-300]}]}


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit."""
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def all_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def whole(saved, step: int, ranks: int) -> bool:
    into = {name: torch.ones_like(tensor) for name, tensor in shared_state(step).items()}
    into["expanded"] = torch.ones(3, 4)  # the like of it cannot be written to
    saved.load_shared(into)
    return (
        (saved.step, saved.ranks, saved.plain) == (step, ranks, plain_state(step))
        and all_same(into, shared_state(step))
        and all(all_same(shard, shard_state(step, r)) for r, shard in enumerate(saved.shards()))
        and len(list(saved.shards())) == ranks
    )


def save(checkpoints: Checkpoints, step: int) -> bool:
    return checkpoints.save(step, shared_state(step), shard_state(step, rank()), plain_state(step))


def write(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    checkpoints = Checkpoints(folder, keep=2)
    found["first"] = save(checkpoints, 10)
    real = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def bug(descriptor: int) -> None:
        raise ValueError("a bug")

    behind = Checkpoints(folder, keep=2, background=True)
    os.fsync = full if rank() == 1 else real
    found["full on rank 1"] = save(checkpoints, 20)
    found["full on rank 1, behind"] = save(behind, 21)
    behind.wait()
    os.fsync = bug if rank() == 1 else real
    try:
        save(checkpoints, 22)
    except ValueError as error:
        found["bug on rank 1"] = str(error)
    os.fsync = real
    found["left"] = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    state = shared_state(30)
    found["behind"] = behind.save(30, state, shard_state(30, rank()), plain_state(30))
    numbers = torch.ones(1)
    for _ in range(20):  # the training goes on, talks and changes its state
        dist.all_reduce(numbers)
        state["float"].add_(1)
    found["sums"] = numbers.item()
    behind.wait()
    (folder / "a file").touch()
    try:
        Checkpoints(folder / "a file" / "below")
    except InputError as error:
        found["unwritable"] = str(error)
    return found


def read(good: Path, damaged: Path) -> dict[str, object]:
    saved = Checkpoints(good).newest()
    back = Checkpoints(damaged).newest()
    return {"good": whole(saved, 30, 2), "damaged": whole(back, 10, 2), "rank 1 of it": len(back.shard(1)["rows"])}


if __name__ == "__main__":
    task, out, *folders = sys.argv[1:]
    with process_group():
        outcome = {"write": write, "read": read}[task](*map(Path, folders))
        Path(f"{out}.{rank()}of{world_size()}.json").write_text(json.dumps(outcome))
