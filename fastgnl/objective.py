"""``GNLObjective``: the method's loss and the label state it keeps, for one network or two.

Axes: N samples of the training set, B rows of this rank, C classes, K draws, R rows of the window.
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from fastgnl.distributed import is_distributed, sum_over_ranks, world_size
from fastgnl.errors import InputError, check, check_choice, check_count, check_range, check_seed
from fastgnl.kernels import backends, philox
from fastgnl.kernels.backends import Backend
from fastgnl.kernels.candidates import CLIP, Coverage, PriorForm, candidate_sets, coverage_label
from fastgnl.kernels.step import COVERS, PRIORS, TICKETS, Options, State, differentiable_step
from fastgnl.kernels.terms import Direction, EStep, PriorKL, log_denominator, row_terms
from fastgnl.mixture import noise_probability

Denominator = Literal["batch", "window", "dataset"]
Uncertainty = Literal["mixture", "random", "none"]
LossSource = Literal["online", "eval"]
TableDtype = Literal["float32", "float16", "bfloat16"]
TERMS = ("ce", "prior", "estep")


@dataclass(frozen=True)
class GNLConfig:
    """Every option of the method, checked when made."""

    num_samples: int
    """N: sample ids are 0 to N - 1."""
    num_classes: int
    """C."""
    direction: Direction = "y->x"
    """Which way data are generated, y->x or x->y; changes the E-step only."""
    denominator: Denominator = "batch"
    """Where D_j comes from: the global batch, it and a window of batches, or the whole data set."""
    window: int = 4
    """Batches in the sum with denominator="window", the live one included."""
    prior_kl: PriorKL = "reverse"
    """KL(r || q), KL(q || r), or the cross-entropy of p."""
    estep: EStep = "normalised"
    """The E-step's target normalised, or as the paper prints it."""
    terms: tuple[str, ...] = TERMS
    """Which of ce, prior, estep make up the loss."""
    beta: float = 0.9
    """Decay of the moving average M; 0 keeps the last q only."""
    tau: float = 0.5
    """Temperature of the coverage draw: c ~ M^(1/tau)."""
    k_max: int | Literal["auto"] | None = "auto"
    """Cap on the random candidates: None is the paper's rule, "auto" is it up to 100 classes and 20 beyond."""
    warmup_epochs: int = 10
    """Epochs before w is estimated."""
    coverage: Coverage = "sample"
    """The coverage label: drawn from M, its argmax, or left out."""
    uncertainty: Uncertainty = "mixture"
    """w from the losses, at random, or no random candidates at all."""
    prior_form: PriorForm = "set"
    """p uniform on the set, or the paper's sum in which a label named twice weighs double."""
    loss_source: LossSource = "online"
    """w from the losses seen while training, or from those given to end_epoch."""
    table_dtype: TableDtype = "float32"
    """How M is stored. A step rounds to the nearest: the average stops moving once within 4% (bfloat16) or 0.5%
    (float16) of where it is going."""
    backend: Backend = "auto"
    """What computes a step: Triton on a GPU, native code on a CPU, plain PyTorch; "auto" takes the fastest there is."""
    seed: int = 0
    """Key of every random draw."""

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples, 1)
        check_count("num_classes", self.num_classes, 2)
        check_choice("direction", self.direction, get_args(Direction))
        check_choice("denominator", self.denominator, get_args(Denominator))
        check_count("window", self.window, 1)
        check_choice("prior_kl", self.prior_kl, get_args(PriorKL))
        check_choice("estep", self.estep, get_args(EStep))
        check(len(self.terms) > 0, f"terms is empty, wanted at least one of {', '.join(TERMS)}")
        for term in self.terms:
            check_choice("terms", term, TERMS)
        check_range("beta", self.beta, 0, 1)
        # 1/tau beyond 8 would underflow float32 at 21,841 classes.
        check_range("tau", self.tau, 0.125, 100)
        if self.k_max not in ("auto", None):
            check_count("k_max", self.k_max, 0)  # type: ignore[arg-type]
        check_count("warmup_epochs", self.warmup_epochs, 0)
        check_choice("coverage", self.coverage, get_args(Coverage))
        check_choice("uncertainty", self.uncertainty, get_args(Uncertainty))
        check_choice("prior_form", self.prior_form, get_args(PriorForm))
        check_choice("loss_source", self.loss_source, get_args(LossSource))
        check_choice("table_dtype", self.table_dtype, get_args(TableDtype))
        check_choice("backend", self.backend, get_args(Backend))
        check_seed(self.seed)

    @property
    def candidate_cap(self) -> int | None:
        """k_max with "auto" settled."""
        if self.k_max == "auto":
            return 20 if self.num_classes > 100 else None
        return self.k_max


