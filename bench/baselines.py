"""What the fused kernels are measured against: one training step of the method in PyTorch, four ways.

``eager``     gradients in closed form, most operations in place
``autograd``  the loss as one would first write it, gradients by autograd
``compiled``  ``torch.compile``: all of ``autograd`` for few classes, else the closed form after eager draws
``loop``      candidate sets drawn row by row in Python and numpy, as research code does

Each takes (z, t, labels, index, state), draws the candidate sets, updates the table, computes the three terms and
calls ``loss.backward()``, with the defaults of ``GNLConfig``: reverse KL, y->x, the batch's own denominator with its
gradient, tau 0.5, beta 0.9. All but the loop draw as the method does, a number for every class: the coverage label
by an exponential race, the free classes by their smallest keys. The numbers come from ``torch.rand``: not the words
of the contract, the same distribution. Nothing is validated.

python bench/baselines.py    # checks them against the reference kernels

Axes: N samples, B rows, C classes.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fastgnl.kernels.candidates import CLIP, FLOOR
from fastgnl.kernels.terms import TINY, log_denominator, row_terms
from fastgnl.objective import GNLObjective

BETA = 0.9
LOG_FLOOR = math.log(FLOOR)
FEW = 32
"""Up to so many classes compiled draws are faster than eager ones."""


@dataclass
class State:
    """What the method keeps of every sample."""

    M_NC: Tensor
    loss_N: Tensor
    cap: int | None
    """k_max."""
    w_N: Tensor | None = None
    """None in warm-up."""


Step = Callable[[Tensor, Tensor, Tensor, Tensor, State], Tensor]


def cap_of(num_classes: int) -> int | None:
    """The cap on random candidates in all that is timed: none up to 100 classes."""
    return 20 if num_classes > 100 else None


def fresh_state(num_samples: int, num_classes: int) -> State:
    """M = 1/C, in warm-up."""
    cap = cap_of(num_classes)
    return State(torch.full((num_samples, num_classes), 1.0 / num_classes), torch.zeros(num_samples), cap)


class Sets(NamedTuple):
    """Candidate sets as a table of 1 (member) and 0, float32, and |S_i|."""

    member_BC: Tensor
    size_B1: Tensor


class Result(NamedTuple):
    loss: Tensor
    dz_BC: Tensor
    dt_BC: Tensor
    q_BC: Tensor
    sample_loss_B1: Tensor
    """-log q_i[y_i]"""


# Draws.


def random_count(free_B1: Tensor, num_classes: int, cap: int | None, w_B1: Tensor | None) -> Tensor:
    """k_i = round(w_i min(n_i, k_max)); in warm-up uniform in [0, min(C - 3, k_max - 1)]."""
    if w_B1 is None:
        most = num_classes - 3 if cap is None else min(num_classes - 3, cap - 1)
        return torch.randint(0, max(most, 0) + 1, free_B1.shape)
    return (w_B1 * (free_B1 if cap is None else free_B1.clamp(max=cap))).round_().long()


def draw(label_B1: Tensor, old_BC: Tensor, cap: int | None, w_B1: Tensor | None) -> Sets:
    """c_i by an exponential race, then the |S_i| smallest of a row of keys, the named classes before all others.

    Two equal keys at the threshold (once in 2^24 / C rows) leave a set one class off.
    """
    B, C = old_BC.shape
    cover_B1 = torch.rand(B, C).log_().div_(old_BC * old_BC).argmax(1, keepdim=True)
    named_B1 = (cover_B1 != label_B1) + 1
    size_B1 = named_B1 + random_count(C - named_B1, C, cap, w_B1)
    key_BC = torch.rand(B, C).scatter_(1, label_B1, -1.0).scatter_(1, cover_B1, -1.0)
    smallest = (key_BC.sort(1) if cap is None else key_BC.topk(min(C, cap + 2), 1, largest=False)).values
    return Sets(key_BC.le_(smallest.gather(1, size_B1 - 1)), size_B1.float())


# The loss.


def closed_form(z: Tensor, t: Tensor, label_B1: Tensor, sets: Sets) -> Result:
    """The three terms with their gradients written out.

    With a = p q / D and Z = sum_j a: r = a / Z, g = log p - log D, KL(r||q) = sum_j r g - log Z,
    G = r (g - sum_j r g), dz = G - r - s sum_k G_k + q (1 + sum_j s sum_k G_k), s = q / D.
    """
    B = len(z)
    l_BC, log_f_BC = torch.log_softmax(z, 1), torch.log_softmax(t, 1)
    q_BC, f_BC = l_BC.exp(), log_f_BC.exp()
    p_BC = (sets.member_BC / sets.size_B1).clamp_(min=FLOOR)
    log_p_BC = p_BC.log()
    D_C = q_BC.sum(0) + TINY
    s_BC = q_BC / D_C
    r_BC = s_BC * p_BC
    Z_B1 = r_BC.sum(1, keepdim=True)
    r_BC /= Z_B1
    g_BC = log_p_BC - D_C.log()
    mean_g_B1 = (r_BC * g_BC).sum(1, keepdim=True)
    G_BC = g_BC.sub_(mean_g_B1).mul_(r_BC)
    sum_G_C = G_BC.sum(0)
    through_B = torch.mv(s_BC, sum_G_C).add_(1)
    dz_BC = G_BC.sub_(r_BC).sub_(s_BC.mul_(sum_G_C)).addcmul_(q_BC, through_B[:, None]).div_(B)

    h_BC = p_BC.mul_(f_BC)
    H_B1 = h_BC.sum(1, keepdim=True)
    sample_loss_B1, ce_B1 = l_BC.gather(1, label_B1).neg_(), log_f_BC.gather(1, label_B1).neg_()
    cross_BC = l_BC.sub_(log_f_BC).sub_(log_p_BC).mul_(q_BC)
    loss = ((ce_B1 + mean_g_B1 + H_B1.log() - Z_B1.log()).sum() + cross_BC.sum()) / B
    dt_BC = h_BC.div_(H_B1).add_(f_BC).sub_(q_BC).div_(B)
    dt_BC.scatter_add_(1, label_B1, torch.full((1, 1), -1 / B).expand(B, 1))
    return Result(loss, dz_BC, dt_BC, q_BC, sample_loss_B1)


class WithGradients(torch.autograd.Function):
    """A loss whose gradients are known: they are handed on, not copied."""

    @staticmethod
    def forward(ctx, z, t, loss, dz, dt):  # type: ignore[no-untyped-def]
        ctx.gradients = dz, dt
        return loss.clone()

    @staticmethod
    def backward(ctx, scale):  # type: ignore[no-untyped-def]
        dz, dt = ctx.gradients
        ctx.gradients = None
        if scale.item() != 1:
            dz, dt = dz * scale, dt * scale
        return dz, dt, None, None, None


def update(state: State, index: Tensor, old_BC: Tensor, q_BC: Tensor, sample_loss_B1: Tensor) -> None:
    """M_i <- beta M_i + (1 - beta) norm(clip(q_i)). Overwrites ``old`` and ``q``."""
    q_BC.clamp_(CLIP, 1 - CLIP)
    state.M_NC.index_copy_(0, index, old_BC.mul_(BETA).addcmul_(q_BC, (1 - BETA) / q_BC.sum(1, keepdim=True)))
    state.loss_N[index] = sample_loss_B1.squeeze(1)


def rows_of_w(state: State, index: Tensor) -> Tensor | None:
    return None if state.w_N is None else state.w_N[index][:, None]


def eager(z: Tensor, t: Tensor, labels: Tensor, index: Tensor, state: State) -> Tensor:
    """The gradients in closed form."""
    label_B1 = labels[:, None]
    with torch.no_grad():
        old_BC = state.M_NC.index_select(0, index)
        sets = draw(label_B1, old_BC, state.cap, rows_of_w(state, index))
        result = closed_form(z, t, label_B1, sets)
        update(state, index, old_BC, result.q_BC, result.sample_loss_B1)
    loss = WithGradients.apply(z, t, result.loss, result.dz_BC, result.dt_BC)
    del result  # autograd takes over a gradient that nothing else still holds
    loss.backward()
    return loss


def joint_loss(z: Tensor, t: Tensor, labels: Tensor, log_p_BC: Tensor) -> tuple[Tensor, Tensor]:
    """L = L_CE + L_PRI + L_KL (mean over rows) for autograd, and l."""
    l_BC, log_f_BC = torch.log_softmax(z, 1), torch.log_softmax(t, 1)
    log_D_C = log_denominator(l_BC.exp().sum(0))
    log_r_BC = torch.log_softmax(log_p_BC + l_BC - log_D_C, 1)
    prior = (log_r_BC.exp() * (log_r_BC - l_BC)).sum()
    target_BC = l_BC.detach()
    estep = (target_BC.exp() * (target_BC - torch.log_softmax(log_f_BC + log_p_BC, 1))).sum()
    return functional.nll_loss(log_f_BC, labels) + (prior + estep) / len(z), target_BC


def averaged(old_BC: Tensor, l_BC: Tensor) -> Tensor:
    """beta M_i + (1 - beta) norm(clip(q_i))."""
    q_BC = l_BC.exp().clamp(CLIP, 1 - CLIP)
    return BETA * old_BC + (1 - BETA) / q_BC.sum(1, keepdim=True) * q_BC


def drawn_loss(
    z: Tensor, t: Tensor, labels: Tensor, old_BC: Tensor, cap: int | None, w_B1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws and loss for autograd, the new rows of the table and -log q_i[y_i]."""
    with torch.no_grad():
        sets = draw(labels[:, None], old_BC, cap, w_B1)
        log_p_BC = torch.where(sets.member_BC > 0, -sets.size_B1.log(), LOG_FLOOR)
    loss, l_BC = joint_loss(z, t, labels, log_p_BC)
    with torch.no_grad():
        return loss, averaged(old_BC, l_BC), -l_BC.gather(1, labels[:, None]).squeeze(1)


