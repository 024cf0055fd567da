"""Shared by the tests of the fused backends: one case of shapes and options, run by the reference and by a backend."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from fastgnl import GNLObjective
from fastgnl import objective as objective_module
from fastgnl.kernels.step import Given, backend_module


@dataclass
class Case:
    B: int = 17
    C: int = 10
    K: int = 1
    dtype: torch.dtype = torch.float32
    scale: float = 2.0
    given_D: bool = False
    coverage: int | None = None
    """Coverage labels given; None: the objective draws its own."""
    strided: bool = False
    training: bool = True
    clean: bool = True
    far: bool = False
    """Sample ids that are not the rows of the table, and beyond its last."""
    steps: int = 2
    spoilt: float | None = None
    """What one logit of the first step's z is."""
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    values: list[dict[str, Tensor]]
    """Of each step: what the objective gives, and both gradients."""
    sets: list[Tensor]
    """Of each step: the candidate sets, bool [B, C]."""
    state: dict[str, Tensor]


def strided(x: Tensor) -> Tensor:
    """The same numbers with a gap after each row."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def unpacked(bits: Tensor, num_classes: int) -> Tensor:
    return ((bits[:, :, None] >> torch.arange(32)) & 1).flatten(1)[:, :num_classes].bool()


def renumber(objective: GNLObjective, **changes: Callable[[Tensor], Tensor]) -> None:
    """Steps from now on get the ids or the slots that ``changes`` makes of a batch's ids."""

    def changed(given: Any) -> Any:
        if not isinstance(given, Given):
            return given
        return given._replace(**{name: change(given.ids) for name, change in changes.items()})

    def step(inner: Callable[..., Any], *args: Any) -> Any:
        return inner(*map(changed, args))

    for name in ("_fused_step", "_reference_step"):
        setattr(objective, name, partial(step, getattr(objective, name)))


