"""Shared by the benchmarks: how rows are shown, drawn and kept, and where they were measured."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes

from fastgnl.files import written
from fastgnl.report import axes, line, run_colour, svg, text_table

ROOT = Path(__file__).resolve().parents[1]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Chart:
    """Which columns of the rows are drawn, and how."""

    title: str
    value: str | tuple[str, ...]
    """A column of numbers, or several: each a group of its own."""
    label: tuple[str, ...]
    """Columns that name a bar; of lines the first is x and the others name the line."""
    group: str | None = None
    """Rows of one value of this column have one colour."""
    log: bool = False
    kind: Literal["bars", "lines", "grid"] = "bars"
    """A grid has a line for each label, a column for each group."""


# Where it was measured.


def commit() -> str:
    """What is checked out, and whether other files than the results differ from it."""
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        paths = ["--", ".", ":!bench/results"]
        status = subprocess.run([*git, "status", "--porcelain", *paths], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" + changes" if status.stdout else "")


def machine() -> str:
    """CPU, cores and memory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.machine()
    try:
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GB"
    except (AttributeError, OSError, ValueError):
        memory = ""
    return f"{cpu}, {os.cpu_count()} cores{memory}"


def command() -> str:
    """The command line, without the file for the rows."""
    script, *words = sys.argv
    path = Path(script).resolve()
    shown, rest = [str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)], iter(words)
    for word in rest:
        if word == "--json":
            next(rest, None)
        elif not word.startswith("--json="):
            shown.append(word)
    return ("FASTGNL_DATA=... " if os.environ.get("FASTGNL_DATA") else "") + f"python {shlex.join(shown)}"


# At the start: what is checked out may change while a long benchmark runs.
COMMIT = commit()


def facts(runs: Sequence[Row] = ()) -> dict[str, str]:
    """What a result is of; ``runs``: those that were noted one by one, each with its commit."""
    count = Counter(row.get("commit", "earlier ones") for row in runs)
    of = {"runs": ", ".join(f"{number} of {name}" for name, number in count.items())} if runs else {}
    return {
        "command": f"`{command()}`",
        "machine": machine(),
        "software": f"torch {torch.__version__}, Python {platform.python_version()}",
        **of,
        "commit": COMMIT,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }


# Tables.


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a table; a value that is missing is a dash."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    return header, [["-" if row.get(name) is None else str(row[name]) for name in header] for row in rows]


def markdown(rows: Sequence[Row]) -> str:
    header, lines = cells(rows)
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (header, rule, *lines)
    )


# The picture.


def drawable(value: object, log: bool) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (value > 0 or not log)


def points(rows: Sequence[Row], chart: Chart) -> list[tuple[Row, str, float]]:
    """(row, its group, its value) of all that can be drawn."""
    several = chart.value if isinstance(chart.value, tuple) else (chart.value,)
    found = []
    for row in rows:
        for name in several:
            if drawable(row.get(name), chart.log):
                group = "" if chart.group is None else str(row.get(chart.group, ""))
                words = [group, name if len(several) > 1 else ""]
                found.append((row, ", ".join(word for word in words if word), row[name]))
    return found


def name_of(row: Row, columns: Sequence[str]) -> str:
    return ", ".join(str(row.get(name, "")) for name in columns)


def bars(ax: Axes, found: list[tuple[Row, str, float]], chart: Chart) -> None:
    """A block for each label, in it a bar for each group."""
    groups = list(dict.fromkeys(group for _, group, _ in found))
    ticks: dict[str, list[float]] = {}
    y = 0.0
    by_label: dict[str, list[tuple[str, float]]] = {}
    for row, group, value in found:
        by_label.setdefault(name_of(row, chart.label), []).append((group, value))
    for label, members in by_label.items():
        for group, value in members:
            ax.barh(y, value, 0.86, color=run_colour(groups.index(group)))
            place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5}
            ax.annotate(f"{value:.4g}" if isinstance(value, float) else f"{value:,}", (value, y), **place)
            ticks.setdefault(label, []).append(y)
            y += 1
        y += 0.6
    ax.set_yticks([sum(places) / len(places) for places in ticks.values()], list(ticks))
    ax.invert_yaxis()
    ax.grid(False)
    ax.grid(axis="x", color="#e2e8f0", linewidth=0.6)
    if chart.log:
        ax.set_xscale("log")
    ax.margins(x=0.08)
    if len(groups) > 1:
        handles = [ax.barh(0, 0, 0, color=run_colour(i)) for i in range(len(groups))]
        where = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        ax.legend(handles, groups, frameon=False, fontsize=8, **where)


