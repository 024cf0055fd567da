"""The fused step in Triton: candidate sets, table update, the three terms and both gradients.

Three kernels. ``column_sums_kernel`` adds q over the rows of this rank, ``rows_kernel`` does all that a row needs
once D is known, ``finish_kernel`` adds the part of dL/dz that flows through D. A denominator known before the step
needs ``rows_kernel`` alone. Between them the caller adds the column sums of all ranks.

A row of up to ``backends.RESIDENT`` classes stays in registers and is read once. A longer row is streamed in blocks
and read twice, the second time from the L2 cache. A program that adds over rows leaves a partial sum; the last
program of each group, found by a ticket, adds its group in order, and the last group adds all: the same bits every
run, no float atomics.

A row whose -log q_i[y_i] is not finite is not ``sound``: it leaves its sample's row of M and its loss as they were.

Axes: B rows, C classes, K draws, N samples this rank keeps, X given coverage labels, P programs, L rows of the
window; in a kernel [R, J]: a tile of rows and classes. ``cls`` are the classes of a tile.
"""

import triton
import triton.language as tl

from fastgnl.kernels import candidates, philox, step, terms

TINY = tl.constexpr(terms.TINY)
FLOOR = tl.constexpr(candidates.FLOOR)
CLIP = tl.constexpr(candidates.CLIP)
COVERAGE, FREE, WARMUP = tl.constexpr(philox.COVERAGE), tl.constexpr(philox.FREE), tl.constexpr(philox.WARMUP)
STREAMS_PER_NETWORK = tl.constexpr(philox.STREAMS_PER_NETWORK)
HALF_UNITS = tl.constexpr(step.HALF_UNITS)
LARGEST_RATIO = tl.constexpr(1e30)
"""Cap on q / D where D is given: keeps its sum over classes finite. A D that holds the live batch has q <= D."""
REVERSE, FORWARD, CE = (tl.constexpr(i) for i in range(3))
NO_COVER, SAMPLE, ARGMAX, GIVEN = (tl.constexpr(i) for i in range(4))
SHIFT, INVERSE_SUM, MEAN_GAP, INVERSE_Z, SUM_U, ROW_TERMS = (tl.constexpr(i) for i in range(6))
"""What ``stats`` keeps of a row: max z, 1 / sum exp(z - max), sum r g, 1 / Z, sum U, and the three terms."""


@triton.jit
def _words(seed, id_R, start, step, stream, BLOCK: tl.constexpr):
    """The random words of classes start to start + BLOCK - 1, uint32 [R, BLOCK]; one Philox call gives four."""
    quad = start // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.philox(seed, id_R[:, None], quad[None, :], step, stream)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _exponential(word):
    """-log u in the very steps of ``philox.exponential``: IEEE operations in one order, nothing contracted."""
    bits = ((word >> 9) * 2 + 1).to(tl.int32).to(tl.float32).to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    high = mantissa > 1.4142135
    exponent = ((bits >> 23) - (127 + 24) + high.to(tl.int32)).to(tl.float32)
    f = tl.where(high, mantissa * 0.5, mantissa)
    s = tl.div_rn(f - 1.0, f + 1.0)
    s2 = s * s
    series = s2 * (1.0 / 9.0)
    series = s2 * (series + 1.0 / 7.0)
    series = s2 * (series + 1.0 / 5.0)
    series = s2 * (series + 1.0 / 3.0)
    return -(exponent * 0.6931472 + 2.0 * s * (series + 1.0))


@triton.jit
def _race(M, word, valid, COVER: tl.constexpr, POWER: tl.constexpr):
    """What the coverage label is the argmin of: E / M^(1/tau), or -M."""
    if COVER == SAMPLE:
        weight = M
        for _ in tl.static_range(POWER - 1):
            weight = weight * M
        key = tl.div_rn(_exponential(word), weight)
    else:
        key = -M
    return tl.where(valid, key, float("inf"))


@triton.jit
def _is_free(cls, y_R, a_R, b_R, C):
    """Classes that are not named by the given label y or the coverage labels a, b (-1: none)."""
    return (cls != y_R[:, None]) & (cls != a_R[:, None]) & (cls != b_R[:, None]) & (cls < C)


@triton.jit
def _selected(word, cls, free, T_R, L_R):
    """Free classes up to the key (T, L), in the order of (word, class)."""
    return free & ((word < T_R[:, None]) | ((word == T_R[:, None]) & (cls <= L_R[:, None])))


@triton.jit
def _count(word, seed, id_R, step, stream, y_R, a_R, b_R, T_R, L_R, C, BLOCK: tl.constexpr, STREAMED: tl.constexpr):
    """How many classes ``_selected`` gives: from the words in registers, or drawing those of a streamed row again."""
    if STREAMED:
        count_R = tl.zeros_like(y_R)
        for start in range(0, C, BLOCK):
            cls = (start + tl.arange(0, BLOCK))[None, :]
            block = _words(seed, id_R, start, step, stream, BLOCK)
            count_R += tl.sum(_selected(block, cls, _is_free(cls, y_R, a_R, b_R, C), T_R, L_R).to(tl.int32), 1)
    else:
        cls = tl.arange(0, BLOCK)[None, :]
        count_R = tl.sum(_selected(word, cls, _is_free(cls, y_R, a_R, b_R, C), T_R, L_R).to(tl.int32), 1)
    return count_R