def autograd(z: Tensor, t: Tensor, labels: Tensor, index: Tensor, state: State) -> Tensor:
    """As one would first write it."""
    old_BC = state.M_NC[index]
    loss, state.M_NC[index], state.loss_N[index] = drawn_loss(z, t, labels, old_BC, state.cap, rows_of_w(state, index))
    loss.backward()
    return loss


@functools.cache
def compiled_drawn_loss() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(drawn_loss, dynamic=False)


def closed_step(z: Tensor, t: Tensor, label_B1: Tensor, old_BC: Tensor, sets: Sets) -> tuple[Result, Tensor]:
    """The terms of given candidate sets with their gradients, and the new rows of the table."""
    result = closed_form(z, t, label_B1, sets)
    q_BC = result.q_BC.clamp(CLIP, 1 - CLIP)
    return result, BETA * old_BC + (1 - BETA) / q_BC.sum(1, keepdim=True) * q_BC


@functools.cache
def compiled_closed_step() -> Callable[..., tuple[Result, Tensor]]:
    return torch.compile(closed_step, dynamic=False)


def compiled(z: Tensor, t: Tensor, labels: Tensor, index: Tensor, state: State) -> Tensor:
    """The draws stay eager beyond few classes: compiled, they are slower (random numbers, sorts)."""
    label_B1 = labels[:, None]
    old_BC = state.M_NC.index_select(0, index)
    w_B1 = rows_of_w(state, index)
    if z.shape[1] <= FEW:
        loss, new_BC, state.loss_N[index] = compiled_drawn_loss()(z, t, labels, old_BC, state.cap, w_B1)
        state.M_NC.index_copy_(0, index, new_BC)
    else:
        with torch.no_grad():
            sets = draw(label_B1, old_BC, state.cap, w_B1)
            result, new_BC = compiled_closed_step()(z, t, label_B1, old_BC, sets)
            state.M_NC.index_copy_(0, index, new_BC)
            state.loss_N[index] = result.sample_loss_B1.squeeze(1)
        loss = WithGradients.apply(z, t, result.loss, result.dz_BC, result.dt_BC)
        del result
    loss.backward()
    return loss


