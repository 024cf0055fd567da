"""``GNLObjective``: the method's loss and the label state it keeps.

Axes: N samples of the training set, B rows of this rank, C classes, K draws, R rows of the window, X coverage labels.
"""

from dataclasses import fields
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from fastgnl.batch import as_int64, check_batch, check_below, check_device, check_ids, check_noisy, check_once, stacked
from fastgnl.config import TERMS, GNLConfig
from fastgnl.distributed import is_distributed, sum_over_ranks, world_size
from fastgnl.errors import check
from fastgnl.kernels import backends, philox
from fastgnl.kernels.candidates import CLIP, candidate_sets, coverage_label
from fastgnl.kernels.step import COVERS, PRIORS, TICKETS, Given, Options, State, differentiable_step
from fastgnl.kernels.terms import log_denominator, row_terms
from fastgnl.mixture import noise_probability


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
        for label_B in coverage or []:
            check_ids("coverage", label_B, z)
            check_device(z, coverage=label_B)
            check_below("coverage", label_B, config.num_classes)
        given = Given(
            z,
            t,
            as_int64(labels),
            as_int64(index),
            None if clean is None else as_int64(clean),
            None if coverage is None else stacked(coverage, z),
            self.w_N if w is None else w,
            denominator,
        )
        backend = self.backend_for(z, t)
        return self._reference_step(given) if backend == "reference" else self._fused_step(backend, given)

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

    def _fused_step(self, backend: str, given: Given) -> Terms:
        """One call of the op that holds the whole step."""
        if given.z.dtype != given.t.dtype:
            given = given._replace(z=given.z.float(), t=given.t.float())
        if given.w.dtype != torch.float32 or not given.w.is_contiguous():
            given = given._replace(w=given.w.float().contiguous())
        if given.denominator is not None:
            given = given._replace(denominator=given.denominator.detach().float().contiguous())
        own = cast(dict[str, Tensor], self._buffers)
        state = State(
            own["M_NC"],
            own["loss_N"],
            own["visited_N"],
            own["step"],
            own["epoch"],
            own["column_sum_C"] if self.config.denominator == "dataset" else None,
            own["window_RC"] if self._has_window else None,
            own["tickets"],
        )
        cover = "own" if given.cover is None else "given" if len(given.cover) else "none"
        return Terms(*differentiable_step(given, state, self.step_options(backend, cover), self.training))

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

    def _reference_step(self, given: Given) -> Terms:
        """The step in plain PyTorch, gradients by autograd: what every backend is compared with."""
        config = self.config
        z, t, labels, index, clean, cover, w_N, denominator = given
        check_below("labels", labels, config.num_classes)
        check_below("index", index, config.num_samples)
        check_once(index)
        if clean is not None:
            check_below("clean", clean, config.num_classes)
        t_BKC = t if t.dim() == 3 else t[:, None]
        wide = torch.promote_types(z.dtype, torch.float32)
        l_BC = torch.log_softmax(z.to(wide), 1)
        with torch.no_grad():
            cover_BC, free_BC, warmup_BC = self._words(index, philox.COVERAGE, philox.FREE, philox.WARMUP)
            old_BC = self.M_NC[index]
            if cover is not None:
                named = list(cover)
            elif config.coverage == "none":
                named = []
            else:
                named = [coverage_label(old_BC, cover_BC, config.tau, config.coverage)]
            candidates = candidate_sets(
                labels,
                named,
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