@triton.jit
def _threshold(word, seed, id_R, step, stream, y_R, a_R, b_R, k_R, n_R, C, BLOCK: tl.constexpr, STREAMED: tl.constexpr):
    """The key (T, L) up to which exactly k of the n free classes lie, found by counting.

    Words are uniform, so interpolating between two counts is off by few; any word in the gap after the k-th will
    do. Where equal words straddle it, a second search finds the last class L that still belongs.
    """
    low_R = tl.full(k_R.shape, -1, tl.int64)  # fewer than k words are <= low
    high_R = tl.full(k_R.shape, 0xFFFFFFFF, tl.int64)  # k or more are <= high
    below_R = tl.zeros_like(k_R)
    above_R = n_R
    last_R = tl.zeros_like(k_R) + C
    turn = 0
    open_R = (above_R != k_R) & (k_R > 0)
    while tl.max(open_R.to(tl.int32), 0) > 0:
        share_R = (k_R - below_R + 0.5) / (above_R - below_R + 1).to(tl.float32)
        # Halving every fourth turn bounds the search where words are not spread as expected.
        share_R = tl.where(turn % 4 == 3, 0.5, share_R)
        guess_R = low_R + ((high_R - low_R).to(tl.float32) * share_R).to(tl.int64)
        guess_R = tl.minimum(tl.maximum(guess_R, low_R + 1), high_R - 1)
        guess_R = tl.where(open_R, guess_R, high_R)
        count_R = _count(
            word, seed, id_R, step, stream, y_R, a_R, b_R, guess_R.to(tl.uint32), last_R, C, BLOCK, STREAMED
        )
        few_R = count_R < k_R
        low_R = tl.where(open_R & few_R, guess_R, low_R)
        below_R = tl.where(open_R & few_R, count_R, below_R)
        high_R = tl.where(open_R & (count_R >= k_R), guess_R, high_R)
        above_R = tl.where(open_R & (count_R >= k_R), count_R, above_R)
        open_R = open_R & (above_R != k_R) & (high_R - low_R > 1)
        turn += 1
    T_R = high_R.to(tl.uint32)
    tied_R = (above_R != k_R) & (k_R > 0)
    first_R = tl.full(k_R.shape, -1, tl.int32)  # fewer than k keys are <= (T, first)
    last_R = tl.where(tied_R, C - 1, last_R)  # k or more are <= (T, last)
    while tl.max((tied_R & (last_R - first_R > 1)).to(tl.int32), 0) > 0:
        middle_R = tl.where(tied_R, (first_R + last_R) // 2, last_R)
        count_R = _count(word, seed, id_R, step, stream, y_R, a_R, b_R, T_R, middle_R, C, BLOCK, STREAMED)
        moving_R = tied_R & (last_R - first_R > 1)
        first_R = tl.where(moving_R & (count_R < k_R), middle_R, first_R)
        last_R = tl.where(moving_R & (count_R >= k_R), middle_R, last_R)
    return tl.where(k_R > 0, T_R, 0), tl.where(k_R > 0, last_R, -1)


@triton.jit
def _how_many(w, seed, id_R, slot_R, n_R, step, stream, warm, cap, C):
    """k: round(w min(n, cap)), ties to even; in warm-up uniform in [0, min(C - 3, cap - 1)]. cap < 0: none."""
    limit_R = n_R
    most = C - 3
    if cap >= 0:
        limit_R = tl.minimum(n_R, cap)
        most = tl.minimum(most, cap - 1)
    # Adding and taking away 1.5 * 2**23 leaves a float rounded to a whole number, half to even.
    wanted_R = (tl.load(w + slot_R).to(tl.float32) * limit_R.to(tl.float32) + 12582912.0) - 12582912.0
    word_R, _, _, _ = tl.philox(seed, id_R, tl.zeros_like(n_R), step, stream)
    drawn_R = tl.umulhi(word_R, tl.zeros_like(word_R) + (tl.maximum(most, 0) + 1).to(tl.uint32)).to(tl.int32)
    return tl.where(warm, drawn_R, wanted_R.to(tl.int32))


@triton.jit
def _prior(cls, chosen, y_R, a_R, b_R, total_R, ADDITIVE: tl.constexpr):
    """p and log p: on the members, their floor elsewhere."""
    named_y = cls == y_R[:, None]
    named_a = cls == a_R[:, None]
    named_b = cls == b_R[:, None]
    once_R = 1.0 / total_R.to(tl.float32)
    if ADDITIVE:
        count = named_y.to(tl.int32) + named_a.to(tl.int32) + named_b.to(tl.int32) + chosen.to(tl.int32)
        p = tl.maximum(count.to(tl.float32) * once_R[:, None], FLOOR)
        log_p = tl.log(p)
    else:
        member = named_y | named_a | named_b | chosen
        p = tl.where(member, once_R[:, None], FLOOR)
        log_p = tl.where(member, tl.log(once_R)[:, None], tl.log(tl.full([1, 1], FLOOR, tl.float32)))
    return p, log_p


@triton.jit
def _prior_term(Z_R, gap_R, q_gap_R, p_R, p_l_R, PRIOR: tl.constexpr):
    """L_PRI of a row and sum_j U_ij."""
    if PRIOR == REVERSE:
        prior_R = gap_R - tl.log(Z_R)
        sum_U_R = tl.full(Z_R.shape, -1.0, tl.float32)
    elif PRIOR == FORWARD:
        prior_R = tl.log(Z_R) - q_gap_R
        sum_U_R = 1.0 - q_gap_R
    else:
        prior_R = -p_l_R
        sum_U_R = -p_R
    return prior_R, sum_U_R


@triton.jit
def _denominator(sums, column_sum, window, given, at, valid, C, L, mix, LIVE: tl.constexpr, DATASET: tl.constexpr):
    """D_j + TINY, D_j = live_j + mix * detached_j or as given; 1 in lanes beyond C."""
    D = tl.full(at.shape, 1.0, tl.float32)
    if given is not None:
        D = tl.load(given + at, mask=valid, other=1.0)
    if LIVE:
        D = tl.load(sums + at, mask=valid, other=1.0)
        if DATASET:
            kept = tl.load(column_sum + at, mask=valid, other=0.0) - tl.load(sums + C + at, mask=valid, other=0.0)
            D += mix * tl.maximum(kept, 0.0)
        if window is not None:
            for row in range(L):
                D += mix * tl.load(window + row * C + at, mask=valid, other=0.0)
    return D + TINY


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _pack(member, R: tl.constexpr, BLOCK: tl.constexpr):
    """The set as bits, int32 [R, BLOCK / 32]."""
    bit = tl.reshape(member.to(tl.int32), [R, BLOCK // 32, 32]) << tl.arange(0, 32)[None, None, :]
    return tl.sum(bit, 2)


@triton.jit
def _unpack(word, R: tl.constexpr, BLOCK: tl.constexpr):
    """The set from its bits, [R, BLOCK]."""
    return tl.reshape((word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1, [R, BLOCK]) != 0


@triton.jit
def _is_last(tickets, programs):
    """Whether every other program has come this far. What they wrote before is then to be seen."""
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets, 1, sem="acq_rel")
    last = ticket == programs - 1
    if last:
        tl.store(tickets, 0)
    return last


@triton.jit
def _add_rows(source, out, rows, width, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """out_j = sum of source[0:rows, j], GROUP rows at a time."""
    row = tl.arange(0, GROUP)[:, None]
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, rows, GROUP):
            here = (first + row < rows) & (at < width)[None, :]
            part = tl.load(
                source + (first + row).to(tl.int64) * width + at[None, :], mask=here, other=0.0, cache_modifier=".cg"
            )
            total += tl.sum(part, 0)
        tl.store(out + at, total, mask=at < width)


@triton.jit
def _sum_programs(partial, group, out, tickets, width, programs, GROUP: tl.constexpr):
    """out = sum over programs of partial [P, width], in their order; returns whether this program was the last."""
    of_group = tl.program_id(0) // GROUP
    groups = (programs + GROUP - 1) // GROUP
    size = tl.minimum(GROUP, programs - of_group * GROUP)
    last = False
    if _is_last(tickets + 1 + of_group, size):
        _add_rows(
            partial + (of_group * GROUP).to(tl.int64) * width,
            group + of_group.to(tl.int64) * width,
            size,
            width,
            GROUP,
            128,
        )
        last = _is_last(tickets, groups)
        if last:
            _add_rows(group, out, groups, width, GROUP, 128)
    return last


@triton.jit
def column_sums_kernel(
    z,  # [B, C]
    z_stride,
    M,  # [N, C]
    slots,  # [B]
    stats,  # [8, B]
    partial,  # [P, (1 + DATASET) C]
    group,  # [P / GROUP, (1 + DATASET) C]
    sums,  # [(1 + DATASET) C + 1]
    tickets,  # [1 + P / GROUP]
    B,
    C,
    programs,
    DATASET: tl.constexpr,
    ALIGN: tl.constexpr,
    STREAMED: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """sum_i q_ij of this rank's rows, with DATASET also sum_i M_ij of the table's rows as they are, and B."""
    program = tl.program_id(0)
    # Says what is known: loads of ALIGN numbers at once need it.
    C = C // ALIGN * ALIGN
    z_stride = z_stride // ALIGN * ALIGN
    width = C * (1 + DATASET)
    mine = partial + program.to(tl.int64) * width
    tile = tl.arange(0, R)
    if STREAMED:
        for row in range(program, B, programs):
            row_R = row + tile
            z_R = z + row_R.to(tl.int64) * z_stride
            shift_R = tl.full([R], float("-inf"), tl.float32)
            total_R = tl.zeros([R], tl.float32)
            for start in range(0, C, BLOCK):
                cls = (start + tl.arange(0, BLOCK))[None, :]
                block = tl.load(z_R[:, None] + cls, mask=cls < C, other=float("-inf")).to(tl.float32)
                shift_R, total_R = _online_sum(block, shift_R, total_R)
            tl.store(stats + SHIFT * B + row_R, shift_R)
            tl.store(stats + INVERSE_SUM * B + row_R, 1.0 / total_R)
            for start in range(0, C, BLOCK):
                cls = (start + tl.arange(0, BLOCK))[None, :]
                block = tl.load(z_R[:, None] + cls, mask=cls < C, other=float("-inf")).to(tl.float32)
                q = tl.exp(block - shift_R[:, None]) / total_R[:, None]
                at = mine + cls
                if row != program:
                    q += tl.load(at, mask=cls < C, other=0.0)
                tl.store(at, q, mask=cls < C)
                if DATASET:
                    slot_R = tl.load(slots + row_R)
                    old = tl.load(M + slot_R[:, None] * C + cls, mask=cls < C, other=0.0).to(tl.float32)
                    if row != program:
                        old += tl.load(at + C, mask=cls < C, other=0.0)
                    tl.store(at + C, old, mask=cls < C)
    else:
        cls = tl.arange(0, BLOCK)
        live = tl.zeros([BLOCK], tl.float32)
        stale = tl.zeros([BLOCK], tl.float32)
        for first in range(program * R, B, programs * R):
            row_R = first + tile
            here = (row_R < B)[:, None] & (cls < C)[None, :]
            block = tl.load(
                z + row_R.to(tl.int64)[:, None] * z_stride + cls[None, :], mask=here, other=float("-inf")
            ).to(tl.float32)
            shift_R = tl.where(row_R < B, tl.max(block, 1), 0.0)
            e = tl.exp(block - shift_R[:, None])
            total_R = tl.where(row_R < B, tl.sum(e, 1), 1.0)
            live += tl.sum(e / total_R[:, None], 0)
            tl.store(stats + SHIFT * B + row_R, shift_R, mask=row_R < B)
            tl.store(stats + INVERSE_SUM * B + row_R, 1.0 / total_R, mask=row_R < B)
            if DATASET:
                slot_R = tl.load(slots + row_R, mask=row_R < B, other=0)
                stale += tl.sum(tl.load(M + slot_R[:, None] * C + cls[None, :], mask=here, other=0.0).to(tl.float32), 0)
        tl.store(mine + cls, live, mask=cls < C)
        if DATASET:
            tl.store(mine + C + cls, stale, mask=cls < C)
    if _sum_programs(partial, group, sums, tickets, width, programs, GROUP):
        tl.store(sums + width, B * 1.0)


@triton.jit
def _online_sum(block, shift_R, total_R):
    """A running max and sum of exp(x - max) taken on by a block."""
    new_R = tl.maximum(shift_R, tl.max(block, 1))
    return new_R, total_R * tl.exp(shift_R - new_R) + tl.sum(tl.exp(block - new_R[:, None]), 1)


@triton.jit
def rows_kernel(
    z,  # [B, C]
    z_stride,
    t,  # [B, K, C]
    t_stride_b,
    t_stride_k,
    M,  # [N, C]
    labels,  # [B]
    ids,  # [B]: of the samples, for random words only
    slots,  # [B]: their rows of M, w and loss
    clean,  # [B] or None
    cover,  # [X, B] or None
    w,  # [N]
    loss,  # [N]
    step,  # []
    epoch,  # []
    column_sum,  # [C] or None
    window,  # [L, C] or None
    given,  # [C] or None
    sums,  # [(1 + DATASET) C + 1]
    D_out,  # [C]
    partial,  # [P, (1 + DATASET) C]
    group,  # [P / GROUP, (1 + DATASET) C]
    through,  # [(1 + DATASET) C]
    tickets,  # [1 + P / GROUP]
    grad_z,  # [B, C] or None
    grad_t,  # [B, K, C] or None
    bits,  # [B, C / 32]
    stats,  # [8, B]
    total,  # []: the loss
    terms,  # [4]: ce, prior, estep, what 1 in the gradients stands for
    sample_loss,  # [B]
    set_size,  # [B]
    picked,  # [2, B]: the coverage labels, -1: none
    covered,  # [B] or None
    B,
    C,
    K,
    L,
    rows,
    world,
    seed,
    network,
    cap,
    warmup_epochs,
    beta,
    mix,
    weight_ce,
    weight_prior,
    weight_estep,
    programs,
    X: tl.constexpr,
    LIVE: tl.constexpr,
    DATASET: tl.constexpr,
    UPDATE: tl.constexpr,
    HALF: tl.constexpr,
    COVER: tl.constexpr,
    RANDOM: tl.constexpr,
    ADDITIVE: tl.constexpr,
    X_TO_Y: tl.constexpr,
    PRIOR: tl.constexpr,
    POWER: tl.constexpr,
    ALIGN: tl.constexpr,
    STREAMED: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Everything of a row but the part of dL/dz through D: sets, table, terms, dL/dt, and sum_i V_ij for that part."""
    program = tl.program_id(0)
    # Says what is known: loads of ALIGN numbers at once need it.
    C = C // ALIGN * ALIGN
    z_stride = z_stride // ALIGN * ALIGN
    t_stride_b = t_stride_b // ALIGN * ALIGN
    t_stride_k = t_stride_k // ALIGN * ALIGN
    width = C * (1 + DATASET)
    now = tl.load(step).to(tl.uint32)
    stream = STREAMS_PER_NETWORK * network
    warm = tl.load(epoch) < warmup_epochs
    if LIVE:
        rows = tl.load(sums + width)
    scale = world / rows
    grad_scale = scale
    if HALF:
        grad_scale = HALF_UNITS
    mine = partial + program.to(tl.int64) * width
    packs = (C + 31) // 32
    if not STREAMED:
        at = tl.arange(0, BLOCK)
        V_sum = tl.zeros([BLOCK], tl.float32)
        delta_sum = tl.zeros([BLOCK], tl.float32)
    for first in range(program * R, B, programs * R):
        row_R = first + tl.arange(0, R)
        alive_R = row_R < B
        wide_R = row_R.to(tl.int64)
        id_R = tl.load(ids + row_R, mask=alive_R, other=0).to(tl.uint32)
        slot_R = tl.load(slots + row_R, mask=alive_R, other=0)
        y_R = tl.load(labels + row_R, mask=alive_R, other=0).to(tl.int32)
        M_R = M + slot_R * C
        z_R = z + wide_R * z_stride
        t_R = t + wide_R * t_stride_b

        # The coverage label, from the table as it was.
        a_R = tl.full([R], -1, tl.int32)
        b_R = tl.full([R], -1, tl.int32)
        if STREAMED:
            cls = tl.arange(0, BLOCK)[None, :]
            if COVER != NO_COVER and COVER != GIVEN:
                best_R = tl.full([R], float("inf"), tl.float32)
                a_R = tl.zeros([R], tl.int32)
                for start in range(0, C, BLOCK):
                    block = tl.load(M_R[:, None] + start + cls, mask=start + cls < C, other=1.0).to(tl.float32)
                    word = _words(seed, id_R, start, now, stream + COVERAGE, BLOCK)
                    key = _race(block, word, start + cls < C, COVER, POWER)
                    winner_R = tl.min(key, 1)
                    place_R = start + tl.argmin(key, 1).to(tl.int32)
                    a_R = tl.where(winner_R < best_R, place_R, a_R)
                    best_R = tl.minimum(winner_R, best_R)
        else:
            cls = tl.arange(0, BLOCK)[None, :]
            here = alive_R[:, None] & (cls < C)
            old = tl.load(M_R[:, None] + cls, mask=here, other=1.0).to(tl.float32)
            if COVER != NO_COVER and COVER != GIVEN:
                word = _words(seed, id_R, 0, now, stream + COVERAGE, BLOCK)
                a_R = tl.argmin(_race(old, word, cls < C, COVER, POWER), 1).to(tl.int32)
                a_R = tl.minimum(a_R, C - 1)  # a row of NaN has no winner
        if COVER == GIVEN:
            a_R = tl.load(cover + row_R, mask=alive_R, other=0).to(tl.int32)
            if X == 2:
                b_R = tl.load(cover + B + row_R, mask=alive_R, other=0).to(tl.int32)

        # The random labels: all free classes up to the key (T, last).
        named_R = 1 + ((a_R >= 0) & (a_R != y_R)).to(tl.int32) + ((b_R >= 0) & (b_R != y_R) & (b_R != a_R)).to(tl.int32)
        T_R = tl.zeros([R], tl.uint32)
        last_R = tl.full([R], -1, tl.int32)
        k_R = tl.zeros([R], tl.int32)
        free_word = tl.zeros([R, BLOCK], tl.uint32)
        if RANDOM:
            n_R = C - named_R
            k_R = _how_many(w, seed, id_R, slot_R, n_R, now, stream + WARMUP, warm, cap, C)
            if not STREAMED:
                free_word = _words(seed, id_R, 0, now, stream + FREE, BLOCK)
            T_R, last_R = _threshold(
                free_word, seed, id_R, now, stream + FREE, y_R, a_R, b_R, k_R, n_R, C, BLOCK, STREAMED
            )
        size_R = named_R + k_R
        total_R = size_R
        if ADDITIVE:
            total_R = 1 + (a_R >= 0).to(tl.int32) + (b_R >= 0).to(tl.int32) + k_R
        tl.store(set_size + row_R, size_R.to(tl.int64), mask=alive_R)

        if STREAMED:
            if LIVE:
                shift_R = tl.load(stats + SHIFT * B + row_R)
                inverse_R = tl.load(stats + INVERSE_SUM * B + row_R)
            else:
                shift_R = tl.full([R], float("-inf"), tl.float32)
                inverse_R = tl.zeros([R], tl.float32)
                for start in range(0, C, BLOCK):
                    block = tl.load(z_R[:, None] + start + cls, mask=start + cls < C, other=float("-inf")).to(
                        tl.float32
                    )
                    shift_R, inverse_R = _online_sum(block, shift_R, inverse_R)
                inverse_R = 1.0 / inverse_R
            log_sum_R = -tl.log(inverse_R)
            clipped_R = tl.zeros([R], tl.float32)
            Z_R = tl.zeros([R], tl.float32)
            gap_R = tl.zeros([R], tl.float32)
            q_gap_R = tl.zeros([R], tl.float32)
            p_l_R = tl.zeros([R], tl.float32)
            p_R = tl.zeros([R], tl.float32)
            q_l_R = tl.zeros([R], tl.float32)
            q_log_p_R = tl.zeros([R], tl.float32)
            l_y_R = tl.zeros([R], tl.float32)
            known_R = tl.zeros([R], tl.int32)
            t_shift_R = tl.full([R], float("-inf"), tl.float32)
            t_sum_R = tl.zeros([R], tl.float32)
            f_p_R = tl.zeros([R], tl.float32)
            q_so_far_R = tl.zeros([R], tl.float32)
            q_t_R = tl.zeros([R], tl.float32)
            for start in range(0, C, BLOCK):
                at = start + cls
                here = at < C
                D = _denominator(sums, column_sum, window, given, at, here, C, L, mix, LIVE, DATASET)
                if LIVE and program == 0:
                    tl.store(D_out + at, D, mask=here)
                chosen = tl.zeros([R, BLOCK], tl.int1)
                if RANDOM:
                    word = _words(seed, id_R, start, now, stream + FREE, BLOCK)
                    chosen = _selected(word, at, _is_free(at, y_R, a_R, b_R, C), T_R, last_R)
                member = chosen | ((at == y_R[:, None]) | (at == a_R[:, None]) | (at == b_R[:, None]))
                pack_at = start // 32 + tl.arange(0, BLOCK // 32)[None, :]
                tl.store(bits + row_R[:, None] * packs + pack_at, _pack(member & here, R, BLOCK), mask=pack_at < packs)
                if clean is not None:
                    clean_R = tl.load(clean + row_R).to(tl.int32)
                    known_R = tl.maximum(known_R, tl.max((member & (at == clean_R[:, None])).to(tl.int32), 1))
                p, log_p = _prior(at, chosen, y_R, a_R, b_R, total_R, ADDITIVE)
                p = tl.where(here, p, 0.0)
                gap = log_p - tl.log(D)
                zs = tl.where(
                    here, tl.load(z_R[:, None] + at, mask=here, other=0.0).to(tl.float32) - shift_R[:, None], 0.0
                )
                q = tl.where(here, tl.exp(zs) * inverse_R[:, None], 0.0)
                a = p * tl.minimum(q / D, LARGEST_RATIO)
                clipped_R += tl.sum(tl.where(here, tl.minimum(tl.maximum(q, CLIP), 1 - CLIP), 0.0), 1)
                Z_R += tl.sum(a, 1)
                gap_R += tl.sum(a * gap, 1)
                q_gap_R += tl.sum(q * gap, 1)
                p_l_R += tl.sum(p * (zs - log_sum_R[:, None]), 1)
                p_R += tl.sum(p, 1)
                q_l_R += tl.sum(q * zs, 1)
                q_log_p_R += tl.sum(q * log_p, 1)
                l_y_R += tl.sum(tl.where(at == y_R[:, None], zs, 0.0), 1)
                t_block = tl.load(t_R[:, None] + at, mask=here, other=float("-inf")).to(tl.float32)
                new_R = tl.maximum(t_shift_R, tl.max(t_block, 1))
                # The first block has no earlier maximum to move from.
                moved_R = tl.where(start > 0, t_shift_R - new_R, 0.0)
                shrink_R = tl.exp(moved_R)
                e = tl.exp(t_block - new_R[:, None])
                t_sum_R = t_sum_R * shrink_R + tl.sum(e, 1)
                f_p_R = f_p_R * shrink_R + tl.sum(e * p, 1)
                q_t_R += q_so_far_R * moved_R + tl.sum(tl.where(here, q * (t_block - new_R[:, None]), 0.0), 1)
                q_so_far_R += tl.sum(q, 1)
                t_shift_R = new_R
            gap_R = gap_R / Z_R
            l_y_R -= log_sum_R
            q_l_R -= log_sum_R
            ce_R = t_shift_R + tl.log(t_sum_R) - tl.load(t_R + y_R).to(tl.float32)
            estep_R = q_l_R - (q_t_R - tl.log(t_sum_R))
            if not X_TO_Y:
                estep_R += tl.log(f_p_R / t_sum_R) - q_log_p_R
            prior_R, sum_U_R = _prior_term(Z_R, gap_R, q_gap_R, p_R, p_l_R, PRIOR)
            sound_R = _is_finite(l_y_R)
        else:
            member = (cls == y_R[:, None]) | (cls == a_R[:, None]) | (cls == b_R[:, None])
            chosen = tl.zeros([R, BLOCK], tl.int1)
            if RANDOM:
                chosen = _selected(free_word, cls, _is_free(cls, y_R, a_R, b_R, C), T_R, last_R)
                member = member | chosen
            pack_at = tl.arange(0, BLOCK // 32)[None, :]
            pack_here = alive_R[:, None] & (pack_at < packs)
            tl.store(bits + row_R[:, None] * packs + pack_at, _pack(member & here, R, BLOCK), mask=pack_here)
            if clean is not None:
                clean_R = tl.load(clean + row_R, mask=alive_R, other=0).to(tl.int32)
                known_R = tl.max((member & (cls == clean_R[:, None])).to(tl.int32), 1)
            p, log_p = _prior(cls, chosen, y_R, a_R, b_R, total_R, ADDITIVE)
            p = tl.where(cls < C, p, 0.0)
            zs = tl.load(z_R[:, None] + cls, mask=here, other=float("-inf")).to(tl.float32)
            shift_R = tl.where(alive_R, tl.max(zs, 1), 0.0)
            zs = tl.where(here, zs - shift_R[:, None], 0.0)
            q = tl.where(here, tl.exp(zs), 0.0)
            sum_R = tl.where(alive_R, tl.sum(q, 1), 1.0)
            inverse_R = 1.0 / sum_R
            log_sum_R = tl.log(sum_R)
            q = q * inverse_R[:, None]
            q_l_R = tl.sum(q * zs, 1) - log_sum_R
            l_y_R = tl.sum(tl.where(cls == y_R[:, None], zs, 0.0), 1) - log_sum_R
            sound_R = alive_R & _is_finite(l_y_R)
            # D is read where it is used rather than kept: registers are what bounds the tile.
            D = _denominator(sums, column_sum, window, given, at, at < C, C, L, mix, LIVE, DATASET)[None, :]
            if LIVE and program == 0:
                tl.store(D_out + cls, D, mask=cls < C)
            gap = log_p - tl.log(D)
            a = p * tl.minimum(q / D, LARGEST_RATIO)
            Z_R = tl.where(alive_R, tl.sum(a, 1), 1.0)
            gap_R = tl.sum(a * gap, 1) / Z_R
            q_gap_R = tl.sum(q * gap, 1)
            p_R = tl.sum(p, 1)
            p_l_R = tl.sum(p * (zs - log_sum_R[:, None]), 1)
            prior_R, sum_U_R = _prior_term(Z_R, gap_R, q_gap_R, p_R, p_l_R, PRIOR)
            r = a / Z_R[:, None]
            if LIVE and PRIOR != CE:
                V = q - r if PRIOR == FORWARD else -r * (gap - gap_R[:, None])
                V_sum += tl.sum(tl.where(here, V, 0.0), 0)
            if grad_z is not None and (not LIVE or PRIOR == CE):
                U = _direct(p, q, r, gap, gap_R, PRIOR)
                dz = (U - q * sum_U_R[:, None]) * (grad_scale * weight_prior)
                tl.store(grad_z + wide_R[:, None] * C + cls, dz.to(grad_z.dtype.element_ty), mask=here)
            if UPDATE:
                clipped = tl.where(cls < C, tl.minimum(tl.maximum(q, CLIP), 1 - CLIP), 0.0)
                new = beta * old + (1 - beta) * (clipped / tl.sum(clipped, 1)[:, None])
                new = new.to(M.dtype.element_ty)
                taken = here & sound_R[:, None]
                tl.store(M_R[:, None] + cls, new, mask=taken)
                if DATASET:
                    delta_sum += tl.sum(tl.where(taken, new.to(tl.float32) - old, 0.0), 0)
            ce_R = tl.zeros([R], tl.float32)
            estep_R = tl.zeros([R], tl.float32)
            for draw in range(K):
                ts = tl.load(t_R[:, None] + draw * t_stride_k + cls, mask=here, other=float("-inf")).to(tl.float32)
                t_shift_R = tl.where(alive_R, tl.max(ts, 1), 0.0)
                ts = tl.where(here, ts - t_shift_R[:, None], 0.0)
                f = tl.where(here, tl.exp(ts), 0.0)
                t_sum_R = tl.where(alive_R, tl.sum(f, 1), 1.0)
                f = f / t_sum_R[:, None]
                ce_R += tl.log(t_sum_R) - tl.sum(tl.where(cls == y_R[:, None], ts, 0.0), 1)
                estep_R += q_l_R - tl.sum(q * ts, 1) + tl.log(t_sum_R)
                h = f
                if not X_TO_Y:
                    f_p_R = tl.where(alive_R, tl.sum(f * p, 1), 1.0)
                    estep_R += tl.log(f_p_R) - tl.sum(q * log_p, 1)
                    h = f * p / f_p_R[:, None]
                if grad_t is not None:
                    onehot = (cls == y_R[:, None]).to(tl.float32)
                    dt = (weight_ce * (f - onehot) + weight_estep * (h - q)) * (grad_scale / K)
                    tl.store(grad_t + (wide_R * K + draw)[:, None] * C + cls, dt.to(grad_t.dtype.element_ty), mask=here)
            ce_R = ce_R / K
            estep_R = estep_R / K

        tl.store(stats + ROW_TERMS * B + row_R, ce_R, mask=alive_R)
        tl.store(stats + (ROW_TERMS + 1) * B + row_R, prior_R, mask=alive_R)
        tl.store(stats + (ROW_TERMS + 2) * B + row_R, estep_R, mask=alive_R)
        tl.store(sample_loss + row_R, -l_y_R, mask=alive_R)
        if clean is not None:
            tl.store(covered + row_R, known_R.to(tl.int8), mask=alive_R)
        if UPDATE:
            tl.store(loss + slot_R, -l_y_R, mask=sound_R)
        if LIVE:
            tl.store(picked + row_R, a_R, mask=alive_R)
            tl.store(picked + B + row_R, b_R, mask=alive_R)
            tl.store(stats + SHIFT * B + row_R, shift_R, mask=alive_R)
            tl.store(stats + INVERSE_SUM * B + row_R, inverse_R, mask=alive_R)
            tl.store(stats + MEAN_GAP * B + row_R, gap_R, mask=alive_R)
            tl.store(stats + INVERSE_Z * B + row_R, 1.0 / Z_R, mask=alive_R)
            tl.store(stats + SUM_U * B + row_R, sum_U_R, mask=alive_R)

        if STREAMED:
            tl.debug_barrier()  # the bits were written by other threads
            for start in range(0, C, BLOCK):
                at = start + cls
                here = at < C
                D = _denominator(sums, column_sum, window, given, at, here, C, L, mix, LIVE, DATASET)
                pack_at = start // 32 + tl.arange(0, BLOCK // 32)[None, :]
                packed = tl.load(bits + row_R[:, None] * packs + pack_at, mask=pack_at < packs, other=0)
                member = _unpack(packed, R, BLOCK)
                p, log_p = _prior(at, member & _is_free(at, y_R, a_R, b_R, C), y_R, a_R, b_R, total_R, ADDITIVE)
                zs = tl.load(z_R[:, None] + at, mask=here, other=float("-inf")).to(tl.float32) - shift_R[:, None]
                q = tl.exp(zs) * inverse_R[:, None]
                gap = log_p - tl.log(D)
                r = p * tl.minimum(q / D, LARGEST_RATIO) / Z_R[:, None]
                if LIVE and PRIOR != CE:
                    V = q - r if PRIOR == FORWARD else -r * (gap - gap_R[:, None])
                    if first != program * R:
                        V += tl.load(mine + at, mask=here, other=0.0)
                    tl.store(mine + at, V, mask=here)
                if grad_z is not None and (not LIVE or PRIOR == CE):
                    U = _direct(p, q, r, gap, gap_R, PRIOR)
                    dz = (U - q * sum_U_R[:, None]) * (grad_scale * weight_prior)
                    tl.store(grad_z + wide_R[:, None] * C + at, dz.to(grad_z.dtype.element_ty), mask=here)
                if UPDATE:
                    old = tl.load(M_R[:, None] + at, mask=here, other=0.0).to(tl.float32)
                    clipped = tl.minimum(tl.maximum(q, CLIP), 1 - CLIP)
                    new = (beta * old + (1 - beta) * (clipped / clipped_R[:, None])).to(M.dtype.element_ty)
                    tl.store(M_R[:, None] + at, new, mask=here & sound_R[:, None])
                    if DATASET:
                        delta = tl.where(sound_R[:, None], new.to(tl.float32) - old, 0.0)
                        if first != program * R:
                            delta += tl.load(mine + C + at, mask=here, other=0.0)
                        tl.store(mine + C + at, delta, mask=here)
                if grad_t is not None:
                    f = tl.load(t_R[:, None] + at, mask=here, other=float("-inf")).to(tl.float32)
                    f = tl.exp(f - t_shift_R[:, None]) / t_sum_R[:, None]
                    h = f if X_TO_Y else f * p * (t_sum_R / f_p_R)[:, None]
                    onehot = (at == y_R[:, None]).to(tl.float32)
                    dt = (weight_ce * (f - onehot) + weight_estep * (h - q)) * grad_scale
                    tl.store(grad_t + wide_R[:, None] * C + at, dt.to(grad_t.dtype.element_ty), mask=here)

    if not STREAMED and LIVE:
        tl.store(mine + at, V_sum, mask=at < C)
        if DATASET:
            tl.store(mine + C + at, delta_sum, mask=at < C)
    if LIVE:
        last = _sum_programs(partial, group, through, tickets, width, programs, GROUP)
    else:
        last = _is_last(tickets, programs)
    if last:
        ce = tl.zeros([256], tl.float32)
        prior = tl.zeros([256], tl.float32)
        estep = tl.zeros([256], tl.float32)
        for start in range(0, B, 256):
            row = start + tl.arange(0, 256)
            kept = stats + ROW_TERMS * B + row
            ce += tl.load(kept, mask=row < B, other=0.0, cache_modifier=".cg")
            prior += tl.load(kept + B, mask=row < B, other=0.0, cache_modifier=".cg")
            estep += tl.load(kept + 2 * B, mask=row < B, other=0.0, cache_modifier=".cg")
        ce_sum, prior_sum, estep_sum = tl.sum(ce, 0), tl.sum(prior, 0), tl.sum(estep, 0)
        tl.store(total, (weight_ce * ce_sum + weight_prior * prior_sum + weight_estep * estep_sum) * scale)
        tl.store(terms, ce_sum / B)
        tl.store(terms + 1, prior_sum / B)
        tl.store(terms + 2, estep_sum / B)
        tl.store(terms + 3, scale / grad_scale)
        if UPDATE:
            tl.store(step, tl.load(step) + 1)


@triton.jit
def _direct(p, q, r, gap, gap_R, PRIOR: tl.constexpr):
    """U: what of dL/dl does not go through D."""
    if PRIOR == REVERSE:
        U = r * (gap - gap_R[:, None] - 1.0)
    elif PRIOR == FORWARD:
        U = r - q * gap
    else:
        U = -p
    return U


@triton.jit
def scale_kernel(
    grad,  # [n]
    factor,  # []
    n,
    BLOCK: tl.constexpr,
):
    """grad times what came from above; by 1, nothing is read or written."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(grad + at, mask=at < n).to(tl.float32) * by
        tl.store(grad + at, value.to(grad.dtype.element_ty), mask=at < n)


@triton.jit
def finish_kernel(
    z,  # [B, C]
    z_stride,
    bits,  # [B, C / 32]
    stats,  # [8, B]
    labels,  # [B]
    cover,  # [2, B]
    set_size,  # [B]
    sums,  # [(1 + DATASET) C + 1]
    D_in,  # [C]
    through,  # [(1 + DATASET) C]
    column_sum,  # [C] or None
    window,  # [L, C] or None
    grad_z,  # [B, C] or None
    B,
    C,
    L,
    world,
    weight_prior,
    programs,
    DATASET: tl.constexpr,
    UPDATE: tl.constexpr,
    HALF: tl.constexpr,
    ADDITIVE: tl.constexpr,
    PRIOR: tl.constexpr,
    ALIGN: tl.constexpr,
    STREAMED: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dL/dz = A - q sum_j A with A = U + q / D sum_k V_kj, and the column sums kept for the next step."""
    program = tl.program_id(0)
    # Says what is known: loads of ALIGN numbers at once need it.
    C = C // ALIGN * ALIGN
    z_stride = z_stride // ALIGN * ALIGN
    if program == 0 and UPDATE:
        for start in range(0, C, BLOCK):
            at = start + tl.arange(0, BLOCK)
            if DATASET:
                kept = tl.load(column_sum + at, mask=at < C) + tl.load(through + C + at, mask=at < C)
                tl.store(column_sum + at, kept, mask=at < C)
            if window is not None:
                for row in range(L - 1):
                    tl.store(window + row * C + at, tl.load(window + (row + 1) * C + at, mask=at < C), mask=at < C)
                live = tl.load(sums + at, mask=at < C, other=0.0)
                tl.store(window + (L - 1) * C + at, tl.where(_is_finite(live), live, 0.0), mask=at < C)
    if grad_z is not None and PRIOR != CE:
        grad_scale = weight_prior * world / tl.load(sums + C * (1 + DATASET))
        if HALF:
            grad_scale = weight_prior * HALF_UNITS
        packs = (C + 31) // 32
        for first in range(program * R, B, programs * R):
            row_R = first + tl.arange(0, R)
            alive_R = row_R < B
            wide_R = row_R.to(tl.int64)
            y_R = tl.load(labels + row_R, mask=alive_R, other=0).to(tl.int32)
            a_R = tl.load(cover + row_R, mask=alive_R, other=-1)
            b_R = tl.load(cover + B + row_R, mask=alive_R, other=-1)
            total_R = tl.load(set_size + row_R, mask=alive_R, other=1).to(tl.int32)
            if ADDITIVE:
                total_R += ((a_R >= 0) & (a_R == y_R)).to(tl.int32) + ((b_R >= 0) & ((b_R == y_R) | (b_R == a_R))).to(
                    tl.int32
                )
            shift_R = tl.load(stats + SHIFT * B + row_R, mask=alive_R, other=0.0)
            inverse_R = tl.load(stats + INVERSE_SUM * B + row_R, mask=alive_R, other=0.0)
            gap_R = tl.load(stats + MEAN_GAP * B + row_R, mask=alive_R, other=0.0)
            inverse_Z_R = tl.load(stats + INVERSE_Z * B + row_R, mask=alive_R, other=0.0)
            sum_A_R = tl.load(stats + SUM_U * B + row_R, mask=alive_R, other=0.0)
            z_R = z + wide_R * z_stride
            if STREAMED:
                for start in range(0, C, BLOCK):
                    cls = (start + tl.arange(0, BLOCK))[None, :]
                    zs = (
                        tl.load(z_R[:, None] + cls, mask=cls < C, other=float("-inf")).to(tl.float32) - shift_R[:, None]
                    )
                    D = tl.load(D_in + cls, mask=cls < C, other=1.0)
                    V = tl.load(through + cls, mask=cls < C, other=0.0)
                    sum_A_R += tl.sum(tl.exp(zs) * inverse_R[:, None] / D * V, 1)
            for start in range(0, C, BLOCK):
                cls = (start + tl.arange(0, BLOCK))[None, :]
                here = alive_R[:, None] & (cls < C)
                zs = tl.load(z_R[:, None] + cls, mask=here, other=float("-inf")).to(tl.float32) - shift_R[:, None]
                q = tl.exp(zs) * inverse_R[:, None]
                D = tl.load(D_in + cls, mask=cls < C, other=1.0)
                s = q / D
                through_D = s * tl.load(through + cls, mask=cls < C, other=0.0)
                if not STREAMED:
                    sum_A_R += tl.sum(through_D, 1)
                pack_at = start // 32 + tl.arange(0, BLOCK // 32)[None, :]
                pack_here = alive_R[:, None] & (pack_at < packs)
                member = _unpack(tl.load(bits + row_R[:, None] * packs + pack_at, mask=pack_here, other=0), R, BLOCK)
                p, log_p = _prior(cls, member & _is_free(cls, y_R, a_R, b_R, C), y_R, a_R, b_R, total_R, ADDITIVE)
                gap = log_p - tl.log(D)
                A = _direct(p, q, p * s * inverse_Z_R[:, None], gap, gap_R, PRIOR) + through_D
                dz = (A - q * sum_A_R[:, None]) * grad_scale
                tl.store(grad_z + wide_R[:, None] * C + cls, dz.to(grad_z.dtype.element_ty), mask=here)
