"""DivideMix, CausalNL and InstanceGM: the parts that define each, by hand, and short trainings."""

import math

import pytest
import torch

from fastgnl.errors import InputError
from fastgnl.loader import Batch, Loader
from fastgnl.methods.base import Setting, given_loss
from fastgnl.methods.causalnl import CausalNL, CausalNLOptions
from fastgnl.methods.dividemix import DivideMix, DivideMixOptions, Mixed, confidence_penalty, sharpened, targets
from fastgnl.methods.generative import (
    ElboOptions,
    Generate,
    Generated,
    GenerativePair,
    log_normaliser,
    negative_elbo,
    reconstruction_loss,
)
from fastgnl.methods.instancegm import InstanceGM
from fastgnl.networks import MLP, SmallCNN
from fastgnl.optimise import TrainConfig
from fastgnl.samples import Samples
from fastgnl.trainer import train
from fastgnl.transition import with_transition

N, C = 24, 3
SHAPES = [(6,), (1, 8, 8)]
NO_ELBO = ElboOptions(reconstruction=0, given=0, prior=0, latent=0)


def backbones(shape):
    return [MLP(shape[0], hidden=16) if len(shape) == 1 else SmallCNN(shape[0], width=4) for _ in range(2)]


def made(method, shape, warmup=1):
    setting = Setting(N, C, epochs=2, warmup_epochs=warmup, shape=shape)
    parts = backbones(shape)
    if method is DivideMix:
        return with_transition(tuple(parts), parts[0].num_features, C, transition_input="none"), method(setting)
    return GenerativePair(parts, setting), method(setting)


def a_batch(shape, views=2):
    x, *others = (torch.randn(N, *shape) for _ in range(views))
    return Batch(x, torch.arange(N) % C, torch.arange(N), None, N, tuple(others))


# DivideMix.


def test_sharpening():
    p = torch.tensor([[0.6, 0.3, 0.1]])
    torch.testing.assert_close(sharpened(p, 0.5), torch.tensor([[0.36, 0.09, 0.01]]) / 0.46)
    torch.testing.assert_close(sharpened(p, 1.0), p)


def test_each_network_is_divided_by_the_other():
    clean_2B = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    _, labelled_2B = targets(torch.full((2, 2, 2, C), 1 / C), torch.tensor([0, 1]), clean_2B, DivideMixOptions())
    assert labelled_2B.tolist() == [[False, True], [True, False]]


def test_refined_and_guessed_by_hand():
    """One row that network 0 takes for labelled (w = 0.75, of network 1), and network 1 does not."""
    q_2VBC = torch.tensor([[[[0.6, 0.4]], [[0.2, 0.8]]], [[[0.9, 0.1]], [[0.7, 0.3]]]])
    found_2BC, labelled_2B = targets(q_2VBC, torch.tensor([0]), torch.tensor([[0.3], [0.75]]), DivideMixOptions())
    assert labelled_2B.tolist() == [[True], [False]]
    refined = 0.75 + 0.25 * 0.4
    guessed = (0.6 + 0.2 + 0.9 + 0.7) / 4
    wanted = [p**2 / (p**2 + (1 - p) ** 2) for p in (refined, guessed)]
    torch.testing.assert_close(found_2BC[:, 0, 0], torch.tensor(wanted))


