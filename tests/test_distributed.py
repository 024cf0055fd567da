"""The same seed gives the same result on any number of ranks, and twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastgnl.distributed import SyncBatchNorm, synchronise_batch_norm

WORKER = Path(__file__).with_name("worker_train.py")
CASES = ("batch", "window", "dataset", "pair", "prior only", "ce")
FUSED = ("fused batch", "fused window", "fused dataset")


def run(tmp_path_factory, ranks):
    out = tmp_path_factory.mktemp("ranks") / f"{ranks}.pt"
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launch, str(WORKER), str(out)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return run(tmp_path_factory, 1)


def test_two_ranks_give_the_same_parameters(one_rank, two_ranks):
    """Four do in test_engine. Here 6 epochs of 3 steps, BatchNorm and every denominator included; batches of 31 and 30
    rows. In float64 by the reference and in float32 by the native kernel, where the order of sums shows in the fourth
    place."""
    many = two_ranks
    for case in (*CASES, *FUSED):
        room = 1e-10 if case in CASES else 2e-3
        assert one_rank[case].keys() == many[case].keys()
        for name, value in one_rank[case].items():
            near = max(room, 1e-6) if name.endswith("w") else room  # w is float32 everywhere
            torch.testing.assert_close(
                many[case][name],
                value,
                rtol=near,
                atol=near,
                equal_nan=True,
                msg=lambda m, n=name, c=case: f"{c} {n}: {m}",
            )


def test_any_number_of_ranks_sees_the_same_images(one_rank, two_ranks):
    """Batches, windows and flips of a file's images, bit by bit."""
    for name, value in one_rank["images"].items():
        assert torch.equal(two_ranks["images"][name], value), name
    assert not torch.equal(one_rank["images"]["random 0 x"], one_rank["images"]["random 3 x"])
    assert one_rank["images"]["random 0 batch"].min() == 1, "every sample is visited"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run(tmp_path_factory, 2)


def test_batch_norm_over_ranks_is_batch_norm(one_rank, two_ranks):
    """In float32 far from zero, where a difference of squares would cancel, and in bfloat16 without weights."""
    for case, tolerance in (("far from zero", 2e-3), ("bfloat16", 2e-2)):
        for name, value in one_rank[case].items():
            torch.testing.assert_close(two_ranks[case][name], value, rtol=tolerance, atol=tolerance)


def test_frozen_batch_norm_stays_frozen():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3).requires_grad_(False).eval(), torch.nn.BatchNorm1d(3))
    synchronise_batch_norm(net)
    assert all(isinstance(part, SyncBatchNorm) for part in net)
    assert [part.training for part in net] == [False, True]
    assert [part.weight.requires_grad for part in net] == [False, True]


def test_the_same_run_twice_gives_equal_bits(tmp_path_factory, one_rank):
    again = run(tmp_path_factory, 1)
    for case in (*CASES, *FUSED):
        for name, value in one_rank[case].items():
            assert torch.equal(value.nan_to_num(-1), again[case][name].nan_to_num(-1)), (case, name)


def test_the_fused_step_trains_as_the_reference_does(one_rank, two_ranks):
    for ranks in (one_rank, two_ranks):
        for case in FUSED:
            wanted = ranks[case.removeprefix("fused ")]
            for name in ("history", "q", "objective.M", "net.clean.weight"):
                torch.testing.assert_close(ranks[case][name].double(), wanted[name].double(), rtol=5e-3, atol=5e-3)


def test_denominators_differ(one_rank):
    """The comparison above would mean little if the cases were one."""
    weights = [one_rank[case]["net.clean.weight"] for case in ("batch", "window", "dataset", "ce")]
    for i, a in enumerate(weights):
        for b in weights[i + 1 :]:
            assert not torch.allclose(a, b, rtol=1e-3)
