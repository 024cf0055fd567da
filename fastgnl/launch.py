"""What makes a launcher of an experiment: its command line, its configuration in the run's folder, going on from it."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from fastgnl.distributed import on_first_rank, process_group, rank, world_size
from fastgnl.errors import InputError, check
from fastgnl.experiment import DEMO, Experiment, layout_of, made_by, plain, run, with_options
from fastgnl.files import check_writable, written

CONFIG = "config.json"
PAPER = {
    "backbone",
    "encoder",
    "noise.kind",
    "noise.rate",
    "images.size",
    "images.crop",
    "images.padding",
    "images.flip",
    "batches.size",
    "batches.order",
    "batches.per_epoch",
    "draws",
    "gnl.direction",
    "gnl.beta",
    "gnl.tau",
    "gnl.warmup_epochs",
    "train.epochs",
    "train.lr",
    "train.momentum",
    "train.weight_decay",
    "train.decay_at",
    "train.schedule",
    "train.optimizer",
}
"""Options whose defaults are the published settings; those of the others are fastgnl's."""


def _shown(default: str, whose: str) -> str:
    return f"(default: {default}, {whose})"


def _with_origins(cls: type, default: Any, whose: str, prefix: str = "") -> tuple[type, Any]:
    """The options of ``cls``, and an instance, that say in ``--help`` where their defaults come from."""
    hints = get_type_hints(cls, include_extras=True)
    parts: list[tuple[str, Any, Any]] = []
    values = {}
    for option in fields(cls):
        kind, value = hints[option.name], getattr(default, option.name)
        if is_dataclass(kind) and isinstance(kind, type):
            kind, value = _with_origins(kind, value, whose, f"{prefix}{option.name}.")
        else:
            name = f"{prefix}{option.name}"
            hint = partial(_shown, whose=whose if name in PAPER else "fastgnl's")
            kind = Annotated[kind, tyro.conf.arg(help_behavior_hint="(required)" if name == "data" else hint)]
        values[option.name] = value
        parts.append((option.name, kind, field(default=value)))
    unchecked = {"__post_init__": lambda self: None}  # tyro would print a refusal in its own way, on every rank
    found = make_dataclass(cls.__name__, parts, bases=(cls,), namespace=unchecked, frozen=True, kw_only=True)
    return found, found(**values)


def _checked(cls: type, found: Any) -> Any:
    """What was parsed, as an instance of ``cls`` itself."""
    hints = get_type_hints(cls)
    values = {option.name: getattr(found, option.name) for option in fields(cls)}
    return cls(
        **{name: _checked(hints[name], value) if is_dataclass(value) else value for name, value in values.items()}
    )


def _given(args: Sequence[str], option: str) -> str | None:
    """The value of an option among the arguments."""
    for i, word in enumerate(args):
        if word == option:
            return args[i + 1] if i + 1 < len(args) else ""
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return None


def _description(cls: type[Experiment]) -> str:
    found = [
        " ".join((cls.__doc__ or "").split()),
        'Defaults named "the paper\'s" are its published settings. --resume RUN goes on with the run in that folder, '
        "and needs nothing else.",
    ]
    for variant, options in cls.variants.items():
        other = ", ".join(f"{name} {_word(value)}" for name, value in options.items())
        found.append(f"--{variant} comes with other defaults: {other}.")
    return "\n\n".join(found)


def _word(value: Any) -> str:
    if is_dataclass(value):
        return " ".join(
            f"{f.name} {getattr(value, f.name)}" for f in fields(value) if getattr(value, f.name) != f.default
        )
    return "none" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def parse(cls: type[Experiment], args: Sequence[str]) -> Experiment:
    """The experiment that the arguments describe: the launcher's defaults, with ``--data demo`` those of the demo."""
    resumed = _given(args, "--resume")
    if resumed is not None:
        check(
            len(args) == (1 if "--resume" not in args else 2),
            f"--resume {resumed} was given with other options, wanted it alone: a run goes on as it was begun",
        )
        return read_config(cls, Path(resumed))
    data = _given(args, "--data")
    if data is None and not {"-h", "--help"} & set(args):
        files = cls(data="DIR").files()
        raise InputError(
            f"--data is missing, wanted --data DIR, {layout_of(files)} ({made_by(files, 'DIR')}), or --data demo"
        )
    default, whose = cls(data=data or "DIR"), "the paper's"
    for variant, options in cls.variants.items():
        option, value = variant.split()
        if _given(args, f"--{option}") == value:
            default, whose = with_options(default, options), f"{variant}'s"
    kind, instance = _with_origins(cls, default, whose)
    found: Experiment = _checked(cls, tyro.cli(kind, default=instance, args=list(args), description=_description(cls)))
    return found