def test_the_losses_of_an_epoch_divide_the_samples():
    method = DivideMix(Setting(N, C, epochs=5, warmup_epochs=2))
    assert not method.wants_losses
    method.end_epoch()
    assert method.wants_losses
    assert method.views == 1
    low, high = 0.1 + 0.01 * torch.rand(N // 2), 3 + 0.01 * torch.rand(N // 2)
    method.end_epoch(torch.stack([torch.cat([low, high]), torch.cat([high, low])]))
    assert method.wants_losses
    assert method.views == 2
    first, second = method.clean_N2.T
    assert bool((first[: N // 2] > 0.9).all() and (first[N // 2 :] < 0.1).all())
    assert bool((second[: N // 2] < 0.1).all() and (second[N // 2 :] > 0.9).all())


def test_mixing_stays_near_to_the_own_row():
    """The share of the own row is at least a half: undone with the known targets, it is what was drawn."""
    net, method = made(DivideMix, (6,), warmup=0)
    batch = a_batch((6,))
    x = torch.cat([batch.x, *batch.others])
    for _ in range(5):
        mixed = method.mixed(net, batch)
        assert net.training
        for own in mixed.x:
            assert own.shape == x.shape
            assert bool((own >= x.min(0).values - 1e-6).all() and (own <= x.max(0).values + 1e-6).all())
            # x~_i - x_i = (1 - l)(x_j - x_i): of any j, the nearest fit gives 1 - l.
            step_RRF, gone_RF = x[None] - x[:, None], own - x
            share_RR = (step_RRF * gone_RF[:, None]).sum(-1) / step_RRF.square().sum(-1).clamp(min=1e-9)
            fit_R = (share_RR[..., None] * step_RRF - gone_RF[:, None]).norm(dim=-1).min(1)
            assert float(fit_R.values.max()) < 1e-4
            assert float(share_RR.gather(1, fit_R.indices[:, None]).max()) <= 0.5 + 1e-5
        torch.testing.assert_close(mixed.target_2RC.sum(-1), torch.ones(2, 2 * N))
        assert not torch.equal(mixed.x[0], mixed.x[1])


def test_lambda_u_rises_in_a_line():
    method = DivideMix(Setting(N, C, epochs=100, warmup_epochs=10), DivideMixOptions(unlabelled=25))
    found = []
    for now in (5, 10, 18, 26, 50):
        method.now = now
        found.append(method.weight)
    assert found == [0, 0, 12.5, 25, 25]


@pytest.mark.parametrize("labelled", [[1, 1], [0, 0], [1, 0]])
def test_mixmatch_loss_by_hand(labelled):
    """Of one network's two rows; a batch without rows of a kind has no loss of that kind."""
    method = DivideMix(Setting(N, 2, epochs=100, warmup_epochs=0), DivideMixOptions(unlabelled=25))
    method.now = 16
    q = torch.tensor([[0.8, 0.2], [0.4, 0.6]])
    target = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    nothing = torch.zeros(0)
    mixed = Mixed((nothing, nothing), target.expand(2, 2, 2), torch.tensor(labelled).bool().expand(2, 2), nothing)
    ce = [-math.log(0.8), -0.5 * (math.log(0.4) + math.log(0.6))]
    error = [0.2**2, 0.1**2]
    taught = [v for v, chosen in zip(ce, labelled, strict=True) if chosen]
    guessed = [v for v, chosen in zip(error, labelled, strict=True) if not chosen]
    uniform = 0.5 * (math.log(0.5 / 0.6) + math.log(0.5 / 0.4))
    wanted = sum(taught) / max(len(taught), 1) + 25 * sum(guessed) / max(len(guessed), 1) + uniform
    assert float(method.mixmatch(q.log().expand(2, 2, 2), mixed)) == pytest.approx(2 * wanted, rel=1e-5)


def test_confidence_penalty_in_the_warmup():
    torch.testing.assert_close(confidence_penalty(torch.zeros(1, 4)), torch.tensor([-math.log(4)]))
    z = torch.randn(2, N, C)
    batch = a_batch((6,), views=1)
    setting = Setting(N, C, epochs=2, warmup_epochs=1)
    plain = DivideMix(setting, DivideMixOptions(confidence=0)).warmup_terms(z, batch).loss
    torch.testing.assert_close(plain, given_loss(z, batch.labels).sum(0).mean())
    whole = DivideMix(setting).warmup_terms(z, batch).loss
    torch.testing.assert_close(whole, plain + confidence_penalty(z).sum(0).mean())


# The generative model.


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.48, 0.4905, 0.495, 0.5, 0.5095, 0.9])
def test_log_normaliser_is_that_of_the_integral(rate):
    x = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    wanted = -torch.trapezoid(rate**x * (1 - rate) ** (1 - x), x).log()
    assert float(log_normaliser(torch.tensor(rate, dtype=torch.float64))) == pytest.approx(float(wanted), abs=3e-10)


def test_continuous_bernoulli_is_torchs():
    x_hat, x = torch.randn(50), torch.randn(50)
    wanted = -torch.distributions.ContinuousBernoulli(logits=x_hat).log_prob(x.sigmoid()).mean()
    torch.testing.assert_close(reconstruction_loss(x_hat, x, "continuous bernoulli"), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sure_reconstruction_in_half_precision_is_finite(dtype):
    x_hat = torch.tensor([-12.0, 7.0, 12.0], dtype=dtype).requires_grad_()
    loss = reconstruction_loss(x_hat, torch.zeros(3), "continuous bernoulli")
    loss.backward()
    assert bool(loss.isfinite())
    assert bool(x_hat.grad.isfinite().all())


def one_output(**parts):
    plain = {name: torch.zeros(2, 4, C) for name in ("z_raw", "x_hat", "mean", "log_var", "t")}
    return Generated(None, **(plain | parts))


def test_terms_of_the_bound_by_hand():
    """Each alone, and so twice that of one network."""
    x, labels = torch.zeros(4, C), torch.zeros(4, dtype=torch.int64)

    def bound(outputs, **weight):
        options = ElboOptions(**({"reconstruction": 0.0, "given": 0.0, "prior": 0.0, "latent": 0.0} | weight))
        return float(negative_elbo(outputs, x, labels, "gaussian", options))

    mean, log_var = torch.full((2, 4, 1), 2.0), torch.full((2, 4, 1), math.log(3))
    latent = one_output(mean=mean, log_var=log_var)
    assert bound(latent, latent=1.0) == pytest.approx(2 * 0.5 * (4 + 3 - math.log(3) - 1))
    assert bound(one_output(), latent=1.0) == 0
    assert bound(one_output(), prior=1.0) == pytest.approx(0, abs=1e-6)
    sure = one_output(z_raw=torch.tensor([50.0, 0, 0]).expand(2, 4, C))
    assert bound(sure, prior=1.0) == pytest.approx(2 * math.log(C))
    assert bound(one_output(), given=1.0) == pytest.approx(2 * math.log(C))
    assert bound(one_output(x_hat=torch.full((2, 4, C), 0.5)), reconstruction=1.0) == pytest.approx(2 * 0.25)


@pytest.mark.parametrize("shape", [(6,), (1, 8, 8), (3, 32, 32), (3, 28, 20), (3, 64, 64)])
def test_generative_pair_rebuilds_any_shape_and_is_a_pair_else(shape):
    net = GenerativePair(backbones(shape), Setting(N, C, 2, 1, shape=shape))
    x = torch.randn(4, *shape)
    given = net(Generate((x[:3], x[:3]), x))
    assert given.z.shape == (2, 3, C)
    assert given.x_hat.shape == (2, *x.shape)
    assert given.mean.shape == given.log_var.shape == (2, 4, 25)
    assert given.t.shape == (2, 4, C)
    z, t = net.eval()(x)
    assert z.shape == (2, 4, C)
    assert t is None
    torch.testing.assert_close(net.predict_proba(x), z.softmax(-1).mean(0))


@pytest.mark.parametrize("shape", [(), (28, 28)])
def test_a_shape_that_cannot_be_rebuilt(shape):
    with pytest.raises(InputError, match=r"shape is .* wanted that of the inputs"):
        GenerativePair(backbones((6,)), Setting(N, C, 2, 1, shape=shape))


def test_causalnl_teaches_what_is_small_for_the_other():
    """Without the bound: a network's loss has no gradient at rows that are large for the other."""
    setting = Setting(4, 2, epochs=40, warmup_epochs=0, noise_rate=0.5, shape=(6,))
    method = CausalNL(setting, CausalNLOptions(elbo=NO_ELBO))
    method.now = 20
    z = torch.tensor([[[4.0, 0], [3, 0], [0, 3], [0, 4]], [[0, 4.0], [0, 3], [3, 0], [4, 0]]]).requires_grad_()
    zeros = torch.zeros(2, 4, 1)
    batch = Batch(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), torch.arange(4), None, 4)
    terms = method.run(lambda *_: Generated(None, z, zeros, zeros, zeros, torch.zeros(2, 4, 2)), None, batch)
    (grad,) = torch.autograd.grad(terms.loss, z)
    assert (grad.abs().sum(-1) > 0).tolist() == [[False, False, True, True], [True, True, False, False]]
    wanted = (given_loss(z[0, 2:], batch.labels[2:]) + given_loss(z[1, :2], batch.labels[:2])).mean()
    torch.testing.assert_close(terms.loss, wanted)


def test_instancegm_warms_up_by_cross_entropy_alone():
    net, method = made(InstanceGM, (6,))
    batch = a_batch((6,), views=1)
    said = []
    terms = method.run(lambda x, index: said.append(net(x, index)) or said[-1], net, batch)
    torch.testing.assert_close(terms.loss, given_loss(said[0][0], batch.labels).sum(0).mean())
    terms.loss.backward()
    assert all(not weight.grad.any() for weight in net.vaes.parameters())


def test_instancegm_adds_the_bound_after_it():
    """In place of the network, what it might say: the loss is DivideMix's and that bound."""
    net, method = made(InstanceGM, (6,), warmup=0)
    batch = a_batch((6,))
    said, mixes = [], []
    mixed = method.mixed
    method.mixed = lambda *given: mixes.append(mixed(*given)) or mixes[-1]
    terms = method.run(lambda asked, index: said.append(net(asked, index)) or said[-1], net, batch)
    bound = negative_elbo(said[0], batch.x, batch.labels, "continuous bernoulli", method.elbo)
    assert float(bound.detach()) > 0
    torch.testing.assert_close(terms.loss, method.mixmatch(said[0].z, mixes[0]) + bound)


# All of them, in the trainer.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", [DivideMix, CausalNL, InstanceGM])
@pytest.mark.parametrize("warmup", [0, 1])
def test_every_weight_has_a_gradient(method, shape, warmup):
    """DDP waits for each in every step."""
    net, objective = made(method, shape, warmup)
    calls = []

    def engine(x, index):
        calls.append(x)
        return net(x, index)

    objective.run(engine, net, a_batch(shape, objective.views)).loss.backward()
    assert len(calls) == 1
    assert [name for name, weight in net.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", [DivideMix, CausalNL, InstanceGM])
def test_two_epochs(method, shape):
    net, objective = made(method, shape)
    samples = Samples(torch.randn(N, *shape), torch.arange(N) % C)
    history = train(net, objective, Loader(samples, 8), TrainConfig(epochs=2), samples)
    assert len(history) == 2
    assert all(math.isfinite(epoch.loss) and not epoch.skipped for epoch in history)
    assert objective.now == 2


@pytest.mark.parametrize("method", [DivideMix, InstanceGM])
def test_the_division_comes_back(method):
    """From what two ranks have kept, each of its own rows."""
    setting = Setting(N, C, 2, 1, shape=(6,))
    kept = []
    for ids in torch.arange(N).split(10):
        own = method(Setting(N, C, 2, 1, shape=(6,), ids=ids))
        own.clean_N2.copy_(torch.arange(2.0 * N).view(N, 2))
        kept.append(own.shard_state())
        assert kept[-1]["clean_N2"].shape == (len(ids), 2)
    other = method(setting)
    other.epoch.fill_(1)
    other.load_shards(kept)
    assert other.now == 1
    assert not other.in_warmup
    torch.testing.assert_close(other.clean_N2, torch.arange(2.0 * N).view(N, 2))
