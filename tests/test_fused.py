"""The fused backends against the reference: values, gradients, label state, and the sampled sets exactly."""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from fused_cases import Case, cases, differences, renumber, run
from hypothesis import HealthCheck, given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from fastgnl import GNLObjective, GNLPair
from fastgnl import objective as objective_module
from fastgnl.errors import InputError
from fastgnl.kernels import backends, cpu, philox
from fastgnl.kernels import step as step_module
from fastgnl.kernels.candidates import smallest_free_keys

pytest.importorskip("triton", reason="triton is not installed")
if backends.problem("cpu", "cpu"):
    pytest.skip(str(backends.problem("cpu", "cpu")), allow_module_level=True)

import triton
import triton.language as tl

from fastgnl.kernels import triton_kernels, triton_step

BACKENDS = ("cpu", "triton")
relaxed = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(relaxed, max_examples=300)
@given(cases(most_rows=70, most_classes=200))
def test_the_native_kernel_equals_the_reference(case):
    assert differences(case, "cpu") == []


@settings(relaxed, max_examples=15)
@given(cases(most_rows=20, most_classes=70))
def test_the_triton_kernels_equal_the_reference(case):
    """In Triton's interpreter."""
    assert differences(case, "triton") == []


LONG_ROWS = {
    "capped": {},
    "not capped": {"warmup_epochs": 0, "k_max": None},
    "dataset": {"denominator": "dataset", "prior_kl": "forward"},
    "window": {"denominator": "window", "prior_form": "additive"},
    "ce": {"prior_kl": "ce", "direction": "x->y"},
}


@pytest.mark.parametrize("name", LONG_ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_longer_than_a_block(backend, name):
    assert differences(Case(2, 2500, options=LONG_ROWS[name]), backend) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("B", "C"), [(1, 21841), (3, 1000), (1, 2), (2, 3)])
@pytest.mark.parametrize("given_D", [False, True])
def test_extreme_shapes(backend, B, C, given_D):
    assert differences(Case(B, C, steps=1, given_D=given_D), backend) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_saturated_logits(backend, dtype):
    """+-10,000: most of q underflows, and some class gets no mass from any row."""
    for prior_kl in ("reverse", "forward", "ce"):
        options = {"prior_kl": prior_kl, "denominator": "window"}
        assert differences(Case(9, 12, dtype=dtype, scale=1e4, options=options), backend) == []


SPOILT = {
    "a lane a row": Case(20, 10, options={"denominator": "dataset"}),
    "one row": Case(1, 10, options={"denominator": "window"}),
    "few classes": Case(17, 3, options={"denominator": "window", "prior_kl": "forward"}),
    "a row at a time": Case(9, 100, options={"denominator": "dataset", "prior_kl": "forward"}),
    "window": Case(9, 100, dtype=torch.float16, options={"denominator": "window", "table_dtype": "float16"}),
    "longer than a block": Case(2, 2500, options={"denominator": "dataset"}),
    "D given": Case(9, 40, given_D=True),
    "ce": Case(9, 40, dtype=torch.bfloat16, options={"prior_kl": "ce"}),
}


NOT_FINITE = [float("nan"), float("inf")]


@pytest.mark.parametrize("spoilt", NOT_FINITE)
@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_are_not_finite_do_the_same_in_the_reference(backend, name, spoilt):
    assert differences(replace(SPOILT[name], spoilt=spoilt), backend) == []


