"""M as a top-k store: what it keeps of a row, what it stands for, and training on it."""

import pytest
import torch

from fastgnl import GNLObjective, top_k
from fastgnl.errors import InputError
from fastgnl.kernels import backends
from fastgnl.top_k import TopK

ROUNDING = 2**-11
"""The largest relative error of a float16."""
TINY = 2**-25
"""And the largest absolute one of those below 2^-14."""
BACKENDS = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(backends.problem("cpu", "cpu") is not None, reason="no C++ compiler")),
]


def random_rows(B, C, seed=0, scale=3.0):
    return torch.softmax(scale * torch.randn(B, C, generator=torch.Generator().manual_seed(seed)), 1)


def filled(N, C, k):
    """A store in which every row has been written, in two parts and in no order."""
    top, rows = TopK(N, C, k), random_rows(N, C)
    for slots in torch.randperm(N, generator=torch.Generator().manual_seed(1)).chunk(2):
        top.write(slots, rows[slots])
    return top, rows


@pytest.mark.parametrize(
    ("N", "C", "k", "kind"),
    [
        (20, 12, 1, torch.int16),
        (20, 12, 5, torch.int16),
        (20, 12, 11, torch.int16),
        (6, 65_536, 8, torch.int16),
        (6, 65_537, 8, torch.int32),
    ],
)
def test_keeps_the_largest_entries_and_spreads_the_rest(N, C, k, kind):
    top, rows = filled(N, C, k)
    assert top.class_NK.dtype == kind
    found, (largest, classes) = top.read(torch.arange(N)), rows.topk(k, 1)
    torch.testing.assert_close(found.gather(1, classes), largest, rtol=ROUNDING, atol=TINY)
    others = found.scatter(1, classes, torch.nan)
    others = others[~others.isnan()].view(N, C - k)
    rest = 1 - largest.half().float().sum(1, keepdim=True)
    torch.testing.assert_close(others, (rest / (C - k)).clamp(min=0).expand_as(others), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.sum(1), torch.ones(N), rtol=0, atol=ROUNDING)


def test_the_last_classes_of_the_largest_sets_are_kept():
    """Where int16 would wrap around."""
    for C in (65_536, 65_537):
        top, rows = TopK(1, C, 2), torch.zeros(1, C)
        rows[0, [C - 1, 2**15]] = torch.tensor([0.75, 0.25])
        top.write(torch.tensor([0]), rows)
        assert torch.equal(top.read(torch.tensor([0])), rows)


@pytest.mark.parametrize("C", [7, 1000, 21_841, 70_000])
def test_starts_from_equal_shares(C):
    found = TopK(3, C, 4).read(torch.arange(3))
    torch.testing.assert_close(found, torch.full((3, C), 1 / C), rtol=ROUNDING, atol=TINY)


def test_a_write_leaves_other_rows_alone():
    top, _ = filled(20, 12, 3)
    before, slots = top.read(torch.arange(20)), torch.tensor([17, 2])
    top.write(slots, random_rows(2, 12, seed=2))
    same = (top.read(torch.arange(20)) == before).all(1)
    assert torch.equal((~same).nonzero().squeeze(1), slots.sort().values)


def test_a_row_as_good_as_certain_has_no_negative_rest():
    """Rounded, shares may add up to more than 1."""
    shares = torch.tensor([[0.5 + 0.6 * ROUNDING, 0.5 - 0.6 * ROUNDING, 0.0, 0.0]])
    top = TopK(1, 4, 2)
    top.write(torch.tensor([0]), shares)
    assert float(top.share_NK.double().sum()) > 1
    assert (top.read(torch.tensor([0]))[0, 2:] == 0).all()


@pytest.mark.parametrize("chunk", [1, 40, 10**6])
def test_column_sum_is_that_of_the_whole_rows(monkeypatch, chunk):
    """Row by row (a chunk smaller than a row), in pieces of which the last is shorter, and at once."""
    monkeypatch.setattr(top_k, "CHUNK", chunk)
    top, _ = filled(101, 12, 3)
    found = top.column_sum()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, top.read(torch.arange(101)).double().sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("C", "each"), [(1000, 4), (65_536, 4), (65_537, 6)])
@pytest.mark.parametrize("k", [1, 64])
def test_bytes_a_sample(C, each, k):
    objective = GNLObjective(50, C, top_k=k)
    assert objective.M_NC.numel() == 0
    assert objective.top.class_NK.nbytes + objective.top.share_NK.nbytes == 50 * each * k


def train(objective, make_batch, steps, N=40, C=12):
    """(loss, |S_i|) of each step on float32 logits."""
    found = []
    for seed in range(steps):
        b = make_batch(16, C, N, seed, torch.float32)
        terms = objective(b.z, b.t, b.labels, b.index)
        found.append((terms.loss.detach(), terms.set_size))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("denominator", ["batch", "dataset"])
def test_all_but_one_class_kept_trains_as_the_dense_table_does(make_batch, backend, denominator):
    """The one that is left out has what is left of 1: all that differs from a float16 table is how it is rounded."""
    options = {"denominator": denominator, "backend": backend, "warmup_epochs": 1}
    dense = GNLObjective(40, 12, table_dtype="float16", **options)
    kept = GNLObjective(40, 12, top_k=11, **options)
    for _ in range(2):
        for a, b in zip(train(dense, make_batch, 5), train(kept, make_batch, 5), strict=True):
            assert torch.equal(a[1], b[1])
            torch.testing.assert_close(a[0], b[0], rtol=1e-3, atol=1e-3)
        for objective in (dense, kept):
            objective.end_epoch()
    assert kept.w_N.any()
    torch.testing.assert_close(dense.w_N, kept.w_N)
    torch.testing.assert_close(kept.top.read(torch.arange(40)), dense.M_NC.float(), rtol=0, atol=12 * ROUNDING)
    torch.testing.assert_close(dense.column_sum_C, kept.column_sum_C, rtol=12 * ROUNDING, atol=0)


