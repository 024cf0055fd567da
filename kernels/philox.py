"""Philox-4x32-10, the counter-based generator behind every draw of the method.

The contract. A 32-bit word belongs to (seed, sample id, class, step, stream) and to nothing else:

    word(id, class, step, stream) = Philox(key = seed, counter = (id, class // 4, step, stream))[class % 4]

so a sample draws the same words on any backend, in any batch position and on any number of ranks.
Axes: S streams, B rows, C classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

COVERAGE, FREE, WARMUP, TRANSITION, RANDOM_W, AUGMENT = range(6)
STREAMS_PER_NETWORK = 16
STREAMS_PER_DRAW = 256


def stream(kind: int, network: int = 0, draw: int = 0) -> int:
    """The fourth counter word: what is drawn, for which of two networks, which of K draws."""
    return kind + STREAMS_PER_NETWORK * network + STREAMS_PER_DRAW * draw


def philox_4x32_10(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four int64 tensors of 32-bit counter words (broadcast together) -> four of 32-bit output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2**64, which keeps both 32-bit halves right.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def words(seed: int, ids_B: Tensor, num_classes: int, step: Tensor | int, streams: Sequence[int]) -> Tensor:
    """The 32-bit words of every (stream, sample, class), as int64 of shape [S, B, C]."""
    device = ids_B.device
    quads = torch.arange((num_classes + 3) // 4, device=device)
    out = philox_4x32_10(
        (
            ids_B.to(torch.int64)[:, None],
            quads,
            torch.as_tensor(step, dtype=torch.int64, device=device),
            torch.tensor(streams, device=device)[:, None, None],
        ),
        seed,
    )
    return torch.stack(torch.broadcast_tensors(*out), -1).flatten(2)[..., :num_classes]


def exponential(words: Tensor) -> Tensor:
    """A standard exponential variate from each word: ``-log u``, ``u = (2 (word >> 9) + 1) / 2**24``.

    The logarithm is spelled out in IEEE-exact float32 steps (log f = 2 atanh((f-1)/(f+1)) on
    [sqrt 1/2, sqrt 2)), because a library's own differs in the last bit between backends and the
    race it decides must not.
    """
    bits = ((words >> 9) * 2 + 1).to(torch.float32).view(torch.int32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    high = mantissa > 1.4142135
    exponent = ((bits >> 23) - (127 + 24) + high.to(torch.int32)).to(torch.float32)
    f = torch.where(high, mantissa * 0.5, mantissa)
    s = (f - 1.0) / (f + 1.0)
    s2 = s * s
    series = s2 * (1.0 / 9.0)
    for power in (7, 5, 3):
        series = s2 * (series + 1.0 / power)
    return -(exponent * 0.6931472 + 2.0 * s * (series + 1.0))


def integer_below(words: Tensor, bound: int) -> Tensor:
    """A uniform integer in [0, bound) from each word, by the high half of a 64-bit product."""
    return (words * bound) >> 32