@pytest.mark.parametrize("spoilt", NOT_FINITE)
@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_that_are_not_finite_spoil_no_state(backend, name, spoilt):
    """Their row leaves its sample's as it was, the others update theirs, and the next step is sound again."""
    case = replace(SPOILT[name], spoilt=spoilt)
    sound, first, both = (run(c, backend) for c in (replace(case, spoilt=None, steps=1), replace(case, steps=1), case))
    assert all(value.isfinite().all() for value in [*first.state.values(), *both.state.values()])
    assert both.values[0]["loss"].isnan()
    assert both.values[0]["dz"][case.B // 2].isnan().all()
    assert all(value.isfinite().all() for value in both.values[1].values())
    kept = run(replace(case, steps=0), backend).state
    apart = (first.state["loss_N"] != sound.state["loss_N"]).nonzero().flatten()
    assert len(apart) == 1
    for key in ("M_NC", "loss_N"):
        assert torch.equal(first.state[key][apart], kept[key][apart])
        sound.state[key][apart] = kept[key][apart]
        assert torch.equal(first.state[key], sound.state[key])
    if case.options.get("denominator") == "dataset":
        wanted = (first.state["M_NC"].double() - kept["M_NC"].double()).sum(0)
        torch.testing.assert_close(
            first.state["column_sum_C"] - kept["column_sum_C"], wanted.float(), rtol=0, atol=1e-5
        )
    if case.options.get("denominator") == "window":
        window = first.state["window_RC"]
        assert torch.equal(window, torch.cat([kept["window_RC"][1:], torch.zeros(1, case.C)]))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("C", [10, 40])
def test_any_bits_of_a_nan_are_seen(backend, C):
    """A GPU's own NaN is 0x7FFFFFFF."""
    for bits in (0x7F800001, 0x7FC00101, 0x7FFFFFFF, 0xFFC00000 - 2**32, -1):
        for j in range(C):
            objective = GNLObjective(2, C, backend=backend)
            z = torch.randn(2, C, generator=torch.Generator().manual_seed(j))
            z.view(torch.int32)[1, j] = bits
            terms = objective(z, torch.zeros(2, C), torch.tensor([0, 1]), torch.tensor([0, 1]))
            assert terms.loss.isnan()
            assert terms.sample_loss.isnan().tolist() == [False, True]
            assert (objective.M_NC[1] == 1 / C).all()


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("C", [10, 40])
def test_a_masked_class_is_taken_into_the_average_unless_it_is_the_given_label(backend, C):
    objective = GNLObjective(2, C, backend=backend)
    z = torch.zeros(2, C)
    z[:, 3] = -float("inf")
    objective(z, torch.zeros(2, C), torch.tensor([0, 3]), torch.tensor([0, 1]))
    assert objective.M_NC.isfinite().all()
    assert objective.M_NC[0, 3] < 1 / C
    assert (objective.M_NC[1] == 1 / C).all()
    assert objective.loss_N.isfinite().tolist() == [True, False]
    assert not objective.loss_N.isinf().any()


FAR = {
    "a lane a row": Case(20, 10, far=True, options={"warmup_epochs": 0, "denominator": "dataset"}),
    "in warm-up": Case(20, 10, far=True),
    "a row at a time": Case(9, 100, far=True, options={"warmup_epochs": 0, "denominator": "dataset"}),
    "in warm-up, a row at a time": Case(9, 100, far=True, options={"table_dtype": "bfloat16"}),
    "longer than a block": Case(2, 2500, far=True, options={"warmup_epochs": 0, "denominator": "dataset"}),
    "D given": Case(9, 100, far=True, given_D=True, options={"warmup_epochs": 0}),
}


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_beyond_the_rows_of_the_table(backend, name):
    assert differences(FAR[name], backend) == []


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("C", [10, 100])
def test_where_a_samples_row_lies_changes_no_bit(backend, C):
    """The draws follow the id; M, w and the loss follow the slot."""
    B, N, g = 16, 40, torch.Generator().manual_seed(0)
    z, t = (torch.randn(B, C, generator=g) for _ in range(2))
    labels, index, place = (torch.randperm(N, generator=g)[:n] for n in (B, B, N))
    table, w, far = torch.rand(N, C, generator=g), torch.rand(N, generator=g), 3 * torch.arange(N) + 10**6
    outcomes = []
    for slots, ids in ((torch.arange(N), far), (place, far), (place, far + 1)):
        objective = GNLObjective(N, C, backend=backend, warmup_epochs=0, denominator="dataset")
        renumber(objective, ids=ids.__getitem__, slots=slots.__getitem__)
        objective.M_NC[slots], objective.w_N[slots] = table, w
        leaves = [v.clone().requires_grad_() for v in (z, t)]
        terms = objective(*leaves, labels % C, index)
        terms.loss.backward()
        grads = [leaf.grad for leaf in leaves]
        outcomes.append(
            (terms.loss, terms.set_size, objective.M_NC[slots], objective.loss_N[slots].nan_to_num(-1), *grads)
        )
    assert all(torch.equal(a, b) for a, b in zip(*outcomes[:2], strict=True))
    assert not torch.equal(outcomes[1][0], outcomes[2][0])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("slots", "sentence"),
    [
        ([0, 9, 2], "index holds 9, wanted 0 to 8"),
        ([-1, 0, 2], "index holds -1"),
        ([0, 2, 2], "index names a sample twice"),
    ],
)
def test_bad_slots_are_refused_whatever_the_ids(backend, slots, sentence):
    objective = GNLObjective(9, 4, backend=backend)
    renumber(objective, ids=lambda ids: ids + 100, slots=lambda ids: torch.tensor(slots))
    with pytest.raises(InputError, match=sentence):
        objective(*torch.zeros(2, 3, 4), torch.arange(3), torch.arange(3))
    assert (objective.M_NC == 0.25).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prior_kl", ["reverse", "forward"])
