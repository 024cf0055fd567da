"""GNLObjective: what a step computes, what it keeps, what it refuses."""

import itertools

import pytest
import torch

from fastgnl import GNLObjective, mixture
from fastgnl import objective as objective_module
from fastgnl.config import GNLConfig
from fastgnl.errors import InputError
from fastgnl.kernels import candidates, philox
from fastgnl.kernels.terms import log_denominator, row_terms
from fastgnl.mixture import noise_probability


def step(objective, b, **options):
    return objective(b.z, b.t, b.labels, b.index, **options)


def test_loss_is_the_sum_of_the_terms_and_drives_both_heads(make_batch):
    b = make_batch()
    terms = step(GNLObjective(40, 5), b)
    torch.testing.assert_close(terms.loss.detach(), terms.ce + terms.prior + terms.estep)
    terms.loss.backward()
    assert b.z.grad.abs().sum() > 0
    assert b.t.grad.abs().sum() > 0
    torch.testing.assert_close(terms.sample_loss, -torch.log_softmax(b.z, 1)[torch.arange(16), b.labels].detach())
    assert terms.covered is None
    assert not terms.sample_loss.requires_grad


@pytest.mark.parametrize("names", [("ce",), ("prior",), ("ce", "prior"), ("ce", "estep"), ("prior", "estep")])
def test_terms_can_be_switched_off(make_batch, names):
    terms = step(GNLObjective(40, 5, terms=names), make_batch())
    torch.testing.assert_close(terms.loss.detach(), sum(getattr(terms, name) for name in names))


def certain_sets(**options):
    """An objective whose candidate sets hold every class, so that its prior is known: p = 1/5."""
    objective = GNLObjective(40, 5, warmup_epochs=0, coverage="none", **options)
    objective.w_N.fill_(1.0)
    return objective


def formula(b, D):
    """The loss of a batch with p = 1/5 and the denominator D."""
    l = torch.log_softmax(b.z, 1)
    log_p = torch.full((16, 5), 0.2, dtype=torch.float64).log()
    options = {"direction": "y->x", "prior_kl": "reverse", "estep": "normalised"}
    return sum(row_terms(l, b.t[:, None], b.labels, log_p, log_denominator(D), **options)).mean()


def test_batch_denominator_is_the_column_sum(make_batch):
    b = make_batch()
    terms = step(certain_sets(), b)
    assert (terms.set_size == 5).all()
    expected = formula(b, torch.softmax(b.z, 1).sum(0))
    torch.testing.assert_close(terms.loss, expected, rtol=1e-6, atol=1e-6)
    (grad, expected_grad) = (torch.autograd.grad(loss, b.z)[0] for loss in (terms.loss, expected))
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-8)


