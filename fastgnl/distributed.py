"""What the rest needs to know of other ranks; without a process group, a world of one."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def device() -> torch.device:
    """Where this rank computes: its own GPU, or the CPU."""
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


LINGER = 0.05
"""Seconds. Gloo's threads outlive the group where DDP has used it, and one that still has to let go of a tensor
when the interpreter ends aborts the process; asleep, this thread lets them."""


@contextmanager
def process_group() -> Iterator[None]:
    """Join the group torchrun describes, or run alone without one. The ranks leave together."""
    if "RANK" not in os.environ:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    store, mine, size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # torchrun keeps one store for all its attempts, in which a worker could look up where a dead one was and wait
        # for it. (The agents of several machines count attempts each for itself, and their number tells nothing.)
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    # Label counts, losses and checkpoints are on the CPU everywhere.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=mine, world_size=size)
    try:
        yield
        dist.barrier()
    finally:
        time.sleep(LINGER)
        dist.destroy_process_group()


def on_first_rank(work: Callable[[], object]) -> None:
    """Done by one rank, the first on its machine, while the others wait."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        work()
    if is_distributed():
        dist.barrier()


class _SumOverRanks(torch.autograd.Function):
    """y = sum over ranks of x; the gradient of a sum that every rank uses is the sum of the gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        (grad,) = grads
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of ``x`` over all ranks, differentiable."""
    return _SumOverRanks.apply(x) if is_distributed() else x


def sum_over_ranks_(x: Tensor) -> Tensor:
    """The same in place, outside autograd."""
    if is_distributed():
        dist.all_reduce(x)
    return x


class _GlobalBatchNorm(torch.autograd.Function):
    """y = w (x - mean) / sqrt(var + eps) + b with the mean and variance of the global batch.

    dx = w invstd (dy - mean(dy) - xhat mean(dy xhat)), means over the global batch.
    Also returns mean, variance and row count, which carry no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        # As BatchNorm's own kernel has them; var_mean takes three times as long.
        local_mean, local_var = torch.batch_norm_update_stats(x.to(wide), None, None, 0.0)
        mine = torch.cat([local_mean, local_var, local_mean.new_full((1,), x.numel() / x.shape[1])])
        ranks = [torch.empty_like(mine) for _ in range(world_size())]
        dist.all_gather(ranks, mine)
        C = x.shape[1]
        means, variances, counts = torch.stack(ranks).split([C, C, 1], 1)
        count = counts.sum(0)
        mean = (means * counts).sum(0) / count
        # Squared distances of the ranks' means, not a difference of two large squares, which would cancel.
        var = ((variances + (means - mean).square()) * counts).sum(0) / count
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var, count)
        return nn.functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        dy = grads[0].contiguous()
        x, weight, mean, var, count = ctx.saved_tensors
        invstd = torch.rsqrt(var + ctx.eps)
        _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, mean, var, None, None, False, ctx.eps, [False, True, True]
        )
        sums = torch.cat([dweight, dbias])
        dist.all_reduce(sums)
        mean_dy_xhat, mean_dy = (sums / count).chunk(2)
        a = weight * invstd
        # -a xhat mean(dy xhat) - a mean(dy) is one more batch norm.
        dx = nn.functional.batch_norm(x.to(mean.dtype), mean, var, -a * mean_dy_xhat, -a * mean_dy, False, 0.0, ctx.eps)
        dx.addcmul_(a.view([1, -1, *[1] * (x.dim() - 2)]), dy.to(dx.dtype))
        return dx.to(x.dtype), dweight, dbias, None


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose statistics are those of the global batch, on any device and backend.

    torch's own runs on GPUs only; without it two ranks would normalise halves of a batch by different
    numbers, and a run's result would depend on how many ranks made it.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not is_distributed():
            return super().forward(input)
        weight, bias = self.weight, self.bias
        if not self.affine:
            weight, bias = (value.expand(self.num_features) for value in torch.tensor([1.0, 0.0], device=input.device))
        out, mean, var, count = _GlobalBatchNorm.apply(input, weight, bias, self.eps)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(var * count / (count - 1), momentum)
        return out


def synchronise_batch_norm(module: nn.Module) -> None:
    """Replace every BatchNorm below ``module`` by one over the global batch, in the state it is in."""
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            new = SyncBatchNorm(child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats)
            for key, value in [*child.named_parameters(), *child.named_buffers()]:
                setattr(new, key, value)  # the very same tensors: frozen stays frozen
            setattr(module, name, new.train(child.training))
        else:
            synchronise_batch_norm(child)
