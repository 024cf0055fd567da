"""How a network is optimised: the options, and the learning rate of each step."""

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal, get_args

from fastgnl.errors import check, check_choice, check_count, check_range

Schedule = Literal["step", "cosine", "linear", "constant"]
Precision = Literal["float32", "bfloat16", "float16"]
Optimizer = Literal["sgd", "adamw"]
EngineName = Literal["ddp", "deepspeed"]
RISE = 2.0
"""Epochs over which the learning rate rises where the given labels alone are taught first: begun at once, two runs
of three on 242 classes ended at 0.4 and 5.2% (docs/large-label-sets.md)."""


@dataclass(frozen=True)
class TrainConfig:
    """How to optimise. The defaults are the paper's for small images."""

    epochs: int = 40
    lr: float = 0.02
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 5e-4
    decay_at: float = 2 / 3
    """With schedule="step", the learning rate drops to a tenth after this share of the epochs."""
    schedule: Schedule = "step"
    """The learning rate: one drop, half a cosine to 0, a line to 0, or always the same."""
    lr_warmup: float | Literal["auto"] = "auto"
    """Epochs over which the learning rate rises from 0 first. "auto" is 2 where an objective's candidate sets begin as
    the given label alone, else 0."""
    optimizer: Optimizer = "sgd"
    clip: float | None = None
    """The largest norm of a gradient; a longer one is scaled down to it."""
    accumulate: int = 1
    """Batches whose gradients make up one step. The loss of each has the denominators of that batch alone."""
    precision: Precision = "float32"
    """Of the network's products; weights and the loss stay float32."""
    channels_last: bool = False
    """Keep images and filters with their channels side by side."""
    compile: bool = False
    """Run the backbone through torch.compile."""
    engine: EngineName = "ddp"
    """What brings the ranks' gradients together: PyTorch's DistributedDataParallel, or DeepSpeed."""
    zero: int = 1
    """DeepSpeed's ZeRO stage: 0 shares nothing out, 1 the optimizer's state, 2 also the gradients."""
    patience: int = 10
    """Steps in a row that may be skipped because a loss or gradient is not finite; then the run stops."""
    ema: float | None = None
    """Keep an exponential moving average of the weights with this decay, scored beside them. After step s the decay is
    (1 + s) / (10 + s) where that is lower."""

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs, 1)
        check_range("lr", self.lr, 0, 100)
        check_range("momentum", self.momentum, 0, 1)
        check_range("weight_decay", self.weight_decay, 0, 1)
        check_range("decay_at", self.decay_at, 0, 1)
        check_choice("schedule", self.schedule, get_args(Schedule))
        if self.lr_warmup != "auto":
            check_range("lr_warmup", self.lr_warmup, 0, self.epochs)
        check_choice("optimizer", self.optimizer, get_args(Optimizer))
        if self.clip is not None:
            check_range("clip", self.clip, 1e-12, 1e12)
        check_count("accumulate", self.accumulate, 1)
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("engine", self.engine, get_args(EngineName))
        check(
            self.zero != 3,
            "zero is 3, wanted 0, 1 or 2: stage 3 leaves each rank a part of the weights only, and the momentum "
            "encoder, the transition matrices and evaluation need them whole",
        )
        check_choice("zero", self.zero, (0, 1, 2))
        check_count("patience", self.patience, 1)
        if self.ema is not None:
            check(
                isinstance(self.ema, Real) and 0 < self.ema < 1,
                f"ema is {self.ema!r}, wanted a number above 0 and below 1",
            )


def settled(config: TrainConfig, given_alone: bool) -> TrainConfig:
    """Put in what "auto" stands for, where the given labels alone are taught first, or where they are not."""
    if config.lr_warmup != "auto":
        return config
    return replace(config, lr_warmup=min(RISE, config.epochs) if given_alone else 0.0)


def learning_rate(config: TrainConfig, epoch: float) -> float:
    """lr(e) of a step begun after ``epoch`` epochs, whole and broken: min(e / warm-up, 1) times

    step: lr, lr / 10 from the epoch nearest to decay_at on; cosine: lr (1 + cos(pi u)) / 2; linear: lr (1 - u), where
    u is the share of the epochs after the warm-up that is over."""
    warmup = config.lr_warmup
    assert warmup != "auto", "not settled"
    rise = min(epoch / warmup, 1.0) if warmup else 1.0
    left = config.epochs - warmup
    over = max(epoch - warmup, 0.0) / left if left else 1.0
    fall = {
        "step": 0.1 if epoch >= round(config.epochs * config.decay_at) else 1.0,
        "cosine": (1 + math.cos(math.pi * over)) / 2,
        "linear": 1 - over,
        "constant": 1.0,
    }[config.schedule]
    return config.lr * rise * fall