OPTIONS = [
    {"direction": "x->y"},
    {"prior_kl": "forward"},
    {"prior_kl": "ce"},
    {"estep": "literal"},
    {"direction": "x->y", "estep": "literal"},
    {"k_max": 3},
    {"tau": 0.25},
    {"prior_form": "additive"},
    {"coverage": "argmax"},
    {"coverage": "none"},
    {"uncertainty": "none"},
    {"seed": 5},
]


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
@pytest.mark.parametrize("warmup_epochs", [0, 1])
def test_every_option_reaches_the_formulas(make_batch, options, warmup_epochs):
    """A step against the functions of ``kernels`` put together by hand, and against the step without the option."""
    b = make_batch(B=32, C=9, N=40)
    objective = GNLObjective(40, 9, warmup_epochs=warmup_epochs, **options)
    table = torch.rand(40, 9, generator=torch.Generator().manual_seed(5))
    objective.M_NC.copy_(table / table.sum(1, keepdim=True))
    objective.w_N.copy_(torch.rand(40, generator=torch.Generator().manual_seed(6)))
    old, config = objective.M_NC.clone(), objective.config
    terms = step(objective, b)

    words = philox.words(config.seed, b.index, 9, 0, [philox.COVERAGE, philox.FREE, philox.WARMUP])
    cover = candidates.coverage_label(old[b.index], words[0], config.tau, config.coverage)
    sets = candidates.candidate_sets(
        b.labels,
        [] if config.coverage == "none" else [cover],
        words[1],
        words[2, :, 0],
        None if warmup_epochs else objective.w_N[b.index],
        k_max=config.k_max if isinstance(config.k_max, int) else None,
        random_labels=config.uncertainty != "none",
        form=config.prior_form,
    )
    l = torch.log_softmax(b.z, 1)
    chosen = {"direction": config.direction, "prior_kl": config.prior_kl, "estep": config.estep}
    log_D = log_denominator(l.exp().sum(0))
    expected = row_terms(l, b.t[:, None], b.labels, sets.log_prior_BC, log_D, **chosen)
    torch.testing.assert_close(terms.loss, sum(expected).mean())
    assert torch.equal(terms.set_size, sets.member_BC.sum(1))
    assert config == GNLConfig(num_samples=40, num_classes=9, warmup_epochs=warmup_epochs, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_makes_a_difference(make_batch, options):
    losses = []
    for chosen in ({}, options):
        objective = GNLObjective(400, 9, warmup_epochs=0, **chosen)
        table = torch.rand(400, 9, generator=torch.Generator().manual_seed(5))
        objective.M_NC.copy_(table / table.sum(1, keepdim=True))
        objective.w_N.fill_(0.6)
        losses.append(step(objective, make_batch(B=400, C=9, N=400)).loss)
    assert (losses[0] - losses[1]).abs() > 1e-4


@pytest.mark.parametrize(("C", "cap"), [(100, None), (101, 10)])
def test_random_candidates_are_capped_beyond_100_classes(C, cap):
    objective = GNLObjective(30, C, warmup_epochs=0, coverage="none")
    objective.w_N.fill_(1.0)
    zeros = torch.zeros(30, C)
    terms = objective(zeros, zeros, torch.arange(30), torch.arange(30))
    assert (terms.set_size == 1 + (cap or C - 1)).all()


@pytest.mark.parametrize(("C", "settled"), [(100, ("batch", None, None, "drawn")), (101, ("batch", None, 10, "given"))])
def test_what_auto_settles_to(C, settled):
    """By the number of classes: docs/large-label-sets.md."""
    config = GNLConfig(num_samples=2, num_classes=C)
    assert (config.denominator, config.mix, config.k_max, config.warmup_sets) == settled
    for denominator in ("bank", "dataset"):
        assert GNLConfig(num_samples=2, num_classes=C, denominator=denominator).mix == (0.25 if C > 100 else None)
    own = GNLConfig(num_samples=2, num_classes=C, denominator="dataset", mix=None, k_max=None, warmup_sets="drawn")
    assert (own.denominator, own.mix, own.k_max, own.warmup_sets) == ("dataset", None, None, "drawn")


def test_the_moving_average(make_batch):
    objective, b = GNLObjective(40, 5, beta=0.7), make_batch(scale=8.0)
    assert torch.softmax(b.z, 1).min() < 1e-6  # so that the clip is at work
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[b.index] = False
    expected = torch.full((16, 5), 0.2, dtype=torch.float64)
    for _ in range(3):
        step(objective, b)
        q = torch.softmax(b.z.detach(), 1).clamp(1e-4, 1 - 1e-4)
        expected = 0.7 * expected + 0.3 * q / q.sum(1, keepdim=True)
    torch.testing.assert_close(objective.M_NC[b.index].double(), expected, rtol=1e-5, atol=1e-9)
    assert (objective.M_NC[untouched] == 0.2).all()
    assert int(objective.step) == 3


def test_the_coverage_label_is_drawn_before_the_table_is_updated(make_batch):
    """beta = 0 with logits that are certain: a coverage label after the update would always be the argmax."""
    objective = GNLObjective(2000, 8, beta=0.0, uncertainty="none")
    z = torch.zeros(2000, 8)
    z[:, 5] = 1e4
    labels, index = torch.zeros(2000, dtype=torch.int64), torch.arange(2000)
    first = objective(z, z, labels, index, clean=torch.full((2000,), 5))
    second = objective(z, z, labels, index, clean=torch.full((2000,), 5))
    assert 0.05 < first.covered.double().mean() < 0.25  # one of eight equal classes
    assert second.covered.double().mean() > 0.999


def test_window_denominator_adds_the_last_batches_detached(make_batch):
    objective, plain = certain_sets(denominator="window", window=3), certain_sets()
    batches = [make_batch(seed=s) for s in range(5)]
    for i, b in enumerate(batches):
        older = sum((torch.softmax(o.z.detach(), 1).sum(0) for o in batches[max(0, i - 2) : i]), torch.zeros(5))
        expected = formula(b, torch.softmax(b.z, 1).sum(0) + older)
        actual = step(objective, b).loss
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        (grad, expected_grad) = (torch.autograd.grad(loss, b.z)[0] for loss in (actual, expected))
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-8)
        if i > 0:
            assert (actual - step(plain, b).loss).abs() > 1e-4


