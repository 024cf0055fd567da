"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fastgnl.errors import InputError, check


def _permissions(path: Path) -> int:
    """Those of the file that is replaced, or what the user's umask leaves of a new one."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def check_writable(path: Path) -> None:
    """Refuse a target that could not be written, before long work is spent on its content. Makes its folder."""
    check(not path.is_dir(), f"cannot write {path}: it is a folder, wanted the name of a file")
    try:
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}, wanted a folder that can be written to") from error


@contextmanager
def written(path: Path, binary: bool = False) -> Iterator[IO[Any]]:
    """A file under a temporary name beside ``path``, renamed to it when the block ends well."""
    check_writable(path)
    target = path.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with open(descriptor, "wb") if binary else open(descriptor, "w", encoding="utf-8", newline="") as file:
            yield file
        os.chmod(temporary, _permissions(target))
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}, wanted a place that can be written to") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
