"""Run by torchrun in test_distributed: trains a small network with each denominator, in float64 by the reference and
in float32 by the fused step, and saves the outcome."""

import sys
from pathlib import Path

import torch
from torch import nn

from fastgnl import GNLObjective, GNLPair, with_transition
from fastgnl.augment import Augment
from fastgnl.convert import converted
from fastgnl.distributed import (
    is_distributed,
    on_first_rank,
    process_group,
    rank,
    sum_over_ranks,
    synchronise_batch_norm,
    world_size,
)
from fastgnl.evaluate import eval_losses, predict_proba
from fastgnl.formats.embedded import Digits
from fastgnl.image_file import ImageFile
from fastgnl.loader import Loader
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.optimise import TrainConfig
from fastgnl.samples import Samples
from fastgnl.trainer import train

N, F, C = 91, 7, 4
CASES = ("batch", "window", "dataset", "pair", "prior only", "ce")
FUSED = ("fused batch", "fused window", "fused dataset")


def whole_state(objective: nn.Module) -> dict[str, torch.Tensor]:
    """The label state of all samples, put together from the ranks' shards, and what they share."""
    found = dict(objective.shared_state())
    shard = objective.shard_state()
    for name, value in shard.items():
        mark = name[:2] if name[:2] in ("0 ", "1 ") else ""
        if name != f"{mark}ids":
            full = torch.zeros(N, *value.shape[1:], dtype=value.dtype)
            full[shard[f"{mark}ids"]] = value
            found[name] = sum_over_ranks(full)
    return found


def outcome(case: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    fused = case.startswith("fused")
    dtype, case = torch.float32 if fused else torch.float64, case.removeprefix("fused ")
    x = torch.randn(N, F, generator=g, dtype=torch.float64).to(dtype)
    labels = torch.randint(C, (N,), generator=g)
    torch.manual_seed(1)
    parts = [nn.Sequential(nn.Linear(F, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(2)]
    backbone = tuple(parts) if case == "pair" else parts[0]
    head = "none" if case == "ce" else "logits"
    net = with_transition(backbone, 16, C, transition_input=head, seed=1).to(dtype)
    samples = Samples(x, labels, labels.roll(1))
    loader = Loader(samples, 31, seed=2)
    options = {"warmup_epochs": 2, "k_max": 2, "seed": 3, "ids": loader.shard()}
    if case == "ce":
        objective: nn.Module = CrossEntropy()
    elif case == "pair":
        objective = GNLPair(N, C, **options).double()
    else:
        terms = {"terms": ("prior",)} if case == "prior only" else {"denominator": case}
        objective = GNLObjective(N, C, **terms, **options, backend="cpu" if fused else "reference").to(dtype)
    history = train(net, objective, loader, TrainConfig(epochs=6, lr=0.1), samples)
    return {
        "history": torch.tensor(
            [
                [e.loss, e.ce, e.prior, e.estep, e.coverage, e.clean_size, e.noisy_size, e.test_accuracy]
                for e in history
            ],
            dtype=torch.float64,
        ),
        "q": predict_proba(net, samples),
        "losses": eval_losses(net, samples),
        **{f"net.{name}": value for name, value in net.state_dict().items()},
        **{f"objective.{name}": value for name, value in whole_state(objective).items()},
    }


def batch_norm(mean: float, std: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of BatchNorm over a global batch of 31 images, gathered from the ranks' shares."""
    g = torch.Generator().manual_seed(4)
    x = (torch.randn(31, 3, 5, 5, generator=g) * std + mean).to(dtype)
    target = torch.randn(31, 3, 5, 5, generator=g).to(dtype)
    norm = nn.Sequential(nn.BatchNorm2d(3, affine=dtype is torch.float32))
    if is_distributed():
        synchronise_batch_norm(norm)
    part = torch.arange(31).tensor_split(world_size())[rank()]
    mine = x[part].requires_grad_()
    y = norm(mine)
    (y.float() * target[part].float()).sum().backward()
    whole = {"y": torch.zeros(31, 3, 5, 5), "dx": torch.zeros(31, 3, 5, 5)}
    whole["y"][part], whole["dx"][part] = y.detach().float(), mine.grad.float()
    return {name: sum_over_ranks(value) for name, value in whole.items()}


def images(folder: Path) -> dict[str, torch.Tensor]:
    """What each sample of an image file met in an epoch: batch, rank's shard, input. Gathered from the ranks."""
    path = folder / "digits.beton"
    on_first_rank(lambda: converted(Digits("test").listing(), path))
    source = ImageFile(path, Augment(crop="random", padding=2, flip=True), seed=7, reader="builtin")
    found = {}
    for order in ("random", "balanced"):
        for epoch in (0, 3):
            batch_of, x_of = torch.zeros(len(source)), torch.zeros(len(source), 3, 8, 8)
            for number, batch in enumerate(Loader(source, 50, seed=1, order=order).epoch(epoch), 1):
                batch_of[batch.index], x_of[batch.index] = float(number), batch.x
            found[f"{order} {epoch} batch"], found[f"{order} {epoch} x"] = (
                sum_over_ranks(batch_of),
                sum_over_ranks(x_of),
            )
    return found


if __name__ == "__main__":
    with process_group():
        results = {case: outcome(case) for case in (*CASES, *FUSED)}
        results["far from zero"] = batch_norm(1000.0, 0.5, torch.float32)
        results["bfloat16"] = batch_norm(0.0, 1.0, torch.bfloat16)
        results["images"] = images(Path(sys.argv[1]).parent)
        if rank() == 0:
            torch.save(results, sys.argv[1])
