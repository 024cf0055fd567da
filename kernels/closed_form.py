"""The gradients of the summed terms in closed form (METHOD section 5), what a fused backend computes.

Every prior loss has the shape  dL/dl_ij = U_ij + s_ij sum_k V_kj  with s_ij = q_ij / D_j, where U is the
direct part and V the part through log D_j; then dL/dz_i = A_i - q_i sum_j A_ij. A denominator without the
live batch has no V part. Axes as in ``terms``; the mean over B rows is applied by the caller's ``1/B``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastgnl.kernels.terms import Direction, PriorKL, implied_posterior, kl


class Parts(NamedTuple):
    direct_BC: Tensor
    """U_ij"""
    through_D_BC: Tensor
    """V_ij"""


def prior_parts(l_BC: Tensor, log_prior_BC: Tensor, log_D_C: Tensor, which: PriorKL) -> Parts:
    """U and V of one prior loss.

    reverse: G_ij = r_ij (log r_ij - l_ij - KL_i), U = G - r, V = -G
    forward: U = q_ij (log D_j - log p_ij) + r_ij, V = q - r
    ce:      U = -p, V = 0
    """
    if which == "ce":
        p_BC = log_prior_BC.exp()
        return Parts(-p_BC, torch.zeros_like(p_BC))
    log_r_BC = implied_posterior(l_BC, log_prior_BC, log_D_C)
    r_BC = log_r_BC.exp()
    if which == "reverse":
        G_BC = r_BC * (log_r_BC - l_BC - kl(log_r_BC, l_BC)[:, None])
        return Parts(G_BC - r_BC, -G_BC)
    q_BC = l_BC.exp()
    return Parts(q_BC * (log_D_C - log_prior_BC) + r_BC, q_BC - r_BC)


def grad_z(l_BC: Tensor, log_D_C: Tensor, parts: Parts, sum_through_D_C: Tensor | None) -> Tensor:
    """dL/dz. ``sum_through_D_C`` is sum_k V_kj over all ranks, or None for a detached denominator."""
    A_BC = parts.direct_BC
    if sum_through_D_C is not None:
        A_BC = A_BC + (l_BC - log_D_C).exp() * sum_through_D_C
    return A_BC - l_BC.exp() * A_BC.sum(1, keepdim=True)


def grad_t(l_BC: Tensor, t_BC: Tensor, labels_B: Tensor, log_prior_BC: Tensor, direction: Direction) -> Tensor:
    """dL/dt_i = f_i - onehot(y_i) + h_i - sg(q_i)."""
    log_f_BC = torch.log_softmax(t_BC, 1)
    log_h_BC = torch.log_softmax(log_f_BC + log_prior_BC, 1) if direction == "y->x" else log_f_BC
    onehot_BC = torch.nn.functional.one_hot(labels_B, t_BC.shape[1])
    return log_f_BC.exp() - onehot_BC + log_h_BC.exp() - l_BC.exp()
