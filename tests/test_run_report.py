"""``fastgnl report``: what it reads from runs, shows, prints and refuses."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib import pyplot as plt

from fastgnl import report, run_report
from fastgnl.cli import main
from fastgnl.errors import InputError
from fastgnl.run_report import ReportConfig, load, load_all, names_of, table_rows, write_report

STEPS = 10
"""Of an epoch."""


def epoch_line(number, time=None, **values):
    line = {"kind": "epoch", "step": (number + 1) * STEPS, "epoch": number, "loss": 1 / (number + 1)} | values
    return line if time is None else line | {"time": time}


def write(folder, lines, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def loaded(tmp_path, lines, tail=""):
    return load(write(tmp_path / "run", lines, tail) / "metrics.jsonl", "run")


def test_what_was_measured_last_counts(tmp_path):
    """Killed in epoch 4, resumed in the middle of epoch 2, killed again in epoch 3."""
    run = loaded(
        tmp_path,
        [
            {"kind": "run", "time": 100.0, "epochs": 9},
            *(epoch_line(e, loss=1.0, skipped=e) for e in range(4)),
            *({"kind": "step", "step": s, "epoch": 4, "loss": 1.0} for s in (41, 46)),
            {"kind": "run", "time": 900.0, "epochs": 9},
            {"kind": "event", "event": "resumed", "step": 25, "epoch": 2},
            {"kind": "step", "step": 26, "epoch": 2, "loss": 2.0},
            {"kind": "event", "event": "checkpoint", "step": 26},
            epoch_line(2, loss=2.0, skipped=7),
            {"kind": "step", "step": 36, "epoch": 3, "loss": 2.0},
        ],
    )
    assert run.curve("loss") == ([1, 2, 3], [1.0, 1.0, 2.0])
    assert list(run.steps) == [26, 36]
    assert run.done == 3
    assert run.skipped == 7
    assert [start.where(run) for start in run.restarts] == [2.5]
    assert run.state == "still running or killed"
    x, y = run.fine_curve("loss")
    np.testing.assert_allclose(x, [2.6, 3.6])
    np.testing.assert_allclose(y, [2.0, 2.0])
    assert run.reached == pytest.approx(3.6)


def test_epochs_whose_work_was_lost_are_not_done(tmp_path):
    """Resumed within the second epoch, which is not through again yet."""
    step = {"kind": "step", "step": 15, "epoch": 1}
    assert loaded(tmp_path, [*(epoch_line(e) for e in range(4)), RUN, step]).done == 1


def test_the_same_epoch_twice(tmp_path):
    assert loaded(tmp_path, [epoch_line(0, loss=1.0), epoch_line(0, loss=5.0)]).curve("loss") == ([1], [5.0])


RUN = {"kind": "run", "epochs": 3}
RESUMED = {"kind": "event", "event": "resumed"}
STOPPED = {"kind": "event", "event": "stopped"}
FINISHED = {"kind": "event", "event": "finished"}


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ([RUN, epoch_line(0)], "still running or killed"),
        ([RUN, epoch_line(0), STOPPED], "stopped"),
        ([RUN, epoch_line(0), STOPPED, {"kind": "event", "event": "checkpoint"}], "stopped"),
        ([RUN, epoch_line(0), STOPPED, RUN], "still running or killed"),
        ([RUN, epoch_line(0), STOPPED, RESUMED, epoch_line(1)], "still running or killed"),
        ([RUN, epoch_line(2)], "finished"),
        ([RUN, epoch_line(2), {"kind": "run", "epochs": 5}], "still running or killed"),
        ([{"kind": "run"}, epoch_line(0), FINISHED], "finished"),
    ],
)
def test_states(tmp_path, lines, state):
    assert loaded(tmp_path, lines).state == state


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ([RUN, epoch_line(0), epoch_line(1)], []),
        ([RUN, epoch_line(0), RUN, RESUMED, epoch_line(1)], [2.0]),  # nothing better is known
        ([RUN, epoch_line(0), RUN, RESUMED | {"step": 10}, epoch_line(1)], [1.0]),
        ([RUN, epoch_line(0), RUN, RESUMED | {"epoch": 1}, epoch_line(1)], [1.0]),
        ([RUN, epoch_line(0), RESUMED | {"step": 15}, epoch_line(1)], [1.5]),  # in the same process
        ([RUN, epoch_line(0), RUN, RUN, RESUMED | {"step": 10}, epoch_line(1)], [None, 1.0]),  # killed at once
        ([RUN, RESUMED | {"step": 10}, epoch_line(1)], [1.0]),  # another run's checkpoint
        ([epoch_line(0), epoch_line(1), RUN], [None]),
    ],
)
def test_restarts(tmp_path, lines, where):
    run = loaded(tmp_path, lines)
    assert [start.where(run) for start in run.restarts] == where


def test_the_table(tmp_path):
    run = loaded(
        tmp_path,
        [
            {"kind": "run", "time": 1000.0, "epochs": 4},
            epoch_line(0, 1010.0, seconds=8.0, images_per_second=900.0, wait=0.5, test_accuracy=0.5),
            epoch_line(1, 1030.0, seconds=12.0, images_per_second=1234.0, wait=0.02, test_accuracy=0.75),
            {"kind": "run", "time": 90_000.0, "epochs": 4},
            epoch_line(2, 90_064.0, seconds=14.0, images_per_second=2000.0, wait=0.01, test_accuracy=0.625, skipped=3),
            {"kind": "event", "event": "stopped", "time": 90_065.0},
        ],
    )
    wanted = ("run", "3 of 4", "62.5%", "75.0%", "1 min 35 s", "12 s", "1,234", "2.0%", "3", "1", "stopped")
    assert table_rows([run]) == [wanted]
    bare = loaded(tmp_path, [epoch_line(0, test_accuracy=None)])
    assert table_rows([bare])[0][1:8] == ("1", "-", "-", "0.0 s", "-", "-", "-")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10 s"), (59.7, "1 min 00 s"), (3599, "59 min 59 s"), (7379.0, "2 h 02 min")],
)
def test_durations(seconds, text):
    assert run_report.duration(seconds) == text


def test_names_tell_runs_apart(tmp_path):
    def names(*folders):
        return names_of([tmp_path / folder / "metrics.jsonl" for folder in folders])

    assert names("x/a") == ["a"]
    assert names("x/a", "y/b") == ["a", "b"]
    assert names("ce/0/m", "gnl/0/m", "gnl/1/m") == ["ce/0/m", "gnl/0/m", "gnl/1/m"]
    assert names("a", "a/a", "a/a/a")[1:] == [f"{tmp_path.name}/a/a", "a/a/a"]
    assert names_of([tmp_path / "old.jsonl", tmp_path / "new.jsonl"]) == ["old.jsonl", "new.jsonl"]


def test_a_file_may_be_given_and_names_follow_links(tmp_path, monkeypatch):
    write(tmp_path / "first", [epoch_line(0)])
    (tmp_path / "latest").symlink_to(tmp_path / "first")
    monkeypatch.chdir(tmp_path / "latest")
    assert [run.name for run in load_all([tmp_path / "latest/metrics.jsonl"])] == ["latest"]
    with pytest.raises(InputError, match="first is given twice, wanted each run once"):
        load_all([tmp_path / "latest/metrics.jsonl", tmp_path / "first"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no whole line, wanted one for each epoch"),
        ('{"kind": "run"}', "holds no whole line"),
        ('{"kind": "run"}\n{"kind": "ep\n{"kind": "run"}\n', "is damaged in line 2, wanted a line"),
        ('{"kind": "run"}\n\n', "is damaged in line 2"),
        ("[1]\n", "is damaged in line 1"),
        ('{"time": 1}\n', "is damaged in line 1"),
        ('{"kind": "epoch", "step": 1}\n', "is damaged in line 1"),
        ('{"kind": "step", "step": 1.5, "epoch": 0}\n', "is damaged in line 1"),
        ('{"kind": "epoch", "step": 1, "epoch": -1}\n', "is damaged in line 1"),
        ("[" * 100_000 + "\n", "is damaged in line 1"),
        (b'{"kind": "\xff"}\n', "is damaged in line 1"),
        ('{"kind": "run"}\n{"kind": "step", "step": 1, "epoch": 0}\n', "has no epoch yet, wanted one that is through"),
    ],
)
def test_what_cannot_be_shown(tmp_path, content, sentence):
    (tmp_path / "metrics.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=sentence) as told:
        load_all([tmp_path])
    assert str(tmp_path) in str(told.value)
    assert "\n" not in str(told.value)


def test_a_torn_end_and_what_is_not_known_are_passed_over(tmp_path):
    odd = [{"kind": "weather", "sun": 1}, epoch_line(0, loss=None, lr="fast", wait=10**400), epoch_line(1, ce=0.5)]
    run = loaded(tmp_path, odd, tail='{"kind": "epo')
    assert run.curve("loss") == ([2], [0.5])
    assert run.curve("lr") == run.curve("wait") == ([], [])
    assert run.curve("ce") == ([2], [0.5])


def test_a_run_that_has_just_begun_is_listed_beside_others(tmp_path):
    write(tmp_path / "old", [RUN, epoch_line(0)])
    write(tmp_path / "new", [RUN, {"kind": "step", "step": 3, "epoch": 0, "loss": 1.0}])
    runs = load_all([tmp_path / "old", tmp_path / "new"])
    assert table_rows(runs)[1][:2] == ("new", "0 of 3")
    write_report(tmp_path / "page.html", runs)
    with pytest.raises(InputError, match="none of the 2 runs has an epoch yet"):
        load_all([tmp_path / "new", write(tmp_path / "newer", [RUN])])


class Page(HTMLParser):
    """The text of a page, its tags and what they refer to."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.text, self.tags, self.addresses = [], [], []
        self.feed(self.source)
        self.shown = " ".join(self.text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def charts(monkeypatch):
    """The charts of a page by title, kept for a look in place of being drawn."""
    found = {}

    def keep(figure):
        found.update({ax.get_title(): ax for ax in figure.axes})
        plt.close(figure)
        return ""

    monkeypatch.setattr(report, "svg", keep)
    return found


def curves(ax):
    """Colour and style of each curve over epochs, without restarts and single steps."""
    return [(line.get_color(), line.get_linestyle()) for line in ax.lines if line.get_linewidth() == 1.6]


def full(number, **values):
    known = {"ce": 0.5, "prior": 0.25, "estep": 0.125, "coverage": 0.75, "clean_size": 1.5, "noisy_size": 3.0}
    speed = {"images_per_second": 1000.0, "wait": 0.25, "lr": 0.01 / (number + 1), "test_accuracy": 0.1 * number}
    return epoch_line(number, **known | speed | values)


@pytest.fixture
def two_runs(tmp_path):
    step = {"kind": "step", "step": 12, "epoch": 1, "loss": 99.0}
    write(tmp_path / "runs/<i>ce & gnl", [RUN, full(0), RUN, RESUMED | {"step": 5}, full(0), step, full(1)])
    write(tmp_path / "runs/b", [RUN, *(full(number) for number in range(3))])
    return tmp_path


def test_the_page(two_runs, monkeypatch, capsys):
    monkeypatch.chdir(two_runs)
    main(["report", "runs/<i>ce & gnl", "runs/b/metrics.jsonl"])
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"page: {two_runs / 'report.html'}"
    assert "<i>ce & gnl  2 of 3      10.0%" in out
    page = Page(two_runs / "report.html")
    assert all(address.startswith("#") for address in page.addresses)
    assert "@import" not in page.source
    assert "script" not in page.tags
    assert "i" not in page.tags
    assert page.shown.count("<i>ce & gnl") == 2  # in the legend and in the table
    assert "2 runs, the best at its end: b with 20.0%" in page.shown
    assert page.source.count("<svg") == 4
    assert f"background:{report.RUN_COLOURS[1]}" in page.source


def test_the_curves(two_runs, charts):
    write_report(two_runs / "page.html", load_all([two_runs / "runs/<i>ce & gnl", two_runs / "runs/b"]))
    assert list(charts) == [
        *("test accuracy, %", "loss", "L_CE", "L_PRI", "L_KL", "coverage, %", "uncertainty, labels in the set"),
        *("images a second", "waited for data, %", "learning rate"),
    ]
    first, second = report.RUN_COLOURS[:2]
    assert curves(charts["loss"]) == [(first, "-"), (second, "-")]
    assert curves(charts["uncertainty, labels in the set"]) == [(c, s) for c in (first, second) for s in ("-", "--")]
    (mark,) = [line for line in charts["coverage, %"].lines if line.get_linewidth() == 0.7]
    assert mark.get_color() == first
    assert list(mark.get_xdata()) == [0.5, 0.5]
    np.testing.assert_allclose(charts["test accuracy, %"].lines[-1].get_ydata(), [0, 10, 20])
    assert charts["loss"].get_ylim()[1] < 2  # one step's 99 does not flatten the rest


def legend_of(ax):
    return None if ax.get_legend() is None else [text.get_text() for text in ax.get_legend().get_texts()]


def test_every_top_1_score_is_a_curve(tmp_path, charts):
    scores = {"test top1": 0.1, "test top5": 0.9, "test EMA top1": 0.3, "imagenet top1": 0.2}
    one = write(tmp_path / "one", [RUN, full(0, **scores), full(1, **scores)])
    write_report(tmp_path / "page.html", load_all([one]))
    chart = charts["test accuracy, %"]
    np.testing.assert_allclose([line.get_ydata()[-1] for line in chart.lines], [10, 30, 20])
    assert len({line.get_color() for line in chart.lines}) == 3
    assert legend_of(chart) == ["test", "test EMA", "imagenet"]
    assert legend_of(charts["loss"]) is None
    older = write(tmp_path / "older", [RUN, full(0), full(1, test_accuracy=0.4)])
    write_report(tmp_path / "page.html", load_all([one, older]))
    chart = charts["test accuracy, %"]
    assert [line.get_linestyle() for line in chart.get_legend().get_lines()] == ["-", "--", ":"]
    (line,) = [line for line in chart.lines if line.get_color() == report.RUN_COLOURS[1] and len(line.get_xdata())]
    np.testing.assert_allclose(line.get_ydata(), [0, 40])
    write_report(tmp_path / "page.html", load_all([older]))
    assert legend_of(charts["test accuracy, %"]) is None


def test_charts_without_a_curve_are_left_out(tmp_path, charts):
    untested = {"test_accuracy": None, "coverage": None, "clean_size": None, "noisy_size": None}
    one = write(tmp_path / "one", [RUN, full(0, **untested)])
    two = write(tmp_path / "two", [RUN, full(0)])
    write_report(tmp_path / "page.html", load_all([one]))
    assert "test accuracy, %" not in charts
    assert "The label prior" not in Page(tmp_path / "page.html").shown
    assert "one: 1 epoch" in Page(tmp_path / "page.html").shown
    write_report(tmp_path / "page.html", load_all([one, two]))
    with_values = [line for line in charts["test accuracy, %"].lines if len(line.get_xdata())]
    assert [line.get_color() for line in with_values] == [report.RUN_COLOURS[1]]


def test_the_learning_rate_is_drawn_step_by_step(tmp_path, charts):
    steps = [{"kind": "step", "step": s, "epoch": s // STEPS, "lr": s / 100} for s in range(1, 20)]
    write_report(tmp_path / "page.html", load_all([write(tmp_path / "a", [*steps, full(1)])]))
    (line,) = charts["learning rate"].lines
    np.testing.assert_allclose(line.get_ydata(), [s / 100 for s in range(1, 20)])
    np.testing.assert_allclose(line.get_xdata(), [s / 10 for s in range(1, 20)])


def test_many_steps_are_thinned_out(tmp_path):
    run = loaded(
        tmp_path, [{"kind": "step", "step": s, "epoch": 0, "loss": s} for s in range(4000)] + [epoch_line(399)]
    )
    x, y = run.fine_curve("loss")
    assert len(x) == run_report.POINTS
    np.testing.assert_allclose(x, y / 10)


def test_colours_of_many_runs():
    colours = [report.run_colour(i) for i in range(24)]
    assert colours[:12] == list(report.RUN_COLOURS)
    assert len(set(colours)) == 24
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["nowhere"], "nowhere does not exist, wanted the folder of a run"),
        (["."], ". holds no metrics.jsonl, wanted the folder of a run"),
        ([], "no run is given, wanted the folder of at least one"),
        (["good", "./good"], "good is given twice, wanted each run once"),
        (["good", "--out", "good/metrics.jsonl"], "out is good/metrics.jsonl, wanted a name that ends in .html"),
        (["good", "--out", "/proc/nowhere/a.html"], "cannot write /proc/nowhere/a.html"),
    ],
)
def test_bad_commands(tmp_path, monkeypatch, capsys, args, sentence):
    write(tmp_path / "good", [RUN, epoch_line(0)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main(["report", *args])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_config_is_checked():
    with pytest.raises(InputError, match="no run is given"):
        ReportConfig(())
