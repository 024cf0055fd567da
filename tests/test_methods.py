"""The methods of comparison: the part that defines each, by hand; what they keep; that the trainer trains them."""

import math

import pytest
import torch
from torch import nn

from fastgnl import with_transition
from fastgnl.errors import InputError
from fastgnl.loader import Loader
from fastgnl.methods.base import Setting, given_loss
from fastgnl.methods.catalogue import METHODS, make_method
from fastgnl.methods.cores import Cores
from fastgnl.methods.coteaching import CoTeaching, JoCoR, exchanged, remembered, small_losses
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.methods.elr import ELR
from fastgnl.methods.forward import Forward, anchored
from fastgnl.methods.gce import GCE
from fastgnl.methods.mixup import Mixup, MixupOptions
from fastgnl.methods.peer import PeerLoss
from fastgnl.methods.smoothing import LabelSmoothing, NegativeLabelSmoothing
from fastgnl.methods.volminnet import VolMinNet, VolumeNet
from fastgnl.networks import MLP
from fastgnl.optimise import TrainConfig
from fastgnl.run import RunConfig
from fastgnl.samples import Samples
from fastgnl.trainer import Runs, train

N, C, F = 96, 4, 6


def setting(epochs=8, warmup=2, **more):
    return Setting(N, C, epochs, warmup, 0.4, shape=(F,), **more)


def logits(B=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, C, generator=g).requires_grad_(), torch.randint(C, (B,), generator=g), torch.arange(B)


def after(method, epochs):
    for _ in range(epochs):
        method.end_epoch()
    return method


def loss_of(method, z, labels, index, t=None):
    return method(z, t, labels, index).loss


def samples(seed=0):
    g = torch.Generator().manual_seed(seed)
    clean = torch.randint(C, (N,), generator=g)
    x = torch.randn(N, F, generator=g) + 3 * torch.eye(C, F)[clean]
    wrong = torch.rand(N, generator=g) < 0.3
    return Samples(x, torch.where(wrong, (clean + 1) % C, clean), clean)


def test_cross_entropy_of_one_and_two_networks():
    z, labels, index = logits()
    wanted = nn.functional.cross_entropy(z, labels)
    torch.testing.assert_close(loss_of(CrossEntropy(), z, labels, index), wanted)
    torch.testing.assert_close(loss_of(CrossEntropy(), torch.stack([z, z]), labels, index), 2 * wanted)


def test_gce_lies_between_cross_entropy_and_the_absolute_error():
    z, labels, index = logits()
    q = z.softmax(1).gather(1, labels[:, None])
    torch.testing.assert_close(loss_of(GCE(setting()), z, labels, index), ((1 - q**0.7) / 0.7).mean())


def test_smoothing_is_torchs_and_the_negative_one_waits_for_the_warmup():
    z, labels, index = logits()
    wanted = nn.functional.cross_entropy(z, labels, label_smoothing=0.6)
    torch.testing.assert_close(loss_of(LabelSmoothing(setting()), z, labels, index), wanted)
    plain = nn.functional.cross_entropy(z, labels)
    negative = NegativeLabelSmoothing(setting())
    torch.testing.assert_close(loss_of(negative, z, labels, index), plain)
    after(negative, 2)
    everywhere = -torch.log_softmax(z, 1).mean()
    torch.testing.assert_close(loss_of(negative, z, labels, index), 1.2 * plain - 0.2 * everywhere)


def test_forward_takes_the_rows_of_anchors():
    """Of 101 samples the one at the 97th percentile of each class, not the four above it."""
    q = torch.rand(101, C, generator=torch.Generator().manual_seed(0))
    T = anchored(q, 0.97)
    for j in range(C):
        assert T[j, j] == q[:, j].sort().values[97]
        assert any(torch.equal(T[j], row) for row in q)


def test_forward_corrects_after_the_warmup():
    z, labels, index = logits()
    method = Forward(setting())
    torch.testing.assert_close(loss_of(method, z, labels, index), nn.functional.cross_entropy(z, labels))
    after(method, 2)
    T = torch.full((C, C), 0.1) + 0.6 * torch.eye(C)
    method.T.copy_(T)
    wanted = nn.functional.nll_loss((z.softmax(1) @ T).log(), labels)
    torch.testing.assert_close(loss_of(method, z, labels, index), wanted)


