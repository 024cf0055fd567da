"""The ``fastgnl`` command."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union

import tyro

from fastgnl import audit, convert, demo, doctor, noise_file, predict, run_report
from fastgnl.errors import InputError, OwnInputError, check_count
from fastgnl.files import check_writable
from fastgnl.formats import EMBEDDED, FORMATS
from fastgnl.named import NamedData
from fastgnl.task import check_data

Config = TypeVar("Config")


def fail(error: Exception) -> None:
    """One sentence on standard error, and a non-zero exit. Of an error that every rank meets, one tells."""
    if os.environ.get("RANK", "0") == "0" or isinstance(error, OwnInputError):
        print(f"fastgnl: {error}", file=sys.stderr)
    sys.exit(2)


def run_worker(config: type[Config], main: Callable[[Config], object]) -> None:
    """A launcher: parse the options of ``config`` and run, one sentence on bad input."""
    try:
        main(tyro.cli(config))
    except InputError as error:
        fail(error)


@dataclass(frozen=True)
class Demo(demo.DemoConfig):
    """Train CE and GNL on data with wrong labels (digits by default), then show a table and a page."""

    workers: int = 2
    """Processes to train with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("workers", self.workers, 1)


@dataclass(frozen=True)
class Doctor:
    """Say what is installed, which backends work and what would speed this machine up."""


Format = TypeVar("Format")


@dataclass(frozen=True)
class Working:
    """How the conversion is run."""

    unreadable: Literal["refuse", "skip"] = "refuse"
    """What to do with a sample that cannot be read: stop there, or leave it out and list it."""
    workers: int | None = None
    """Processes that decode and encode; one a core when not given."""

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_count("workers", self.workers, 1)


@dataclass(frozen=True)
class FromFiles(Generic[Format]):
    source: tyro.conf.Positional[Path]
    """Where the data lie."""
    target: tyro.conf.Positional[Path]
    """The .beton file to write."""
    format: Format
    storage: convert.Storage
    working: Working


@dataclass(frozen=True)
class Embedded(Generic[Format]):
    target: tyro.conf.Positional[Path]
    """The .beton file to write."""
    format: Format
    working: Working


def _conversions() -> Any:
    """A subcommand for each format, with its options."""
    found = [
        Annotated[kind[layout], tyro.conf.subcommand(name, description=layout.__doc__.splitlines()[0])]
        for kind, layouts in ((FromFiles, FORMATS | {"named": NamedData}), (Embedded, EMBEDDED))
        for name, layout in layouts.items()
    ]
    return Union[tuple(found)]  # noqa: UP007


Conversion: Any = _conversions()


@dataclass(frozen=True)
class Convert:
    """Write a data set in its published layout as one .beton file, for FFCV and the built-in loader."""

    conversion: Conversion
    """The layout the data are in."""


@dataclass(frozen=True)
class Check:
    """Read a whole .beton file, say what it holds, and refuse it if anything was altered."""

    file: tyro.conf.Positional[Path]


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[audit.AuditConfig, tyro.conf.subcommand("audit")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[noise_file.NoiseConfig, tyro.conf.subcommand("noise")]
    | Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[run_report.ReportConfig, tyro.conf.subcommand("report")]
    | Annotated[predict.PredictConfig, tyro.conf.subcommand("predict")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def run_convert(conversion: Any) -> None:
    """List the samples, write them, say what was written."""
    embedded = isinstance(conversion, Embedded)
    listing = conversion.format.listing(None if embedded else conversion.source)
    described = {"format": type(conversion.format).__name__, "options": asdict(conversion.format)}
    beton = convert.convert(
        listing,
        conversion.target,
        None if embedded else conversion.storage,
        conversion.working.unreadable,
        conversion.working.workers,
        described,
    )
    convert.report(beton)


def run_demo(config: Demo) -> None:
    """Become torchrun with its workers on this machine, so that a signal reaches them."""
    check_data(config.data, config.test)
    check_writable(config.page)
    options = [
        word
        for field in fields(demo.DemoConfig)
        if getattr(config, field.name) is not None
        for word in (f"--{field.name.replace('_', '-')}", str(getattr(config, field.name)))
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.workers}"]
    sys.stdout.flush()
    os.execv(sys.executable, [*launch, "-m", "fastgnl.demo", *options])


def parse(args: list[str] | None = None) -> Any:
    """The command that the arguments give, with its options."""
    return tyro.cli(
        Command,
        prog="fastgnl",
        description="Train classifiers that survive wrong labels.",
        args=args,
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
    )


def main(args: list[str] | None = None) -> None:
    """Entry point of the ``fastgnl`` command."""
    try:
        command = parse(args)
        if isinstance(command, Demo):
            run_demo(command)
        elif isinstance(command, audit.AuditConfig):
            audit.run(command)
        elif isinstance(command, Convert):
            run_convert(command.conversion)
        elif isinstance(command, noise_file.NoiseConfig):
            noise_file.run(command)
        elif isinstance(command, Check):
            convert.check_file(command.file)
        elif isinstance(command, run_report.ReportConfig):
            run_report.run(command)
        elif isinstance(command, predict.PredictConfig):
            predict.run(command)
        else:
            doctor.run()
    except InputError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
