"""Shared by the tests: a batch of random logits, labels and ids."""

import os
from dataclasses import dataclass

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: there is no GPU to run its kernels
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is: two workers of pytest share two cores

import pytest
import torch
from torch import Tensor


@dataclass
class Batch:
    z: Tensor
    t: Tensor
    labels: Tensor
    index: Tensor
    clean: Tensor | None = None


@pytest.fixture(autouse=True)
def fixed_seed():
    """A test that makes its own network starts from the same weights in any order of the tests."""
    torch.manual_seed(0)


@pytest.fixture
def make_batch():
    """(B, C, N, seed) -> a batch whose ids are drawn from N."""

    def make(B=16, C=5, N=40, seed=0, dtype=torch.float64, scale=2.0) -> Batch:
        g = torch.Generator().manual_seed(seed)
        z = (torch.randn(B, C, generator=g, dtype=torch.float64) * scale).to(dtype).requires_grad_()
        t = (torch.randn(B, C, generator=g, dtype=torch.float64) * scale).to(dtype).requires_grad_()
        labels = torch.randint(C, (B,), generator=g)
        index = torch.randperm(N, generator=g)[:B]
        return Batch(z, t, labels, index)

    return make
