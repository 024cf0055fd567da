"""The fused step: one operation that draws the candidate sets, updates the table and gives the loss, its terms, the
per-sample losses and both gradients. They are computed in the forward pass; the backward scales them.

A backend is a module with five functions: ``check``, the phases ``column_sums``, ``rows`` and ``finish``, between
which this module adds the column sums of all ranks, and ``scale_`` for the backward. ``torch.compile`` sees the step
as one op, ``torch.ops.fastgnl.step``.

Axes: B rows, C classes, K draws, N samples this rank keeps, X given coverage labels, L rows of the window.
"""

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgnl.distributed import sum_over_ranks_, world_size

PRIORS = ("reverse", "forward", "ce")
COVERS = ("none", "sample", "argmax", "given")
HALF_UNITS = 64.0
"""A gradient in float16 is kept as this many units a row, not divided by the rows of the batch: it would underflow
before a loss scale in the upstream gradient could save it."""
TICKETS = 17
"""Counters the Triton kernels find their last program with; all zero between calls."""


class Given(NamedTuple):
    """What a step is given."""

    z: Tensor  # [B, C]
    t: Tensor  # [B, C] or [B, K, C]
    labels: Tensor  # [B]
    ids: Tensor  # [B]: of the samples, for random numbers only
    slots: Tensor  # [B]: the samples' rows of table, w and loss_N
    clean: Tensor | None  # [B]
    cover: Tensor | None  # [X, B]
    w: Tensor  # [N]
    denominator: Tensor | None  # [C]: known before the step


class Options(NamedTuple):
    """What stays the same from step to step."""

    backend: str
    x_to_y: bool
    prior_kl: int
    """Place in ``PRIORS``."""
    cover_mode: int
    """Place in ``COVERS``."""
    random_labels: bool
    additive: bool
    power: int
    """1/tau."""
    cap: int
    """Of random candidates; -1: none."""
    beta: float
    mix: float
    """D_j = live_j + mix * detached_j."""
    weights: tuple[float, ...]
    """Of ce, prior and estep."""
    warmup_epochs: int
    seed: int
    network: int


class State(NamedTuple):
    """What a step keeps of the samples, and updates."""

    table: Tensor  # [N, C]
    loss_N: Tensor  # [N]
    now: Tensor  # []: the step's number
    epoch: Tensor  # []
    column_sum: Tensor | None  # [C]
    window: Tensor | None  # [L, C]
    tickets: Tensor  # [TICKETS]


@dataclass(slots=True)
class Step:
    """One step: what it is given, what it gives, and what is kept between its phases."""

    z: Tensor  # [B, C]
    t: Tensor  # [B, C] or [B, K, C]
    labels: Tensor
    ids: Tensor
    slots: Tensor
    clean: Tensor | None
    cover: Tensor | None
    w: Tensor
    denominator: Tensor | None
    state: State
    options: Options
    update: bool
    live: bool
    rows: float
    world: float

    loss: Tensor  # []
    terms: Tensor  # [4]: ce, prior, estep, means over this rank's rows; what 1 in the gradients stands for
    sample_loss: Tensor  # [B]: -log q_i[y_i]
    set_size: Tensor  # [B]: |S_i|
    covered: Tensor | None  # [B]: whether S_i holds the clean label
    grad_z: Tensor | None  # [B, C]
    grad_t: Tensor | None  # as t was given

    work: Tensor
    """Of one piece: sums [W + 1], through [W], D [C], stats [8, B], and as int32 picked [2, B], bits [B, C / 32], where
    W = (1 + dataset) C."""
    native: bytes = b""
    """The same for the native kernel."""

    @property
    def dataset(self) -> bool:
        return self.state.column_sum is not None

    @property
    def half(self) -> bool:
        return self.z.dtype == torch.float16

    @property
    def width(self) -> int:
        return self.z.shape[1] * (1 if self.state.column_sum is None else 2)

    @property
    def places(self) -> tuple[int, ...]:
        """Where in ``work`` each of its arrays begins, and where it ends."""
        return layout(*self.z.shape, self.width)

    @property
    def sums(self) -> Tensor:
        """Column sums: of q, with ``dataset`` of the table's rows, and the number of rows."""
        return self.work[: self.width + 1]

    @property
    def through(self) -> Tensor:
        """Column sums: of V, with ``dataset`` of the table's change."""
        return self.work[self.places[1] :][: self.width]

    @property
    def bits(self) -> Tensor:
        """The candidate sets, int32 [B, C / 32]."""
        B, C = self.z.shape
        packs = (C + 31) // 32
        return self.work[self.places[5] :][: B * packs].view(torch.int32).view(B, packs)


