"""Partial-Label Supervision: candidate sets S_i and the prior p_i (METHOD section 2, steps 1 to 5).

Axes: B rows, C classes. ``table_BC`` holds the visited rows of the moving average M, before this
step's update.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastgnl.kernels.philox import exponential, integer_below

FLOOR = 1e-9
"""p_ij outside the candidate set, so that log p stays finite."""
CLIP = 1e-4
"""The moving average takes in q clipped to [CLIP, 1 - CLIP]."""

Coverage = Literal["sample", "argmax", "none"]
PriorForm = Literal["set", "additive"]


class Candidates(NamedTuple):
    member_BC: Tensor
    """True where class j is in S_i."""
    log_prior_BC: Tensor
    """log p_ij, float32."""


def coverage_label(table_BC: Tensor, words_BC: Tensor, tau: float, how: Coverage) -> Tensor:
    """c_i ~ Cat(M_i^(1/tau) / Z) by an exponential race, argmin_j E_ij / M_ij^(1/tau)."""
    table_BC = table_BC.to(torch.float32)
    if how == "argmax":
        return table_BC.argmax(1)
    power = 1.0 / tau
    weight_BC = table_BC
    if power == int(power):
        # Repeated products round the same everywhere; pow does not.
        for _ in range(int(power) - 1):
            weight_BC = weight_BC * table_BC
    else:
        weight_BC = table_BC.pow(power)
    return (exponential(words_BC) / weight_BC).argmin(1)


def random_count(
    noise_probability_B: Tensor | None,
    free_B: Tensor,
    words_B: Tensor,
    num_classes: int,
    k_max: int | None,
) -> Tensor:
    """k_i: round(w_i min(n_i, k_max)); in warm-up (w absent) uniform in [0, min(C - 3, k_max - 1)]."""
    if noise_probability_B is None:
        most = num_classes - 3 if k_max is None else min(num_classes - 3, k_max - 1)
        return integer_below(words_B, max(most, 0) + 1)
    cap_B = free_B if k_max is None else free_B.clamp(max=k_max)
    return torch.round(noise_probability_B.to(torch.float32) * cap_B).to(torch.int64)


def named_labels(labels_B: Tensor, coverage: list[Tensor], num_classes: int) -> Tensor:
    """How often each class is named by the given label and the coverage labels, int64 [B, C]."""
    columns_BX = torch.stack([labels_B, *coverage], 1)
    count_BC = torch.zeros(len(labels_B), num_classes, dtype=torch.int64, device=labels_B.device)
    return count_BC.scatter_add_(1, columns_BX, torch.ones_like(columns_BX))


def smallest_free_keys(named_BC: Tensor, words_BC: Tensor, count_B: Tensor) -> Tensor:
    """The ``count`` free classes of each row with the smallest (word, class), as a mask: a uniform draw
    without replacement. The class breaks a tie of words, so the choice is exact."""
    num_classes = named_BC.shape[1]
    key_BC = words_BC * num_classes + torch.arange(num_classes, device=words_BC.device)
    key_BC = key_BC.masked_fill(named_BC, torch.iinfo(torch.int64).max)
    sorted_BC = key_BC.sort(1).values
    threshold_B1 = sorted_BC.gather(1, (count_B - 1).clamp(min=0)[:, None])
    return (key_BC <= threshold_B1) & (count_B > 0)[:, None]


def candidate_sets(
    labels_B: Tensor,
    coverage: list[Tensor],
    free_words_BC: Tensor,
    count_words_B: Tensor,
    noise_probability_B: Tensor | None,
    *,
    k_max: int | None,
    random_labels: bool = True,
    form: PriorForm = "set",
) -> Candidates:
    """S_i = {y_i} + coverage labels + k_i random free classes, and p_i = 1/|S_i| on it.

    ``form="additive"`` weighs a label that is named twice double, as the paper's (y + c + u)/Z does.
    """
    num_classes = free_words_BC.shape[1]
    count_BC = named_labels(labels_B, coverage, num_classes)
    if random_labels:
        named_BC = count_BC > 0
        free_B = num_classes - named_BC.sum(1)
        k_B = random_count(noise_probability_B, free_B, count_words_B, num_classes, k_max)
        count_BC = count_BC + smallest_free_keys(named_BC, free_words_BC, k_B)
    member_BC = count_BC > 0
    weight_BC = (count_BC if form == "additive" else member_BC).to(torch.float32)
    prior_BC = (weight_BC / weight_BC.sum(1, keepdim=True)).clamp(min=FLOOR)
    return Candidates(member_BC, prior_BC.log())
