"""The training loop: a network, an objective, a loader. The same for one process and for torchrun's workers."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from fastgnl.distributed import device, is_distributed, rank, sum_over_ranks_, synchronise_batch_norm, world_size
from fastgnl.engine import Engine, make_engine, trained
from fastgnl.errors import InputError, check
from fastgnl.evaluate import eval_losses, scores
from fastgnl.kernels.backends import notice
from fastgnl.loader import Batch, Loader, Source
from fastgnl.momentum import MomentumEncoder
from fastgnl.optimise import TrainConfig, learning_rate, settled
from fastgnl.run import Parts, Position, Run, RunConfig, told_to_stop
from fastgnl.tally import Epoch, Tally
from fastgnl.terms import Terms
from fastgnl.transition import PairNet, TransitionNet


class Objective(Protocol):
    """What the loop needs of a loss."""

    @property
    def wants_losses(self) -> bool:
        """Whether ``end_epoch`` needs the losses of an eval-mode pass now."""
        ...

    @property
    def wants_momentum(self) -> float | None:
        """The momentum of the encoder whose logits it wants, if any."""
        ...

    def train(self) -> object: ...

    def to(self, device: torch.device) -> object: ...

    def __call__(
        self,
        z: Tensor,
        t: Tensor | None,
        labels: Tensor,
        index: Tensor,
        clean: Tensor | None,
        momentum: Tensor | None = None,
    ) -> Terms: ...

    def end_epoch(self, losses: Tensor | None = None) -> None: ...

    def check_owns(self, ids: Tensor) -> None:
        """Refuse to train on the samples of this rank where their state is not kept here."""
        ...

    def shared_state(self) -> dict[str, Tensor]:
        """The state that is equal on all ranks; what is written to its tensors is taken over."""
        ...

    def shard_state(self) -> dict[str, Tensor]:
        """The state of the samples of this rank."""
        ...

    def load_shards(self, shards: Iterable[dict[str, Tensor]]) -> None:
        """Pick the state of this rank's samples out of what any number of ranks have kept."""
        ...


@runtime_checkable
class Runs(Protocol):
    """An objective that runs the network itself: on mixed inputs, on several views of each sample, more than once."""

    @property
    def views(self) -> int:
        """Differently augmented inputs that it wants of each sample now."""
        ...

    def run(self, engine: Engine, net: Any, batch: Batch) -> Terms:
        """The loss of a batch. What is run through ``engine`` has a gradient, ``net`` is for all else."""
        ...


def _begins_alone(objective: Objective) -> bool:
    """Whether its candidate sets are the given label alone at first."""
    config = getattr(objective, "config", None)
    return config is not None and config.warmup_sets == "given" and config.warmup_epochs > 0


def _seed_step(seed: int, step: int) -> None:
    """The key of dropout and the like: a run that is resumed draws the same without generators being kept."""
    torch.manual_seed((seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank() * 0x94D049BB133111EB) % 2**63)


def _timed(batches: Iterator[Batch], at: Position) -> Iterator[Batch]:
    """The batches, with the seconds of each added up: those waited for it, and those until the next is asked for."""
    while True:
        start = time.perf_counter()
        batch = next(batches, None)
        waited = time.perf_counter()
        at.waited += waited - start
        if batch is not None:
            yield batch
        at.seconds += time.perf_counter() - start
        if batch is None:
            return


def _prepare(net: TransitionNet | PairNet, objective: Objective, loader: Loader, config: TrainConfig) -> None:
    """Put the network and the label state where this rank computes."""
    if is_distributed():
        synchronise_batch_norm(net)
        objective.check_owns(loader.shard())
    net.to(device())
    if config.channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.compile:
        for part in net.nets if isinstance(net, PairNet) else [net]:
            cast(TransitionNet, part).backbone.compile()
    objective.to(device())
    objective.train()
    if config.accumulate > 1 and rank() == 0 and hasattr(objective, "config"):
        notice(f"gradients of {config.accumulate} batches make a step; each batch has denominators of its own")