@cache
def layout(B: int, C: int, width: int) -> tuple[int, ...]:
    """Where the arrays of ``Step.work`` begin, each at a multiple of 16 bytes, and where the last ends."""
    places, place = [], 0
    for size in (width + 1, width, C, 8 * B, 2 * B, (C + 31) // 32 * B):
        places.append(place)
        place += -(-size // 4) * 4
    return (*places, place)


@cache
def backend_module(name: str) -> ModuleType:
    """The module of a backend, imported when first used: Triton takes a second, the native kernel a build."""
    if name == "triton":
        from fastgnl.kernels import triton_step

        return triton_step
    from fastgnl.kernels import cpu_step

    return cpu_step


def contiguous_rows(x: Tensor) -> Tensor:
    """The kernels take any stride between rows, but neighbouring classes side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def run(given: Given, state: State, options: Options, update: bool, grads: bool) -> Step:
    """The step, outside of autograd."""
    z, t, labels, ids, slots, clean, cover, w, denominator = given
    B, C = z.shape
    w_like = w.new_empty  # float32, on the device
    keeps_sums = state.column_sum is not None or state.window is not None
    live = denominator is None and (keeps_sums or PRIORS[options.prior_kl] != "ce")
    width = C if state.column_sum is None else 2 * C
    world = world_size()
    s = Step(
        contiguous_rows(z),
        contiguous_rows(t),
        labels.contiguous(),
        ids.contiguous(),
        slots.contiguous(),
        None if clean is None else clean.contiguous(),
        cover,
        w,
        denominator,
        state,
        options,
        update,
        live,
        float(B),
        float(world),
        w_like(()),
        w_like(4),
        w_like(B),
        torch.empty_like(labels),
        None if clean is None else torch.empty_like(clean, dtype=torch.bool),
        torch.empty(z.shape, dtype=z.dtype, device=z.device) if grads else None,
        torch.empty(t.shape, dtype=t.dtype, device=z.device) if grads else None,
        w_like(layout(B, C, width)[-1]),
    )
    if not live and world > 1:
        s.rows = float(sum_over_ranks_(torch.tensor(s.rows, device=z.device)))
    phases = backend_module(options.backend)
    phases.check(s)
    if live:
        phases.column_sums(s)
        if world > 1:
            sum_over_ranks_(s.sums)
    phases.rows(s)
    if live and (grads or update):
        if world > 1:
            sum_over_ranks_(s.through)
        phases.finish(s)
    return s


class Attach(torch.autograd.Function):
    """A step's loss with the gradients the step has computed: dL/dz and dL/dt, times the upstream one."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, t: Tensor, made: tuple[Any, ...], backend: str) -> Tensor:
        # Not by save_for_backward: what is held there autograd copies instead of taking it over.
        loss, *ctx.made = made
        ctx.backend = backend
        return loss

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.made is None:
            raise RuntimeError("a fused step was differentiated twice, wanted once (backend='reference' can be)")
        (factor,), (terms, dz, dt) = upstreams, ctx.made
        if terms is not None:
            factor = factor * terms[3]
        if type(dz) is not Tensor:  # traced: what is compiled must not change what it is given
            dz, dt = ((grad.float() * factor).to(grad.dtype) for grad in (dz, dt))
        else:
            ctx.made = None
            backend_module(ctx.backend).scale_((dz, dt), factor)
        return dz, dt, None, None


def differentiable_step(
    given: Given, state: State, options: Options, update: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """-> loss, terms, -log q_i[y_i], |S_i|, whether S_i holds the clean label.

    Outside of torch.compile without a turn through the dispatcher, which with so many arguments takes as long as a
    small batch.
    """
    z, t = given.z, given.t
    grads = torch.is_grad_enabled() and (z.requires_grad or t.requires_grad)
    if torch.compiler.is_compiling():
        loss, terms, sample_loss, set_size, covered, _, _ = STEP(*given, *state, *options, update, grads)
        return loss, terms, sample_loss, set_size, None if given.clean is None else covered
    s = run(given, state, options, update, grads)
    loss = s.loss
    if grads:
        made = (loss, s.terms if s.half else None, s.grad_z, s.grad_t)
        s.grad_z = s.grad_t = None
        loss = Attach.apply(z, t, made, options.backend)
    return loss, s.terms, s.sample_loss, s.set_size, s.covered


# The same as an op.

LIBRARY = torch.library.Library("fastgnl", "DEF")
LIBRARY.define(
    "step(Tensor z, Tensor t, Tensor labels, Tensor ids, Tensor slots, Tensor? clean, Tensor? cover, Tensor w, "
    "Tensor? denominator, Tensor(a!) table, Tensor(b!) loss_N, Tensor(c!) now, Tensor epoch, Tensor(d!)? column_sum, "
    "Tensor(e!)? window, Tensor(f!) tickets, str backend, bool x_to_y, int prior_kl, int cover_mode, "
    "bool random_labels, bool additive, int power, int cap, float beta, float mix, float[] weights, "
    "int warmup_epochs, int seed, int network, bool update, bool grads) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
STEP = torch.ops.fastgnl.step.default
STATE, OPTIONS = slice(9, 16), slice(16, 30)
"""Where the fields of ``State`` and ``Options`` are among the arguments."""


def _step(*args: Any) -> tuple[Tensor | None, ...]:
    z, t, clean = args[0], args[1], args[5]
    options = Options(*args[OPTIONS])
    options = options._replace(weights=tuple(options.weights))
    update, grads = args[OPTIONS.stop :]
    s = run(Given(*args[: STATE.start]), State(*args[STATE]), options, update, grads)
    return (
        s.loss,
        s.terms,
        s.sample_loss,
        s.set_size,
        z.new_empty(0, dtype=torch.bool) if clean is None else s.covered,
        z.new_empty(0) if s.grad_z is None else s.grad_z,
        t.new_empty(0) if s.grad_t is None else s.grad_t,
    )


def _shapes(*args: Any) -> tuple[Tensor, ...]:
    z, t, clean, grads = args[0], args[1], args[5], args[-1]
    B = z.shape[0]
    return (
        z.new_empty((), dtype=torch.float32),
        z.new_empty(4, dtype=torch.float32),
        z.new_empty(B, dtype=torch.float32),
        z.new_empty(B, dtype=torch.int64),
        z.new_empty(0 if clean is None else B, dtype=torch.bool),
        z.new_empty(z.shape if grads else 0),
        t.new_empty(t.shape if grads else 0),
    )


def _with_gradients(*args: Any) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        loss, terms, *rest, dz, dt = STEP(*args)
    if args[-1]:
        half = args[0].dtype == torch.float16
        loss = Attach.apply(args[0], args[1], (loss, terms if half else None, dz, dt), args[OPTIONS][0])
    return loss, terms, *rest, dz, dt


LIBRARY.impl("step", _step, "CPU")
LIBRARY.impl("step", _step, "CUDA")
LIBRARY.impl("step", _with_gradients, "Autograd")
torch.library.register_fake("fastgnl::step", _shapes, lib=LIBRARY)