def test_peer_term_rises_and_is_taken_away():
    z, labels, index = logits(B=512)
    method = PeerLoss(setting())
    plain = float(nn.functional.cross_entropy(z, labels).detach())
    assert method.alpha == 0
    assert float(loss_of(method, z, labels, index).detach()) == pytest.approx(plain, rel=1e-5)
    after(method, 2 + 3)
    assert method.alpha == 1
    # Logits that know nothing of the labels: a row's own loss is that of any pair, in the mean.
    assert abs(float(loss_of(method, z, labels, index).detach())) < 0.15


def test_cores_sieve_leaves_out_what_is_worse_than_its_mean():
    z = torch.tensor([[4.0, 0, 0, 0], [4.0, 0, 0, 0]], requires_grad=True)
    labels = torch.tensor([0, 1])
    method = after(Cores(setting()), 8)
    assert method.ramp == 1
    loss_of(method, z, labels, torch.arange(2)).backward()
    assert z.grad[0].abs().sum() > 0
    assert z.grad[1].abs().sum() == 0


def test_cores_regulariser_by_hand():
    z, labels, index = logits()
    method = Cores(setting(epochs=14, warmup=2))
    loss_of(method, z, labels, index)
    after(method, 4)  # half of the way up
    assert method.ramp == pytest.approx(0.5)
    prior = method.count_C / method.count_C.sum()
    wanted = nn.functional.cross_entropy(z, labels) + (torch.log_softmax(z, 1) @ prior).mean()
    torch.testing.assert_close(loss_of(method, z, labels, index), wanted)


def test_elr_targets_and_gradient():
    z, labels, index = logits()
    method = ELR(setting())
    loss = loss_of(method, z, labels, index)
    q = z.detach().softmax(1)
    torch.testing.assert_close(method.target_NC[index], 0.3 * q, atol=1e-4, rtol=1e-3)
    assert float(method.target_NC[len(index) :].abs().sum()) == 0
    wanted = nn.functional.cross_entropy(z, labels) + 3 * torch.log(1 - (z.softmax(1) * 0.3 * q).sum(1)).mean()
    torch.testing.assert_close(loss, wanted, atol=1e-4, rtol=1e-3)


def test_volume_net_has_rows_that_sum_to_one_and_learns_them():
    net = VolumeNet(nn.Identity(), F, C)
    T = net.matrix()
    torch.testing.assert_close(T.sum(1), torch.ones(C))
    torch.testing.assert_close(T.diagonal(), torch.full((C,), 0.5))
    method = VolMinNet(setting(), net)
    z, t = net.train()(torch.randn(8, F))
    labels = torch.zeros(8, dtype=torch.int64)
    loss = method(z, t, labels, torch.arange(8)).loss
    wanted = -(z.softmax(1) @ T)[:, 0].log().mean() + 1e-4 * torch.linalg.det(T).abs().log()
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=1e-5)
    loss.backward()
    assert net.a_CC.grad.abs().sum() > 0
    assert not list(method.parameters())
    assert net.eval()(torch.randn(2, F))[1] is None


def test_what_co_teaching_remembers():
    assert remembered(setting(epochs=80), 0, 10) == 1
    assert remembered(setting(epochs=80), 5, 10) == pytest.approx(0.8)
    assert remembered(setting(epochs=80), 50, 10) == pytest.approx(0.6)
    assert remembered(setting(epochs=8), 2, 10) == pytest.approx(0.6)  # a quarter of so few epochs


def test_small_losses_are_exchanged():
    loss = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    assert small_losses(loss[0], 0.5).tolist() == [1, 1, 0, 0]
    # The first network is taught rows 2 and 3, which are small for the second, and the other way round.
    assert exchanged(loss, 0.5).tolist() == [8.0, 6.0, 6.0, 8.0]
    assert exchanged(loss, 0.5).mean() == (3.5 + 3.5)
    assert small_losses(loss[0], 0.0).sum() == 1


def test_co_teaching_begins_with_all_rows():
    z, labels, index = logits()
    other, _, _ = logits(seed=1)
    pair = torch.stack([z, other])
    wanted = nn.functional.cross_entropy(z, labels) + nn.functional.cross_entropy(other, labels)
    torch.testing.assert_close(loss_of(CoTeaching(setting()), pair, labels, index), wanted)