def loop_log_prior(labels: Tensor, old_BC: Tensor, cap: int | None, w_B1: Tensor | None) -> Tensor:
    """log p_i, one row after the other: a list of candidates, the free ones by ``numpy.random.choice``."""
    B, C = old_BC.shape
    cover_B = torch.multinomial(old_BC * old_BC, 1).squeeze(1)
    prior_BC = torch.full((B, C), FLOOR)
    for i in range(B):
        candidates = list({int(labels[i]), int(cover_B[i])})
        free = np.setdiff1d(np.arange(C), candidates)
        if w_B1 is None:
            most = C - 3 if cap is None else min(C - 3, cap - 1)
            k = np.random.randint(0, max(most, 0) + 1)
        else:
            k = round(float(w_B1[i]) * (len(free) if cap is None else min(len(free), cap)))
        candidates += list(np.random.choice(free, k, replace=False))
        prior_BC[i, candidates] = 1 / len(candidates)
    return prior_BC.log()


def loop(z: Tensor, t: Tensor, labels: Tensor, index: Tensor, state: State) -> Tensor:
    old_BC = state.M_NC[index]
    loss, l_BC = joint_loss(z, t, labels, loop_log_prior(labels, old_BC, state.cap, rows_of_w(state, index)))
    state.M_NC[index] = averaged(old_BC, l_BC)
    state.loss_N[index] = -l_BC.gather(1, labels[:, None]).squeeze(1)
    loss.backward()
    return loss


# Are they right?


