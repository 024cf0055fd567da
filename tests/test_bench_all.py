"""What the benchmarks have in common, and the command that runs all of them."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
try:
    import all as bench_all
    import common
finally:
    sys.path.pop(0)

BENCH = Path(common.__file__).parent
SCRIPT = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(BENCH)!r})
from common import Chart, show
rows = [{{"name": "a", "value": 1.5}}, {{"name": "b", "value": float("nan")}}]
show(rows, Path(sys.argv[-1]), Chart("Values", "value", ("name",)))
"""


@pytest.fixture
def make(tmp_path):
    """A benchmark of its own script."""

    def made(name, code=SCRIPT, minutes=0.1, needs=()):
        script = tmp_path / f"{name}.py"
        script.write_text(code)
        return bench_all.Benchmark(name, (str(script),), minutes, f"What is {name}?", needs)

    return made


@pytest.fixture
def configured(tmp_path):
    def config(**options):
        return bench_all.Config(**{"budget": 1, "results": tmp_path / "out", "page": tmp_path / "page.html"} | options)

    return config


@pytest.mark.parametrize("log", [False, True])
def test_rows_picture_and_page_are_kept(tmp_path, capsys, log):
    rows = [
        {"loader": "a", "data": "x", "rate": 10, "ratio": 2.0},
        {"loader": "b", "data": "x", "rate": 0, "ratio": float("nan")},
        {"loader": "c", "data": "x"},
        {"loader": "d|e", "data": "x", "rate": "failed", "ratio": None},
    ]
    chart = common.Chart("Rates", ("rate", "ratio"), ("loader",), "data", log=log)
    common.show(rows, tmp_path / "rows.json", chart, {"More": [{"what": 1}]})
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert kept[0] == rows[0]
    assert kept[1]["ratio"] is None
    assert "nan" not in capsys.readouterr().out
    assert (tmp_path / "rows.svg").read_text().startswith("<svg")
    page = (tmp_path / "rows.md").read_text()
    for part in (
        "| loader | data | rate | ratio |",
        "| c | x | - | - |",
        "d\\|e",
        "## More",
        "(rows.svg)",
        "- machine: ",
    ):
        assert part in page
    assert re.search(r"^- commit: (unknown|[0-9a-f]{12}( \+ changes)?)$", page, re.M)
    assert re.search(r"^- date: \d{4}-\d\d-\d\d \d\d:\d\d UTC$", page, re.M)


def test_without_a_file_the_picture_is_drawn_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench/some.py", "--size", "3", "--json=a", "--json", "b", "--last"])
    rows = [{"x": x, "method": name, "y": x**2} for name in "ab" for x in (2, 1)] + [{"x": "-", "method": "a", "y": 1}]
    common.show(rows, None, common.Chart("Squares", "y", ("x",), "method", kind="lines"))
    assert "picture: runs/bench/some.svg" in capsys.readouterr().out
    assert (tmp_path / "runs/bench/some.svg").exists()
    assert common.command().endswith("bench/some.py --size 3 --last")


def test_nothing_to_draw_is_no_error():
    assert common.picture([{"a": "b", "v": "failed"}], common.Chart("Nothing", "v", ("a",))).startswith("<svg")


def test_what_fits_is_run_and_all_is_told_of(make, configured, capfd, monkeypatch):
    monkeypatch.delenv("FASTGNL_DATA", raising=False)
    listed = [
        make("fails", SCRIPT + "sys.exit(3)"),
        make("silent", "pass"),
        make("long", minutes=5),
        make("small"),
        make("real", needs=("FASTGNL_DATA", "no_such_package")),
    ]
    config = configured()
    assert bench_all.run_all(config, listed) == 1
    told, page = capfd.readouterr().out, config.page.read_text()
    for line in (
        "fails: failed: exit code 3",
        "silent: failed: it wrote no rows",
        "long: did not fit: takes about 5 minutes",
        "small: run",
        "real: skipped: FASTGNL_DATA, no_such_package not here",
    ):
        assert f"\n{line}" in told
        assert line.split(": ", 1)[1] in page
    assert "[4/5] small: about 0.1 minutes" in told
    assert "<svg" in page
    assert "What is long?" in page


def test_a_failure_leaves_what_was_kept(make, configured):
    config = configured()
    assert bench_all.run_all(config, [make("one")]) == 0
    kept = {path.name: path.read_text() for path in config.results.iterdir()}
    assert kept.keys() == {"one.json", "one.md", "one.svg"}
    assert bench_all.run_all(configured(again=True), [make("one", SCRIPT.replace("1.5", "2.5") + "sys.exit(1)")]) == 1
    assert {path.name: path.read_text() for path in config.results.iterdir()} == kept
    assert "of an earlier run" in config.page.read_text()


def test_results_of_this_commit_are_not_made_again(make, configured, monkeypatch, capfd):
    listed, config = [make("one"), make("two")], configured()
    assert bench_all.run_all(config, listed) == 0
    note = config.results / "one.md"
    note.write_text(re.sub("(?m)^- commit: .*", "- commit: 0123456789ab", note.read_text()))
    monkeypatch.setattr(bench_all, "commit", lambda: "0123456789ab")
    capfd.readouterr()
    assert bench_all.run_all(config, listed) == 0
    assert "one: up to date\ntwo: run\n" in capfd.readouterr().out
    assert bench_all.run_all(configured(only=("one",), again=True), listed) == 0
    assert "one: run\npage:" in capfd.readouterr().out
    monkeypatch.setattr(bench_all, "commit", lambda: "0123456789ab + changes")
    assert bench_all.run_all(configured(only=("two",)), listed) == 0
    assert "two: run\n" in capfd.readouterr().out


def test_no_budget_is_only_the_page(make, configured):
    config = configured(budget=0)
    assert bench_all.run_all(config, [make("one")]) == 0
    assert not list(config.results.iterdir())
    assert "No results yet." in config.page.read_text()


def test_unknown_names_are_refused(make, configured):
    with pytest.raises(ValueError, match="only is 'two', wanted one of 'one'"):
        bench_all.run_all(configured(only=("two",)), [make("one")])


def test_the_list_names_each_once():
    names = [benchmark.name for benchmark in bench_all.BENCHMARKS]
    assert len(set(names)) == len(names)
