"""Run by torchrun in test_engine, and by its single process: small networks trained by each engine in many ways."""

import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastgnl import GNLObjective, with_transition
from fastgnl.distributed import process_group, rank, sum_over_ranks, world_size
from fastgnl.errors import InputError
from fastgnl.loader import Loader
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.networks import SmallCNN
from fastgnl.optimise import TrainConfig
from fastgnl.run import RunConfig
from fastgnl.samples import Samples
from fastgnl.trainer import train

N, F, C, BATCH = 512, 8, 5, 128
DENOMINATORS = ("batch", "window", "bank", "dataset")
HAS_DEEPSPEED = find_spec("deepspeed") is not None
STAGES = (0, 1, 2) if HAS_DEEPSPEED else ()
ENGINES: dict[str, dict[str, Any]] = {"ddp": {}} | {
    f"zero {stage}": {"engine": "deepspeed", "zero": stage} for stage in STAGES
}
OPTIONS: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 0.01,
    "schedule": "cosine",
    "lr_warmup": 2,
    "clip": 0.5,
    "accumulate": 2,
}


def samples(dtype: torch.dtype = torch.float32, images: bool = False) -> Samples:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, *((3, 6, 6) if images else (F,)), generator=g, dtype=torch.float64).to(dtype)
    return Samples(x, torch.randint(C, (N,), generator=g))


def network(
    dtype: torch.dtype = torch.float32, images: bool = False, norm: bool = True, plain: bool = False
) -> nn.Module:
    torch.manual_seed(1)
    if images:
        backbone: nn.Module = SmallCNN(3, width=4)
    else:
        backbone = nn.Sequential(nn.Linear(F, 16, bias=False), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh())
    return with_transition(backbone, 16, C, transition_input="none" if plain else "logits", seed=1).to(dtype)


def trained(
    objective: str,
    dtype: torch.dtype = torch.float32,
    data: Samples | None = None,
    net: nn.Module | None = None,
    batch: int = BATCH,
    run: RunConfig | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """5 epochs of 4 steps: the loss of each, and all that has been learned, gathered from the ranks."""
    data = samples(dtype) if data is None else data
    net = network(dtype, plain=objective == "ce") if net is None else net
    loader = Loader(data, batch, seed=2)
    loss: nn.Module = CrossEntropy()
    if objective != "ce":
        loss = GNLObjective(
            N,
            C,
            denominator=objective,
            bank=2 * BATCH,
            momentum=0.9,
            warmup_epochs=2,
            seed=3,
            ids=loader.shard(),
            backend="cpu" if dtype is torch.float32 else "reference",
        ).to(dtype)
    steps: list[Tensor] = []
    loss.register_forward_hook(lambda _, __, terms: steps.append(terms.loss.detach()))
    config = TrainConfig(**{"epochs": 5, "lr": 0.1, "schedule": "constant", **options})
    history = train(net, loss, loader, config, run=run)
    found = {f"net.{name}": value.clone() for name, value in net.state_dict().items()}
    found["losses"] = sum_over_ranks(torch.stack(steps).double()) / world_size()
    found["history"] = torch.tensor([[e.loss, e.ce, e.prior, e.estep, e.lr] for e in history], dtype=torch.float64)
    found["skipped"] = torch.tensor([e.skipped for e in history])
    if isinstance(loss, GNLObjective):
        for name in ("M_NC", "w_N"):
            whole = torch.zeros(N, *getattr(loss, name).shape[1:], dtype=dtype)
            whole[loss.own_ids] = getattr(loss, name).to(dtype)
            found[name] = sum_over_ranks(whole)
    return found


def stopped(**options: Any) -> str:
    """What is said where one number of each batch, always on the last rank, is none."""
    data = samples()
    data.x[BATCH - 1 :: BATCH, 0] = math.nan
    try:
        trained("ce", data=data, patience=3, **options)
    except InputError as error:
        return str(error)
    return ""


def bad_step(**options: Any) -> dict[str, Tensor]:
    """One of the four batches of each epoch holds what is not a number."""
    data = samples()
    data.x[7, 0] = math.nan
    return trained("ce", data=data, **options)


def clipped(**options: Any) -> Tensor:
    """How far one step of plain gradient descent goes with a clip of 0.01 and a learning rate of 1."""
    net = network()
    before = [weight.detach().clone() for weight in net.parameters()]
    plain = {"epochs": 1, "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.01}
    trained("batch", net=net, batch=N, **plain, **options)
    moves = [(weight.detach() - old).flatten() for weight, old in zip(net.parameters(), before, strict=True)]
    return torch.cat(moves).norm()


def whole_gradient(accumulate: int, **options: Any) -> dict[str, Tensor]:
    """Batches whose gradients are added up over an epoch, where they are as good as one batch."""
    dtype = torch.float32 if options else torch.float64
    net = network(dtype, norm=False, plain=True)
    return trained("ce", dtype, net=net, batch=N // accumulate, accumulate=accumulate, **options)


def changed_engine(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Tensor]:
    """Two epochs with one engine, three with another, AdamW and the bank."""
    folder = folder / f"{first} {second}".translate({ord(mark): None for mark in "{}':,"})
    plain = {"optimizer": "adamw", "lr": 0.01}
    trained("bank", run=RunConfig(folder), epochs=2, **plain, **first)
    return trained("bank", run=RunConfig(folder), **plain, **second)


def cases(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {f"float64 {name}": trained(name, torch.float64) for name in DENOMINATORS}
    found["float64 options"] = trained("window", torch.float64, **OPTIONS)
    found["float64 whole gradient"] = whole_gradient(8)
    for engine, options in ENGINES.items() if world_size() > 1 else [("ddp", {})]:
        for name in DENOMINATORS:
            found[f"{engine} {name}"] = trained(name, **options)
        found[f"{engine} options"] = trained("window", **OPTIONS, **options)
        found[f"{engine} bfloat16"] = trained("batch", precision="bfloat16", **options)
        found[f"{engine} bad step"] = bad_step(**options)
        found[f"{engine} stopped"] = stopped(**options)
        found[f"{engine} clipped"] = clipped(**options)
        if options:
            found[f"{engine} whole gradient"] = whole_gradient(8, **options)
            found[f"ddp, then {engine}"] = changed_engine(folder, {}, options)
            found[f"{engine}, then ddp"] = changed_engine(folder, options, {})
    found["adamw"] = trained("bank", optimizer="adamw", lr=0.01)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    with process_group():
        results = cases(out.parent)
        if rank() == 0:
            torch.save(results, out)
