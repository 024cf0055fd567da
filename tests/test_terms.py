"""The loss terms against a second derivation in plain probabilities, and their closed-form gradients."""

import itertools

import numpy as np
import pytest
import torch

from fastgnl.kernels.closed_form import grad_t, grad_z, prior_parts
from fastgnl.kernels.terms import log_denominator, row_terms

DIRECTIONS = ("y->x", "x->y")
PRIORS = ("reverse", "forward", "ce")


def random_prior(B, C, seed=0):
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(B, C, generator=g) < 0.5
    member[torch.arange(B), torch.randint(C, (B,), generator=g)] = True
    return (member / member.sum(1, keepdim=True)).clamp(min=1e-9).log().double()


def by_probabilities(z, t, y, p, D, direction, prior_kl, estep):
    """METHOD section 4 with numpy and no logarithm tricks; means over rows."""
    q = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    f = np.exp(t) / np.exp(t).sum(1, keepdims=True)
    ce = -np.log(f[np.arange(len(y)), y])
    likelihood = q / D
    r = p * likelihood / (p * likelihood).sum(1, keepdims=True)
    prior = {
        "reverse": (r * np.log(r / q)).sum(1),
        "forward": (q * np.log(q / r)).sum(1),
        "ce": -(p * np.log(q)).sum(1),
    }[prior_kl]
    target = f * p if direction == "y->x" else f * (p * likelihood).sum(1, keepdims=True)
    if estep == "normalised":
        target = target / target.sum(1, keepdims=True)
    return ce.mean(), prior.mean(), (q * np.log(q / target)).sum(1).mean()


@pytest.mark.parametrize(
    ("direction", "prior_kl", "estep"), list(itertools.product(DIRECTIONS, PRIORS, ("normalised", "literal")))
)
def test_terms_equal_their_formulas(make_batch, direction, prior_kl, estep):
    b = make_batch()
    log_p = random_prior(16, 5)
    l = torch.log_softmax(b.z, 1)
    D = l.exp().sum(0)
    terms = row_terms(
        l, b.t[:, None], b.labels, log_p, log_denominator(D), direction=direction, prior_kl=prior_kl, estep=estep
    )
    z, t, p, D = (v.detach().numpy() for v in (b.z, b.t, log_p.exp(), D))
    expected = by_probabilities(z, t, b.labels.numpy(), p, D, direction, prior_kl, estep)
    np.testing.assert_allclose([float(term.detach().mean()) for term in terms], expected, rtol=1e-10)


def test_terms_of_k_draws_are_means_over_them(make_batch):
    b, other = make_batch(), make_batch(seed=1)
    options = {"direction": "y->x", "prior_kl": "reverse", "estep": "normalised"}
    l, log_p, log_D = torch.log_softmax(b.z, 1), random_prior(16, 5), torch.zeros(5)
    both = row_terms(l, torch.stack([b.t, other.t], 1), b.labels, log_p, log_D, **options)
    each = [row_terms(l, t[:, None], b.labels, log_p, log_D, **options) for t in (b.t, other.t)]
    for name in ("ce", "prior", "estep"):
        torch.testing.assert_close(getattr(both, name), (getattr(each[0], name) + getattr(each[1], name)) / 2)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("prior_kl", PRIORS)
@pytest.mark.parametrize("denominator", ["batch", "partial", "detached"])
@pytest.mark.parametrize("shape", [(16, 5), (1, 2), (64, 30)])
def test_closed_form_gradients_equal_autograd(make_batch, direction, prior_kl, denominator, shape):
    """float64, to 1e-9. "partial" is a denominator of which the live batch is one part."""
    B, C = shape
    b = make_batch(B, C, N=max(B, 40))
    log_p = random_prior(B, C)
    other = torch.rand(C, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * B
    l = torch.log_softmax(b.z, 1)
    live = l.exp().sum(0)
    D = {"batch": live, "partial": live + other, "detached": other}[denominator]
    log_D = log_denominator(D)
    terms = row_terms(
        l, b.t[:, None], b.labels, log_p, log_D, direction=direction, prior_kl=prior_kl, estep="normalised"
    )
    (sum(terms).sum() / B).backward()

    with torch.no_grad():
        parts = prior_parts(l, log_p, log_D, prior_kl)
        through = None if denominator == "detached" else parts.through_D_BC.sum(0)
        dz = grad_z(l, log_D, parts, through) / B
        dt = grad_t(l, b.t, b.labels, log_p, direction) / B
    torch.testing.assert_close(dz, b.z.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dt, b.t.grad, rtol=1e-9, atol=1e-9)


def test_section_5_as_printed(make_batch):
    """The reverse KL's gradient spelled as METHOD writes it, with 1/B inside G."""
    b = make_batch()
    B, log_p = 16, random_prior(16, 5)
    q = torch.softmax(b.z.detach(), 1)
    l, D = q.log(), q.sum(0)
    r = torch.softmax(log_p + l - D.log(), 1)
    G = r * (r.log() - l - (r * (r.log() - l)).sum(1, keepdim=True)) / B
    A = G - q / D * G.sum(0) - r / B
    expected = A - q * A.sum(1, keepdim=True)
    parts = prior_parts(l, log_p, D.log(), "reverse")
    actual = grad_z(l, D.log(), parts, parts.through_D_BC.sum(0)) / B
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    detached = grad_z(l, D.log(), parts, None) / B
    torch.testing.assert_close(detached, G + (q - r) / B, rtol=1e-12, atol=1e-14)


def test_the_estep_target_is_not_moved_by_z(make_batch):
    """sg(q): L_KL alone gives z no gradient (normalised), and the literal x->y reading does."""
    for estep, moves in (("normalised", False), ("literal", True)):
        b = make_batch()
        l = torch.log_softmax(b.z, 1)
        terms = row_terms(
            l,
            b.t[:, None],
            b.labels,
            random_prior(16, 5),
            log_denominator(l.exp().sum(0)),
            direction="x->y",
            prior_kl="reverse",
            estep=estep,
        )
        (grad,) = torch.autograd.grad(terms.estep.sum(), b.z, allow_unused=True)
        assert (grad is not None and bool(grad.abs().sum() > 0)) == moves