def run(case: Case, backend: str) -> Outcome:
    """Some steps of a case from one random state."""
    B, C, g = case.B, case.C, torch.Generator().manual_seed(case.seed)
    N = B + 5
    options = {"warmup_sets": "drawn", "mix": None, "seed": case.seed, **case.options}
    objective = GNLObjective(N, C, backend=backend, **options).train(case.training)
    if case.far:
        renumber(objective, ids=lambda ids: 7 * ids + 1000)
    table = torch.rand(N, C, generator=g)
    objective.M_NC.copy_(table / table.sum(1, keepdim=True))
    objective.w_N.copy_(torch.rand(N, generator=g))
    objective.loss_N.copy_(torch.arange(N) / N)
    objective.column_sum_C.copy_(objective.M_NC.float().sum(0))
    objective.window_RC.copy_(torch.rand(objective.window_RC.shape, generator=g) * B / C)
    values, sets = [], []
    for number in range(case.steps):
        z, t = ((torch.randn(B, K, C, generator=g) * case.scale).to(case.dtype) for K in (1, case.K))
        z, t = z[:, 0], t[:, 0] if case.K == 1 else t
        if case.spoilt is not None and number == 0:
            z[B // 2, C // 2] = case.spoilt
        if backend == "reference":  # the truth, of the same numbers
            z, t = z.double(), t.double()
        z, t = ((strided(x) if case.strided else x).requires_grad_() for x in (z, t))
        labels, clean = (torch.randint(C, (B,), generator=g) for _ in range(2))
        index = torch.randperm(N, generator=g)[:B]
        given = {"clean": clean} if case.clean else {}
        if case.coverage is not None:
            given["coverage"] = [torch.randint(C, (B,), generator=g) for _ in range(case.coverage)]
        if case.given_D:
            given["denominator"] = torch.rand(C, generator=g) * B / C + 0.01
        with watched(backend, C, sets):
            terms = objective(z, t, labels, index, **given)
        terms.loss.backward()
        step = {name: value for name, value in terms._asdict().items() if value is not None}
        step["means"] = terms.means[:3]
        values.append({**step, "loss": terms.loss.detach(), "dz": z.grad, "dt": t.grad})
    return Outcome(values, sets, objective.state_dict())


def watched(backend: str, C: int, sets: list[Tensor]) -> Any:
    """Keeps the candidate sets of the steps within."""
    if backend == "reference":
        owner, name, found = objective_module, "candidate_sets", lambda args, out: out.member_BC
    else:
        owner, name, found = (
            backend_module(backend),
            "rows",
            lambda args, out: unpacked(args[0].bits, C),
        )
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        sets.append(found(args, out))
        return out

    return mock.patch.object(owner, name, outer)


EXACT = ("set_size", "covered", "step", "epoch", "w_N")


def differences(case: Case, backend: str) -> list[str]:
    """Where a backend is not as close to the reference in float64 as the case's types allow; [] is: nowhere.

    float32: 2e-5 of an array's largest number (and 5e-6 absolutely). 16-bit logits round the gradients, a 16-bit
    table its rows, and what follows from them: one unit in the last place, 2^-8 or 2^-10. Of a step with spoilt logits
    the loss is to be NaN, and how far that spreads in the gradients is left open.
    """
    wanted, given = run(case, "reference"), run(case, backend)
    found = [f"step {i}: sets" for i in range(case.steps) if not torch.equal(wanted.sets[i], given.sets[i])]
    table = getattr(torch, case.options.get("table_dtype", "float32"))
    assert all(wanted.state[name].dtype == given.state[name].dtype for name in wanted.state)
    pairs = [(wanted.state, given.state, table)]
    pairs += [(a, b, case.dtype) for a, b in zip(wanted.values, given.values, strict=True)]
    if case.spoilt is not None:
        for outcome in (wanted, given):
            assert outcome.values[0]["loss"].isnan()
            for name in ("loss", "means", "dz", "dt"):
                del outcome.values[0][name]
    for a, b, dtype in pairs:
        assert a.keys() == b.keys()
        for name in a:
            x, y = a[name].double().nan_to_num(-1), b[name].double().nan_to_num(-1)
            assert x.shape == y.shape, name
            unit = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
            largest = float(x.abs().max()) if x.numel() else 0.0
            room = 0.0 if name in EXACT else (2e-5 + unit) * largest + 5e-6
            worst = float((x - y).abs().max()) if x.numel() else 0.0
            if not worst <= room:
                found.append(f"{name}: {worst:.1e} apart, largest {largest:.1e}")
    return found


def cases(most_rows: int, most_classes: int) -> st.SearchStrategy[Case]:
    """Any shape, type and option."""
    options = st.fixed_dictionaries(
        {},
        optional={
            "direction": st.just("x->y"),
            "prior_kl": st.sampled_from(["forward", "ce"]),
            "denominator": st.sampled_from(["window", "dataset", "mixed"]),
            "prior_form": st.just("additive"),
            "coverage": st.sampled_from(["argmax", "none"]),
            "uncertainty": st.just("none"),
            "k_max": st.sampled_from([None, 0, 1, 3]),
            "tau": st.sampled_from([1.0, 0.25]),
            "beta": st.sampled_from([0.0, 0.5, 1.0]),
            "warmup_epochs": st.just(0),
            "terms": st.sampled_from([("ce",), ("prior",), ("estep",), ("ce", "prior")]),
            "table_dtype": st.sampled_from(["float16", "bfloat16"]),
        },
    ).map(lambda o: {**o, "denominator": "dataset", "mix": 0.3} if o.get("denominator") == "mixed" else o)
    return st.builds(
        Case,
        B=st.integers(1, most_rows),
        C=st.integers(2, most_classes),
        K=st.sampled_from([1, 1, 3]),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16]),
        scale=st.sampled_from([0.1, 2.0, 10.0]),
        given_D=st.sampled_from([False, False, True]),
        coverage=st.sampled_from([None, None, 0, 1, 2]),
        strided=st.booleans(),
        training=st.sampled_from([True, True, False]),
        clean=st.booleans(),
        far=st.booleans(),
        steps=st.just(2),
        spoilt=st.sampled_from([None, None, None, float("nan"), float("inf")]),
        seed=st.integers(0, 2**64 - 1),
        options=options,
    )