@pytest.mark.parametrize("mix", [None, 0.3])
def test_dataset_denominator_is_the_table_with_the_live_rows_in_it(make_batch, mix):
    """Its other rows weigh so much that an average class of 40 samples counts for ``mix``."""
    weight = 1 if mix is None else mix * 5 / 40
    objective, plain = certain_sets(denominator="dataset", mix=mix), certain_sets()
    for s in range(4):
        b = make_batch(seed=s)
        rest = torch.ones(40, dtype=torch.bool)
        rest[b.index] = False
        expected = formula(b, weight * objective.M_NC[rest].double().sum(0) + torch.softmax(b.z, 1).sum(0))
        actual = step(objective, b).loss
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        (grad, expected_grad) = (torch.autograd.grad(loss, b.z)[0] for loss in (actual, expected))
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(objective.column_sum_C, objective.M_NC.sum(0), rtol=1e-5, atol=1e-5)
        assert (actual - step(plain, b).loss).abs() > 1e-4


def test_w_appears_after_warm_up_from_the_online_losses(make_batch):
    objective = GNLObjective(64, 5, warmup_epochs=2)
    b = make_batch(64, 5, N=64)
    for epoch in range(4):
        assert objective.in_warmup == (epoch < 2)
        assert bool(objective.w_N.any()) == (epoch >= 2)
        terms = step(objective, b)
        objective.end_epoch()
    expected = torch.zeros(64)
    expected[b.index] = noise_probability(terms.sample_loss.float())
    torch.testing.assert_close(objective.w_N, expected)


def test_w_from_given_losses(make_batch):
    objective = GNLObjective(40, 5, warmup_epochs=0, loss_source="eval")
    step(objective, make_batch())
    losses = torch.rand(40, generator=torch.Generator().manual_seed(0)).square()
    objective.end_epoch(losses)
    torch.testing.assert_close(objective.w_N, noise_probability(losses))
    assert objective.wants_losses
    with pytest.raises(InputError, match="given no losses, wanted them"):
        objective.end_epoch()
    with pytest.raises(InputError, match="given losses, wanted none"):
        GNLObjective(40, 5).end_epoch(losses)
    assert not GNLObjective(40, 5, warmup_epochs=2, loss_source="eval").wants_losses
    with pytest.raises(InputError, match=r"losses has shape \(39,\), wanted \(40,\)"):
        objective.end_epoch(losses[:39])


def test_random_w_is_uniform_and_new_each_epoch():
    objective = GNLObjective(5000, 5, warmup_epochs=0, uncertainty="random")
    objective.end_epoch()
    first = objective.w_N.clone()
    objective.end_epoch()
    assert abs(float(first.mean()) - 0.5) < 0.03
    assert first.min() >= 0
    assert first.max() <= 1
    assert (first == objective.w_N).float().mean() < 0.01


def test_state_dict_restores_everything(make_batch):
    """A run that is stopped and restored goes on bit for bit."""
    options = {"denominator": "window", "warmup_epochs": 1, "seed": 7}
    through, stopped = GNLObjective(40, 5, **options), GNLObjective(40, 5, **options)
    batches = [make_batch(seed=s) for s in range(8)]
    for b in batches[:5]:
        step(through, b)
        step(stopped, b)
    through.end_epoch()
    stopped.end_epoch()
    restored = GNLObjective(40, 5, **options)
    restored.load_state_dict(stopped.state_dict())
    for b in batches[5:]:
        a, c = step(through, b), step(restored, b)
        assert torch.equal(a.loss, c.loss)
        assert torch.equal(a.set_size, c.set_size)
    through.end_epoch()
    restored.end_epoch()
    for name, value in through.state_dict().items():
        assert torch.equal(value.nan_to_num(-1), restored.state_dict()[name].nan_to_num(-1)), name


def test_each_step_draws_anew(make_batch):
    b = make_batch(B=32, C=12, N=40)
    objective = GNLObjective(40, 12, beta=1.0)
    assert not torch.equal(step(objective, b).set_size, step(objective, b).set_size)


def test_the_column_sum_is_made_exact_at_the_end_of_an_epoch(make_batch):
    objective = GNLObjective(40, 5, denominator="dataset")
    step(objective, make_batch())
    objective.column_sum_C += 0.3  # what rounding would pile up
    objective.end_epoch()
    torch.testing.assert_close(objective.column_sum_C, objective.M_NC.sum(0))


