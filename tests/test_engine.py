"""Both engines, on any number of ranks, with any option, train to the same weights."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from worker_engine import DENOMINATORS, HAS_DEEPSPEED, cases, network, samples, trained, whole_gradient

from fastgnl import GNLObjective, with_transition
from fastgnl.errors import InputError
from fastgnl.loader import Loader
from fastgnl.optimise import TrainConfig, learning_rate, settled
from fastgnl.samples import Samples
from fastgnl.trainer import train

WORKER = Path(__file__).with_name("worker_engine.py")
FLOAT64, FLOAT32 = 1e-10, 2e-5
"""How far one process and four may be apart, in absolute and in relative numbers."""

needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
engines = pytest.mark.parametrize(
    "engine", ["ddp", *(pytest.param(f"zero {stage}", marks=needs_deepspeed) for stage in (0, 1, 2))]
)
with_deepspeed = pytest.mark.parametrize(
    "engine", [pytest.param(f"zero {stage}", marks=needs_deepspeed) for stage in (0, 1, 2)]
)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A single process with batches of 128."""
    return cases(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four workers with 32 rows each of the same batches."""
    out = tmp_path_factory.mktemp("four") / "out.pt"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launch, str(WORKER), str(out)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(out, weights_only=True)


def close(found, wanted, room, but=()):
    assert found.keys() == wanted.keys()
    for name in found.keys() - set(but):
        torch.testing.assert_close(
            found[name],
            wanted[name],
            rtol=room,
            atol=room,
            equal_nan=True,
            check_dtype=False,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("case", [*DENOMINATORS, "options", "whole gradient"])
def test_four_processes_train_as_one_does(one, four, case):
    """20 steps in float64; "options": AdamW, clip, accumulation, a cosine after a warm-up."""
    close(four[f"float64 {case}"], one[f"float64 {case}"], FLOAT64)


@engines
@pytest.mark.parametrize("case", [*DENOMINATORS, "options"])
def test_every_engine_trains_as_one_process_does(one, four, engine, case):
    """In float32, by the native kernel."""
    close(four[f"{engine} {case}"], one[f"ddp {case}"], FLOAT32)


def test_the_cases_differ(one):
    """The comparisons above would mean little if they were one."""
    weights = [one[f"float64 {case}"]["net.clean.weight"] for case in (*DENOMINATORS, "options")]
    for i, a in enumerate(weights):
        for b in weights[i + 1 :]:
            assert not torch.allclose(a, b, rtol=1e-3, atol=1e-3)


@with_deepspeed
@pytest.mark.parametrize("order", ["ddp, then {}", "{}, then ddp"])
def test_a_run_may_go_on_with_the_other_engine(one, four, engine, order):
    """AdamW, whose state and count of steps are taken over; two epochs with one, three with the other."""
    found = four[order.format(engine)]
    assert len(found["losses"]) == 12
    close(found, one["adamw"], FLOAT32, but=["losses"])
    torch.testing.assert_close(found["losses"], one["adamw"]["losses"][-12:], rtol=FLOAT32, atol=FLOAT32)


@engines
def test_gradients_of_many_batches_are_as_good_as_those_of_one(four, engine):
    wanted = whole_gradient(1)
    found = four["float64 whole gradient" if engine == "ddp" else f"{engine} whole gradient"]
    assert len(found["losses"]) == 8 * len(wanted["losses"])
    room = FLOAT64 if engine == "ddp" else FLOAT32
    for name in ("net.backbone.0.weight", "net.clean.weight"):
        torch.testing.assert_close(found[name].double(), wanted[name], rtol=room, atol=room)


@engines
def test_a_step_is_no_longer_than_the_clip(four, engine):
    assert float(four[f"{engine} clipped"]) == pytest.approx(0.01, rel=1e-4)


@engines
def test_bfloat16(four, engine):
    found, wanted = four[f"{engine} bfloat16"], four[f"{engine} batch"]
    assert found["net.clean.weight"].dtype is torch.float32
    assert not torch.equal(found["losses"][:4], wanted["losses"][:4])
    torch.testing.assert_close(found["history"], wanted["history"], rtol=0.02, atol=0.02)


@engines
def test_a_step_that_is_not_finite_is_skipped_and_counted(one, four, engine):
    """One batch of each epoch; not even the statistics of BatchNorm know of it."""
    found = four[f"{engine} bad step"]
    assert found["skipped"].tolist() == [1, 2, 3, 4, 5]
    assert int(found["losses"].isnan().sum()) == 5
    assert int(found["net.backbone.1.num_batches_tracked"]) == 15
    assert all(bool(value.isfinite().all()) for name, value in found.items() if name.startswith(("net.", "history")))
    close(found, one["ddp bad step"], FLOAT32)


@engines
def test_a_run_without_finite_steps_stops_with_a_diagnosis(four, engine):
    """What is wrong is on the last rank, and the first one tells of it."""
    said = four[f"{engine} stopped"]
    assert said.startswith(
        "the loss or its gradient was not finite in 3 steps in a row, up to step 3: loss nan (ce nan"
    )
    assert "inputs hold 1 values that are not finite, weights are finite; wanted a lower lr (it is 0.1)" in said


def test_channels_last_trains_the_same():
    images = samples(images=True)
    found, nets = [], []
    for channels_last in (False, True):
        nets.append(network(images=True))
        found.append(trained("batch", data=images, net=nets[-1], epochs=2, channels_last=channels_last))
    close(*found, 1e-3)
    filters = [net.backbone.layers[1][0].weight for net in nets]
    assert [weight.is_contiguous(memory_format=torch.channels_last) for weight in filters] == [False, True]


def test_compiled_trains_the_same():
    net = network()
    found = trained("batch", net=net, epochs=2, compile=True)
    assert net.backbone._compiled_call_impl is not None
    close(found, trained("batch", epochs=2), 1e-4)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {0: 1, 5.9: 1, 6: 0.1, 8.5: 0.1}),
        ({"schedule": "constant"}, {0: 1, 8.9: 1}),
        ({"schedule": "linear"}, {0: 1, 4.5: 0.5, 9: 0}),
        ({"schedule": "cosine"}, {0: 1, 3: 0.75, 4.5: 0.5, 6: 0.25, 9: 0}),
        ({"schedule": "cosine", "lr_warmup": 3}, {0: 0, 1.5: 0.5, 3: 1, 5: 0.75, 6: 0.5, 9: 0}),
        ({"schedule": "linear", "lr_warmup": 0.5}, {0.25: 0.5, 0.5: 1, 4.75: 0.5}),
        ({"schedule": "constant", "lr_warmup": 9}, {4.5: 0.5, 9: 1}),
    ],
)
def test_learning_rate(options, wanted):
    config = settled(TrainConfig(epochs=9, lr=2.0, **options), given_alone=False)
    found = [learning_rate(config, epoch) for epoch in wanted]
    assert found == pytest.approx([2 * value for value in wanted.values()], abs=1e-12)


@pytest.mark.parametrize(
    ("classes", "options", "how", "wanted"),
    [
        (101, {}, {}, [0.0, 0.5, 1.0]),
        (101, {}, {"lr_warmup": 0}, [1.0, 1.0, 1.0]),
        (101, {"warmup_epochs": 0}, {}, [1.0, 1.0, 1.0]),
        (101, {"warmup_sets": "drawn"}, {}, [1.0, 1.0, 1.0]),
        (100, {}, {}, [1.0, 1.0, 1.0]),
        (100, {"warmup_sets": "given"}, {}, [0.0, 0.5, 1.0]),
    ],
)
def test_the_rate_rises_where_the_given_labels_alone_are_taught_first(classes, options, how, wanted):
    """By what training itself does: one batch an epoch, whose rate is that of the epoch's beginning."""
    torch.manual_seed(0)
    data = Samples(torch.randn(8, 4), torch.randint(classes, (8,)))
    net = with_transition(torch.nn.Linear(4, 6), 6, classes)
    config = TrainConfig(epochs=3, lr=1e-3, schedule="constant", **how)
    history = train(net, GNLObjective(8, classes, **options), Loader(data, 8), config)
    assert [epoch.lr / 1e-3 for epoch in history] == pytest.approx(wanted)


def test_the_rate_follows_the_schedule_within_an_epoch(one):
    """Of the last step of each epoch: a rise over two epochs, half a cosine over three; 4 batches each."""
    rates = one["float64 options"]["history"][:, 4].tolist()
    after = [(epoch + 0.75 - 2) / 3 for epoch in (2, 3, 4)]
    wanted = [0.01 * 0.375, 0.01 * 0.875, *(0.005 * (1 + math.cos(math.pi * u)) for u in after)]
    assert rates == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"zero": 3}, "zero is 3, wanted 0, 1 or 2: stage 3 leaves each rank a part of the weights only"),
        ({"zero": 4}, "zero is 4, wanted one of 0, 1, 2"),
        ({"engine": "horovod"}, "engine is 'horovod', wanted one of 'ddp', 'deepspeed'"),
        ({"accumulate": 0}, "accumulate is 0, wanted a whole number of at least 1"),
        ({"lr_warmup": 6, "epochs": 5}, "lr_warmup is 6, wanted a number from 0 to 5"),
        ({"lr_warmup": "often"}, "lr_warmup is 'often', wanted a number from 0 to 40"),
    ],
)
def test_refuses(options, sentence):
    with pytest.raises(InputError, match=sentence):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param({}, "engine is 'deepspeed' in a single process, wanted torchrun", marks=needs_deepspeed),
        (
            {"precision": "float16"},
            "precision is 'float16' with engine 'deepspeed'.*wanted 'bfloat16', or engine 'ddp'",
        ),
    ],
)
def test_deepspeed_refuses(options, sentence):
    with pytest.raises(InputError, match=sentence):
        trained("batch", engine="deepspeed", **options)


def test_deepspeed_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("fastgnl.engine.find_spec", lambda name: None)
    with pytest.raises(InputError, match="engine is 'deepspeed', which is not installed, wanted it or 'ddp'"):
        trained("batch", engine="deepspeed")
