"""The momentum encoder: a slow copy of the network, and the bank of what it says."""

import copy
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastgnl.distributed import sum_over_ranks_


class MomentumEncoder(nn.Module):
    """theta' <- m theta' + (1 - m) theta after each step, where m = min(momentum, (1 + s) / (10 + s)) at step s.

    Called, BatchNorm takes the statistics of the batch, as in the network that is trained, and dropout is off. The
    running statistics are the network's: ``net`` in eval mode is the averaged network."""

    def __init__(self, net: nn.Module, momentum: float) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.momentum = momentum

    @torch.no_grad()
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """The logits z of a batch."""
        self.net.eval()
        for module in self.net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()
        return self.net(x, index)[0]

    @torch.no_grad()
    def follow(self, net: nn.Module, step: int) -> None:
        """Take in the network after a step."""
        m = min(self.momentum, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.net.parameters()), list(net.parameters()), 1 - m)
        for mine, other in zip(self.net.buffers(), net.buffers(), strict=True):
            mine.copy_(other)


class Entry(NamedTuple):
    """This rank's rows of a batch."""

    step: int
    ids: Tensor  # [B]
    q_BC: Tensor  # float16


class Bank(nn.Module):
    """The last ``size`` rows of the momentum encoder's q over all ranks, in whole batches, and their column sums.

    A rank keeps the rows it has made. The sums are of float16 numbers in float64, which holds them exactly: they never
    drift, and are the same for any number of ranks.
    """

    sum_C: Tensor

    def __init__(self, size: int, num_classes: int) -> None:
        super().__init__()
        self.size = size
        self.entries: deque[Entry] = deque()
        self.rows: deque[int] = deque()
        """Of each batch, over all ranks."""
        # Not in a state_dict, which does not hold the rows: a bank that is begun anew must not start from their sums.
        self.register_buffer("sum_C", torch.zeros(num_classes, dtype=torch.float64), persistent=False)

    @property
    def full(self) -> bool:
        """Before it is, its sums say little of the rarer classes."""
        return sum(self.rows) >= self.size

    @torch.no_grad()
    def push(self, q_BC: Tensor, ids: Tensor, step: int) -> None:
        """Take in a batch, let go of the oldest: sum_C <- sum_C + new - old."""
        entry = Entry(step, ids.clone(), q_BC.nan_to_num(0).to(torch.float16))
        change_C = entry.q_BC.double().sum(0)
        while self.rows and sum(self.rows) - self.rows[0] >= self.size:
            change_C -= self.entries.popleft().q_BC.double().sum(0)
            self.rows.popleft()
        message = sum_over_ranks_(torch.cat([change_C, change_C.new_tensor([len(ids)])]))
        self.sum_C += message[:-1]
        self.entries.append(entry)
        self.rows.append(int(message[-1]))

    def shard(self) -> dict[str, Tensor]:
        """This rank's rows as tensors: q [R, C], their sample ids and steps [R]; and of all batches step and rows."""
        none = torch.empty(0, dtype=torch.int64)
        q = [entry.q_BC.cpu() for entry in self.entries]
        return {
            "q": torch.cat([torch.empty(0, len(self.sum_C), dtype=torch.float16), *q]),
            "ids": torch.cat([none, *(entry.ids.cpu() for entry in self.entries)]),
            "steps": torch.cat([none, *(torch.full((len(entry.ids),), entry.step) for entry in self.entries)]),
            "batch steps": torch.tensor([entry.step for entry in self.entries], dtype=torch.int64),
            "batch rows": torch.tensor(list(self.rows), dtype=torch.int64),
        }

    def load(self, shards: list[dict[str, Tensor]], own_ids: Tensor) -> None:
        """Pick the rows of these samples out of the shards of all ranks. ``sum_C`` is kept apart."""
        q, ids, steps = (torch.cat([shard[name] for shard in shards]) for name in ("q", "ids", "steps"))
        mine = torch.isin(ids, own_ids)
        q, ids, steps = (part[mine].to(self.sum_C.device) for part in (q, ids, steps))
        self.rows = deque(shards[0]["batch rows"].tolist())
        self.entries = deque(
            Entry(step, ids[steps == step], q[steps == step]) for step in shards[0]["batch steps"].tolist()
        )
