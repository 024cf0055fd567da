"""The two heads, the gradients between them, and transition matrices."""

import pytest
import torch
from torch import nn

from fastgnl import GNLObjective, GNLPair, with_transition
from fastgnl.errors import InputError
from fastgnl.samples import Samples
from fastgnl.transition import class_transition


def make(networks=1, **options):
    torch.manual_seed(0)
    parts = tuple(nn.Sequential(nn.Linear(6, 8), nn.ReLU()) for _ in range(networks))
    return with_transition(parts if networks > 1 else parts[0], 8, 4, **options)


class Nothing(nn.Module):
    def forward(self, x):
        return None


X = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
INDEX = torch.arange(10)


def test_heads_are_linear_in_features_and_detached_logits():
    net = make()
    z, t = net(X)
    feat = net.backbone(X)
    torch.testing.assert_close(z, feat @ net.clean.weight.T + net.clean.bias)
    torch.testing.assert_close(t, torch.cat([feat, z], 1) @ net.noisy.weight.T + net.noisy.bias)


def test_t_reaches_the_backbone_but_not_the_clean_head():
    net = make()
    net(X)[1].square().sum().backward()
    assert net.clean.weight.grad is None
    assert net.backbone[0].weight.grad.abs().sum() > 0


def test_sampled_input_draws_by_sample_id_and_step():
    net = make(transition_input="sample", draws=3, seed=5)
    with torch.no_grad():
        _, t = net(X, INDEX)
        assert t.shape == (10, 3, 4)
        # t is the head at one of the C one-hot inputs, and which one is a draw from q.
        feat = net.backbone(X)
        options = torch.stack([net.noisy(torch.cat([feat, torch.eye(4)[[c] * 10]], 1)) for c in range(4)], 1)
        chosen = (t[:, :, None] - options[:, None]).abs().sum(-1).argmin(-1)
        picked = options.gather(1, chosen[..., None].expand(-1, -1, 4))
        torch.testing.assert_close(picked, t)
        again = make(transition_input="sample", draws=3, seed=5)
        order = torch.randperm(10)
        torch.testing.assert_close(again(X[order], INDEX[order])[1], t[order])
        assert not torch.equal(net(X, INDEX)[1], t)  # the next step


def test_sampled_input_follows_q():
    net = make(transition_input="sample")
    x, index = X[:1].expand(20_000, -1), torch.arange(20_000)
    with torch.no_grad():
        z, t = net(x, index)
        _, counts = t[:, 0].mul(1e3).round().unique(dim=0, return_counts=True)
    q = torch.softmax(z[0], 0).sort().values
    torch.testing.assert_close(counts.sort().values / 20_000, q, atol=0.015, rtol=0)


def test_draws_and_networks_have_their_own_random_numbers():
    net = make(transition_input="sample", draws=2, networks=2)
    first, second = net.nets
    second.load_state_dict(first.state_dict())
    x, index = X[:1].expand(500, -1), torch.arange(500)
    with torch.no_grad():
        _, t = net(x, index)
    for a, b in ((t[0, :, 0], t[0, :, 1]), (t[0], t[1])):
        assert 0.1 < (a - b).abs().amax(-1).gt(1e-3).float().mean() < 0.95  # equal at times, by chance


def test_transition_asks_the_head_with_the_log_odds_of_each_class():
    net = make().eval()
    with torch.no_grad():
        feat = net.backbone(X)
        for a in range(4):
            odds = torch.full((4,), 0.1 / 3).log()
            odds[a] = torch.tensor(0.9).log()
            t = net.noisy(torch.cat([feat, (odds - odds.mean()).expand(10, -1)], 1))
            torch.testing.assert_close(net.transition(X)[:, a], t.softmax(1))
        sampled = make(transition_input="sample").eval()
        t = sampled.noisy(torch.cat([sampled.backbone(X), torch.eye(4)[1].expand(10, -1)], 1))
        torch.testing.assert_close(sampled.transition(X)[:, 1], t.softmax(1))


def test_sampled_input_trains_with_the_objective():
    net = make(transition_input="sample", draws=2)
    z, t = net(X, INDEX)
    terms = GNLObjective(10, 4)(z, t, INDEX % 4, INDEX)
    terms.loss.backward()
    assert torch.isfinite(net.noisy.weight.grad).all()
    with pytest.raises(InputError, match="given no index"):
        net(X)
    assert net.eval()(X)[1].shape == (10, 1, 4)


def test_no_transition_head():
    net = make(transition_input="none")
    z, t = net(X)
    assert z.shape == (10, 4)
    assert t is None
    with pytest.raises(InputError, match="no transition head"):
        net.transition(X)


@pytest.mark.parametrize("options", [{}, {"transition_input": "sample"}, {"networks": 2}])
def test_transition_rows_are_distributions(options):
    net = make(**options).eval()
    for part in getattr(net, "nets", [net]):
        part.clean.bias.data[3] = -100  # a class that is never predicted
    T = net.transition(X)
    assert T.shape == (10, 4, 4)
    torch.testing.assert_close(T.sum(-1), torch.ones(10, 4))
    matrix = class_transition(net, Samples(X, INDEX))
    torch.testing.assert_close(matrix.sum(1), torch.ones(4, dtype=torch.float64))
    a = net.predict_proba(X).argmax(1)
    c = int(a[0])
    torch.testing.assert_close(matrix[c], T[a == c, c].double().mean(0))
    assert 3 not in a
    torch.testing.assert_close(matrix[3], T[:, 3].double().mean(0))
    torch.testing.assert_close(net.transition(X, a), T[torch.arange(10), a])


def test_two_networks_start_apart_and_predict_their_mean():
    net = make(networks=2)
    first, second = net.nets
    assert not torch.equal(first.backbone[0].weight, second.backbone[0].weight)
    z, t = net(X)
    assert z.shape == t.shape == (2, 10, 4)
    torch.testing.assert_close(net.predict_proba(X), z.softmax(-1).mean(0))
    GNLPair(10, 4)(z, t, INDEX % 4, INDEX).loss.backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: with_transition(len, 8, 4), "backbone is a builtin_function_or_method, wanted a torch.nn.Module"),
        (lambda: make(transition_input="onehot"), "transition_input is 'onehot', wanted one of"),
        (lambda: make(draws=0), "draws is 0, wanted a whole number"),
        (lambda: make(networks=3), "the number of backbones is 3, wanted one of 1, 2"),
        (lambda: with_transition((nn.Linear(6, 8),) * 2, 8, 4), "backbone is one module twice, wanted two that differ"),
        (lambda: with_transition(Nothing(), 8, 4)(X), "the backbone returned a NoneType, wanted a tensor"),
        (lambda: with_transition(nn.Identity(), 8, 1), "num_classes is 1"),
        (lambda: with_transition(nn.Identity(), 8, 4)(X), r"returned shape \(10, 6\), wanted \(B, 8\)"),
    ],
)
def test_bad_input(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()
