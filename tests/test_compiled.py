"""The Triton kernels compiled for GPUs that are not here: no spills, each byte moved once, and, where the ptxrun
emulator is at hand, the machine's own instructions against the reference."""

import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import worker_compiled
from fused_cases import Case

pytest.importorskip("triton", reason="triton is not installed")
sys.path.append(str(Path(__file__).parents[1] / "bench"))
import emulator

needs_ptxrun = pytest.mark.skipif(emulator.folder() is None, reason="ptxrun is not here: set PTXRUN to its folder")

EVERYTHING = {"denominator": "dataset", "mix": 0.3, "prior_form": "additive"}
BF16 = {"dtype": torch.bfloat16}
# Few classes are compiled in the test of bench/kernel_report.py.
VARIANTS = {
    "window": Case(64, 100, steps=1, **BF16, options={"denominator": "window", "prior_kl": "forward"}),
    "float16": Case(
        64, 100, steps=1, given_D=True, training=False, dtype=torch.float16, options={"table_dtype": "float16"}
    ),
    "draws": Case(64, 500, 2, steps=1, options={**EVERYTHING, "prior_kl": "forward", "tau": 0.25}),
    "a block": Case(64, 1000, steps=1),
    "the largest block": Case(
        64, 1024, coverage=2, steps=1, **BF16, options={**EVERYTHING, "prior_kl": "forward", "table_dtype": "bfloat16"}
    ),
    "streamed": Case(64, 21841, steps=1),
}
EMULATED = {
    "few classes": (Case(9, 10, steps=1), 90, True, "lockstep"),
    "dataset": (Case(19, 33, coverage=2, strided=True, far=True, steps=1, options=EVERYTHING), 80, False, "warp"),
    "window": (
        Case(6, 100, steps=1, options={"denominator": "window", "prior_kl": "forward"}),
        100,
        True,
        "warp",
    ),
    "D given": (
        Case(5, 100, 2, steps=1, given_D=True, dtype=torch.float16, options={"warmup_epochs": 0}),
        86,
        True,
        "lockstep",
    ),
    "ce": (
        Case(3, 200, steps=1, options={"prior_kl": "ce", "direction": "x->y", "coverage": "argmax"}),
        80,
        True,
        "warp",
    ),
    "a block": (Case(3, 1000, far=True, steps=1, options={"warmup_epochs": 0, "k_max": None}), 90, False, "warp"),
    "bfloat16": (Case(2, 1000, steps=1, **BF16, options={"table_dtype": "bfloat16"}), 80, True, "lockstep"),
    "streamed": (Case(2, 2500, far=True, steps=1, options={"denominator": "dataset", "mix": 0.3}), 90, True, "warp"),
    "spoilt": (Case(9, 10, steps=1, spoilt=float("nan"), options={"denominator": "dataset"}), 90, True, "lockstep"),
    "streamed, D given": (Case(1, 4100, steps=1, given_D=True, options={"prior_kl": "forward"}), 86, False, "lockstep"),
}


@pytest.fixture(scope="module")
def jobs():
    """Every job of this module, begun at once in two processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        begun = {("resources", name): pool.submit(worker_compiled.resources, case) for name, case in VARIANTS.items()}
        if emulator.folder() is not None:
            for name, job in EMULATED.items():
                begun["emulated", name] = pool.submit(worker_compiled.emulated, *job)
            for name, given_D in (("live", False), ("given", True)):
                case = Case(32, 1000, steps=1, given_D=given_D, clean=False)
                begun["traffic", name] = pool.submit(worker_compiled.traffic, case)
        yield begun
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_variant_spills_registers(jobs, name):
    found = jobs["resources", name].result()
    kernels = {"rows_kernel", "scale_kernel"}
    case = VARIANTS[name]
    if not case.given_D and case.options.get("prior_kl") != "ce":
        kernels |= {"column_sums_kernel", "finish_kernel"}
    assert {kernel for kernel, *_ in found} == kernels
    for kernel, arch, registers, stack in found:
        assert stack == 0, f"{kernel} for sm_{arch}"
        assert 0 < registers <= 255


@needs_ptxrun
@pytest.mark.parametrize("name", EMULATED)
def test_compiled_code_equals_the_reference(jobs, name):
    assert jobs["emulated", name].result() == []


def large(moved):
    """Bytes per element of the arrays of size B x C that a launch moves."""
    names = ("z", "t", "M", "grad_z", "grad_t")
    return {
        (name, what): moved[f"tensor '{name}'", what, "bytes"] / (32 * 1000)
        for name in names
        for what in ("load", "store")
        if moved.get((f"tensor '{name}'", what, "bytes"))
    }


@needs_ptxrun
def test_a_known_denominator_moves_each_number_once(jobs):
    (name, moved), *scales = jobs["traffic", "given"].result()
    assert name == "rows_kernel"
    once = {(array, "load"): 4.0 for array in ("z", "t", "M")} | {(a, "store"): 4.0 for a in ("M", "grad_z", "grad_t")}
    assert large(moved) == once
    assert all(not large(Counter(moved)) for _, moved in scales)


@needs_ptxrun
def test_a_live_denominator_reads_z_twice_more(jobs):
    launches = jobs["traffic", "live"].result()
    assert [name for name, _ in launches][:3] == ["column_sums_kernel", "rows_kernel", "finish_kernel"]
    (_, sums), (_, rows), (_, finish), *_ = launches
    assert large(sums) == {("z", "load"): 4.0}
    assert large(rows) == {(a, "load"): 4.0 for a in ("z", "t", "M")} | {(a, "store"): 4.0 for a in ("M", "grad_t")}
    assert large(finish) == {("z", "load"): 4.0, ("grad_z", "store"): 4.0}
    sectors = sum(bytes_ for _, moved in launches for (_, _, unit), bytes_ in moved.items() if unit == "sectors")
    assert sectors < 60 * 32 * 1000
