"""The label state of a rank's samples, the momentum encoder and its bank, candidate sets in warm-up."""

import pytest
import torch
from torch import nn

from fastgnl import GNLObjective, with_transition
from fastgnl.errors import InputError
from fastgnl.loader import Loader
from fastgnl.momentum import Bank, MomentumEncoder
from fastgnl.samples import Samples

N, C, B = 40, 6, 8
BACKENDS = ("reference", "cpu")


def batches(steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        index = torch.randperm(N, generator=g)[:B]
        z, t = (2 * torch.randn(B, C, generator=g) for _ in range(2))
        yield z.requires_grad_(), t.requires_grad_(), index % C, index


class TestShards:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("denominator", ["batch", "window", "dataset"])
    def test_a_shard_is_the_rows_of_the_whole(self, backend, denominator):
        """The state of odd samples, seen alone, is that of an objective which keeps them all."""
        odd = torch.arange(1, N, 2)
        options = {"denominator": denominator, "warmup_epochs": 1, "backend": backend}
        whole, shard = GNLObjective(N, C, **options), GNLObjective(N, C, ids=odd, **options)
        assert len(shard.M_NC) == len(shard.w_N) == N // 2
        g = torch.Generator().manual_seed(1)
        for epoch in range(2):
            for _ in range(3):
                index = odd[torch.randperm(len(odd), generator=g)[:B]]
                z, t = (2 * torch.randn(B, C, generator=g) for _ in range(2))
                a, b = (objective(z, t, index % C, index) for objective in (whole, shard))
                torch.testing.assert_close(a.loss, b.loss)
                assert torch.equal(a.set_size, b.set_size)
            whole.column_sum_C.copy_(shard.column_sum_C)  # the whole one has the rows of even samples besides
            if epoch == 0:
                whole.loss_N[::2] = float("nan")
                whole.end_epoch()
                shard.end_epoch()
                whole.column_sum_C.copy_(shard.column_sum_C)
        assert torch.equal(whole.M_NC[odd], shard.M_NC)
        assert torch.equal(whole.w_N[odd], shard.w_N)
        assert float(shard.w_N.max()) > 0

    def test_a_stranger_is_refused(self):
        objective = GNLObjective(N, C, ids=torch.arange(10))
        z, t = torch.randn(2, C), torch.randn(2, C)
        with pytest.raises(InputError, match=r"index holds \[12\], wanted samples among the ids"):
            objective(z, t, torch.tensor([0, 1]), torch.tensor([3, 12]))

    @pytest.mark.parametrize(
        ("ids", "sentence"),
        [([1, 1, 2], "ids names 2 samples in 3 places"), ([3, N], f"ids holds {N}, wanted 0 to {N - 1}")],
    )
    def test_ids_are_checked(self, ids, sentence):
        with pytest.raises(InputError, match=sentence):
            GNLObjective(N, C, ids=torch.tensor(ids))

    def test_the_shard_must_be_the_loaders(self):
        loader = Loader(Samples(torch.zeros(N, 1), torch.zeros(N, dtype=torch.int64)), B)
        GNLObjective(N, C, ids=loader.shard()).check_owns(loader.shard())
        for objective in (GNLObjective(N, C), GNLObjective(N, C, ids=torch.arange(10))):
            with pytest.raises(InputError, match=r"wanted GNLObjective\(\.\.\., ids=loader.shard\(\)\)"):
                objective.check_owns(loader.shard())

    @pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"denominator": "bank", "bank": 12}])
    def test_two_shards_become_three(self, options):
        """What two ranks have kept is picked up by three, each sample's state by the one it comes to."""
        two = [GNLObjective(N, C, ids=torch.arange(r, N, 2), warmup_epochs=0, **options) for r in range(2)]
        for step in range(3):
            for rank, objective in enumerate(two):
                index = torch.arange(rank, N, 2)[step * 4 : step * 4 + 4]
                z, t, slow = torch.randn(3, 4, C)
                objective(z, t, index % C, index, None, slow if options.get("bank") else None)
            for objective in two:
                objective.end_epoch()
        shards = [objective.shard_state() for objective in two]
        for rank in range(3):
            ids = torch.arange(rank, N, 3)
            new = GNLObjective(N, C, ids=ids, warmup_epochs=0, **options)
            new.load_shards(iter(shards))
            for name, value in new.shard_state().items():
                if name.startswith("bank "):
                    continue
                for i, row in zip(ids.tolist(), value, strict=True):
                    place = int((shards[i % 2]["ids"] == i).nonzero())
                    assert torch.equal(row.nan_to_num(-1), shards[i % 2][name][place].nan_to_num(-1)), (name, i)
            if new.bank is not None:
                kept = {int(i) for entry in new.bank.entries for i in entry.ids}
                there = {int(i) for shard in shards for i in shard["bank ids"]}
                assert kept == there & set(ids.tolist())
                assert len(kept) > 0

    def test_a_missing_sample_is_told(self):
        part = GNLObjective(N, C, ids=torch.arange(N - 1)).shard_state()
        with pytest.raises(InputError, match=rf"the state of sample \[{N - 1}\] is not there"):
            GNLObjective(N, C).load_shards([part])


