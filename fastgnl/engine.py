"""What carries out a step of the optimizer on every rank: PyTorch's DistributedDataParallel, or DeepSpeed.

Both are given a loss whose mean over the ranks is that of the global batch, and both keep their state under the same
names, so that a run may go on with the other.
"""

import io
import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastgnl.distributed import is_distributed
from fastgnl.errors import check
from fastgnl.optimise import TrainConfig

MOMENTS = {"sgd": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
"""What each optimizer keeps of every weight."""


class Engine(Protocol):
    """A network with its optimizer."""

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a loss; with the ``last`` before a step, over all ranks."""
        ...

    def step(self, lr: float) -> bool:
        """Take the step, unless the gradient is not finite: whether it was taken."""
        ...

    def moments(self) -> dict[str, Tensor]:
        """What the optimizer keeps, whole on every rank; it may be written to before ``load_moments``."""
        ...

    def load_moments(self, moments: dict[str, Tensor], steps: int) -> None:
        """Take over weights that were loaded into the network, and what the optimizer kept after so many steps."""
        ...


def make_engine(net: nn.Module, config: TrainConfig) -> Engine:
    """The engine that the options name."""
    return DeepSpeed(net, config) if config.engine == "deepspeed" else Ddp(net, config)


def optimizer_of(net: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(net.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def trained(net: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that are trained, with their names."""
    return ((name, weight) for name, weight in net.named_parameters() if weight.requires_grad)


def kept_moments(net: nn.Module, optimizer: torch.optim.Optimizer, keys: tuple[str, ...]) -> dict[str, Tensor]:
    """What an optimizer of the whole weights keeps of each; zeros before its first step."""
    found = {}
    for name, weight in trained(net):
        for key in keys:
            kept = optimizer.state.get(weight, {}).get(key)
            found[f"{name}.{key}"] = torch.zeros_like(weight.detach()) if kept is None else kept
    return found


def restore_moments(
    net: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, moments: dict[str, Tensor], steps: int
) -> None:
    """Put them back, after so many steps."""
    for name, weight in trained(net):
        state = optimizer.state[weight]
        for key in MOMENTS[config.optimizer]:
            state[key] = moments[f"{name}.{key}"].clone()
        if config.optimizer == "adamw":
            state["step"] = torch.tensor(float(steps))


class Ddp:
    """DistributedDataParallel, or the network as it is where there is one process only."""

    def __init__(self, net: nn.Module, config: TrainConfig) -> None:
        self.net, self.config = net, config
        self.device = next(net.parameters()).device
        self.model: nn.Module = net
        if is_distributed():
            self.model = model = DistributedDataParallel(net)
            if self.device.type == "cpu":
                # DDP sorts the gradients into new buckets after its first step. Here it does so before: the order of
                # every sum, and so the last bit of a run, must not depend on where it was resumed.
                model.reducer._push_all_rebuilt_params()
                model.reducer._rebuild_buckets()
        self.optimizer = optimizer_of(net, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "float16")

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
        dtype = getattr(torch, self.config.precision)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not torch.float32):
            return self.model(x, index)

    def backward(self, loss: Tensor, last: bool) -> None:
        waits = self.model.no_sync() if isinstance(self.model, DistributedDataParallel) and not last else nullcontext()
        with waits:
            self.scaler.scale(loss).backward()

    def step(self, lr: float) -> bool:
        set_rate(self.optimizer, lr)
        self.scaler.unscale_(self.optimizer)
        weights = [weight for _, weight in trained(self.net) if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        finite = math.isfinite(float(norm))
        if finite:
            if self.config.clip is not None:
                torch.nn.utils.clip_grads_with_norm_(weights, self.config.clip, norm)
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return finite

    def moments(self) -> dict[str, Tensor]:
        found = kept_moments(self.net, self.optimizer, MOMENTS[self.config.optimizer])
        scale = self.scaler.state_dict()
        found["loss scale"] = torch.tensor(
            [scale.get("scale", 1.0), scale.get("_growth_tracker", 0)], dtype=torch.float64
        )
        return found

    def load_moments(self, moments: dict[str, Tensor], steps: int) -> None:
        restore_moments(self.net, self.optimizer, self.config, moments, steps)
        scale, since = moments["loss scale"].tolist()
        if self.scaler.is_enabled():
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": int(since)})


@contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed tells of every part it sets up; only what goes wrong is for the user."""
    warnings.filterwarnings("ignore", ".*torch.distributed.* is deprecated", FutureWarning)  # what DeepSpeed calls
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


class DeepSpeed:
    """DeepSpeed with ZeRO stage 0, 1 or 2."""

    def __init__(self, net: nn.Module, config: TrainConfig) -> None:
        check(
            config.precision != "float16",
            "precision is 'float16' with engine 'deepspeed', whose loss scale does not fall after a step that was "
            "skipped, wanted 'bfloat16', or engine 'ddp'",
        )
        check(find_spec("deepspeed") is not None, "engine is 'deepspeed', which is not installed, wanted it or 'ddp'")
        check(
            is_distributed(),
            "engine is 'deepspeed' in a single process, wanted torchrun to start it (one worker will do)",
        )
        self.net, self.config = net, config
        self.device = next(net.parameters()).device
        if self.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        # An all-reduce for inference, compiled before anything runs; a worker killed meanwhile leaves a lock for which
        # every later one waits for ever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.engine: Any
        with _quiet():
            self.engine, *_ = deepspeed.initialize(
                model=net, optimizer=optimizer_of(net, config), config=self._options(), dist_init_required=False
            )
        self.shared_out = config.zero > 0

    def _options(self) -> dict[str, Any]:
        c = self.config
        return {
            "train_micro_batch_size_per_gpu": 1,  # of DeepSpeed's own counters only: batches come from our loader
            "gradient_accumulation_steps": 1,  # the loop says when a step is due
            "gradient_clipping": c.clip or 0.0,
            "zero_optimization": {"stage": c.zero},
            "zero_allow_untested_optimizer": True,
            "torch_autocast": {"enabled": c.precision != "float32", "dtype": c.precision},
        }

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.engine(x, index)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss)

    def step(self, lr: float) -> bool:
        set_rate(self.engine.optimizer, lr)
        if self.shared_out:
            self.engine.step()  # looks at the norm of the parts of all ranks itself
            return not self.engine.optimizer.overflow
        grads = [weight.grad for _, weight in trained(self.net) if weight.grad is not None]
        finite = math.isfinite(float(torch.nn.utils.get_total_norm(grads)))
        if finite:
            self.engine.step()
        else:
            self.engine.zero_grad()
        return finite

    def moments(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        keys = MOMENTS[self.config.optimizer]
        if not self.shared_out or not self._begun(keys[0]):
            found = kept_moments(self.net, self.engine.optimizer, keys)
        else:
            found = {
                f"{name}.{key}": safe_get_full_optimizer_state(weight, key).view_as(weight)
                for name, weight in trained(self.net)
                for key in keys
            }
        found["loss scale"] = torch.tensor([1.0, 0.0], dtype=torch.float64)
        return found

    def load_moments(self, moments: dict[str, Tensor], steps: int) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        optimizer, keys = self.engine.optimizer, MOMENTS[self.config.optimizer]
        if not self.shared_out:
            restore_moments(self.net, optimizer, self.config, moments, steps)
            return
        optimizer.refresh_fp32_params()
        for part in optimizer.single_partition_of_fp32_groups:
            optimizer.optimizer.state[part] = {key: torch.zeros_like(part) for key in keys}
            if self.config.optimizer == "adamw":
                optimizer.optimizer.state[part]["step"] = torch.tensor(float(steps))
        optimizer._lazy_init_hp_params_optimizer_state()  # ties each weight to its place in those
        for name, weight in trained(self.net):
            for key in keys:
                safe_set_full_optimizer_state(weight, moments[f"{name}.{key}"], key)

    def _begun(self, key: str) -> bool:
        """Whether this rank's part of the optimizer has taken a step."""
        optimizer = self.engine.optimizer
        return key in optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[0]]