def test_the_specified_constants():
    config = GNLConfig(num_samples=2, num_classes=2)
    assert (config.beta, config.tau, config.k_max, config.warmup_epochs) == (0.9, 0.5, None, 10)
    assert (config.direction, config.denominator, config.prior_kl) == ("y->x", "batch", "reverse")
    assert (config.prior_form, config.coverage, config.uncertainty) == ("set", "sample", "mixture")
    assert (config.estep, config.loss_source, config.terms) == ("normalised", "online", ("ce", "prior", "estep"))
    assert (candidates.FLOOR, objective_module.CLIP) == (1e-9, 1e-4)
    assert (mixture.MAX_ITER, mixture.TOLERANCE, mixture.VARIANCE_FLOOR) == (20, 1e-2, 5e-4)


@pytest.mark.parametrize("denominator", ["batch", "window", "dataset"])
def test_eval_mode_changes_no_state(make_batch, denominator):
    objective = GNLObjective(40, 5, denominator=denominator)
    step(objective, make_batch(seed=1))
    objective.eval()
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    step(objective, make_batch())
    for name, value in objective.state_dict().items():
        assert torch.equal(value.nan_to_num(-1), before[name].nan_to_num(-1)), name


def test_moves_with_to(make_batch):
    objective = GNLObjective(40, 5).to(torch.float64)
    assert objective.M_NC.dtype == torch.float64
    assert objective.step.dtype == torch.int64
    assert torch.isfinite(step(objective, make_batch()).loss)
    meta = GNLObjective(40, 5).to("meta")
    assert meta.M_NC.device.type == "meta"


def test_the_order_of_a_batch_does_not_matter(make_batch):
    b = make_batch()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    a = step(GNLObjective(40, 5), b)
    c = GNLObjective(40, 5)(b.z[order], b.t[order], b.labels[order], b.index[order])
    assert torch.equal(a.set_size[order], c.set_size)
    torch.testing.assert_close(a.loss, c.loss)


@pytest.mark.parametrize("seed", [0, 1])
def test_same_seed_same_sets(make_batch, seed):
    b = make_batch(B=32, C=12, N=40)
    sizes = [step(GNLObjective(40, 12, seed=seed), b).set_size for _ in range(2)]
    assert torch.equal(*sizes)
    assert not torch.equal(sizes[0], step(GNLObjective(40, 12, seed=seed + 2), b).set_size)


def hard_batch(case, B, C):
    g = torch.Generator().manual_seed(0)
    z = {
        "saturated": torch.where(torch.rand(B, C, generator=g) < 0.5, 1e4, -1e4),
        "zero": torch.zeros(B, C),
        "one class": torch.cat([torch.full((B, 1), 1e4), torch.full((B, C - 1), -1e4)], 1),
        "ordinary": torch.randn(B, C, generator=g),
    }[case]
    return z, torch.randint(C, (B,), generator=g), torch.arange(B)


