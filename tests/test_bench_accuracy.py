"""What is said of noted runs of all methods: tables, verdicts, and what is shown where runs are missing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
try:
    import accuracy
    import common
finally:
    sys.path.pop(0)

from fastgnl.errors import InputError

SLEEPING = f"""
import os, sys, time
from pathlib import Path
from typing import NamedTuple
sys.path.insert(0, {str(Path(common.__file__).parent)!r})
from noted import carried_out

class Plan(NamedTuple):
    number: int

def work(plan):
    Path("worker.tmp").write_text(str(os.getpid()))
    os.rename("worker.tmp", "worker")
    time.sleep(300)

if __name__ == "__main__":
    carried_out([Plan(0)], work, Path("found.jsonl"), 1)
"""
WORST = "CIFAR-10N worst, embeddings"


def run(problem, method, seed=0, last=50.0, **more):
    row = {"problem": problem, "method": method, "seed": seed, "epochs": None, "last": last, "best": last + 1}
    return row | {"auroc": 0.9, "seconds": 1.0} | more


def rows(*runs):
    of = {}
    for each in runs:
        of.setdefault((each["problem"], each["method"]), []).append(each)
    return [accuracy.summary(*key, each) for key, each in of.items()]


def test_mean_and_spread_over_the_seeds_in_the_shape_of_the_papers_tables():
    shown = rows(
        run("a", "ce", 0, 50.0), run("a", "ce", 1, 52.0), run("b", "gnl"), run("a", "gnl", failed="not finite")
    )
    assert accuracy.pivot(shown, "last epoch") == [
        {"method": "cross-entropy", "a": "51.0 ± 1.0"},
        {"method": "GNL, y->x", "b": "50.0", "a": "failed"},
    ]
    assert accuracy.pivot(shown, "AUROC")[0]["a"] == "0.9"


def test_verdicts_count_who_is_first_and_name_who_fails():
    told = accuracy.verdicts(
        rows(
            # Behind in one direction, ahead in the other; a pair of networks does not count.
            *(
                run("digits IDN 20%", name, last=v)
                for name, v in (("ce", 60), ("gnl", 70), ("gnl-xy", 72), ("elr", 71))
            ),
            run("digits IDN 20%", "jocor", last=99.0),
            # Level is not first; what failed is not a rival.
            *(run(WORST, name, last=v) for name, v in (("ce", 60), ("gnl", 70), ("gnl-xy", 69), ("gce", 70))),
            run(WORST, "elr", failed="not finite"),
            run(WORST, "cleanlab", last=65, auroc=0.8),
            # Symmetric noise is not counted.
            *(run("digits SN 40%", name, last=v) for name, v in (("ce", 60), ("gnl", 70), ("nls", 60))),
        )
    )
    assert "digits IDN 20%: GNL, y->x 70.0, GNL, x->y 72.0; the best other single network: ELR 71.0" in told
    (count,) = [line for line in told if "first among" in line]
    assert count.startswith("of 2 problems")
    assert "GNL on 1, in one direction or the other; GNL, y->x on 0, GNL, x->y on 1" in count
    assert f"AUROC of wrong labels on {WORST}: GNL's w 0.9, cleanlab's score 0.8" in told
    assert f"{WORST}, failing, not above CE (60.0): ELR (failed)" in told
    assert "digits SN 40%, failing, not above CE (60.0): negative label smoothing (60.0)" in told


def test_what_is_noted_is_shown_without_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench/accuracy.py"])
    found = tmp_path / "found.jsonl"
    found.write_text("".join(json.dumps(run("digits IDN 20%", "ce", seed, commit="0123")) + "\n" for seed in (0, 1)))
    config = {"problems": ("all",), "found": found, "run": False, "json": tmp_path / "rows.json"}
    accuracy.main(accuracy.Config(**config))
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["method"], row["seeds"]) == ("cross-entropy", 2)
    page = (tmp_path / "rows.md").read_text()
    assert "- runs: 2 of 0123\n" in page
    assert "## Last epoch" in page
    with pytest.raises(InputError, match="nothing of that is noted"):
        accuracy.main(accuracy.Config(**config | {"methods": ("gnl",)}))


def test_a_grid_has_the_largest_of_each_column_in_bold():
    chart = common.Chart("Grid", "v", ("method",), "problem", kind="grid")
    cells = [("a", "x", 1.0), ("b", "x", 2.0), ("a", "y", 4.0), ("b", "y", "failed")]
    found = common.points([{"method": m, "problem": p, "v": v} for m, p, v in cells], chart)
    _, (ax,) = common.axes(1)
    common.grid(ax, found, chart)
    assert {text.get_text(): text.get_weight() for text in ax.texts} == {"1": "normal", "2": "bold", "4": "bold"}


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"  # nobody has asked for it yet
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see whether a worker has ended")
def test_no_run_goes_on_when_the_benchmark_is_killed(tmp_path):
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    bench = subprocess.Popen([sys.executable, "sleeping.py"], cwd=tmp_path)
    worker = tmp_path / "worker"
    try:
        while not worker.exists():
            assert bench.poll() is None
            time.sleep(0.1)
    finally:
        bench.send_signal(signal.SIGKILL)
        bench.wait()
    pid = int(worker.read_text())
    for _ in range(300):
        if ended(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker went on for 30 seconds")
