"""The three loss terms in plain PyTorch, differentiated by autograd: the truth for every backend.

Axes: B rows of this rank, C classes, K draws of the transition input (K = 1 with ``"logits"``).
``l = log q = log_softmax(z)`` and ``log f = log_softmax(t)`` (METHOD sections 3 and 4).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Direction = Literal["y->x", "x->y"]
PriorKL = Literal["reverse", "forward", "ce"]
EStep = Literal["normalised", "literal"]

TINY = 1e-37
"""Added to every column sum: the log D_j of a class that no row gives any mass stays finite."""


class RowTerms(NamedTuple):
    """Each term of each row, [B]."""

    ce: Tensor
    prior: Tensor
    estep: Tensor


def log_denominator(sum_C: Tensor) -> Tensor:
    """log D_j."""
    return (sum_C + TINY).log()


def implied_posterior(l_BC: Tensor, log_prior_BC: Tensor, log_D_C: Tensor) -> Tensor:
    """log r_i, r_i = softmax_j(log p_ij + l_ij - log D_j)."""
    return torch.log_softmax(log_prior_BC + l_BC - log_D_C, 1)


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) = sum_j a_j (log a_j - log b_j) over the last axis."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def prior_term(l_BC: Tensor, log_prior_BC: Tensor, log_D_C: Tensor, which: PriorKL) -> Tensor:
    """L_PRI: KL(r_i || q_i), KL(q_i || r_i), or -sum_j p_ij l_ij."""
    if which == "ce":
        return -(log_prior_BC.exp() * l_BC).sum(1)
    log_r_BC = implied_posterior(l_BC, log_prior_BC, log_D_C)
    return kl(log_r_BC, l_BC) if which == "reverse" else kl(l_BC, log_r_BC)


def estep_term(
    l_BC: Tensor, log_f_BKC: Tensor, log_prior_BC: Tensor, log_D_C: Tensor, direction: Direction, form: EStep
) -> Tensor:
    """L_KL = KL(sg(q_i) || h_i), averaged over the K draws.

    y->x: h_i = softmax_j(log f_ij + log p_ij). x->y: h_i = f_i, because p(x_i) is one number a row and
    cancels in the normalised target. ``"literal"`` leaves the target unnormalised as the paper prints it:
    f_i * p_i, or f_i p(x_i) with p(x_i) = sum_j p_ij q_ij / D_j and the gradient through it.
    """
    if direction == "y->x":
        log_h_BKC = log_f_BKC + log_prior_BC[:, None]
        if form == "normalised":
            log_h_BKC = torch.log_softmax(log_h_BKC, -1)
    elif form == "normalised":
        log_h_BKC = log_f_BKC
    else:
        log_px_B = torch.logsumexp(log_prior_BC + l_BC - log_D_C, 1)
        log_h_BKC = log_f_BKC + log_px_B[:, None, None]
    return kl(l_BC.detach()[:, None], log_h_BKC).mean(1)


def row_terms(
    l_BC: Tensor,
    t_BKC: Tensor,
    labels_B: Tensor,
    log_prior_BC: Tensor,
    log_D_C: Tensor,
    *,
    direction: Direction,
    prior_kl: PriorKL,
    estep: EStep,
) -> RowTerms:
    """L_CE = -log f_i[y_i], L_PRI and L_KL of each row."""
    log_f_BKC = torch.log_softmax(t_BKC, -1)
    log_prior_BC = log_prior_BC.to(l_BC.dtype)
    given_BK1 = labels_B[:, None, None].expand(-1, t_BKC.shape[1], 1)
    return RowTerms(
        ce=-log_f_BKC.gather(-1, given_BK1).squeeze(-1).mean(1),
        prior=prior_term(l_BC, log_prior_BC, log_D_C, prior_kl),
        estep=estep_term(l_BC, log_f_BKC, log_prior_BC, log_D_C, direction, estep),
    )
