"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fastgnl.errors import InputError


@contextmanager
def written(path: Path) -> Iterator[IO[str]]:
    """A text file under a temporary name beside ``path``, renamed to it when the block ends well."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}, wanted a folder that can be written to") from error
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}, wanted a place that can be written to") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
