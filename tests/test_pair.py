"""Two networks trained together (METHOD section 8)."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from fastgnl import GNLPair, transition, with_transition
from fastgnl.errors import InputError


def pair_batch(make_batch, B=64, C=12):
    first, second = (make_batch(B, C, N=B, seed=seed, dtype=torch.float32) for seed in range(2))
    return torch.stack([first.z, second.z]), torch.stack([first.t, second.t]), first.labels, first.index


def test_both_coverage_labels_are_in_either_set(make_batch):
    z, t, labels, index = pair_batch(make_batch)
    pair = GNLPair(64, 12, uncertainty="none")
    first, second = pair.objectives
    cover = torch.stack([first.coverage_labels(index), second.coverage_labels(index)])
    assert not torch.equal(*cover)  # their own streams
    expected = torch.stack([labels, *cover], 1)
    sizes = torch.tensor([len(set(row.tolist())) for row in expected])
    terms = pair(z, t, labels, index, clean=cover[1])
    assert torch.equal(terms.set_size, sizes.float())
    assert (terms.covered == 1).all()


def test_each_uses_the_other_ones_w(make_batch):
    z, t, labels, index = pair_batch(make_batch)
    pair = GNLPair(64, 12, warmup_epochs=0, coverage="none")
    pair.objectives[0].w_N.fill_(1.0)
    pair.objectives[1].w_N.fill_(0.0)
    swapped = []
    for i, objective in enumerate(pair.objectives):
        objective.register_forward_hook(lambda _m, _a, out, i=i: swapped.append((i, int(out.set_size[0]))))
    pair(z, t, labels, index)
    assert swapped == [(0, 1), (1, 12)]


def test_loss_is_the_sum_and_state_is_separate(make_batch):
    z, t, labels, index = pair_batch(make_batch)
    pair = GNLPair(64, 12, warmup_epochs=1)
    outputs = []
    for objective in pair.objectives:
        objective.register_forward_hook(lambda _m, _a, out: outputs.append(out.loss))
    terms = pair(z, t, labels, index)
    torch.testing.assert_close(terms.loss, sum(outputs))
    pair.end_epoch()
    a, b = pair.objectives
    assert not torch.equal(a.M_NC, b.M_NC)
    assert not torch.equal(a.w_N, b.w_N)
    torch.testing.assert_close(pair.w_N, (a.w_N + b.w_N) / 2)
    assert int(a.step) == int(b.step) == 1
    restored = GNLPair(64, 12, warmup_epochs=1)
    restored.load_state_dict(pair.state_dict())
    assert np.array_equal(restored.w_N.numpy(), pair.w_N.numpy())


def test_random_w_is_drawn_for_each():
    pair = GNLPair(64, 12, warmup_epochs=0, uncertainty="random")
    pair.end_epoch()
    a, b = pair.objectives
    assert not torch.equal(a.w_N, b.w_N)


def test_wrong_shape(make_batch):
    b = make_batch()
    pair = GNLPair(40, 5, loss_source="eval")
    with pytest.raises(InputError, match=r"z has shape \(16, 5\), wanted \(2, B, C\)"):
        pair(b.z, b.t, b.labels, b.index)
    with pytest.raises(InputError, match=r"losses has shape \(1, 40\), wanted \(2, 40\)"):
        pair.end_epoch(torch.rand(1, 40))
    assert [int(member.epoch) for member in pair.objectives] == [0, 0]


class OnGpu(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True

    def record_stream(self, stream):
        stream.events.append(f"{stream.name} uses {tuple(self.shape)}")


class Stream:
    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize(("head", "recorded"), [("logits", 2), ("none", 1)])
def test_the_second_network_has_a_stream_of_its_own(monkeypatch, head, recorded):
    """It waits for the batch and not for the first network; what follows waits for both."""
    net = with_transition((torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)), 3, 5, transition_input=head)
    x = torch.randn(7, 4)
    wanted = net(x)
    events = []
    own, other = Stream("own", events), Stream("other", events)

    @contextmanager
    def on(stream):
        events.append(f"on {stream.name}")
        yield
        events.append("back")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(transition, "_second_stream", lambda device: other)
    for number, part in enumerate(net.nets, 1):
        part.register_forward_hook(lambda *_, number=number: events.append(f"network {number}"))
    found = net(x.as_subclass(OnGpu))
    assert events == [
        *("other waits for own", "network 1", "on other", "network 2", "back", "own waits for other"),
        "other uses (7, 4)",
        *["own uses (7, 5)"] * recorded,
    ]
    for a, b in zip(found, wanted, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
