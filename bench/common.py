"""Shared by the benchmarks: where data are, how rows are shown and kept."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from fastgnl.files import written
from fastgnl.report import text_table


def show(rows: list[dict[str, Any]], json_file: Path | None) -> None:
    """Print rows as a table; with a file, write them there as a JSON list."""
    header = list(rows[0])
    print(text_table(header, [[str(row[name]) for name in header] for row in rows]))
    print(
        f"\n{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"
    )
    if json_file is not None:
        with written(json_file) as file:
            json.dump(rows, file, indent=1)
