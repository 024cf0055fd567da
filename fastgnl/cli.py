"""The ``fastgnl`` command."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, TypeVar

import tyro

from fastgnl import audit, demo, doctor
from fastgnl.errors import InputError, check_count
from fastgnl.files import check_writable

Config = TypeVar("Config")


def fail(error: Exception) -> None:
    """One sentence on standard error, and a non-zero exit."""
    if os.environ.get("RANK", "0") == "0":
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
    """Train CE and GNL on digits with wrong labels, then show a table and a page."""

    workers: int = 2
    """Processes to train with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("workers", self.workers, 1)


@dataclass(frozen=True)
class Doctor:
    """Say what is installed, which backends work and what would speed this machine up."""


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[audit.AuditConfig, tyro.conf.subcommand("audit")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def run_demo(config: Demo) -> None:
    """Become torchrun with its workers on this machine, so that a signal reaches them."""
    check_writable(config.page)
    options = [
        word
        for field in fields(demo.DemoConfig)
        for word in (f"--{field.name.replace('_', '-')}", str(getattr(config, field.name)))
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.workers}"]
    sys.stdout.flush()
    os.execv(sys.executable, [*launch, "-m", "fastgnl.demo", *options])


def main(args: list[str] | None = None) -> None:
    """Entry point of the ``fastgnl`` command."""
    try:
        command = tyro.cli(
            Command, prog="fastgnl", description="Train classifiers that survive wrong labels.", args=args
        )
        if isinstance(command, Demo):
            run_demo(command)
        elif isinstance(command, audit.AuditConfig):
            audit.run(command)
        else:
            doctor.run()
    except InputError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
