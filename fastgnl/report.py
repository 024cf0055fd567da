"""Self-contained HTML pages: tables, charts as inline SVG, small pictures as inline PNG."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import image
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fastgnl.files import written

CE_COLOUR, GNL_COLOUR, QUIET = "#c2410c", "#1d4ed8", "#64748b"
TERM_COLOURS = ("#1d4ed8", "#0d9488", "#a16207")
RUN_COLOURS = (
    *("#1d4ed8", "#c2410c", "#15803d", "#9333ea", "#0891b2", "#be123c"),
    *("#a16207", "#475569", "#db2777", "#65a30d", "#7c2d12", "#38bdf8"),
)
"""To tell many curves apart; the first are the most distinct."""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #0f172a; max-width: 62rem; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .25rem; }
p { margin: .4rem 0 1rem; color: #334155; max-width: 46rem; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .9rem; border-bottom: 1px solid #e2e8f0; }
th { font-weight: 600; color: #475569; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: .9rem; }
.tile img { width: 100%; image-rendering: pixelated; border-radius: .3rem; display: block; }
.tile { font-size: .82rem; line-height: 1.35; color: #475569; } .tile b { color: #0f172a; }
.wide { overflow-x: auto; font-size: .82rem; } .wide th, .wide td { padding: .35rem .45rem; vertical-align: bottom; }
.wide td { white-space: nowrap; }
.wide td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; padding-left: 1.55rem;
  text-indent: -1.55rem; } .wide .key { text-indent: 0; }
.legend { position: sticky; top: 0; background: #fffffff0; display: flex; flex-wrap: wrap; gap: .15rem 1.3rem;
  padding: .5rem 0; border-bottom: 1px solid #e2e8f0; font-size: .88rem; overflow-wrap: anywhere; }
.key { display: inline-block; width: 1.1rem; height: .3rem; border-radius: .15rem; margin-right: .45rem; flex: none;
  vertical-align: middle; }
footer { margin-top: 3rem; color: #64748b; font-size: .85rem; }
"""


def run_colour(i: int) -> str:
    """The colour of the i-th of many curves; after all of them they come again, paler."""
    paler = 0.5 ** (i // len(RUN_COLOURS))
    red, green, blue = (1 - (1 - part) * paler for part in to_rgb(RUN_COLOURS[i % len(RUN_COLOURS)]))
    return to_hex((red, green, blue))


def _key(colour: str) -> str:
    return f'<span class="key" style="background:{colour}"></span>'


def legend(names: Sequence[str], colours: Sequence[str]) -> str:
    """Names of curves beside their colours, in sight as long as the charts that follow are."""
    entries = (f"<span>{_key(c)}{html.escape(name)}</span>" for name, c in zip(names, colours, strict=True))
    return f'<div class="legend">{"".join(entries)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str] = ()) -> str:
    """An HTML table, with a colour before each row if given."""

    def line(cells: Sequence[str], tag: str, key: str = "") -> str:
        return f"<tr><{tag}>{key}" + f"</{tag}><{tag}>".join(map(html.escape, cells)) + f"</{tag}></tr>"

    keys = [_key(colour) for colour in colours] or [""] * len(rows)
    return (
        "<table>"
        + line(header, "th")
        + "".join(line(row, "td", key) for row, key in zip(rows, keys, strict=True))
        + "</table>"
    )


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table for a terminal."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (header, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def section(title: str, text: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{body}</section>"


def svg(figure: Figure) -> str:
    """A figure as inline SVG."""
    buffer = io.StringIO()
    with plt.rc_context({"svg.hashsalt": "fastgnl"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def axes(columns: int, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A row of charts with quiet frames."""
    figure, grid = plt.subplots(1, columns, figsize=(9.6, height), constrained_layout=True, squeeze=False)
    for ax in grid[0]:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color("#cbd5e1")
        ax.tick_params(colors=QUIET, labelsize=8)
        ax.grid(axis="y", color="#e2e8f0", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.title.set_fontsize(10)
        ax.xaxis.label.set(fontsize=9, color=QUIET)
    return figure, list(grid[0])


def line(ax: Axes, x: Sequence[float], y: Sequence[float], colour: str, label: str, style: str = "-") -> None:
    """A curve, named at its end rather than in a legend."""
    ax.plot(x, y, color=colour, linewidth=1.8, linestyle=style)
    ax.annotate(
        label,
        (x[-1], y[-1]),
        (4, 0),
        textcoords="offset points",
        color=colour,
        fontsize=8.5,
        va="center",
        annotation_clip=False,
    )


def heatmap(ax: Axes, matrix: NDArray[Any], title: str, labels: Sequence[str]) -> None:
    """A transition matrix, rows the true class, with its larger entries written out."""
    ax.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
    ax.grid(False)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("given label")
    ax.set_ylabel("true label", fontsize=9, color=QUIET)
    ax.set_xticks(range(len(labels)), labels)
    ax.set_yticks(range(len(labels)), labels)
    if len(labels) <= 20:
        for i, j in zip(*np.nonzero(matrix >= 0.05), strict=True):
            ax.text(
                j,
                i,
                f"{100 * matrix[i, j]:.0f}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if matrix[i, j] > 0.5 else "#0f172a",
            )


def tile(pixels: NDArray[Any], lines: Sequence[str]) -> str:
    """A small picture in [0, 1], grey or in colours, with lines of text below; the first is bold."""
    buffer = io.BytesIO()
    image.imsave(buffer, pixels, cmap="gray", vmin=0, vmax=1, format="png")
    data = base64.b64encode(buffer.getvalue()).decode()
    first, *rest = [html.escape(text) for text in lines]
    picture = f'<img alt="{first}" src="data:image/png;base64,{data}">'
    return f'<div class="tile">{picture}<b>{first}</b><br>{"<br>".join(rest)}</div>'


def write_page(path: Path, title: str, lead: str, body: str, footer: str = "") -> None:
    """Put a page together; it loads nothing from elsewhere."""
    with written(path) as file:
        file.write(
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
            f"<h1>{html.escape(title)}</h1><p>{html.escape(lead)}</p>{body}<footer>{html.escape(footer)}</footer></body></html>\n"
        )