class TestBank:
    def test_sums_are_those_of_the_last_rows_exactly(self):
        bank, pushed = Bank(20, C), []
        g = torch.Generator().manual_seed(0)
        for step in range(50):
            q_BC = torch.randn(7, C, generator=g).mul(4).softmax(1)
            assert bank.full == (step >= 3)
            bank.push(q_BC, torch.arange(7), step)
            pushed.append(q_BC.half().double())
            # whole batches, as few as hold 20 rows after the oldest has gone
            kept = pushed[-4:]
            assert len(bank.entries) == min(step + 1, 4)
            assert torch.equal(bank.sum_C, torch.cat(kept).sum(0)), "exactly: nothing drifts"

    def test_a_row_that_is_not_finite_does_not_spoil_the_sums(self):
        bank = Bank(4, C)
        bank.push(torch.full((2, C), float("nan")), torch.arange(2), 0)
        assert torch.equal(bank.sum_C, torch.zeros(C, dtype=torch.float64))

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("mix", [None, 0.25])
    def test_the_denominator_is_live_plus_bank_once_it_is_full(self, backend, mix):
        """Loss and gradient with the bank are those with a window that holds the bank's sums, before it is full those
        of the batch."""
        options = {"warmup_epochs": 0, "backend": backend}
        objective = GNLObjective(N, C, denominator="bank", bank=3 * B, mix=mix, **options)
        g = torch.Generator().manual_seed(3)
        for step, (z, t, labels, index) in enumerate(batches(6)):
            other = GNLObjective(N, C, denominator="window", window=2, **options)
            for name in ("M_NC", "w_N", "step", "epoch"):
                getattr(other, name).copy_(getattr(objective, name))
            if step >= 3:
                rest_C = objective.bank.sum_C
                other.window_RC.copy_(rest_C if mix is None else mix * rest_C / rest_C.mean())
            slow = torch.randn(B, C, generator=g)
            found = objective(z, t, labels, index, None, slow)
            dz, dt = torch.autograd.grad(found.loss, (z, t))
            wanted = other(z, t, labels, index)
            for a, b in zip((dz, dt), torch.autograd.grad(wanted.loss, (z, t)), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-5)  # rows of float16 sum to 1 but for rounding
            torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-4, atol=1e-5)
        assert objective.bank.full

    def test_a_state_dict_begins_the_bank_anew(self):
        """It holds no rows of the bank, so it must not hold their sums either."""
        objective = GNLObjective(N, C, denominator="bank", bank=B)
        z, t, labels, index = next(batches(1))
        objective(z, t, labels, index, None, torch.randn(B, C))
        assert objective.bank.full
        again = GNLObjective(N, C, denominator="bank", bank=B)
        again.load_state_dict(objective.state_dict())
        assert not again.bank.full
        assert torch.equal(again.bank.sum_C, torch.zeros(C, dtype=torch.float64))

    def test_training_without_the_momentum_encoder_is_refused(self):
        objective = GNLObjective(N, C, denominator="bank")
        z, t, labels, index = next(batches(1))
        with pytest.raises(InputError, match="no momentum was given"):
            objective(z, t, labels, index)
        objective.eval()
        assert objective(z, t, labels, index).loss.isfinite(), "to evaluate needs none"