def _restored(default: Any, values: dict[str, Any]) -> Any:
    """Options as they were written: what JSON has no type for is made again."""
    hints = get_type_hints(type(default))
    found = {}
    for option in fields(default):
        value = values[option.name]
        was = getattr(default, option.name)
        if is_dataclass(was):
            value = _restored(was, value)
        elif isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and "Path" in str(hints[option.name]):
            value = Path(value)
        found[option.name] = value
    return replace(default, **found)


def _begun(folder: Path) -> tuple[str, dict[str, Any]]:
    """The launcher and the options of the run in a folder."""
    path = folder / CONFIG
    check(path.exists(), f"{path} does not exist, wanted the folder of a run that was begun")
    try:
        config = json.loads(path.read_text())
        launcher, options = str(config["launcher"]), dict(config["options"])
        options["data"]  # the one that every version has
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error!r}), wanted the configuration of a run") from error
    return launcher, options


def read_config(cls: type[Experiment], folder: Path) -> Experiment:
    """The experiment that was begun in a folder."""
    name, options = _begun(folder)
    check(name == cls.name, f"the run in {folder} is of {name}, wanted one of {cls.name}")
    try:
        found: Experiment = _restored(cls(data=options["data"]), options)
    except KeyError as error:
        raise InputError(
            f"{folder / CONFIG} has no option {error}, wanted the configuration of this version's run"
        ) from error
    return replace(found, out=folder)


def write_config(experiment: Experiment) -> None:
    """Keep the configuration in the run's folder, from which the run can go on."""
    with written(experiment.folder / CONFIG) as file:
        json.dump({"launcher": experiment.name, "workers": world_size(), "options": plain(experiment)}, file, indent=1)


def _lines(options: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in options.items():
        found += _lines(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"  {prefix}{name} = {value}"]
    return found


def check_new(experiment: Experiment) -> None:
    """Refuse a folder that holds another run; that of a demo is made anew."""
    folder = experiment.folder
    check_writable(folder / CONFIG)
    if (folder / CONFIG).exists():
        _, before = _begun(folder)
        check(
            before["data"] == DEMO and experiment.is_demo,
            f"{folder} holds a run already, wanted --resume {folder}, or another folder (--out)",
        )


def begin(experiment: Experiment, resumed: bool) -> None:
    """Write the configuration, print it."""
    folder = experiment.folder
    if not resumed:
        if (folder / CONFIG).exists():
            shutil.rmtree(folder)
        write_config(experiment)
    print(f"{experiment.name}, {world_size()} worker(s), {folder}:", flush=True)
    print("\n".join(_lines(plain(experiment))), flush=True)


def execute(experiment: Experiment, resumed: bool = False) -> None:
    """Begin the run, or go on with it, to its end: on every rank."""
    on_first_rank(lambda: begin(experiment, resumed))
    try:
        run(experiment)
    except InputError:
        if rank() == 0 and not resumed:
            _forget(experiment.folder)
        raise


def _forget(folder: Path) -> None:
    """Free the folder of a run that was refused before it left anything but its configuration."""
    if [path.name for path in folder.iterdir()] == [CONFIG]:
        (folder / CONFIG).unlink()


def main(cls: type[Experiment], args: Sequence[str] | None = None) -> None:
    """One of torchrun's workers, or the only process: parse, and run to the end."""
    from fastgnl.cli import fail

    args = sys.argv[1:] if args is None else args
    try:
        experiment = parse(cls, args)
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        resumed = _given(args, "--resume") is not None or again
        experiment.paths()
        if not resumed:
            check_new(experiment)
        with process_group():
            execute(experiment, resumed)
    except InputError as error:
        fail(error)