def reference_step(z: Tensor, t: Tensor, labels: Tensor, member_BC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients in z and t, of the reference kernels in float64."""
    z, t = (x.detach().double().requires_grad_() for x in (z, t))
    l_BC = torch.log_softmax(z, 1)
    log_p_BC = torch.where(member_BC, -member_BC.sum(1, keepdim=True).double().log(), LOG_FLOOR)
    terms = row_terms(
        l_BC,
        t[:, None],
        labels,
        log_p_BC,
        log_denominator(l_BC.exp().sum(0)),
        direction="y->x",
        prior_kl="reverse",
        estep="normalised",
    )
    loss = (terms.ce + terms.prior + terms.estep).mean()
    return loss, *torch.autograd.grad(loss, (z, t))


def members(sets: Sets) -> Tensor:
    """The sets as a table of True and False."""
    # Room for the ties of ``draw``.
    assert (sets.member_BC.sum(1, keepdim=True) != sets.size_B1).float().mean() < 1e-4
    return sets.member_BC.bool()


def check_terms(B: int, C: int, w: float | None) -> float:
    """The largest difference from the reference for the same sets: of the loss (relative), of B dz and B dt."""
    z, t, old_BC = 3 * torch.randn(B, C), 3 * torch.randn(B, C), torch.rand(B, C)
    labels = torch.randint(0, C, (B,))
    w_B1 = None if w is None else torch.full((B, 1), w)
    sets = draw(labels[:, None], old_BC, cap_of(C), w_B1)
    result, new_BC = closed_step(z, t, labels[:, None], old_BC, sets)
    torch.testing.assert_close(new_BC, averaged(old_BC, torch.log_softmax(z, 1)))
    loss, dz, dt = reference_step(z, t, labels, members(sets))
    gaps = (result.loss / loss.detach() - 1, B * (result.dz_BC - dz), B * (result.dt_BC - dt))
    return max(float(gap.abs().max()) for gap in gaps)


def check_draws(C: int, cap: int | None, draws: int = 200_000) -> float:
    """The largest deviation, in standard errors, of how often a class is in a set."""
    table_C = torch.rand(C) + 0.1
    old_BC = table_C.expand(draws, C)
    label_B1 = torch.zeros(draws, 1, dtype=torch.int64)
    weight_C = table_C**2 / (table_C**2).sum()
    w_B1 = torch.full((draws, 1), 0.5)
    sets = draw(label_B1, old_BC, cap, w_B1)
    # P(j in S) = P(c = j) + P(c = 0) k/(C-1) + P(c other) k/(C-2), with k of each of the two cases.
    alone, pair = (float(torch.tensor(0.5 * min(n, cap or n)).round()) / n for n in (C - 1, C - 2))
    chance_C = (weight_C + weight_C[0] * alone + (1 - weight_C - weight_C[0]) * pair)[1:]
    seen_C = members(sets).float().mean(0)[1:]
    return float(((seen_C - chance_C) / (chance_C * (1 - chance_C) / draws).sqrt()).abs().max())


def check_steps(B: int, C: int) -> float:
    """The largest difference of a whole step from ``GNLObjective``'s: of the loss, B dz, B dt and the new table.

    With w = 0 and a table of one-hot rows the sets are {y_i, c_i} for certain, so that all must agree.
    """
    z, t = 3 * torch.randn(B, C), 3 * torch.randn(B, C)
    labels, index = torch.randint(0, C, (B,)), torch.randperm(4 * B)[:B]
    table_NC = functional.one_hot(torch.randint(0, C, (4 * B,)), C).float()
    objective = GNLObjective(4 * B, C, backend="reference", warmup_epochs=0)
    objective.M_NC.copy_(table_NC)

    def run(step: Callable[[Tensor, Tensor], Tensor], table: Callable[[], Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (z, t)]
        loss = step(*leaves).detach()
        return [loss, B * leaves[0].grad, B * leaves[1].grad, table()]

    def reference(z: Tensor, t: Tensor) -> Tensor:
        loss = objective(z, t, labels, index).loss
        loss.backward()
        return loss

    wanted = run(reference, lambda: objective.M_NC)
    worst = 0.0
    for step in (eager, autograd, compiled, loop):
        state = fresh_state(4 * B, C)
        state.M_NC, state.w_N = table_NC.clone(), torch.zeros(4 * B)
        given = run(lambda z, t: step(z, t, labels, index, state), lambda: state.M_NC)  # noqa: B023
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(given, wanted, strict=True)))
    return worst


def main() -> None:
    for B, C in ((128, 10), (128, 100), (64, 300)):
        gap = check_steps(B, C)
        print(f"({B}, {C}): whole steps differ from the objective's by at most {gap:.1e}, wanted 5e-5")
        assert gap < 5e-5
    for B, C in ((128, 2), (128, 3), (128, 10), (128, 100), (256, 101), (1024, 1000)):
        gap = max(check_terms(B, C, w) for w in (None, 0.0, 0.4, 1.0))
        print(f"({B}, {C}): differs from the reference by at most {gap:.1e}, wanted 1e-5")
        assert gap < 1e-5
    for C, cap in ((4, None), (10, None), (50, None), (300, 20)):
        errors = check_draws(C, cap)
        print(f"{C} classes: draws deviate by at most {errors:.1f} standard errors, wanted 5")
        assert errors < 5


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