def curves(ax: Axes, found: list[tuple[Row, str, float]], chart: Chart) -> None:
    """A curve for each group and each value of the labels behind the first, which is x."""
    x_name, *rest = chart.label
    by_name: dict[str, list[tuple[float, float]]] = {}
    for row, group, value in found:
        if drawable(row.get(x_name), False):
            name = ", ".join(word for word in (name_of(row, rest), group) if word)
            by_name.setdefault(name, []).append((row[x_name], value))
    for i, (name, places) in enumerate(by_name.items()):
        x, y = zip(*sorted(places), strict=True)
        line(ax, x, y, run_colour(i), name)
    ax.set_xlabel(x_name)
    if chart.log:
        ax.set_yscale("log")


def grid(ax: Axes, found: list[tuple[Row, str, float]], chart: Chart) -> None:
    """A square for each value, the darker the nearer it is to the largest of its column, which is bold."""
    labels = list(dict.fromkeys(name_of(row, chart.label) for row, _, _ in found))
    groups = list(dict.fromkeys(group for _, group, _ in found))
    value_LG = np.full((len(labels), len(groups)), np.nan)
    for row, group, value in found:
        value_LG[labels.index(name_of(row, chart.label)), groups.index(group)] = value
    least_G, largest_G = np.nanmin(value_LG, 0), np.nanmax(value_LG, 0)
    shade_LG = (value_LG - least_G) / np.maximum(largest_G - least_G, 1e-9)
    ax.imshow(shade_LG, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    for (i, j), value in np.ndenumerate(value_LG):
        if np.isfinite(value):
            weight = "bold" if value == largest_G[j] else "normal"
            ax.text(j, i, f"{value:.4g}", ha="center", va="center", fontsize=7.5, weight=weight)
    ax.set_xticks(range(len(groups)), groups, rotation=30, ha="left", rotation_mode="anchor")
    ax.set_yticks(range(len(labels)), labels)
    ax.xaxis.tick_top()
    ax.grid(False)


DRAWN = {"bars": bars, "lines": curves, "grid": grid}


def picture(rows: Sequence[Row], chart: Chart) -> str:
    """The chart as SVG; what is not a number is left out."""
    found = points(rows, chart)
    labels = len({name_of(row, chart.label) for row, _, _ in found})
    height = {"bars": 1.0 + 0.2 * len(found) + 0.1 * len(rows), "lines": 3.4, "grid": 1.6 + 0.24 * labels}
    figure, (ax,) = axes(1, height[chart.kind])
    ax.set_title(chart.title, fontsize=10, loc="left")
    if found:
        DRAWN[chart.kind](ax, found, chart)
    return svg(figure)


# All of them.


def show(
    rows: Sequence[Row],
    json_file: Path | None,
    chart: Chart | None = None,
    more: Mapping[str, Sequence[Row]] | None = None,
    runs: Sequence[Row] = (),
) -> None:
    """Print the rows as a table and draw them; with a file, keep them there, the picture and a Markdown page beside it.

    ``more``: further tables, with their titles, which are printed and stand on the page. ``runs``: what was noted of
    the runs that the rows are of.
    """
    # A number that is none is a measurement that failed: shown as a dash, and null in the file.
    rows = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    more = more or {}
    known = facts(runs)
    print(text_table(*cells(rows)))
    for title, table in more.items():
        print(f"\n{title}\n{text_table(*cells(table))}")
    print(f"\n{known['machine']}, {known['software']}")
    stem = Path(sys.argv[0]).stem
    drawn = None if chart is None else picture(rows, chart)
    if drawn is not None:
        place = Path("runs/bench") / f"{stem}.svg" if json_file is None else json_file.with_suffix(".svg")
        with written(place) as file:
            file.write(drawn)
        print(f"picture: {place}")
    if json_file is None:
        return
    with written(json_file) as file:
        json.dump(rows, file, indent=1)
    parts = [f"# {json_file.stem}", markdown(rows)]
    for title, table in more.items():
        parts += [f"## {title}", markdown(table)]
    if chart is not None:
        parts.append(f"![{chart.title}]({json_file.stem}.svg)")
    parts.append("\n".join(f"- {name}: {value}" for name, value in known.items()))
    # Last, as it says of what commit the others are.
    with written(json_file.with_suffix(".md")) as file:
        file.write("\n\n".join(parts) + "\n")
