"""What is scored after an epoch: test sets, single networks and their mean, averaged weights."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from fastgnl import GNLObjective, GNLPair, with_transition
from fastgnl.errors import InputError
from fastgnl.evaluate import accuracy, predict_proba, scores
from fastgnl.loader import Loader
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.optimise import TrainConfig
from fastgnl.run import RunConfig
from fastgnl.samples import Samples
from fastgnl.tally import best
from fastgnl.trainer import train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

N, F = 90, 6


def samples(C, seed=0):
    g = torch.Generator().manual_seed(seed)
    return Samples(torch.randn(N, F, generator=g), torch.randint(C, (N,), generator=g))


def network(C, networks=1, plain=False):
    torch.manual_seed(1)
    bodies = tuple(nn.Sequential(nn.Linear(F, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)) for _ in range(networks))
    head = "none" if plain else "logits"
    return with_transition(bodies if networks > 1 else bodies[0], 8, C, transition_input=head)


def share(hits):
    return float(hits.double().mean())


@pytest.mark.parametrize("networks", [1, 2])
def test_top_1_and_top_5(networks):
    data, net = samples(9), network(9, networks)
    q = predict_proba(net, data)
    ranks = (q > q.gather(1, data.labels[:, None])).sum(1)
    found = scores(net, data)
    assert found["top1"] == accuracy(net, data) == share(ranks == 0)
    assert found["top5"] == share(ranks < 5)
    assert found["top1"] < found["top5"] < 1
    assert len(found) == (2 if networks == 1 else 4)


def test_each_of_two_networks_alone():
    data, net = samples(4), network(4, 2)
    first, second = (scores(part, data)["top1"] for part in net.nets)
    assert first != second
    found = scores(net, data)
    assert list(found) == ["top1", "network 1 top1", "network 2 top1"], "of four classes the top five say nothing"
    assert (found["network 1 top1"], found["network 2 top1"]) == (first, second)
    assert found["top1"] == share(predict_proba(net, data).argmax(1) == data.labels)


def trained(test, networks=1, C=7, run=None, on_epoch=None, on_end=None, **options):
    net = network(C, networks)
    objective = (GNLPair if networks == 2 else GNLObjective)(N, C, warmup_epochs=1)
    config = TrainConfig(**{"epochs": 3, "lr": 0.1, **options})
    return net, train(net, objective, Loader(samples(C), 32), config, test, None, on_epoch, run, on_end)


def test_every_set_is_scored_and_the_first_is_the_test_accuracy(tmp_path):
    sets = {"web": samples(7, 1), "imagenet": samples(7, 2)}
    net, history = trained(sets, networks=2, ema=0.9, run=RunConfig(tmp_path))
    names = [
        f"{test} {of}{score}"
        for test in sets
        for of in ("", "EMA ")
        for score in ("top1", "top5", "network 1 top1", "network 2 top1")
    ]
    assert all(list(epoch.scores) == names for epoch in history)
    assert history[-1].test_accuracy == history[-1].scores["web top1"]
    for test, data in sets.items():
        assert (
            scores(net, data).items()
            <= {
                name.removeprefix(f"{test} "): value
                for name, value in history[-1].scores.items()
                if name.startswith(test)
            }.items()
        )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [{name: line[name] for name in names} for line in epochs] == [epoch.scores for epoch in history]
    assert "scores" not in epochs[0], "each score is a value, and so a curve, of its own"


def test_one_set_and_none():
    data = samples(7, 1)
    net, history = trained(data)
    assert history[-1].scores == {f"test {name}": value for name, value in scores(net, data).items()}
    assert trained(None, ema=0.9, epochs=1)[1][0].scores == {}
    assert trained({}, epochs=1)[1][0].test_accuracy is None


def test_the_averaged_weights_are_those_of_the_formula():
    """m = min(0.5, (1 + s) / (10 + s)), that of BatchNorm's statistics 0; and training does not notice."""
    data, ends, weights = samples(7, 1), [], []
    net = network(7, plain=True)
    start = net.clean.weight.detach().clone()

    class Spy(CrossEntropy):
        def forward(self, *given):
            weights.append(net.clean.weight.detach().clone())
            return super().forward(*given)

    history = train(
        net, Spy(), Loader(samples(7), 32), TrainConfig(epochs=8, lr=0.1, ema=0.5), data, on_end=ends.append
    )
    (averaged,) = ends
    wanted = start
    for step, weight in enumerate([*weights[1:], net.clean.weight.detach()], 1):
        wanted = torch.lerp(wanted, weight, 1 - min(0.5, (1 + step) / (10 + step)))
    torch.testing.assert_close(averaged.clean.weight, wanted)
    assert not torch.equal(averaged.clean.weight, net.clean.weight)
    assert torch.equal(averaged.backbone[1].running_mean, net.backbone[1].running_mean)
    assert not averaged.training
    of_average = {f"test EMA {name}": value for name, value in scores(averaged, data).items()}
    assert of_average.items() <= history[-1].scores.items()

    other = network(7, plain=True)
    train(other, CrossEntropy(), Loader(samples(7), 32), TrainConfig(epochs=8, lr=0.1), on_end=ends.append)
    assert torch.equal(other.clean.weight, net.clean.weight)
    assert len(ends) == 1, "without ema there is nothing to give"


def test_a_resumed_run_has_the_same_average(tmp_path):
    data, ends = samples(7, 1), []

    class Stopped(Exception):
        pass

    def stop(epoch):
        raise Stopped

    trained(data, ema=0.9, run=RunConfig(tmp_path / "whole"), on_end=ends.append)
    with pytest.raises(Stopped):
        trained(data, ema=0.9, run=RunConfig(tmp_path / "stopped"), on_epoch=stop)
    history = trained(data, ema=0.9, run=RunConfig(tmp_path / "stopped"), on_end=ends.append)[1]
    whole, resumed = (end.state_dict() for end in ends)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert history[0].scores.keys() == history[-1].scores.keys(), "scores of before are kept"
    with pytest.raises(InputError, match=r"has 'ema\.backbone\.0\.bias', .* wanted none of that name"):
        trained(data, run=RunConfig(tmp_path / "stopped"))


@pytest.mark.parametrize("ema", [0, 1, -0.5, 1.5, True, "0.9", float("nan")])
def test_ema_is_a_share(ema):
    with pytest.raises(InputError, match=rf"ema is {ema!r}, wanted a number above 0 and below 1"):
        TrainConfig(ema=ema)


def test_the_best_epoch():
    first = trained(samples(7, 1), epochs=1)[1][0]
    history = [replace(first, number=i, test_accuracy=share) for i, share in enumerate([0.2, None, 0.7, 0.7, 0.5])]
    assert best(history).number == 2
    assert best(history[1:2]).test_accuracy is None