def _moved(batch: Batch, config: TrainConfig) -> Batch:
    """A batch on this rank's device."""
    place = device()
    x = batch.x.to(place, non_blocking=True)
    if config.channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    clean = None if batch.clean is None else batch.clean.to(place)
    others = tuple(view.to(place, non_blocking=True) for view in batch.others)
    return Batch(x, batch.labels.to(place), batch.index.to(place), clean, batch.global_rows, others)


class _Stepper:
    """Carries out steps: the network in its engine, the objective, the copies that follow it where wanted."""

    def __init__(self, net: TransitionNet | PairNet, objective: Objective, loader: Loader, config: TrainConfig) -> None:
        self.net, self.objective, self.config = net, objective, config
        self.seed, self.per_epoch = loader.seed, len(loader)
        momentum = objective.wants_momentum
        self.encoder = MomentumEncoder(net, momentum).to(device()) if momentum else None
        self.ema = None if config.ema is None else MomentumEncoder(net, config.ema)
        self.engine = make_engine(net, config)
        # A skipped step must not leave its traces in the running statistics of BatchNorm either.
        self.buffers = list(net.buffers())
        self.before = [buffer.clone() for buffer in self.buffers]
        self.bad = 0
        """Steps in a row that were skipped."""

    def rate(self, at: Position) -> float:
        return learning_rate(self.config, at.epoch + at.batch / self.per_epoch)

    def __call__(self, batch: Batch, at: Position) -> Terms:
        """Add the gradient of a batch; with the last of its group, take the step."""
        lr, first = self.rate(at), at.batch // self.config.accumulate * self.config.accumulate
        group = min(self.config.accumulate, self.per_epoch - first)
        if at.batch == first:
            torch._foreach_copy_(self.before, self.buffers)
        at.step, at.batch = at.step + 1, at.batch + 1
        at.between = at.batch - first < group
        _seed_step(self.seed, at.step)
        terms = self._terms(batch)
        # A loss that is not finite makes every gradient so: all ranks see it, and skip the step together.
        share = torch.where(terms.loss.detach().isfinite(), 1 / group, math.nan)
        self.engine.backward(terms.loss * share, last=not at.between)
        if not at.between:
            self._step(lr, batch, terms, at)
        return terms

    def _terms(self, batch: Batch) -> Terms:
        if isinstance(self.objective, Runs):
            return self.objective.run(self.engine, self.net, batch)
        z, t = self.engine(batch.x, batch.index)
        slow = None if self.encoder is None else self.encoder(batch.x, batch.index)
        clean = None if batch.clean is None else batch.clean.clamp(min=0)
        return self.objective(z, t, batch.labels, batch.index, clean, slow)

    def _step(self, lr: float, batch: Batch, terms: Terms, at: Position) -> None:
        if self.engine.step(lr):
            at.taken, self.bad = at.taken + 1, 0
            for follower in (self.encoder, self.ema):
                if follower is not None:
                    follower.follow(self.net, at.taken)
            return
        torch._foreach_copy_(self.buffers, self.before)
        at.skipped, self.bad = at.skipped + 1, self.bad + 1
        if self.bad >= self.config.patience:
            raise InputError(_diagnosis(self.net, terms, batch, self.config, at.step))


def _not_finite(values: Iterable[Tensor]) -> int:
    return sum(int((~value.isfinite()).sum()) for value in values)


def _finite(name: str, bad: int) -> str:
    return f"{name} hold {bad} values that are not finite" if bad else f"{name} are finite"


def _diagnosis(net: TransitionNet | PairNet, terms: Terms, batch: Batch, config: TrainConfig, step: int) -> str:
    """Why training stops: what was not finite on any rank."""
    shown = torch.cat([terms.loss.detach()[None], terms.means[:3]]).double() / world_size()
    message = torch.cat([shown.cpu(), torch.tensor([_not_finite([batch.x])], dtype=torch.float64)])
    loss, ce, prior, estep, bad = sum_over_ranks_(message).tolist()
    weights = _finite("weights", _not_finite(weight.detach() for _, weight in trained(net)))
    return (
        f"the loss or its gradient was not finite in {config.patience} steps in a row, up to step {step}: loss "
        f"{loss:.4g} (ce {ce:.4g}, prior {prior:.4g}, estep {estep:.4g}), {_finite('inputs', int(bad))}, "
        f"{weights}; wanted a lower lr (it is {config.lr:g}), a clip, or scaled inputs (checkpoints are "
        "those of before)"
    )