class Terms(NamedTuple):
    """What one step gives. Only ``loss`` carries a gradient."""

    loss: Tensor
    """The mean over this rank's rows, weighted so that DDP's average is the mean over the global batch."""
    means: Tensor
    """ce, prior and estep, means over this rank's rows, at places 0 to 2."""
    sample_loss: Tensor
    """-log q_i[y_i], [B]."""
    set_size: Tensor
    """|S_i|, [B]."""
    covered: Tensor | None
    """Whether S_i holds the clean label, [B]; None where it is not known."""

    @property
    def ce(self) -> Tensor:
        return self.means[0]

    @property
    def prior(self) -> Tensor:
        return self.means[1]

    @property
    def estep(self) -> Tensor:
        return self.means[2]


def check_ids(name: str, given: Tensor, z: Tensor) -> None:
    """A whole number for each row of z."""
    if given.shape != z.shape[:1]:
        raise InputError(f"{name} has shape {tuple(given.shape)}, wanted ({z.shape[0]},) as z has rows")
    if given.is_floating_point() or given.dtype == torch.bool:
        raise InputError(f"{name} is {given.dtype}, wanted integers")


def as_int64(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int64 else x.to(torch.int64)


def check_below(name: str, given: Tensor, size: int) -> None:
    """Every id from 0 to ``size`` - 1; looked at on the CPU only, elsewhere it would stall the device."""
    if given.device.type == "cpu":
        low, high = (int(v) for v in given.aminmax())
        check(low >= 0 and high < size, f"{name} holds {low if low < 0 else high}, wanted 0 to {size - 1}")


def check_once(index: Tensor) -> None:
    """No sample twice in a batch; looked at on the CPU only."""
    if index.device.type == "cpu":
        check(len(index.unique()) == len(index), "index names a sample twice, wanted each at most once in a batch")


def check_batch(z: Tensor, labels: Tensor, index: Tensor, clean: Tensor | None, num_classes: int) -> None:
    """The shapes and types of one batch of clean logits, given labels and sample ids."""
    for name, given in (("z", z), ("labels", labels), ("index", index)):
        if not isinstance(given, Tensor):
            raise InputError(f"{name} is a {type(given).__name__}, wanted a tensor")
    if z.dim() != 2 or z.shape[1] != num_classes or z.shape[0] == 0:
        raise InputError(f"z has shape {tuple(z.shape)}, wanted (B, {num_classes}) with B >= 1")
    if not z.is_floating_point():
        raise InputError(f"z is {z.dtype}, wanted a floating-point type")
    check_ids("labels", labels, z)
    check_ids("index", index, z)
    if clean is not None:
        check_ids("clean", clean, z)


def check_noisy(t: Tensor, z: Tensor) -> None:
    """The noisy logits that go with z."""
    if not isinstance(t, Tensor):
        raise InputError(f"t is a {type(t).__name__}, wanted the noisy logits as a tensor")
    if not t.is_floating_point():
        raise InputError(f"t is {t.dtype}, wanted a floating-point type")
    if t.dim() not in (2, 3) or (t.shape[0], t.shape[-1]) != z.shape or t.shape[1] == 0:
        raise InputError(f"t has shape {tuple(t.shape)}, wanted {tuple(z.shape)} as z has, or (B, K, C)")


def check_device(z: Tensor, **others: Tensor | None) -> None:
    """Everything is where z is."""
    for name, other in others.items():
        if other is not None and other.device != z.device:
            raise InputError(f"{name} is on {other.device}, wanted {z.device} as z is")


class GNLObjective(nn.Module):
    """The loss L = L_CE + L_PRI + L_KL of a batch, with the state it needs of every sample.

    >>> objective = GNLObjective(num_samples=50_000, num_classes=10, direction="y->x", seed=0)
    >>> terms = objective(z, t, labels, index)  # z, t from ``with_transition``; index: ids of the samples
    >>> terms.loss.backward()
    >>> objective.end_epoch()  # refits w once warm-up is over

    Takes every field of ``GNLConfig``. In training mode a call updates the state; in eval mode it only
    computes. Under torch.distributed the denominators are sums over the global batch, and a sample must be
    visited by one rank only in an epoch: ``end_epoch`` brings the ranks' tables together.
    """

    M_NC: Tensor
    w_N: Tensor
    loss_N: Tensor
    visited_N: Tensor
    step: Tensor
    epoch: Tensor
    column_sum_C: Tensor
    window_RC: Tensor
    tickets: Tensor

    def __init__(self, num_samples: int, num_classes: int, *, network: int = 0, **options: object) -> None:
        super().__init__()
        known = [field.name for field in fields(GNLConfig)]
        for name in options:
            check(name in known, f"GNLObjective has no option {name!r}, wanted one of {', '.join(known)}")
        self.config = GNLConfig(num_samples, num_classes, **options)  # type: ignore[arg-type]
        self.network = network
        self._options: dict[tuple[str, str], Options] = {}
        self._backends: dict[tuple[str, torch.dtype, torch.dtype, torch.dtype, int], str] = {}
        N, C = num_samples, num_classes
        self.register_buffer("M_NC", torch.full((N, C), 1.0 / C, dtype=getattr(torch, self.config.table_dtype)))
        self.register_buffer("w_N", torch.zeros(N))
        self.register_buffer("loss_N", torch.full((N,), float("nan")))
        self.register_buffer("visited_N", torch.zeros(N, dtype=torch.bool))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self.register_buffer("column_sum_C", torch.full((C,), N / C))
        rows = self.config.window - 1 if self.config.denominator == "window" else 0
        self._has_window = rows > 0
        self.register_buffer("window_RC", torch.zeros(rows, C))
        self.register_buffer("tickets", torch.zeros(TICKETS, dtype=torch.int32), persistent=False)

    @property
    def in_warmup(self) -> bool:
        return int(self.epoch) < self.config.warmup_epochs

    @property
    def wants_losses(self) -> bool:
        """Whether ``end_epoch`` needs the losses of an eval-mode pass now."""
        config = self.config
        refits = config.uncertainty == "mixture" and int(self.epoch) + 1 >= config.warmup_epochs
        return refits and config.loss_source == "eval"

    def _words(self, index: Tensor, *kinds: int) -> Tensor:
        """The random words of this step for each kind of draw, [S, B, C]."""
        streams = [philox.stream(kind, self.network) for kind in kinds]
        return philox.words(self.config.seed, index, self.config.num_classes, self.step, streams)

    def coverage_labels(self, index: Tensor) -> Tensor:
        """c_i of this step, from M before its update."""
        (words_BC,) = self._words(index, philox.COVERAGE)
        return coverage_label(self.M_NC[index], words_BC, self.config.tau, self.config.coverage)

    def forward(
        self,
        z: Tensor,
        t: Tensor,
        labels: Tensor,
        index: Tensor,
        clean: Tensor | None = None,
        *,
        coverage: list[Tensor] | None = None,
        w: Tensor | None = None,
        denominator: Tensor | None = None,
    ) -> Terms:
        """Clean logits z [B, C], noisy logits t [B, C] or [B, K, C], given labels and sample ids [B].

        ``clean`` are the true labels where they are known, for ``Terms.covered`` only. ``coverage`` and ``w``
        replace this objective's own coverage labels and noise probabilities (two networks). ``denominator`` [C] is
        a D known before the step: it replaces the sums over the batch, and no gradient flows through it.
        """
        config = self.config
        check_batch(z, labels, index, clean, config.num_classes)
        check_noisy(t, z)
        check_device(z, t=t, labels=labels, index=index, clean=clean, w=w, denominator=denominator, objective=self.M_NC)
        if denominator is not None:
            wanted = (config.num_classes,)
            check(denominator.shape == wanted, f"denominator has shape {tuple(denominator.shape)}, wanted {wanted}")
        if w is not None:
            check(w.shape == self.w_N.shape, f"w has shape {tuple(w.shape)}, wanted ({config.num_samples},)")
        for given in coverage or []:
            check_ids("coverage", given, z)
            check_device(z, coverage=given)
            check_below("coverage", given, config.num_classes)
        labels, index = as_int64(labels), as_int64(index)
        clean = None if clean is None else as_int64(clean)
        w_N = self.w_N if w is None else w
        backend = self.backend_for(z, t)
        if backend == "reference":
            t_BKC = t if t.dim() == 3 else t[:, None]
            return self._reference_step(z, t_BKC, labels, index, clean, coverage, w_N, denominator)
        return self._fused_step(backend, z, t, labels, index, clean, coverage, w_N, denominator)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def backend_for(self, z: Tensor, t: Tensor) -> str:
        """What computes a step of these logits: "reference", "triton" or "cpu"."""
        if self.config.backend == "reference":
            return "reference"
        dtype = (
            z.dtype if z.dtype == t.dtype else torch.promote_types(torch.promote_types(z.dtype, t.dtype), torch.float32)
        )
        given = (z.device.type, dtype, self.M_NC.dtype, self.loss_N.dtype, t.shape[1] if t.dim() == 3 else 1)
        if given not in self._backends:
            self._backends[given] = self._resolve(*given)
        return self._backends[given]

    def _resolve(self, device: str, logits: torch.dtype, table: torch.dtype, state: torch.dtype, draws: int) -> str:
        config = self.config
        backend, slow = (config.backend, None) if config.backend != "auto" else backends.choose(device)
        if slow is not None and device == "cpu":
            backends.notice(f"{slow}, going on with plain PyTorch")
        problem = None if slow else backends.problem(backend, device)
        check(problem is None, f"backend is {backend!r} and {problem}")
        left_out = backends.unsupported(
            backend, config.estep, config.tau, config.num_classes, draws, logits, table, state
        )
        if config.backend == "auto":
            return "reference" if left_out else backend
        check(left_out is None, f"backend is {backend!r}, wanted 'reference' or 'auto' with {left_out}")
        return backend

    def _fused_step(
        self,
        backend: str,
        z: Tensor,
        t: Tensor,
        labels: Tensor,
        index: Tensor,
        clean: Tensor | None,
        coverage: list[Tensor] | None,
        w_N: Tensor,
        denominator: Tensor | None,
    ) -> Terms:
        """One call of the op that holds the whole step."""
        if z.dtype != t.dtype:
            z, t = z.float(), t.float()
        own = self._buffers
        state = State(
            own["M_NC"],  # type: ignore[arg-type]
            own["loss_N"],  # type: ignore[arg-type]
            own["visited_N"],  # type: ignore[arg-type]
            own["step"],  # type: ignore[arg-type]
            own["epoch"],  # type: ignore[arg-type]
            own["column_sum_C"] if self.config.denominator == "dataset" else None,
            own["window_RC"] if self._has_window else None,
            own["tickets"],  # type: ignore[arg-type]
        )
        given = (
            torch.stack([as_int64(label_B) for label_B in coverage]) if coverage else None,
            w_N.float().contiguous(),
            None if denominator is None else denominator.detach().float().contiguous(),
        )
        options = self.step_options(backend, "own" if coverage is None else "given" if coverage else "none")
        loss, terms, sample_loss_B, set_size_B, covered_B = differentiable_step(
            z, t, labels, index, clean, *given, state, options, self.training
        )
        return Terms(loss, terms, sample_loss_B, set_size_B, covered_B)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def step_options(self, backend: str, cover: str) -> Options:
        """The options as a fused step takes them."""
        known = self._options.get((backend, cover))
        if known is None:
            config = self.config
            known = self._options[backend, cover] = Options(
                backend=backend,
                x_to_y=config.direction == "x->y",
                prior_kl=PRIORS.index(config.prior_kl),
                cover_mode=COVERS.index(config.coverage if cover == "own" else cover),
                random_labels=config.uncertainty != "none",
                additive=config.prior_form == "additive",
                power=int(1 / config.tau),
                cap=-1 if config.candidate_cap is None else config.candidate_cap,
                beta=config.beta,
                weights=tuple(float(name in config.terms) for name in TERMS),
                warmup_epochs=config.warmup_epochs,
                seed=config.seed - 2**64 * (config.seed >= 2**63),
                network=self.network,
            )
        return known

    def _reference_step(
        self,
        z: Tensor,
        t_BKC: Tensor,
        labels: Tensor,
        index: Tensor,
        clean: Tensor | None,
        coverage: list[Tensor] | None,
        w_N: Tensor,
        denominator: Tensor | None,
    ) -> Terms:
        """The step in plain PyTorch, gradients by autograd: what every backend is compared with."""
        config = self.config
        check_below("labels", labels, config.num_classes)
        check_below("index", index, config.num_samples)
        check_once(index)
        if clean is not None:
            check_below("clean", clean, config.num_classes)
        wide = torch.promote_types(z.dtype, torch.float32)
        l_BC = torch.log_softmax(z.to(wide), 1)
        with torch.no_grad():
            cover_BC, free_BC, warmup_BC = self._words(index, philox.COVERAGE, philox.FREE, philox.WARMUP)
            old_BC = self.M_NC[index]
            if coverage is None:
                own = config.coverage != "none"
                coverage = [coverage_label(old_BC, cover_BC, config.tau, config.coverage)] if own else []
            candidates = candidate_sets(
                labels,
                coverage,
                free_BC,
                warmup_BC[:, 0],
                None if self.in_warmup else w_N[index],
                k_max=config.candidate_cap,
                random_labels=config.uncertainty != "none",
                form=config.prior_form,
            )
            new_BC = self._averaged(old_BC, l_BC)
        if denominator is None:
            sum_C, rows = self._column_sums(l_BC, old_BC, new_BC)
        else:
            sum_C, rows = denominator.detach(), sum_over_ranks(l_BC.new_tensor(len(z)))
        terms_B = row_terms(
            l_BC,
            t_BKC.to(wide),
            labels,
            candidates.log_prior_BC,
            log_denominator(sum_C),
            direction=config.direction,
            prior_kl=config.prior_kl,
            estep=config.estep,
        )
        # A term left out weighs 0 rather than being dropped: DDP wants every parameter in the graph.
        weighted = [float(name in config.terms) * term.sum() for name, term in zip(TERMS, terms_B, strict=True)]
        loss = torch.stack(weighted).sum() * (world_size() / rows)
        sample_loss_B = -l_BC.detach().gather(1, labels[:, None]).squeeze(1)
        if self.training:
            self.M_NC[index] = new_BC
            self.loss_N[index] = sample_loss_B.to(self.loss_N.dtype)
            self.visited_N[index] = True
            self.step += 1
        return Terms(
            loss,
            torch.stack(terms_B).detach().mean(1),
            sample_loss_B,
            candidates.member_BC.sum(1),
            None if clean is None else candidates.member_BC.gather(1, clean[:, None]).squeeze(1),
        )

    def _averaged(self, old_BC: Tensor, l_BC: Tensor) -> Tensor:
        """M_i <- beta M_i + (1 - beta) norm(clip(q_i)), rounded to the table's type."""
        q_BC = l_BC.detach().exp().clamp(CLIP, 1 - CLIP)
        q_BC = q_BC / q_BC.sum(1, keepdim=True)
        return (self.config.beta * old_BC.to(q_BC.dtype) + (1 - self.config.beta) * q_BC).to(old_BC.dtype)

    def _column_sums(self, l_BC: Tensor, old_BC: Tensor, new_BC: Tensor) -> tuple[Tensor, Tensor]:
        """D_j with the live batch and its gradient in it, and the rows of the global batch."""
        live_C = l_BC.exp().sum(0)
        message = [live_C, live_C.new_full((1,), len(l_BC))]
        if self.config.denominator == "dataset":
            message += [rows_BC.sum(0, dtype=live_C.dtype) for rows_BC in (old_BC, new_BC)]
        live_C, rows, *sums = sum_over_ranks(torch.cat(message)).split([len(part) for part in message])
        rows = rows.detach().squeeze()
        if self.config.denominator == "window":
            total_C = live_C + self.window_RC.sum(0)
            if self.training and len(self.window_RC):
                self.window_RC.copy_(torch.cat([self.window_RC[1:], live_C.detach()[None]]))
            return total_C, rows
        if self.config.denominator == "dataset":
            old_C, new_C = (part.detach() for part in sums)
            # The table's sum with the live q in place of the batch's stale rows. Never negative but for rounding.
            total_C = (self.column_sum_C - old_C).clamp(min=0) + live_C
            if self.training:
                self.column_sum_C += new_C - old_C
            return total_C, rows
        return live_C, rows

    @torch.no_grad()
    def end_epoch(self, losses: Tensor | None = None) -> None:
        """Close an epoch: bring the ranks' tables together and, once warm-up is over, refit w.

        ``losses``: -log q_i[y_i] of every sample from an eval-mode pass, with ``loss_source="eval"``.
        """
        config = self.config
        if self.wants_losses:
            check(losses is not None, "end_epoch() was given no losses, wanted them with loss_source='eval'")
        if losses is not None:
            check(config.loss_source == "eval", "end_epoch() was given losses, wanted none with loss_source='online'")
            check(
                losses.shape == self.loss_N.shape,
                f"losses has shape {tuple(losses.shape)}, wanted ({config.num_samples},)",
            )
        self._synchronise()
        self.column_sum_C.copy_(self.M_NC.sum(0, dtype=torch.float64))
        self.epoch += 1
        if self.in_warmup:
            return
        if config.uncertainty == "random":
            ids_N = torch.arange(config.num_samples, device=self.w_N.device)
            words_N = philox.words(config.seed, ids_N, 1, self.epoch, [philox.stream(philox.RANDOM_W, self.network)])[
                0, :, 0
            ]
            self.w_N.copy_((words_N >> 8).to(torch.float32) / 2**24)
        elif config.uncertainty == "mixture":
            self.w_N.copy_(noise_probability(self.loss_N if losses is None else losses.to(self.loss_N)))

    def _synchronise(self) -> None:
        """Every rank takes over the rows the others visited in this epoch."""
        if is_distributed():
            visits_N = sum_over_ranks(self.visited_N.to(self.M_NC.dtype))
            seen_N = visits_N > 0
            for state in (self.M_NC, self.loss_N):
                mine = self.visited_N.view(-1, *[1] * (state.dim() - 1))
                total = sum_over_ranks(torch.where(mine, state, torch.zeros_like(state)))
                state[seen_N] = total[seen_N] / visits_N[seen_N].view(-1, *[1] * (state.dim() - 1))
        self.visited_N.fill_(False)

    def extra_repr(self) -> str:
        config = self.config
        return f"{config.num_samples} samples, {config.num_classes} classes, {config.direction}, {config.denominator}"


class GNLPair(nn.Module):
    """Two networks trained together (METHOD section 8), each with its own M and w.

    Takes z and t of shape [2, B, C] (``with_transition((first, second), ...)``). Each network uses the w the
    other estimated, and both coverage labels are in either candidate set.
    """

    def __init__(self, num_samples: int, num_classes: int, **options: object) -> None:
        super().__init__()
        self.objectives = nn.ModuleList(
            GNLObjective(num_samples, num_classes, network=network, **options) for network in range(2)
        )

    @property
    def config(self) -> GNLConfig:
        return self._members()[0].config

    def _members(self) -> tuple[GNLObjective, GNLObjective]:
        first, second = self.objectives
        return cast(GNLObjective, first), cast(GNLObjective, second)

    def forward(self, z: Tensor, t: Tensor, labels: Tensor, index: Tensor, clean: Tensor | None = None) -> Terms:
        """The sum of the two losses; the other terms are means of the two."""
        for name, given in (("z", z), ("t", t)):
            check(given.dim() >= 3 and len(given) == 2, f"{name} has shape {tuple(given.shape)}, wanted (2, B, C)")
        members = self._members()
        for member, z_BC in zip(members, z, strict=True):
            check_batch(z_BC, labels, index, clean, member.config.num_classes)
            check_below("index", index, member.config.num_samples)
        with torch.no_grad():
            coverage = None if self.config.coverage == "none" else [m.coverage_labels(index) for m in members]
        a, b = (
            member(z[i], t[i], labels, index, clean, coverage=coverage or [], w=other.w_N)
            for i, (member, other) in enumerate(zip(members, members[::-1], strict=True))
        )
        return Terms(
            a.loss + b.loss,
            (a.means + b.means) / 2,
            (a.sample_loss + b.sample_loss) / 2,
            (a.set_size + b.set_size) / 2,
            None if a.covered is None or b.covered is None else (a.covered.float() + b.covered.float()) / 2,
        )

    def end_epoch(self, losses: Tensor | None = None) -> None:
        """``losses`` as for ``GNLObjective.end_epoch``, of shape [2, N]."""
        if losses is not None:
            wanted = (2, self.config.num_samples)
            check(losses.shape == wanted, f"losses has shape {tuple(losses.shape)}, wanted {wanted}")
        for i, member in enumerate(self._members()):
            member.end_epoch(None if losses is None else losses[i])

    @property
    def wants_losses(self) -> bool:
        return self._members()[0].wants_losses

    @property
    def w_N(self) -> Tensor:
        """The noise probabilities, the mean of the two estimates."""
        a, b = self._members()
        return (a.w_N + b.w_N) / 2