@pytest.mark.parametrize("case", ["saturated", "zero", "one class", "ordinary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("B", "C"), [(1, 2), (1, 10), (8, 3), (8, 10)])
def test_numbers_stay_finite_in_hard_corners(case, dtype, B, C):
    """One-hot priors, saturated logits, low precision, B = 1, C = 2, w all 0 or all 1, a class no row gives mass."""
    options = itertools.product(
        ("y->x", "x->y"), ("reverse", "forward", "ce"), ("batch", "window", "dataset"), ("normalised", "literal")
    )
    for direction, prior_kl, denominator, estep in options:
        for w, coverage in ((None, "sample"), (0.0, "none"), (1.0, "sample")):
            objective = GNLObjective(
                B,
                C,
                direction=direction,
                prior_kl=prior_kl,
                denominator=denominator,
                estep=estep,
                coverage=coverage,
                warmup_epochs=10 if w is None else 0,
            )
            objective.w_N.fill_(w or 0.0)
            z, labels, index = hard_batch(case, B, C)
            z = z.to(dtype).requires_grad_()
            t = z.detach().flip(1).clone().requires_grad_()
            for _ in range(2):
                terms = objective(z, t, labels, index)
                terms.loss.backward()
                given = f"{direction} {prior_kl} {denominator} {estep} w={w}"
                for value in (terms.loss, terms.ce, terms.prior, terms.estep, terms.sample_loss, z.grad, t.grad):
                    assert torch.isfinite(value).all(), given
            objective.end_epoch()
            assert torch.isfinite(objective.w_N).all()
            assert torch.isfinite(objective.M_NC).all()


def test_w_all_one_puts_every_class_in_the_set_and_w_zero_none():
    for w, size in ((0.0, 1), (1.0, 6)):
        objective = GNLObjective(8, 6, warmup_epochs=0, coverage="none")
        objective.w_N.fill_(w)
        terms = objective(torch.zeros(8, 6), torch.zeros(8, 6), torch.arange(8) % 6, torch.arange(8))
        assert (terms.set_size == size).all()


BAD_OPTIONS = [
    ({"direction": "x<-y"}, "direction is 'x<-y', wanted one of 'y->x', 'x->y'"),
    ({"denominator": "epoch"}, "denominator is 'epoch', wanted one of"),
    ({"prior_kl": "both"}, "prior_kl is 'both', wanted one of"),
    ({"estep": "x"}, "estep is 'x', wanted one of"),
    ({"terms": ()}, "terms is empty, wanted at least one of"),
    ({"terms": ("ce", "kl")}, "terms is 'kl', wanted one of"),
    ({"beta": 1.5}, "beta is 1.5, wanted a number from 0 to 1"),
    ({"beta": float("nan")}, "beta is nan, wanted a number from 0 to 1"),
    ({"tau": 0.0}, "tau is 0.0, wanted a number from 0.125 to 100"),
    ({"k_max": -1}, "k_max is -1, wanted a whole number of at least 0"),
    ({"k_max": "all"}, "k_max is 'all', wanted a whole number of at least 0"),
    ({"warmup_epochs": 1.5}, "warmup_epochs is 1.5, wanted a whole number"),
    ({"coverage": "top"}, "coverage is 'top', wanted one of"),
    ({"uncertainty": "gmm"}, "uncertainty is 'gmm', wanted one of"),
    ({"prior_form": "sum"}, "prior_form is 'sum', wanted one of"),
    ({"loss_source": "test"}, "loss_source is 'test', wanted one of"),
    ({"seed": -1}, "seed is -1, wanted a whole number of at least 0"),
    ({"seed": 2**64}, r"wanted one below 2\*\*64"),
    ({"window": 0}, "window is 0, wanted a whole number of at least 1"),
    ({"speed": 9}, "GNLObjective has no option 'speed', wanted one of"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD_OPTIONS)
def test_bad_options_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        GNLObjective(40, 5, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("N", "C", "sentence"), [(0, 5, "num_samples is 0"), (9, 1, "num_classes is 1"), (9, "5", "num_classes is '5'")]
)
def test_bad_sizes_are_refused(N, C, sentence):
    with pytest.raises(InputError, match=sentence):
        GNLObjective(N, C)


def change(b, **changes):
    for name, value in changes.items():
        setattr(b, name, value)
    return b


BAD_BATCHES = [
    (lambda b: change(b, labels=b.labels + 4), "labels holds [5-8], wanted 0 to 4"),
    (lambda b: change(b, labels=b.labels - 4), "labels holds -[1-4], wanted 0 to 4"),
    (lambda b: change(b, labels=b.labels.float()), "labels is torch.float32, wanted integers"),
    (lambda b: change(b, clean=b.labels - 9), "clean holds -[5-9], wanted 0 to 4"),
    (lambda b: change(b, labels=b.labels[:-1]), r"labels has shape \(15,\), wanted \(16,\)"),
    (lambda b: change(b, index=b.index + 39), "index holds [4-7][0-9], wanted 0 to 39"),
    (lambda b: change(b, index=b.index * 0), "index names a sample twice"),
    (lambda b: change(b, z=b.z[:, :4]), r"z has shape \(16, 4\), wanted \(B, 5\)"),
    (lambda b: change(b, z=b.z[:0]), r"z has shape \(0, 5\), wanted \(B, 5\) with B >= 1"),
    (lambda b: change(b, z=b.labels[:, None].expand(16, 5)), "z is torch.int64, wanted a floating-point type"),
    (lambda b: change(b, t=b.t[:8]), r"t has shape \(8, 5\), wanted \(16, 5\)"),
    (lambda b: change(b, t=None), "t is a NoneType, wanted the noisy logits"),
    (lambda b: change(b, labels=b.labels.tolist()), "labels is a list, wanted a tensor"),
    (lambda b: change(b, t=b.t[0]), r"t has shape \(5,\), wanted \(16, 5\)"),
]


@pytest.mark.parametrize(("spoil", "sentence"), BAD_BATCHES)
def test_bad_batches_are_refused_in_one_sentence_and_change_nothing(make_batch, spoil, sentence):
    objective, b = GNLObjective(40, 5), spoil(make_batch())
    with pytest.raises(InputError, match=sentence) as error:
        step(objective, b, clean=getattr(b, "clean", None))
    assert "\n" not in str(error.value)
    assert int(objective.step) == 0
    assert (objective.M_NC == 0.2).all()