def _facts(loader: Loader, objective: Objective) -> dict[str, Any]:
    """What a run that goes on must have in common with the one that was begun."""
    facts = {
        "samples": len(loader.source.labels),
        "batch_size": loader.batch_size,
        "seed": loader.seed,
        "order": loader.order,
        "batches": len(loader),
        "objective": type(objective).__name__,
    }
    config = getattr(objective, "config", None) or getattr(objective, "options", None)
    if config is not None:
        facts |= {name: value for name, value in asdict(config).items() if name != "backend"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}


def _scores(net: TransitionNet | PairNet, ema: MomentumEncoder | None, tests: Mapping[str, Source]) -> dict[str, float]:
    """Those of every test set, of the averaged weights too; the first is the top-1 of the first set."""
    found: dict[str, float] = {}
    for test, samples in tests.items():
        found |= {f"{test} {name}": share for name, share in scores(net, samples).items()}
        if ema is not None:
            averaged = cast(TransitionNet | PairNet, ema.net)
            found |= {f"{test} EMA {name}": share for name, share in scores(averaged, samples).items()}
    return found


def train(
    net: TransitionNet | PairNet,
    objective: Objective,
    loader: Loader,
    config: TrainConfig,
    test: Source | Mapping[str, Source] | None = None,
    on_batch: Callable[[int, dict[str, float] | None], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    run: RunConfig | None = None,
    on_end: Callable[[TransitionNet | PairNet], None] | None = None,
) -> list[Epoch]:
    """Train for the epochs of ``config``, or what is left of them where the folder of ``run`` holds a checkpoint.

    After each epoch every ``test`` set is scored, by its name; a single one is named "test", and the first gives the
    test accuracy. ``on_batch`` is told the rows of each global batch and, now and then, this rank's loss and its terms.
    ``on_end`` is given the network with the averaged weights, in eval mode, where ``config.ema`` asks for them."""
    tests = test if isinstance(test, Mapping) else {} if test is None else {"test": test}
    config = settled(config, _begins_alone(objective))
    _prepare(net, objective, loader, config)
    stepper = _Stepper(net, objective, loader, config)
    parts = Parts(net, stepper.engine, objective, stepper.encoder, stepper.ema)
    with told_to_stop(run is not None) as told, Run(run, parts, _facts(loader, objective), config.epochs) as kept:
        at, tally = kept.resume()
        if on_batch and at.step:
            on_batch(at.step * len(loader.source.labels) // len(loader), None)
        while at.epoch < config.epochs:
            net.train()
            views = objective.views if isinstance(objective, Runs) else 1
            for batch in _timed(loader.epoch(at.epoch, at.batch, views), at):
                lr = stepper.rate(at)
                batch = _moved(batch, config)
                terms = stepper(batch, at)
                tally.add(terms, batch)
                shown = kept.watch(terms, batch, at, lr)
                if on_batch:
                    on_batch(batch.global_rows, shown)
                if at.between or stepper.bad:
                    continue
                if told.anyone(at.step):
                    kept.leave(at, tally)
                if kept.due(at.step) and at.batch < len(loader):
                    kept.save(at, tally)
            start = time.perf_counter()
            objective.end_epoch(eval_losses(net, loader.source) if objective.wants_losses else None)
            at.seconds += time.perf_counter() - start
            lr = learning_rate(config, at.epoch + (len(loader) - 1) / len(loader))  # no batch may have been left
            kept.end_epoch(at, tally, lr, _scores(net, stepper.ema, tests))
            check(
                at.taken > 0,
                f"no step of epoch {at.epoch} had a finite loss and gradient, wanted a lower lr (it is {config.lr:g}), "
                "or scaled inputs",
            )
            tally = Tally()
            if not stepper.bad and kept.due_after(at.epoch):
                kept.save(at, tally)
            if on_epoch:
                on_epoch(at.history[-1])
    net.eval()
    if on_end and stepper.ema is not None:
        on_end(cast(TransitionNet | PairNet, stepper.ema.net.eval()))
    return at.history