@pytest.mark.parametrize(("B", "C"), [(17, 10), (9, 100), (2, 2500)])
def test_what_is_detached_in_the_denominator_is_weighed(backend, prior_kl, B, C):
    case = Case(B, C, steps=1, options={"denominator": "dataset", "mix": 0.3, "prior_kl": prior_kl})
    assert differences(case, backend) == []


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_the_weight_of_what_is_detached_matters(backend):
    """By 0 it leaves the sum over the batch."""
    losses = {}
    for denominator, mix in (("batch", None), ("dataset", 0.0), ("dataset", 0.3), ("dataset", None)):
        case = Case(steps=1, options={"denominator": denominator, "mix": mix})
        losses[denominator, mix] = float(run(case, backend).values[0]["loss"])
    assert losses["batch", None] == losses["dataset", 0.0]
    assert len(set(losses.values())) == 3


@triton.jit
def threshold_kernel(words, k, out, C, R: tl.constexpr, BLOCK: tl.constexpr):
    row, cls = tl.arange(0, R), tl.arange(0, BLOCK)[None, :]
    word = tl.load(words + row[:, None] * C + cls, mask=cls < C, other=0).to(tl.uint32)
    y, none, k_R = row * 0, row * 0 - 1, tl.load(k + row)
    T, last = triton_kernels._threshold(word, 0, row, 0, 0, y, none, none, k_R, row * 0 + (C - 1), C, BLOCK, False)
    chosen = triton_kernels._selected(word, cls, triton_kernels._is_free(cls, y, none, none, C), T, last)
    tl.store(out + row[:, None] * C + cls, chosen.to(tl.int8), mask=cls < C)


@pytest.mark.parametrize("most", [0, 1, 3, 2**20, 2**32 - 1])
def test_equal_words_are_told_apart_by_their_class(most):
    """Rows full of ties, and words at both ends of their range: the sets are those of a full sort."""
    R, C = 16, 24
    g = torch.Generator().manual_seed(most)
    words = torch.randint(0, most + 1, (R, C), generator=g)
    words[:, 5:7] = most
    k = torch.randint(0, C, (R,), generator=g, dtype=torch.int32)
    out = torch.zeros(R, C, dtype=torch.int8)
    threshold_kernel[(1,)](words, k, out, C, R=R, BLOCK=32)
    named = torch.zeros(R, C, dtype=torch.bool)
    named[:, 0] = True
    assert torch.equal(out.bool(), smallest_free_keys(named, words, k.long()))
    assert torch.equal(out.sum(1), k.long())


def free_words(ids):
    """The words of 21,840 free classes; class 21,840 is the given label."""
    return philox.words(0, ids, 21841, 0, [philox.FREE])[0, :, :-1]


@pytest.fixture(scope="module")
def tie():
    """(id, k, class): a row whose k-th and next smallest words are equal, and the class of the next, which is out."""
    ids = torch.arange(60)
    words = free_words(ids)
    ordered = words.sort(1).values
    rows, places = (ordered[:, 1:] == ordered[:, :-1]).nonzero(as_tuple=True)
    assert len(rows), "60 rows of 21,840 words without a tie: the odds are 1 in 30"
    row, place = int(rows[0]), int(places[0])
    return row, place + 1, int((words[row] == ordered[row, place]).nonzero()[1])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_tie_at_the_threshold_of_a_whole_step(backend, tie):
    """w is chosen so that k falls between two equal words of the random-number contract itself."""
    id_, k, second = tie
    C = 21841
    objective = GNLObjective(60, C, warmup_epochs=0, k_max=None, coverage="none", backend=backend, seed=0).eval()
    objective.w_N.fill_(k / (C - 1))
    z, label, index = torch.zeros(1, C), torch.tensor([C - 1]), torch.tensor([id_])
    terms = objective(z, z, label, index, torch.tensor([second]))
    assert int(terms.set_size) == k + 1
    assert not bool(terms.covered)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_runs_give_equal_bits(backend):
    case = Case(40, 33, options={"denominator": "dataset"})
    a, b = run(case, backend), run(case, backend)
    for x, y in zip([a.state, *a.values], [b.state, *b.values], strict=True):
        assert all(torch.equal(x[name].nan_to_num(-1), y[name].nan_to_num(-1)) for name in x)


