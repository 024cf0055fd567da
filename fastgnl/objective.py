"""``GNLObjective``: the method's loss and the label state it keeps.

Axes: N samples of the training set, B rows of this rank, C classes, K draws, R rows of the window, X coverage labels.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import cast

import torch
from torch import Tensor, nn

from fastgnl.batch import as_int64, check_batch, check_below, check_device, check_ids, check_noisy, check_once, stacked
from fastgnl.config import TERMS, GNLConfig
from fastgnl.distributed import is_distributed, sum_over_ranks, sum_over_ranks_, world_size
from fastgnl.errors import check
from fastgnl.kernels import backends, philox
from fastgnl.kernels.candidates import CLIP, candidate_sets, coverage_label
from fastgnl.kernels.step import COVERS, PRIORS, TICKETS, Given, Options, State, differentiable_step
from fastgnl.kernels.terms import log_denominator, row_terms
from fastgnl.mixture import noise_probability
from fastgnl.momentum import Bank
from fastgnl.terms import Terms
from fastgnl.top_k import TopK


class GNLObjective(nn.Module):
    """The loss L = L_CE + L_PRI + L_KL of a batch, with the state it needs of every sample.

    >>> objective = GNLObjective(num_samples=50_000, num_classes=10, direction="y->x", seed=0)
    >>> terms = objective(z, t, labels, index)  # z, t from ``with_transition``; index: ids of the samples
    >>> terms.loss.backward()
    >>> objective.end_epoch()  # refits w once warm-up is over

    Takes every field of ``GNLConfig``. In training mode a call updates the state; in eval mode it only
    computes. Under torch.distributed the denominators are sums over the global batch, and a rank keeps the state of
    the samples that come to it, always the same: ``ids`` (of ``Loader.shard``).
    """

    M_NC: Tensor
    w_N: Tensor
    loss_N: Tensor
    step: Tensor
    epoch: Tensor
    column_sum_C: Tensor
    window_RC: Tensor
    ids_N: Tensor
    tickets: Tensor

    def __init__(
        self, num_samples: int, num_classes: int, *, ids: Tensor | None = None, network: int = 0, **options: object
    ) -> None:
        super().__init__()
        known = [field.name for field in fields(GNLConfig)]
        for name in options:
            check(name in known, f"GNLObjective has no option {name!r}, wanted one of {', '.join(known)}")
        self.config = GNLConfig(num_samples=num_samples, num_classes=num_classes, **options)  # type: ignore[arg-type]
        self.network = network
        self._options: dict[tuple[str, str, bool], Options] = {}
        self._backends: dict[tuple[str, torch.dtype, torch.dtype, torch.dtype, int], str] = {}
        C = num_classes
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self.register_buffer("column_sum_C", torch.full((C,), num_samples / C))
        rows = {"window": self.config.window - 1, "bank": 1}.get(self.config.denominator, 0)
        self._has_window = rows > 0
        self.register_buffer("window_RC", torch.zeros(rows, C))
        self.bank = Bank(self.config.bank, C) if self.config.denominator == "bank" else None
        self.register_buffer("tickets", torch.zeros(TICKETS, dtype=torch.int32), persistent=False)
        self._told = ids is not None
        own = torch.empty(0, dtype=torch.int64) if ids is None else self._checked(ids)
        self.register_buffer("ids_N", own, persistent=False)
        N = len(own) or num_samples
        top_k = self.config.top_k
        dtype = getattr(torch, self.config.table_dtype)
        self.register_buffer("M_NC", torch.full((N if top_k is None else 0, C), 1.0 / C, dtype=dtype))
        self.register_buffer("w_N", torch.zeros(N))
        self.register_buffer("loss_N", torch.full((N,), float("nan")))
        self.top = None if top_k is None else TopK(N, C, top_k)
        self.register_load_state_dict_post_hook(type(self)._read_epoch)
        self._read_epoch()

    def _checked(self, ids: Tensor) -> Tensor:
        """The ids in ascending order; none if they are all there are."""
        check_below("ids", ids, self.config.num_samples)
        own = as_int64(ids).unique()
        check(0 < len(own) == len(ids), f"ids names {len(own)} samples in {len(ids)} places, wanted each once")
        return own if len(own) < self.config.num_samples else own[:0]

    def check_owns(self, ids: Tensor) -> None:
        """Refuse to train on samples whose state is not kept here."""
        check(
            self._told and torch.equal(self.own_ids.cpu(), ids),
            f"this objective keeps the state of {len(self.w_N)} samples where {len(ids)} come to this rank, wanted "
            "GNLObjective(..., ids=loader.shard())",
        )

    def _slots(self, ids: Tensor) -> Tensor:
        """Where each sample's state is on this rank."""
        if len(self.ids_N) == 0:
            return ids
        slots = torch.searchsorted(self.ids_N, ids).clamp_(max=len(self.ids_N) - 1)
        if ids.device.type == "cpu":
            strange = ids[self.ids_N[slots] != ids]
            check(
                len(strange) == 0,
                f"index holds {strange[:1].tolist()}, wanted samples among the ids that this objective was made with",
            )
        return slots

    @property
    def in_warmup(self) -> bool:
        return int(self.epoch) < self.config.warmup_epochs

    @property
    def rest_weight(self) -> float:
        """What a step multiplies all but the live batch by: mix / mean(rest), where rest sums up N rows of q."""
        config = self.config
        if config.rest_rows is None or config.denominator != "dataset":
            return 1.0
        return config.rest_rows * config.num_classes / config.num_samples

    def _read_epoch(self, *_: object) -> None:
        """Note what the epoch decides: to ask for it in each step would stall a device."""
        self.alone = self.config.warmup_sets == "given" and self.in_warmup
        """Whether candidate sets are the given label alone now."""

    @property
    def wants_momentum(self) -> float | None:
        """The momentum of the encoder whose logits a call wants, with denominator="bank"."""
        return self.config.momentum if self.bank is not None else None

    @property
    def wants_losses(self) -> bool:
        """Whether ``end_epoch`` needs the losses of an eval-mode pass now."""
        config = self.config
        refits = config.uncertainty == "mixture" and int(self.epoch) + 1 >= config.warmup_epochs
        return refits and config.loss_source == "eval"

    def _words(self, ids: Tensor, *kinds: int) -> Tensor:
        """The random words of this step for each kind of draw, [S, B, C]."""
        streams = [philox.stream(kind, self.network) for kind in kinds]
        return philox.words(self.config.seed, ids, self.config.num_classes, self.step, streams)

    def coverage_labels(self, index: Tensor) -> Tensor:
        """c_i of this step, from M before its update."""
        (words_BC,) = self._words(index, philox.COVERAGE)
        slots = self._slots(index)
        table_BC = self.M_NC[slots] if self.top is None else self.top.read(slots)
        return coverage_label(table_BC, words_BC, self.config.tau, self.config.coverage)

    def forward(
        self,
        z: Tensor,
        t: Tensor,
        labels: Tensor,
        index: Tensor,
        clean: Tensor | None = None,
        momentum: Tensor | None = None,
        *,
        coverage: list[Tensor] | None = None,
        w: Tensor | None = None,
        denominator: Tensor | None = None,
    ) -> Terms:
        """Clean logits z [B, C], noisy logits t [B, C] or [B, K, C], given labels and sample ids [B].

        ``clean`` are the true labels where they are known, for ``Terms.covered`` only. ``momentum`` [B, C] are the
        clean logits of the momentum encoder, for ``denominator="bank"`` in training mode. ``coverage`` and ``w``
        replace this objective's own coverage labels and noise probabilities (two networks). ``denominator`` [C] is
        a D known before the step: it replaces the sums over the batch, and no gradient flows through it.
        """
        config = self.config
        check_batch(z, labels, index, clean, config.num_classes)
        check_noisy(t, z)
        check_device(z, t=t, labels=labels, index=index, clean=clean, w=w, denominator=denominator, objective=self.w_N)
        if denominator is not None:
            wanted = (config.num_classes,)
            check(denominator.shape == wanted, f"denominator has shape {tuple(denominator.shape)}, wanted {wanted}")
        if w is not None:
            check(w.shape == self.w_N.shape, f"w has shape {tuple(w.shape)}, wanted {tuple(self.w_N.shape)}")
        for label_B in coverage or []:
            check_ids("coverage", label_B, z)
            check_device(z, coverage=label_B)
            check_below("coverage", label_B, config.num_classes)
        check(
            self._told or not self.training or not is_distributed(),
            "this objective was not told which samples come to this rank, wanted GNLObjective(..., ids=loader.shard())",
        )
        if self.alone:
            coverage = []
        ids = as_int64(index)
        given = Given(
            z,
            t,
            as_int64(labels),
            ids,
            self._slots(ids),
            None if clean is None else as_int64(clean),
            None if coverage is None else stacked(coverage, z),
            self.w_N if w is None else w,
            denominator,
        )
        if self.bank is not None:
            return self._step_with_bank(given, self.bank, momentum)
        return self._step(given) if self.top is None else self._step_of_top(given, self.top)

    def _step(self, given: Given, table: Tensor | None = None, losses: Tensor | None = None) -> Terms:
        """One step on this objective's table and losses, or on others of the same kind."""
        own = cast(dict[str, Tensor], self._buffers)
        state = State(
            own["M_NC"] if table is None else table,
            own["loss_N"] if losses is None else losses,
            own["step"],
            own["epoch"],
            own["column_sum_C"] if self.config.denominator == "dataset" else None,
            own["window_RC"] if self._has_window else None,
            own["tickets"],
        )
        backend = self.backend_for(given.z, given.t)
        if backend == "reference":
            return self._reference_step(given, state)
        return self._fused_step(backend, given, state)

    def _step_of_top(self, given: Given, top: TopK) -> Terms:
        """The step on the whole rows of this batch, of which the k largest entries are kept."""
        slots = given.slots
        check_below("index", slots, len(self.w_N))
        rows_BC = top.read(slots).to(self.M_NC.dtype)
        losses_B = self.loss_N[slots]
        places = torch.arange(len(slots), device=slots.device)
        terms = self._step(given._replace(slots=places, w=given.w[slots]), rows_BC, losses_B)
        if self.training:
            top.write(slots, rows_BC)
            self.loss_N[slots] = losses_B
        return terms

    def _step_with_bank(self, given: Given, bank: Bank, momentum: Tensor | None) -> Terms:
        """D_j = live_j + the bank's part once it is full; the bank takes in the momentum encoder's q."""
        if self.training:
            check(
                momentum is not None, "no momentum was given, wanted the momentum encoder's z with denominator='bank'"
            )
        # As a window of one row, which the step would fill with the live sums and which is filled anew each time.
        mix = self.config.rest_rows
        weight = 1.0 if mix is None else mix * self.config.num_classes / max(sum(bank.rows), 1)
        self.window_RC.copy_(bank.sum_C * (weight if bank.full else 0.0))
        now = int(self.step)
        terms = self._step(given) if self.top is None else self._step_of_top(given, self.top)
        if self.training and momentum is not None:
            check(momentum.shape == given.z.shape, f"momentum has shape {tuple(momentum.shape)}, wanted that of z")
            bank.push(momentum.detach().float().softmax(1), given.ids, now)
        return terms

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

    def _fused_step(self, backend: str, given: Given, state: State) -> Terms:
        """One call of the op that holds the whole step."""
        if given.z.dtype != given.t.dtype:
            given = given._replace(z=given.z.float(), t=given.t.float())
        if given.w.dtype != torch.float32 or not given.w.is_contiguous():
            given = given._replace(w=given.w.float().contiguous())
        if given.denominator is not None:
            given = given._replace(denominator=given.denominator.detach().float().contiguous())
        cover = "own" if given.cover is None else "given" if len(given.cover) else "none"
        options = self.step_options(backend, cover, self.config.uncertainty != "none" and not self.alone)
        return Terms(*differentiable_step(given, state, options, self.training))

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def step_options(self, backend: str, cover: str, random_labels: bool) -> Options:
        """The options as a fused step takes them."""
        known = self._options.get((backend, cover, random_labels))
        if known is None:
            config = self.config
            known = self._options[backend, cover, random_labels] = Options(
                backend=backend,
                x_to_y=config.direction == "x->y",
                prior_kl=PRIORS.index(config.prior_kl),
                cover_mode=COVERS.index(config.coverage if cover == "own" else cover),
                random_labels=random_labels,
                additive=config.prior_form == "additive",
                power=int(1 / config.tau),
                cap=-1 if config.candidate_cap is None else config.candidate_cap,
                beta=config.beta,
                mix=self.rest_weight,
                weights=tuple(float(name in config.terms) for name in TERMS),
                warmup_epochs=config.warmup_epochs,
                seed=config.seed - 2**64 * (config.seed >= 2**63),
                network=self.network,
            )
        return known

    def _reference_step(self, given: Given, state: State) -> Terms:
        """The step in plain PyTorch, gradients by autograd: what every backend is compared with."""
        config = self.config
        z, t, labels, ids, slots, clean, cover, w_N, denominator = given
        check_below("labels", labels, config.num_classes)
        check_below("index", slots, len(state.table))
        check_once(slots)
        if clean is not None:
            check_below("clean", clean, config.num_classes)
        t_BKC = t if t.dim() == 3 else t[:, None]
        wide = torch.promote_types(z.dtype, torch.float32)
        l_BC = torch.log_softmax(z.to(wide), 1)
        with torch.no_grad():
            cover_BC, free_BC, warmup_BC = self._words(ids, philox.COVERAGE, philox.FREE, philox.WARMUP)
            old_BC = state.table[slots]
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
                None if self.in_warmup else w_N[slots],
                k_max=config.candidate_cap,
                random_labels=config.uncertainty != "none" and not self.alone,
                form=config.prior_form,
            )
            sample_loss_B = -l_BC.gather(1, labels[:, None]).squeeze(1)
            # A row whose logits are not finite leaves the state of its sample as it was.
            sound_B = sample_loss_B.isfinite()
            new_BC = torch.where(sound_B[:, None], self._averaged(old_BC, l_BC), old_BC)
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
        if self.training:
            state.table[slots] = new_BC
            state.loss_N[slots] = torch.where(sound_B, sample_loss_B.to(state.loss_N.dtype), state.loss_N[slots])
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
        """D_j = live_j + mix * detached_j, its gradient through the live batch, and the rows of the global batch."""
        mix = self.rest_weight
        live_C = l_BC.exp().sum(0)
        message = [live_C, live_C.new_full((1,), len(l_BC))]
        if self.config.denominator == "dataset":
            message += [rows_BC.sum(0, dtype=live_C.dtype) for rows_BC in (old_BC, new_BC)]
        live_C, rows, *sums = sum_over_ranks(torch.cat(message)).split([len(part) for part in message])
        rows = rows.detach().squeeze()
        if self._has_window:
            total_C = live_C + mix * self.window_RC.sum(0)
            if self.training:
                latest_C = live_C.detach().nan_to_num(nan=0.0, posinf=0.0)
                self.window_RC.copy_(torch.cat([self.window_RC[1:], latest_C[None]]))
            return total_C, rows
        if self.config.denominator == "dataset":
            old_C, new_C = (part.detach() for part in sums)
            # The table's sum with the live q in place of the batch's stale rows. Never negative but for rounding.
            total_C = live_C + mix * (self.column_sum_C - old_C).clamp(min=0)
            if self.training:
                self.column_sum_C += new_C - old_C
            return total_C, rows
        return live_C, rows

    @torch.no_grad()
    def end_epoch(self, losses: Tensor | None = None) -> None:
        """Close an epoch: sum the table up anew and, once warm-up is over, refit w.

        ``losses``: -log q_i[y_i] of every sample [N] from an eval-mode pass, with ``loss_source="eval"``.
        """
        config = self.config
        if self.wants_losses:
            check(losses is not None, "end_epoch() was given no losses, wanted them with loss_source='eval'")
        if losses is not None:
            check(config.loss_source == "eval", "end_epoch() was given losses, wanted none with loss_source='online'")
            wanted = (config.num_samples,)
            check(losses.shape == wanted, f"losses has shape {tuple(losses.shape)}, wanted {wanted}")
            losses = losses.to(self.loss_N)[self.own_ids]
        if config.denominator == "dataset":
            sum_C = self.M_NC.sum(0, dtype=torch.float64) if self.top is None else self.top.column_sum()
            self.column_sum_C.copy_(sum_over_ranks_(sum_C))
        self.epoch += 1
        self._read_epoch()
        if self.in_warmup:
            return
        if config.uncertainty == "random":
            stream = philox.stream(philox.RANDOM_W, self.network)
            words_N = philox.words(config.seed, self.own_ids, 1, self.epoch, [stream])[0, :, 0]
            self.w_N.copy_((words_N >> 8).to(torch.float32) / 2**24)
        elif config.uncertainty == "mixture":
            found = self.loss_N if losses is None else losses
            self.w_N.copy_(noise_probability(found, of_all_ranks=True))

    @property
    def own_ids(self) -> Tensor:
        """The ids of the samples whose state is kept here, in the order of the state."""
        return self.ids_N if len(self.ids_N) else torch.arange(self.config.num_samples, device=self.w_N.device)

    def shared_state(self) -> dict[str, Tensor]:
        """The state that is equal on all ranks; what is written to these tensors is taken over."""
        shared = {"step": self.step, "epoch": self.epoch, "column_sum": self.column_sum_C, "window": self.window_RC}
        return shared if self.bank is None else {**shared, "bank sum": self.bank.sum_C}

    def _rows(self) -> dict[str, Tensor]:
        """The state that has a row a sample."""
        kept = {"w": self.w_N, "loss": self.loss_N}
        return kept | (
            {"M": self.M_NC} if self.top is None else {"class": self.top.class_NK, "share": self.top.share_NK}
        )

    def shard_state(self) -> dict[str, Tensor]:
        """The state of this rank's samples, with their ids."""
        bank = {} if self.bank is None else {f"bank {name}": value for name, value in self.bank.shard().items()}
        return {"ids": self.own_ids, **self._rows(), **bank}

    def load_shards(self, shards: Iterable[dict[str, Tensor]]) -> None:
        """Pick the state of this rank's samples out of what any number of ranks have kept."""
        self._read_epoch()
        own, rows = self.own_ids.cpu(), self._rows()
        missing = torch.ones(len(own), dtype=torch.bool)
        banks = []
        for shard in shards:
            there = shard["ids"]
            slots = torch.searchsorted(own, there).clamp_(max=len(own) - 1)
            mine = own[slots] == there
            for name, value in rows.items():
                value[slots[mine]] = shard[name][mine].to(value)
            missing[slots[mine]] = False
            banks.append({name.removeprefix("bank "): part for name, part in shard.items() if name.startswith("bank ")})
        check(
            not bool(missing.any()), f"the state of sample {own[missing][:1].tolist()} is not there, wanted all of them"
        )
        if self.bank is not None:
            self.bank.load(banks, own)

    def extra_repr(self) -> str:
        config = self.config
        return f"{config.num_samples} samples, {config.num_classes} classes, {config.direction}, {config.denominator}"
