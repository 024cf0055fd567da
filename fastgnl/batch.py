"""Is a batch sound? Shapes, types, devices and ids, each refused in one sentence.

Ids are looked at on the CPU only: elsewhere it would stall the device. Sentences are put together only when needed,
because these checks run every step.
"""

import torch
from torch import Tensor

from fastgnl.errors import InputError, check


def check_ids(name: str, given: Tensor, z: Tensor) -> None:
    """A whole number for each row of z."""
    if given.shape != z.shape[:1]:
        raise InputError(f"{name} has shape {tuple(given.shape)}, wanted ({z.shape[0]},) as z has rows")
    if given.is_floating_point() or given.dtype == torch.bool:
        raise InputError(f"{name} is {given.dtype}, wanted integers")


def as_int64(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int64 else x.to(torch.int64)


def stacked(coverage: list[Tensor], z: Tensor) -> Tensor:
    """Coverage labels as one tensor [X, B]."""
    if not coverage:
        return torch.empty(0, len(z), dtype=torch.int64, device=z.device)
    return torch.stack([as_int64(label_B) for label_B in coverage])


def check_below(name: str, given: Tensor, size: int) -> None:
    """Every id from 0 to ``size`` - 1."""
    if given.device.type == "cpu":
        low, high = (int(v) for v in given.aminmax())
        check(low >= 0 and high < size, f"{name} holds {low if low < 0 else high}, wanted 0 to {size - 1}")


def check_once(index: Tensor) -> None:
    """No sample twice in a batch."""
    if index.device.type == "cpu":
        check(len(index.unique()) == len(index), "index names a sample twice, wanted each at most once in a batch")


def check_batch(z: Tensor, labels: Tensor, index: Tensor, clean: Tensor | None, num_classes: int) -> None:
    """The shapes and types of one batch of clean logits, given labels and sample ids."""
    for name, given in (("z", z), ("labels", labels), ("index", index)):
        if not isinstance(given, Tensor):
            raise InputError(f"{name} is a {type(given).__name__}, wanted a tensor")
    if z.dim() != 2 or z.shape[1] != num_classes or z.shape[0] == 0:
        raise InputError(f"z has shape {tuple(z.shape)}, wanted (B, {num_classes}) with B >= 1")
    if not z.is_floating_point():
        raise InputError(f"z is {z.dtype}, wanted a floating-point type")
    check_ids("labels", labels, z)
    check_ids("index", index, z)
    if clean is not None:
        check_ids("clean", clean, z)


def check_noisy(t: Tensor, z: Tensor) -> None:
    """The noisy logits that go with z."""
    if not isinstance(t, Tensor):
        raise InputError(f"t is a {type(t).__name__}, wanted the noisy logits as a tensor")
    if not t.is_floating_point():
        raise InputError(f"t is {t.dtype}, wanted a floating-point type")
    if t.dim() not in (2, 3) or (t.shape[0], t.shape[-1]) != z.shape or t.shape[1] == 0:
        raise InputError(f"t has shape {tuple(t.shape)}, wanted {tuple(z.shape)} as z has, or (B, K, C)")


def check_device(z: Tensor, **others: Tensor | None) -> None:
    """Everything is where z is."""
    for name, other in others.items():
        if other is not None and other.device != z.device:
            raise InputError(f"{name} is on {other.device}, wanted {z.device} as z is")