def member(objective, b, C):
    """Which classes each S_i of the next step holds, [B, C]."""
    objective.eval()
    rows = [objective(b.z, b.t, b.labels, b.index, torch.full_like(b.labels, j)).covered for j in range(C)]
    objective.train()
    return torch.stack(rows, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [1, 4])
def test_a_step_is_that_of_the_rows_the_store_stands_for(make_batch, backend, k):
    options = {"denominator": "dataset", "backend": backend, "warmup_epochs": 0}
    kept, dense = GNLObjective(400, 12, top_k=k, **options), GNLObjective(400, 12, **options)
    for seed in range(3):
        b = make_batch(300, 12, 400, seed, torch.float32)
        kept(b.z, b.t, b.labels, b.index)
    kept.end_epoch()
    dense.M_NC.copy_(kept.top.read(torch.arange(400)))
    for name in ("step", "epoch", "column_sum_C", "w_N", "loss_N"):
        getattr(dense, name).copy_(getattr(kept, name))
    b = make_batch(300, 12, 400, 3, torch.float32)
    sets = member(kept, b, 12)
    assert torch.equal(sets, member(dense, b, 12))
    fresh = GNLObjective(400, 12, **options)  # without what was learnt the draws are others
    fresh.step.copy_(kept.step)
    fresh.w_N.copy_(kept.w_N)
    assert not torch.equal(sets, member(fresh, b, 12))
    assert torch.equal(kept.coverage_labels(b.index), dense.coverage_labels(b.index))
    terms, expected = (objective(b.z, b.t, b.labels, b.index) for objective in (kept, dense))
    torch.testing.assert_close(terms.loss, expected.loss)
    assert torch.equal(kept.loss_N.nan_to_num(-1), dense.loss_N.nan_to_num(-1))
    torch.testing.assert_close(kept.column_sum_C, dense.column_sum_C)
    largest, classes = dense.M_NC.topk(k, 1)
    found = kept.top.read(torch.arange(400)).gather(1, classes)
    torch.testing.assert_close(found, largest, rtol=ROUNDING, atol=TINY)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_mode_keeps_the_store(make_batch, backend):
    objective, b = GNLObjective(40, 12, top_k=3, backend=backend), make_batch(16, 12, 40, 0, torch.float32)
    objective(b.z, b.t, b.labels, b.index)
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    objective.eval()
    objective(-b.z, b.t, b.labels, b.index)
    for name, value in objective.state_dict().items():
        assert torch.equal(value.nan_to_num(-1), before[name].nan_to_num(-1)), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_is_the_state_of_its_own_samples(make_batch, backend):
    """Every third sample: what it draws and learns is what the same samples draw and learn among all."""
    own = torch.arange(0, 40, 3)
    whole = GNLObjective(40, 12, top_k=3, backend=backend)
    shard = GNLObjective(40, 12, ids=own.flip(0), top_k=3, backend=backend)
    assert len(shard.top.class_NK) == len(shard.top.share_NK) == len(shard.w_N) == len(own)
    for seed in range(3):
        b = make_batch(8, 12, len(own), seed, torch.float32)
        terms, expected = (objective(b.z, b.t, b.labels, own[b.index]) for objective in (shard, whole))
        assert torch.equal(terms.loss, expected.loss)
        assert torch.equal(terms.set_size, expected.set_size)
    state, all_state = shard.shard_state(), whole.shard_state()
    assert torch.equal(state["ids"], own)
    for name in ("class", "share", "w", "loss"):
        assert torch.equal(state[name].nan_to_num(-1), all_state[name][own].nan_to_num(-1)), name
    with pytest.raises(InputError, match=r"index holds \[1\], wanted samples among the ids"):
        shard(b.z, b.t, b.labels, torch.arange(8))


def test_shards_are_put_together_from_others(make_batch):
    """Two shards of a store, read by three."""
    stores = [GNLObjective(41, 12, ids=torch.arange(r, 41, 2), top_k=3) for r in range(2)]
    for objective in stores:
        b = make_batch(16, 12, 20, 0, torch.float32)
        objective(b.z, b.t, b.labels, objective.own_ids[b.index])
    rows = torch.empty(41, 12)
    for objective in stores:
        rows[objective.own_ids] = objective.top.read(torch.arange(len(objective.own_ids)))
    for r in range(3):
        taken = GNLObjective(41, 12, ids=torch.arange(r, 41, 3), top_k=3)
        taken.load_shards(objective.shard_state() for objective in stores)
        assert torch.equal(taken.top.read(torch.arange(len(taken.own_ids))), rows[taken.own_ids])


@pytest.mark.parametrize(("k", "sentence"), [(0, "top_k is 0"), (12, "top_k is 12 of 12 classes, wanted fewer")])
def test_bad_k_is_refused(k, sentence):
    with pytest.raises(InputError, match=sentence):
        GNLObjective(40, 12, top_k=k)
