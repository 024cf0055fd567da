"""An experiment: data, network, method and optimisation as one set of options, and the run they describe.

A launcher is a subclass whose defaults are the published settings.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fastgnl import report
from fastgnl.beton import Beton
from fastgnl.comparison import HEADER, NAMES, Result, result_of, table_rows, write_report
from fastgnl.config import GNLOptions
from fastgnl.distributed import on_first_rank, rank
from fastgnl.errors import InputError, check, check_choice, check_count, check_range, check_seed
from fastgnl.files import written
from fastgnl.loader import Loader, Order, Source
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.model import save_model
from fastgnl.noise_file import NoiseConfig, load_noise, make_noise
from fastgnl.objective import GNLObjective
from fastgnl.optimise import TrainConfig
from fastgnl.pair import GNLPair
from fastgnl.progress import Progress
from fastgnl.run import KeepOptions, RunConfig
from fastgnl.tally import Epoch, best
from fastgnl.task import Task
from fastgnl.trainer import Objective, train
from fastgnl.transition import PairNet, TransitionNet, with_transition

Method = Literal["gnl", "ce"]
DEMO = "demo"


@dataclass(frozen=True)
class DataFile:
    """A file of a data folder."""

    name: str
    made_by: str
    """The command that makes it, after ``fastgnl convert``."""
    needed: bool = True

    def command(self, folder: Path | str) -> str:
        return f"fastgnl convert {self.made_by.format(folder=folder)}"


def layout_of(files: dict[str, DataFile]) -> str:
    """What a data folder holds."""
    return f"a folder with {' and '.join(file.name for file in files.values() if file.needed)}"


def made_by(files: dict[str, DataFile], folder: Path | str) -> str:
    """The commands that make it."""
    return "made by: " + "; ".join(file.command(folder) for file in files.values() if file.needed)


class Data(NamedTuple):
    """What an experiment trains on and with."""

    task: Task
    tests: Mapping[str, Source]
    network: dict[str, Any]
    """What ``fastgnl.model`` needs to make the network again."""
    files: dict[str, Any]
    """What was read, for the card."""
    save: Callable[[Path], None] | None = None
    """Writes what the model needs besides its weights."""


@dataclass(frozen=True)
class Batches:
    """How samples become batches."""

    size: int = 128
    """Rows of the global batch, over all ranks."""
    order: Order = "random"
    """Every sample once in any order; page by page, for files larger than memory; as many rows of each class; or texts
    of about one length together."""
    per_epoch: int | None = None
    """How many batches make an epoch, with order balanced."""
    reader: Literal["auto", "ffcv", "builtin"] = "auto"
    """What decodes images."""
    workers: int | None = None
    """Threads that decode; torch's number when not given."""
    os_cache: bool = True
    """Read through the system's page cache; off for files larger than memory, with order quasi-random."""

    def __post_init__(self) -> None:
        check_count("batches.size", self.size, 1)