@pytest.mark.parametrize(("B", "C"), [(300, 100), (70, 1000)])
def test_threads_do_not_change_a_bit(B, C):
    threads = torch.get_num_threads()
    outcomes = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outcomes.append(run(Case(B, C, options={"denominator": "dataset"}), "cpu"))
    finally:
        torch.set_num_threads(threads)
    for other in outcomes[1:]:
        for x, y in zip([outcomes[0].state, *outcomes[0].values], [other.state, *other.values], strict=True):
            assert all(torch.equal(x[name].nan_to_num(-1), y[name].nan_to_num(-1)) for name in x)


def recorded_call(backend, monkeypatch, **options):
    """The arguments of one call of the op."""
    calls = []
    inner = objective_module.differentiable_step
    monkeypatch.setattr(objective_module, "differentiable_step", lambda *a: calls.append(a) or inner(*a))
    z, t = (torch.randn(8, 10, requires_grad=True) for _ in range(2))
    GNLObjective(40, 10, backend=backend, **options)(z, t, torch.arange(8), torch.arange(8))
    ((given, state, options, update),) = calls
    flat = [*given, *state, *options, update, True]
    return tuple(a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in flat)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"denominator": "dataset"}, {"prior_kl": "ce"}], ids=str)
def test_opcheck(backend, options, monkeypatch):
    torch.library.opcheck(step_module.STEP, recorded_call(backend, monkeypatch, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_compile_sees_one_op(backend):
    graphs = []

    def count(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "fastgnl" in str(node.target)])
        return graph.forward

    eager, other = (GNLObjective(40, 10, backend=backend) for _ in range(2))
    compiled = torch.compile(other, backend=count, fullgraph=True)
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(8, 10, generator=g) for _ in range(2))
        leaves = [[v.clone().requires_grad_() for v in (x, y)] for _ in range(2)]
        losses = [o(*v, torch.arange(8), torch.arange(8)).loss for o, v in zip((eager, compiled), leaves, strict=True)]
        for loss in losses:
            (2 * loss).backward()
        assert torch.equal(*losses)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(*leaves, strict=True))
    assert graphs == [["fastgnl.step.default"]]
    assert torch.equal(eager.M_NC, other.M_NC)
    assert int(other.step) == 2


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_upstream_gradient_scales_both(backend, dtype):
    """Also where a float16 gradient would underflow without the loss scale."""
    z, t = (torch.randn(4, 10, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(2))
    grads = []
    for scale in (1.0, 1024.0):
        leaves = [v.clone().requires_grad_() for v in (z * 8, t * 8)]
        objective = GNLObjective(4, 10, backend=backend)
        (objective(*leaves, torch.arange(4), torch.arange(4)).loss * scale).backward()
        grads.append([leaf.grad.double() / scale for leaf in leaves])
    wanted = [v.clone().double().requires_grad_() for v in (z * 8, t * 8)]
    GNLObjective(4, 10, backend="reference")(*wanted, torch.arange(4), torch.arange(4)).loss.backward()
    for scaled, leaf in zip(grads[1], wanted, strict=True):
        seen = leaf.grad.abs() > 1e-6  # float16 alone would keep 4 bits of such a number
        torch.testing.assert_close(scaled[seen], leaf.grad[seen], rtol=4e-3, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_backward_is_refused(backend):
    z = torch.randn(4, 10, requires_grad=True)
    loss = GNLObjective(4, 10, backend=backend)(z, z.detach(), torch.arange(4), torch.arange(4)).loss
    (3 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a fused step was differentiated twice, wanted once"):
        (3 * loss).backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_the_size_of_a_batch_is_allocated_but_the_gradients(backend):
    B, C = 512, 256
    objective = GNLObjective(B, C, backend=backend)
    z, t = (torch.randn(B, C, requires_grad=True) for _ in range(2))
    nowhere = partial(
        triton_step.launches_go_to, lambda launch: None
    )  # a batch of this size takes the interpreter a minute
    for grads, wanted in ((True, 2), (False, 0)):
        with torch.set_grad_enabled(grads), Allocations() as allocations, nowhere():
            objective(z, t, torch.arange(B) % C, torch.arange(B))
        assert sum(numel == B * C for numel in allocations.numels) == wanted
        assert max(numel for numel in allocations.numels if numel != B * C) <= B * C / 4


class Allocations(TorchDispatchMode):
    """The sizes of the tensors made within."""

    def __init__(self):
        super().__init__()
        self.numels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ or "new_" in func.__name__:
            self.numels.append(out.numel())
        return out


def test_launches():
    """One where D is known, three where it holds the live batch; the backward adds a scaling of each gradient."""
    for given_D, wanted in ((True, ["rows_kernel"]), (False, ["column_sums_kernel", "rows_kernel", "finish_kernel"])):
        names = []

        def record(launch, names=names):
            names.append(launch.kernel.__name__ if hasattr(launch.kernel, "__name__") else launch.kernel.fn.__name__)
            triton_step.run_on_device(launch)

        with triton_step.launches_go_to(record):
            run(Case(4, 10, steps=1, given_D=given_D), "triton")
        assert names == [*wanted, "scale_kernel", "scale_kernel"]


def test_two_networks_on_the_native_kernel():
    pairs = [GNLPair(40, 9, backend=backend, warmup_epochs=0) for backend in ("reference", "cpu")]
    g = torch.Generator().manual_seed(0)
    z, t = (torch.randn(2, 16, 9, generator=g) for _ in range(2))
    labels, index = torch.randint(9, (16,), generator=g), torch.randperm(40, generator=g)[:16]
    leaves = [[v.clone().requires_grad_() for v in (z, t)] for _ in pairs]
    terms = [pair(*v, labels, index, labels) for pair, v in zip(pairs, leaves, strict=True)]
    assert torch.equal(terms[0].set_size, terms[1].set_size)
    torch.testing.assert_close(terms[1].loss, terms[0].loss)
    for result in terms:
        result.loss.backward()
    for a, b in zip(*leaves, strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)


# Which backend runs.


def test_auto_takes_the_native_kernel_where_it_can():
    z = torch.zeros(2, 4)
    for options, dtype, wanted in (
        ({}, torch.float32, "cpu"),
        ({}, torch.bfloat16, "cpu"),
        ({}, torch.float64, "reference"),
        ({"estep": "literal"}, torch.float32, "reference"),
        ({"tau": 0.3}, torch.float32, "reference"),
        ({"backend": "reference"}, torch.float32, "reference"),
    ):
        assert GNLObjective(9, 4, **options).backend_for(z.to(dtype), z.to(dtype)) == wanted


@pytest.mark.parametrize(
    ("options", "dtype", "sentence"),
    [
        ({"backend": "cpu", "estep": "literal"}, torch.float32, "wanted 'reference' or 'auto' with estep='literal'"),
        ({"backend": "cpu", "tau": 0.3}, torch.float32, "with tau=0.3: 1/tau is no whole number"),
        ({"backend": "cpu"}, torch.float64, "with logits of torch.float64"),
        ({"backend": "gpu"}, torch.float32, "backend is 'gpu', wanted one of"),
        ({"table_dtype": "int8"}, torch.float32, "table_dtype is 'int8', wanted one of"),
    ],
)
def test_a_backend_that_cannot_is_refused_in_one_sentence(options, dtype, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        GNLObjective(9, 4, **options)(*torch.zeros(2, 3, 4, dtype=dtype), torch.arange(3), torch.arange(3))
    assert "\n" not in str(error.value)


def test_a_module_in_half_precision_is_left_to_the_reference():
    """.half() makes the losses and w 16 bits too, which the kernels would read as 32."""
    z = torch.zeros(2, 4)
    assert GNLObjective(9, 4).half().backend_for(z, z) == "reference"
    with pytest.raises(InputError, match="with losses kept as"):
        GNLObjective(9, 4, backend="cpu").half()(z, z, torch.arange(2), torch.arange(2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"coverage": [torch.tensor([0, 1, 4])]}, "coverage holds 4, wanted 0 to 3"),
        ({"coverage": [torch.tensor([0, 1])]}, r"coverage has shape \(2,\), wanted \(3,\)"),
        ({"w": torch.zeros(8)}, r"w has shape \(8,\), wanted \(9,\)"),
        ({"denominator": torch.ones(3)}, r"denominator has shape \(3,\), wanted \(4,\)"),
        ({"denominator": torch.ones(4, device="meta")}, "denominator is on meta, wanted cpu as z is"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_replaces_the_objectives_own_is_checked(backend, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        GNLObjective(9, 4, backend=backend)(*torch.zeros(2, 3, 4), torch.arange(3), torch.arange(3), **changes)


def test_what_replaces_the_objectives_own_may_be_of_any_type():
    given = {"coverage": [torch.arange(3, dtype=torch.int32)], "w": torch.rand(18).double()[::2]}
    given["denominator"] = torch.rand(8, dtype=torch.float64)[::2] + 0.1
    z, t = torch.randn(2, 3, 4)
    losses = [
        GNLObjective(9, 4, backend=backend, warmup_epochs=0)(z, t, torch.arange(3), torch.arange(3), **given).loss
        for backend in ("reference", "cpu")
    ]
    torch.testing.assert_close(*losses, check_dtype=False)


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="backend is 'triton' and Triton kernels need tensors on a GPU"):
        GNLObjective(9, 4, backend="triton")(*torch.zeros(2, 3, 4), torch.arange(3), torch.arange(3))


@pytest.mark.parametrize(
    ("labels", "index", "clean", "sentence"),
    [
        ([0, 1, 4], [0, 1, 2], None, "labels holds 4, wanted 0 to 3"),
        ([0, -2, 1], [0, 1, 2], None, "labels holds -2, wanted 0 to 3"),
        ([0, 1, 2], [0, 9, 2], None, "index holds 9, wanted 0 to 8"),
        ([0, 1, 2], [0, 2, 2], None, "index names a sample twice"),
        ([0, 1, 2], [0, 1, 2], [0, 7, 1], "clean holds 7, wanted 0 to 3"),
    ],
)
def test_the_native_kernel_refuses_bad_ids_and_changes_nothing(labels, index, clean, sentence):
    objective = GNLObjective(9, 4, backend="cpu")
    given = [torch.tensor(v) for v in (labels, index)]
    with pytest.raises(InputError, match=sentence):
        objective(*torch.zeros(2, 3, 4), *given, None if clean is None else torch.tensor(clean))
    assert int(objective.step) == 0
    assert (objective.M_NC == 0.25).all()


def test_without_a_compiler_the_reference_runs_with_one_line_of_notice(tmp_path):
    script = (
        "import torch; from fastgnl import GNLObjective\n"
        "for _ in range(2):\n"
        "    o = GNLObjective(9, 4); z = torch.randn(3, 4)\n"
        "    print(o.backend_for(z, z), float(o(z, z, torch.arange(3), torch.arange(3)).loss) > 0)\n"
    )
    env = {**os.environ, "PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["reference", "True"] * 2, done.stderr
    assert done.stderr.splitlines() == ["fastgnl: no C++ compiler was found, going on with plain PyTorch"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-512 is of x86_64")
def test_the_native_kernel_builds_for_avx_512(tmp_path):
    library = tmp_path / "step.so"
    cpu.compile_library("AVX-512", library)
    if shutil.which("objdump"):
        code = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=True).stdout
        assert code.count("%zmm") > 1000


def test_the_native_kernel_without_vector_instructions(tmp_path):
    """Built for any machine, it draws the same sets."""
    script = (
        "from fused_cases import Case, differences; from fastgnl.kernels import cpu; print(cpu.isa())\n"
        "for case in (Case(), Case(33, 100), Case(5, 1000, options={'denominator': 'dataset'})):\n"
        "    print(differences(case, 'cpu'))\n"
    )
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout.split() == ["plain", "[]", "[]", "[]"], done.stderr


def test_a_table_of_16_bits_follows_one_of_32(make_batch):
    """Rounding to the nearest holds the average within 4% (bfloat16) and 0.5% (float16) of where it is going."""
    tables = {}
    z = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    for dtype in ("float32", "bfloat16", "float16"):
        objective = GNLObjective(1, 12, table_dtype=dtype)
        for _ in range(200):
            objective(z, z, torch.tensor([0]), torch.tensor([0]))
        tables[dtype] = objective.M_NC.float()
        assert objective.M_NC.dtype == getattr(torch, dtype)
    for dtype, room in (("bfloat16", 0.045), ("float16", 0.006)):
        assert ((tables[dtype] / tables["float32"]) - 1).abs().max() < room