def test_jocor_wants_agreement():
    z, labels, index = logits()
    alike = loss_of(JoCoR(setting()), torch.stack([z, z]), labels, index)
    torch.testing.assert_close(alike, 2 * nn.functional.cross_entropy(z, labels))
    other, _, _ = logits(seed=1)
    p, q = z.log_softmax(1), other.log_softmax(1)
    kl = nn.functional.kl_div
    apart = kl(q, p, log_target=True, reduction="batchmean") + kl(p, q, log_target=True, reduction="batchmean")
    both = nn.functional.cross_entropy(z, labels) + nn.functional.cross_entropy(other, labels)
    found = loss_of(JoCoR(setting()), torch.stack([z, other]), labels, index)
    # The published (1 - lambda) CE + lambda KL, at the scale of cross-entropy.
    torch.testing.assert_close(0.35 * found, 0.35 * both + 0.65 * apart)


def test_mixup_mixes_inputs_and_labels():
    """With a linear network the logits of a mixture are the mixture of the logits."""
    data = samples()
    batch = next(Loader(data, 8).epoch(0))
    seen = []

    def engine(x, index):
        seen.append(x)
        return 2.0 * x[:, :C], None

    torch.manual_seed(3)
    method = Mixup(setting(), MixupOptions(1.0))
    loss = method.run(engine, None, batch).loss
    torch.manual_seed(3)
    share = torch.distributions.Beta(torch.tensor(1.0), torch.tensor(1.0)).sample()
    other = torch.randperm(8)
    mixed = share * batch.x + (1 - share) * batch.x[other]
    torch.testing.assert_close(seen[0], mixed)
    z = 2.0 * mixed[:, :C]
    wanted = share * given_loss(z, batch.labels) + (1 - share) * given_loss(z, batch.labels[other])
    torch.testing.assert_close(loss, wanted.mean())


def test_views_are_augmented_each_in_its_own_way(tmp_path):
    from fastgnl.augment import Augment
    from fastgnl.convert import converted
    from fastgnl.formats.embedded import Digits
    from fastgnl.image_file import ImageFile

    path = tmp_path / "digits.beton"
    converted(Digits().listing(), path)
    images = ImageFile(path, Augment(crop="random", padding=2), reader="builtin", workers=1)
    loader = Loader(images, 64)
    one = next(loader.epoch(0)).x.clone()
    batch = next(loader.epoch(0, views=3))
    assert torch.equal(batch.x, one)
    assert len(batch.others) == 2
    assert not torch.equal(batch.others[0], batch.x)
    assert not torch.equal(batch.others[0], batch.others[1])


def test_a_pair_may_be_given_an_input_each():
    net = with_transition((MLP(F, 8), MLP(F, 8)), 8, C, transition_input="none").eval()
    a, b = torch.randn(2, 5, F)
    z, _ = net((a, b))
    torch.testing.assert_close(z[0], net(a)[0][0])
    torch.testing.assert_close(z[1], net(b)[0][1])


@pytest.mark.parametrize("name", METHODS)
def test_the_trainer_trains_it_and_goes_on_with_the_same_bits(name, tmp_path):
    """Three epochs in one go, and one that is stopped after the second and resumed from its checkpoint."""
    data = samples()

    def run(folder, epochs):
        net, objective = make_method(name, lambda: MLP(F, 16, dropout=0.1), setting(3, 1))
        config = TrainConfig(epochs=epochs, lr=0.05, schedule="constant", lr_warmup=0)
        keep = None if folder is None else RunConfig(folder)
        history = train(net, objective, Loader(data, 32), config, data, run=keep)
        return [epoch.loss for epoch in history], torch.cat([w.detach().flatten() for w in net.parameters()])

    losses, weights = run(None, 3)
    assert all(map(math.isfinite, losses))
    run(tmp_path / "run", 2)
    again, weights_again = run(tmp_path / "run", 3)
    assert again == losses
    assert torch.equal(weights, weights_again)


def test_state_of_samples_goes_to_the_rank_that_has_them():
    whole = ELR(setting())
    whole.target_NC.copy_(torch.rand(N, C))
    half = ELR(setting(ids=torch.arange(0, N, 2)))
    half.load_shards([whole.shard_state()])
    assert torch.equal(half.shard_state()["target_NC"], whole.target_NC[::2])
    with pytest.raises(InputError, match=r"ids=loader.shard\(\)"):
        half.check_owns(torch.arange(N))


def test_which_methods_run_the_network_themselves():
    runs = {name for name in METHODS if isinstance(make_method(name, lambda: MLP(F, 8), setting())[1], Runs)}
    assert {"mixup", "dividemix", "instancegm"} <= runs
    assert not runs & {"ce", "gnl", "elr", "coteaching"}


def test_a_name_that_is_none():
    with pytest.raises(InputError, match="wanted one of"):
        make_method("magic", lambda: MLP(F, 8), setting())