@dataclass(frozen=True)
class Noise:
    """Wrong labels to make; the seed is the experiment's."""

    kind: Literal["none", "symmetric", "asymmetric", "instance"] = "none"
    """To any other class, to one other class, or depending on the sample."""
    rate: float = 0.4
    """Share of wrong labels."""

    def __post_init__(self) -> None:
        check_choice("noise.kind", self.kind, ("none", "symmetric", "asymmetric", "instance"))
        check_range("noise.rate", self.rate, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What every experiment has."""

    name: ClassVar[str]
    variants: ClassVar[dict[str, dict[str, Any]]]
    """Options that come with other defaults, by dotted name: "data demo" and the like."""

    data: str
    """The folder with the .beton files, or "demo": a small embedded data set."""
    out: Path | None = None
    """Folder of the run: configuration, metrics, checkpoints, the trained model; runs/NAME when not given."""
    method: Method = "gnl"
    """Generative noisy-label learning, or plain cross-entropy."""
    compare: bool = False
    """Train with cross-entropy and with GNL, and put both side by side on a page."""
    networks: Literal[1, 2] = 1
    """Two networks teach each other and are tested as an ensemble."""
    transition_input: Literal["logits", "sample"] = "logits"
    """What the noisy head is given of the clean one: its logits, or draws from its softmax."""
    draws: int = 1
    """Of those, the paper's K."""
    seed: int = 0
    """Fixes weights, order, augmentation, noise and draws."""
    batches: Batches = Batches()
    gnl: GNLOptions = GNLOptions()
    train: TrainConfig = TrainConfig()
    keep: KeepOptions = KeepOptions()

    def __post_init__(self) -> None:
        check_seed(self.seed, bits=32)
        check_choice("method", self.method, NAMES)
        check_choice("networks", self.networks, (1, 2))
        check_count("draws", self.draws, 1)
        check(
            self.networks == 1 or (self.method == "gnl" and not self.compare),
            f"networks is 2 with {'compare' if self.compare else 'method ce'}, wanted method gnl alone: two networks "
            "teach each other by GNL",
        )
        check(
            self.draws == 1 or self.transition_input == "sample",
            f"draws is {self.draws} with transition_input {self.transition_input!r}, wanted 'sample'",
        )
        check(
            (self.method == "ce" and not self.compare) or self.gnl.warmup_epochs < self.train.epochs,
            f"gnl.warmup_epochs is {self.gnl.warmup_epochs} of {self.train.epochs} epochs, wanted fewer than there are",
        )
        check(
            self.batches.per_epoch is None or self.batches.order == "balanced",
            f"batches.per_epoch is {self.batches.per_epoch} with batches.order {self.batches.order!r}, wanted balanced",
        )

    @property
    def is_demo(self) -> bool:
        return self.data == DEMO

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.out or Path("runs") / (f"{self.name}-demo" if self.is_demo else self.name)

    def files(self) -> dict[str, DataFile]:
        """The files of the data folder, by what they are for: "train" and the test sets, in order."""
        raise NotImplementedError

    def num_classes(self) -> int | None:
        """How many classes the files must have."""
        return None

    def make_demo(self, paths: dict[str, Path]) -> None:
        """Write the embedded data set under these names."""
        raise NotImplementedError

    def open(self, paths: dict[str, Path]) -> Data:
        """What lies in these files."""
        raise NotImplementedError

    def paths(self) -> dict[str, Path]:
        """The files that are there; one sentence with the layout where one is missing."""
        files = self.files()
        if self.is_demo:
            return {role: self.folder / "data" / file.name for role, file in files.items()}
        folder = Path(self.data)
        layout = layout_of(files)
        check(folder.exists(), f"data is {self.data}, which does not exist, wanted {layout} ({made_by(files, folder)})")
        check(folder.is_dir(), f"data is {self.data}, which is no folder, wanted {layout} ({made_by(files, folder)})")
        found = {}
        for role, file in files.items():
            if (folder / file.name).exists():
                found[role] = folder / file.name
                continue
            made = f"made by: {file.command(self.data)}"
            check(not file.needed, f"{folder / file.name} does not exist, wanted {layout} ({made})")
        return found

    def check_classes(self, path: Path, classes: tuple[str, ...], of_train: tuple[str, ...]) -> None:
        """A file must name as many classes as the experiment has, and those of the training file."""
        wanted = None if self.is_demo else self.num_classes()
        check(
            wanted is None or len(classes) == wanted,
            f"{path} has {len(classes)} classes, wanted {wanted} for {self.name}",
        )
        check(
            len(classes) == len(of_train),
            f"{path} has {len(classes)} classes and the training file {len(of_train)}, wanted as many",
        )
        differ = [i for i, names in enumerate(zip(classes, of_train, strict=True)) if names[0] != names[1]]
        if differ:
            i = differ[0]
            raise InputError(
                f"{path} calls class {i} {classes[i]!r}, the training file {of_train[i]!r}, wanted the same names"
            )


def noisy_labels(path: Path, noise: Noise, seed: int) -> NDArray[np.int64] | None:
    """Labels of the samples of a file with wrong ones among them, by sample id; None where none are to be made."""
    if noise.kind == "none":
        return None
    config = NoiseConfig(path, noise.kind, noise.rate, seed)
    on_first_rank(lambda: make_noise(config, quiet=True))
    return load_noise(config.target, Beton(path, verify=False)).labels


def described(beton: Beton) -> dict[str, Any]:
    """What was read from a file, for the card."""
    return {"file": beton.path.name, "samples": len(beton), "records_crc": beton.info["records_crc"]}


def build(experiment: Experiment, data: Data, method: Method, loader: Loader) -> tuple[Any, Objective]:
    """The network and the objective of one method."""
    task = data.task
    torch.manual_seed(experiment.seed)
    backbones: list[Any] = [task.backbone() for _ in range(experiment.networks)]
    C, N = len(task.classes), len(task.train.labels)
    net = with_transition(
        backbones[0] if len(backbones) == 1 else (backbones[0], backbones[1]),
        backbones[0].num_features,
        C,
        transition_input=experiment.transition_input if method == "gnl" else "none",
        draws=experiment.draws,
        seed=experiment.seed,
    )
    if method == "ce":
        return net, CrossEntropy()
    make = GNLPair if experiment.networks == 2 else GNLObjective
    return net, make(N, C, ids=loader.shard(), seed=experiment.seed, **asdict(experiment.gnl))


def train_method(
    experiment: Experiment, data: Data, method: Method, folder: Path
) -> tuple[TransitionNet | PairNet, list[Epoch]]:
    """Train with one method, kept in a folder, and export what came of it."""
    batches = experiment.batches
    loader = Loader(data.task.train, batches.size, experiment.seed, batches.order, batches_per_epoch=batches.per_epoch)
    net, objective = build(experiment, data, method, loader)
    averaged: list[nn.Module] = []
    rows = len(loader) * batches.size if batches.per_epoch is not None else len(data.task.train.labels)
    with Progress(NAMES[method].ljust(13), rows, experiment.train.epochs, enabled=rank() == 0) as progress:
        history = train(
            net,
            objective,
            loader,
            experiment.train,
            data.tests,
            progress.on_batch,
            progress.on_epoch,
            RunConfig(folder, **asdict(experiment.keep)),
            averaged.append,
        )
    card = {
        "method": method,
        "classes": list(data.task.classes),
        "network": data.network
        | {
            "networks": experiment.networks,
            "transition_input": experiment.transition_input if method == "gnl" else "none",
            "draws": experiment.draws,
        },
        "weights": "the moving average" if averaged else "those of the last epoch",
        "data": data.files,
        "accuracy": results(history),
        "experiment": {"name": experiment.name} | plain(experiment),
    }

    def export() -> None:
        if data.save is not None:
            data.save(folder)
        save_model(folder, averaged[0] if averaged else net, card)

    on_first_rank(export)
    return net, history


def results(history: list[Epoch]) -> dict[str, Any]:
    """The scores of the last epoch, and of the best by the first score."""
    last, top = history[-1], best(history)
    return {
        "last": {"epoch": last.number + 1, **last.scores},
        "best": {"epoch": top.number + 1, **top.scores},
    }


def plain(experiment: Any) -> dict[str, Any]:
    """The options as JSON holds them."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(experiment), default=str))
    return found


def score_rows(history: list[Epoch]) -> list[tuple[str, ...]]:
    """The closing table of one method, a row a score."""
    found = results(history)
    last, top = found["last"], found["best"]
    return [
        (name, f"{100 * last[name]:.2f}%", f"{100 * top[name]:.2f}% (epoch {top['epoch']})")
        for name in last
        if name != "epoch"
    ]


def run(experiment: Experiment) -> None:
    """Train, test, export; on rank 0, print the table and write the results."""
    start = time.perf_counter()
    paths = experiment.paths()
    if experiment.is_demo:
        experiment.make_demo(paths)
    data = experiment.open(paths)
    folder = experiment.folder
    for role, file in experiment.files().items():
        if role not in paths and rank() == 0:
            print(
                f"{file.name} is not in {experiment.data}: not tested on it (made by: {file.command(experiment.data)})"
            )
    if not experiment.compare:
        _, history = train_method(experiment, data, experiment.method, folder)
        if rank() == 0:
            with written(folder / "results.json") as out:
                json.dump(results(history), out, indent=1)
            print(f"\n{report.text_table(('', 'last epoch', 'best epoch'), score_rows(history))}", flush=True)
            print(f"\nmodel: {folder / 'model.safetensors'} (fastgnl predict {folder} FILES...)", flush=True)
            print(f"curves: fastgnl report {folder}", flush=True)
        return
    found: dict[str, Result] = {}
    for method in ("ce", "gnl"):
        net, history = train_method(experiment, data, method, folder / method)
        found[method] = result_of(net, data.task, history, method)
    if rank() == 0:
        print(f"\n{report.text_table(HEADER, table_rows(found))}", flush=True)
        page = folder / "index.html"
        write_report(page, data.task, found, experiment.seed, time.perf_counter() - start)
        print(f"\npage: {page.resolve()}", flush=True)
        print(f"curves as they grow: fastgnl report {' '.join(str(folder / method) for method in found)}", flush=True)


def with_options(experiment: Any, options: Mapping[str, Any]) -> Any:
    """The experiment with these options, by dotted name, in place of its own."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = value
    return replace(
        experiment,
        **{
            first: values[""] if "" in values else with_options(getattr(experiment, first), values)
            for first, values in groups.items()
        },
    )