class TestMomentumEncoder:
    def make(self):
        body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.9))
        return with_transition(body, 4, C)

    def test_weights_follow_slowly_and_warm_up(self):
        net = self.make()
        encoder = MomentumEncoder(net, 0.99)
        before = net.clean.weight.detach().clone()
        with torch.no_grad():
            net.clean.weight += 1
        encoder.follow(net, 1)  # m = 2 / 11
        torch.testing.assert_close(encoder.net.clean.weight, before + 9 / 11)
        encoder.follow(net, 10**6)
        torch.testing.assert_close(encoder.net.clean.weight, before + 1 - 0.99 * 2 / 11)

    def test_batch_norm_is_of_the_batch_and_its_buffers_are_the_networks(self):
        net = self.make()
        encoder = MomentumEncoder(net, 0.99)
        x = torch.randn(16, 3) + 5
        z = encoder(x, torch.arange(16))
        assert torch.equal(z, encoder(x, torch.arange(16))), "no dropout"
        net.train()(x)
        encoder.follow(net, 1)
        for mine, other in zip(encoder.net.buffers(), net.buffers(), strict=True):
            assert torch.equal(mine, other)
        normed = encoder.net.backbone[:2](x)
        torch.testing.assert_close(normed.mean(0), torch.zeros(4), atol=1e-5, rtol=0)

    def test_the_networks_own_weights_are_left_alone(self):
        net = self.make()
        encoder = MomentumEncoder(net, 0.5)
        before = [weight.detach().clone() for weight in net.parameters()]
        encoder(torch.randn(4, 3), torch.arange(4))
        encoder.follow(net, 3)
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        assert all(weight.requires_grad for weight in net.parameters())
        assert not any(weight.requires_grad for weight in encoder.net.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_sets_of_the_given_label_alone_in_warm_up(backend):
    objective = GNLObjective(N, C, warmup_sets="given", warmup_epochs=1, backend=backend)
    z, t, labels, index = next(batches(1))
    terms = objective(z, t, labels, index)
    assert terms.set_size.tolist() == [1] * B
    torch.testing.assert_close(terms.prior, terms.sample_loss.mean(), rtol=1e-4, atol=1e-4)  # -log q of the label
    objective.loss_N.copy_(torch.arange(float(N)) % 2)
    objective.end_epoch()
    assert max(objective(z, t, labels, index).set_size.tolist()) > 2
    again = GNLObjective(N, C, warmup_sets="given", warmup_epochs=1, backend=backend)
    again.load_state_dict(objective.state_dict())
    assert max(again(z, t, labels, index).set_size.tolist()) > 2, "the epoch that was loaded counts"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mixture_with_the_data_set(backend):
    """D_j = live_j + mix * rest_j / mean(rest): a plain sum when mix is N / C."""
    a, b = (GNLObjective(N, C, denominator="dataset", mix=mix, backend=backend) for mix in (None, N / C))
    c = GNLObjective(N, C, denominator="dataset", mix=0.25, backend=backend)
    for z, t, labels, index in batches(4):
        first, second, third = (objective(z, t, labels, index) for objective in (a, b, c))
        torch.testing.assert_close(first.loss, second.loss, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(first.loss, third.loss, rtol=1e-4)
