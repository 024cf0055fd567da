"""How well the class-level transition matrix is estimated: the paper's Fig. "transition".

python bench/transition.py                                      # digits, IDN 20% and 40%, three seeds
FASTGNL_DATA=... python bench/transition.py --data digits newsgroups20 --json bench/results/transition.json

MSE = mean over a, b of (T^[a, b] - T[a, b])^2, times 100; T[a, b] = p(given = b | true = a) is the true one. Beside a
method's own matrix stands what can be counted of its predictions: the share of each given label among the training
samples predicted as a; and, of GNL, what its noisy head says of these samples as they are: the mean of f(x), without a
class put in place of the logits. "gnl-no-estep" is GNL without L_KL, which pulls f towards q.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from ablations import Sizes, lengths, noisy_task
from common import Chart, show
from noted import carried_out
from numpy.typing import NDArray

from fastgnl import GNLObjective, with_transition
from fastgnl.cli import run_worker
from fastgnl.errors import InputError
from fastgnl.evaluate import predict_proba
from fastgnl.loader import Loader, once
from fastgnl.methods.base import Setting
from fastgnl.methods.catalogue import METHODS, make_method
from fastgnl.optimise import TrainConfig
from fastgnl.task import Task, observed
from fastgnl.trainer import train
from fastgnl.transition import class_transition

Name = Literal["gnl", "gnl-no-estep", "gnl-xy", "gnl-pair", "forward", "volminnet", "causalnl", "instancegm", "ce"]
TITLES = {name: entry.title for name, entry in METHODS.items()} | {
    "identity": "identity (no estimate)",
    "gnl-no-estep": "GNL, y->x, without L_KL",
}
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Config(Sizes):
    """Error of the transition matrix and test accuracy after the last epoch."""

    methods: tuple[Name, ...] = ("gnl", "gnl-no-estep", "forward", "volminnet", "causalnl")
    """Cross-entropy has no matrix but that of its predictions."""
    found: Path = Path("runs/bench/transition.jsonl")
    """Where each run is noted; what is there already is not run again."""


class Plan(NamedTuple):
    """One run."""

    data: str
    method: str
    rate: float
    seed: int
    epochs: int


def estimated(name: str, net: Any, objective: Any, task: Task) -> Matrix | None:
    """T^ of a method, [C, C]; the mean of T^(x) over the samples predicted as a where it depends on x."""
    if name == "ce":
        return None
    if name == "forward":
        return objective.T.double().numpy()
    if name == "volminnet":
        return net.matrix().detach().double().numpy()
    return class_transition(net, task.train).numpy()


@torch.no_grad()
def said(net: Any, task: Task) -> Matrix | None:
    """The mean of f(x) over the training samples predicted as a, of a network with a noisy head."""
    if getattr(net, "noisy", None) is None:
        return None
    net.eval()
    C = net.num_classes
    total_CC, count_C = torch.zeros(C, C, dtype=torch.float64), torch.zeros(C, dtype=torch.float64)
    for batch in once(task.train):
        z_BC, t_BC = net(batch.x)
        a_B = z_BC.argmax(1)
        total_CC.index_add_(0, a_B, t_BC.double().softmax(1))
        count_C += torch.bincount(a_B, minlength=C)
    return (total_CC / count_C.clamp(min=1)[:, None]).numpy()


def counted(net: Any, task: Task) -> Matrix:
    """The share of each given label among the training samples predicted as a."""
    predicted_N = predict_proba(net, task.train).argmax(1).numpy()
    return observed(task.train.labels.numpy(), predicted_N, len(task.classes))


def squared_error(found: Matrix | None, task: Task) -> float | None:
    """MSE x 100."""
    return None if found is None else 100 * float(((found - task.transition) ** 2).mean())


def made(method: str, task: Task, setting: Setting) -> tuple[Any, Any]:
    """The network and the objective."""
    if method != "gnl-no-estep":
        return make_method(method, task.backbone, setting)
    torch.manual_seed(setting.seed)
    backbone: Any = task.backbone()
    options: Any = {"warmup_epochs": setting.warmup_epochs, "seed": setting.seed, "terms": ("ce", "prior")}
    net = with_transition(backbone, backbone.num_features, setting.num_classes, seed=setting.seed)
    return net, GNLObjective(setting.num_samples, setting.num_classes, **options)


def carry_out(plan: Plan) -> dict[str, Any]:
    """Train, and compare the matrix; a run that cannot be trained to its end is noted as failed."""
    torch.set_num_threads(1)
    task = noisy_task(plan.data, plan.rate, plan.seed)
    assert task.train.clean is not None
    setting = Setting(
        len(task.train.labels),
        len(task.classes),
        plan.epochs,
        lengths(plan.data, plan.epochs)[1],
        float((task.train.labels != task.train.clean).double().mean()),
        plan.seed,
        shape=tuple(next(task.train.load([np.arange(1)])).shape[1:]),
    )
    net, objective = made(plan.method, task, setting)
    how = TrainConfig(epochs=plan.epochs, lr_warmup=0)
    try:
        history = train(net, objective, Loader(task.train, 128, plan.seed), how, task.test)
    except InputError as error:
        return {"failed": str(error)}
    return {
        "mse": squared_error(estimated(plan.method, net, objective, task), task),
        "head": squared_error(said(net, task), task),
        "counted": squared_error(counted(net, task), task),
        "last": 100 * (history[-1].test_accuracy or 0.0),
    }


def identity(data: str, rate: float, seed: int) -> dict[str, Any]:
    """The error of T^ = 1: of who takes every label for right."""
    task = noisy_task(data, rate, seed)
    return {"mse": squared_error(np.eye(len(task.classes)), task)}


def summary(data: str, method: str, rate: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds; "failed" where one of them did."""
    row: dict[str, Any] = {"data": data, "rate": rate, "method": TITLES[method], "seeds": len(runs)}
    failed = sum("failed" in run for run in runs)
    columns = (
        ("mse", "MSE x100", 3),
        ("head", "MSE x100, head", 3),
        ("counted", "MSE x100, counted", 3),
        ("last", "accuracy", 1),
    )
    for name, column, digits in columns:
        values = [run.get(name) for run in runs]
        known = not failed and None not in values
        row[column] = round(float(np.mean(values)), digits) if known else f"failed {failed}" if failed else None
        row[f"{column}, std"] = round(float(np.std(values)), digits) if known else None
    return row


def main(config: Config) -> None:
    plans = [
        Plan(data, method, rate, seed, lengths(data, config.epochs)[0])
        for data in config.data
        for rate in config.rates
        for method in config.methods
        for seed in range(config.seeds)
    ]
    runs: dict[tuple[str, str, float], list[dict[str, Any]]] = {
        (data, "identity", rate): [identity(data, rate, seed) for seed in range(config.seeds)]
        for data in config.data
        for rate in config.rates
    }
    noted = carried_out(plans, carry_out, config.found, config.jobs)
    for run in noted:
        runs.setdefault((run["data"], run["method"], run["rate"]), []).append(run)
    chart = Chart("Error of the transition matrix, MSE x100", "MSE x100", ("data", "method"), "rate")
    order = sorted(runs, key=lambda key: (config.data.index(key[0]), config.rates.index(key[2])))
    show([summary(*key, runs[key]) for key in order], config.json, chart, runs=noted)


if __name__ == "__main__":
    run_worker(Config, main)
