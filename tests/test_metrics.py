"""What a run leaves behind as it goes: lines that stay whole, charts where they can be drawn, the bar."""

import contextlib
import fcntl
import json
import math
import os
import struct
import sys
import termios
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastgnl import metrics as module
from fastgnl.errors import InputError
from fastgnl.metrics import Metrics
from fastgnl.progress import Progress
from fastgnl.tally import Epoch


def refuse(constant):
    raise AssertionError(f"{constant} is no strict JSON")


def lines(folder):
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def timeless(folder):
    return [{name: value for name, value in line.items() if name != "time"} for line in lines(folder)]


@pytest.fixture(autouse=True)
def tensorboard(monkeypatch):
    """Not installed, unless a test puts something in its place."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def test_lines(tmp_path):
    before = time.time()
    with Metrics(tmp_path / "a/run") as metrics:
        metrics.run(epochs=3, out=tmp_path, layers=(1, float("inf")), device=torch.device("cpu"), amp=False)
        metrics.step(step=5, epoch=0, loss=torch.tensor(0.5), ce=np.float32(0.25), wait=math.nan, skipped=np.int64(2))
        metrics.epoch(step=9, epoch=0, loss=-math.inf, test_accuracy=None, right=np.bool_(True))
        metrics.event("checkpoint", name="last.pt", step=9)
    assert timeless(tmp_path / "a/run") == [
        {"kind": "run", "epochs": 3, "out": str(tmp_path), "layers": [1, None], "device": "cpu", "amp": False},
        {"kind": "step", "step": 5, "epoch": 0, "loss": 0.5, "ce": 0.25, "wait": None, "skipped": 2},
        {"kind": "epoch", "step": 9, "epoch": 0, "loss": None, "test_accuracy": None, "right": True},
        {"kind": "event", "event": "checkpoint", "name": "last.pt", "step": 9},
    ]
    assert all(before - 0.001 <= line["time"] <= time.time() + 0.001 for line in lines(tmp_path / "a/run"))
    metrics.event("late")  # closed: nothing is written, nothing fails
    assert len(lines(tmp_path / "a/run")) == 4


def test_every_line_is_there_at_once_and_one_write(tmp_path, monkeypatch):
    written, write = [], os.write
    monkeypatch.setattr(os, "write", lambda file, data: written.append(data) or write(file, data))
    metrics = Metrics(tmp_path)
    for step in range(3):
        metrics.step(step=step, epoch=0, loss=1.0)
        assert len(lines(tmp_path)) == step + 1
    assert [data.count(b"\n") for data in written] == [1, 1, 1]
    metrics.close()


@pytest.mark.parametrize("torn", ['{"kind": "st', '{"kind": "step"}', "x" * 50])
@pytest.mark.parametrize("whole", ["", '{"kind": "run"}\n', '{"kind": "run"}\n{"kind": "event"}\n'])
def test_a_torn_line_is_cut_off(tmp_path, monkeypatch, whole, torn):
    monkeypatch.setattr(module, "TAIL", 7)
    (tmp_path / "metrics.jsonl").write_text(whole + torn)
    with Metrics(tmp_path) as metrics:
        assert (tmp_path / "metrics.jsonl").read_text() == whole
        metrics.event("resumed")
    assert [line["kind"] for line in lines(tmp_path)] == [json.loads(line)["kind"] for line in whole.splitlines()] + [
        "event"
    ]


def test_another_start_appends(tmp_path):
    for _ in range(2):
        with Metrics(tmp_path) as metrics:
            metrics.run()
    assert timeless(tmp_path) == [{"kind": "run"}] * 2


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path, capfd):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with Metrics(tmp_path) as metrics:
        for step in range(3):
            metrics.step(step=step, epoch=0)
    err = capfd.readouterr().err
    assert err == (
        f"fastgnl: metrics are missing from {tmp_path}/metrics.jsonl (No space left on device), training goes on\n"
    )


def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path, monkeypatch, capfd):
    """The disk runs full within a line and has room again later."""
    write, full = os.write, [False, True, True, False]
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: 9 if full.pop(0) else None]))
    with Metrics(tmp_path) as metrics:
        for step in range(4):
            metrics.step(step=step, epoch=0)
    assert [line["step"] for line in lines(tmp_path)] == [0, 3]
    monkeypatch.undo()
    assert capfd.readouterr().err.count("training goes on") == 1


def test_other_ranks_leave_no_trace(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Metrics(tmp_path / "run", enabled=False, wandb="project") as metrics:
        metrics.run(epochs=1)
        metrics.step(step=1, epoch=0)
        metrics.epoch(step=1, epoch=0)
        metrics.event("stopped")
    assert list(tmp_path.iterdir()) == []


def test_bad_folders_and_names(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*file/metrics\.jsonl: .*, wanted a folder"):
        Metrics(tmp_path / "file")
    (tmp_path / "run/metrics.jsonl").mkdir(parents=True)
    with pytest.raises(InputError, match=r"cannot write .*run/metrics\.jsonl: Is a directory"):
        Metrics(tmp_path / "run")
    with Metrics(tmp_path / "good") as metrics, pytest.raises(InputError, match="named kind or time"):
        metrics.run(kind="instance")


class Writer:
    """TensorBoard's, as far as it is used."""

    def __init__(self, folder, purge_step):
        self.made = (folder, purge_step)
        self.scalars, self.closed = [], False
        made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def flush(self):
        self.scalars.append("flush")

    def close(self):
        self.closed = True


made: list[Writer] = []


def test_tensorboard_where_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    made.clear()
    with Metrics(tmp_path) as metrics:
        metrics.run(epochs=2)
        metrics.event("resumed", step=40)
        assert made == []
        metrics.step(step=45, epoch=1, loss=0.5, coverage=math.nan)
        metrics.epoch(step=50, epoch=1, test_accuracy=0.75, note="text")
    (writer,) = made
    assert writer.made == (str(tmp_path / "tensorboard"), 45)
    assert writer.scalars == [
        ("step/epoch", 1, 45),
        ("step/loss", 0.5, 45),
        ("epoch/epoch", 1, 50),
        ("epoch/test_accuracy", 0.75, 50),
        "flush",
    ]
    assert writer.closed
    assert len(lines(tmp_path)) == 4


def test_the_real_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    with Metrics(tmp_path) as metrics:
        metrics.epoch(step=50, epoch=1, test_accuracy=0.75)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"epoch/test_accuracy" in file.read_bytes()


def test_a_chart_that_fails_leaves_the_lines(tmp_path, monkeypatch, capfd):
    def broken(*args, **options):
        raise RuntimeError("no\nroom")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=broken))
    with Metrics(tmp_path) as metrics:
        metrics.step(step=1, epoch=0)
        metrics.step(step=2, epoch=0)
    assert len(lines(tmp_path)) == 2
    assert capfd.readouterr().err == (
        "fastgnl: metrics are missing from TensorBoard (RuntimeError no room), training goes on\n"
    )


class Wandb:
    """wandb and its run, as far as they are used."""

    def __init__(self):
        self.inits, self.logged, self.defined, self.finished = [], [], [], 0
        self.config = SimpleNamespace(facts={}, update=self.update)

    def update(self, facts, allow_val_change):
        assert allow_val_change
        self.config.facts.update(facts)

    def init(self, **options):
        self.inits.append(options)
        return self

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


def test_wandb_continues_its_run(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for start in range(2):
        with Metrics(tmp_path / "run", wandb="labels") as metrics:
            metrics.run(epochs=2)
            metrics.epoch(step=50 - start, epoch=1, loss=0.5, coverage=math.nan)
    first, second = wandb.inits
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("labels", "run", "allow")
    assert len(first["id"]) == 32
    assert wandb.defined[0] == ("*", "step")
    assert wandb.config.facts == {"epochs": 2}
    assert wandb.logged == [{"epoch/epoch": 1, "epoch/loss": 0.5, "step": step} for step in (50, 49)]
    assert wandb.finished == 2
    with Metrics(tmp_path / "other", wandb="labels"):
        assert wandb.inits[-1]["id"] != first["id"]


def test_wandb_that_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="wandb is 'labels' but wandb is not installed, wanted pip install wandb"):
        Metrics(tmp_path, wandb="labels")
    wandb = Wandb()
    monkeypatch.setattr(wandb, "init", lambda **options: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(InputError, match=r"cannot start \(division by zero\), wanted a project"):
        Metrics(tmp_path, wandb="labels")


def all_of_terminal(file):
    """A terminal hands over what was written a little later, and in parts; once closed it ends in an error."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(file, 1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


@pytest.fixture
def bar(monkeypatch, tmp_path):
    """The lines that a bar draws on a terminal of some columns, or in a log."""

    def draw(act, columns=None, **options):
        if columns is None:
            ours = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
            theirs = os.dup(ours)
        else:
            ours, theirs = os.openpty()
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        with os.fdopen(theirs, "w") as screen:
            monkeypatch.setattr(sys, "stderr", screen)
            with Progress("GNL", 1000, 40, **options) as progress:
                act(progress)
            monkeypatch.undo()
        drawn = (tmp_path / "log").read_text() if columns is None else all_of_terminal(ours)
        os.close(ours)
        return [line.rstrip() for line in drawn.replace("\n", "\r").split("\r") if line.strip()]

    return draw


EPOCH = Epoch(
    number=2,
    seconds=1.0,
    wait=0.034,
    images_per_second=1000.0,
    lr=0.02,
    skipped=0,
    loss=1.236,
    ce=0.9,
    prior=0.21,
    estep=0.13,
    coverage=0.954,
    clean_size=1.21,
    noisy_size=3.42,
    test_accuracy=0.9123,
)


def test_the_bar_shows_everything_where_there_is_room(bar):
    def act(progress):
        progress.on_batch(1000)
        progress.on_batch(1000)
        progress.on_batch(1000)
        progress.on_epoch(EPOCH)
        progress.bar.refresh()
        progress.on_batch(500, {"loss": 1.1, "wait": 0.05, "coverage": math.nan, "set_size": 2.5})

    first, *_, after, last = bar(act, 140)
    assert "epoch" not in first
    assert after.endswith(
        "img/s, epoch 3/40 loss 1.236 test 91.2% wait 3% ce 0.90 pri 0.21 kl 0.13 cov 95% unc 1.2/3.4"
    )
    assert "img/s, epoch 4/40 loss 1.100 test 91.2% wait 5% ce" in last


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_the_bar_keeps_to_the_terminal(bar, columns):
    def act(progress):
        progress.on_batch(3000)
        progress.on_epoch(EPOCH)

    drawn = bar(act, columns)
    assert max(map(len, drawn)) <= columns
    assert "epoch 3/40" in drawn[-1]
    figures = ("loss 1.236", "test 91.2%", "wait 3%", "cov 95%", "ce 0.90 pri 0.21 kl 0.13", "unc 1.2/3.4")
    room = {60: 0, 80: 2, 100: 4, 120: 5}[columns]
    assert all(figure in drawn[-1] for figure in figures[:room])
    for figure in figures:
        drawn[-1] = drawn[-1].replace(f" {figure}", "")
    assert drawn[-1].endswith(", epoch 3/40")  # each is there as a whole or not at all


def test_what_is_not_known_is_not_shown(bar):
    def act(progress):
        progress.on_batch(20, {"loss": 0.7, "ce": 0.7, "prior": 0.0, "estep": 0.0, "set_size": 1.5})
        progress.on_batch(20, {"coverage": math.nan})

    last = bar(act, 140)[-1]
    assert last.endswith("epoch 1/40 loss 0.700 set 1.5")
    assert "nan" not in last


def test_a_log_gets_a_line_now_and_then(bar):
    def act(progress):
        for _ in range(40):
            progress.on_batch(1000, {"loss": 0.5})
            progress.on_epoch(EPOCH)

    drawn = bar(act)
    assert len(drawn) <= 3
    assert "40.0k/40.0k" in drawn[-1]
    assert "unc 1.2/3.4" in drawn[-1]


def test_a_resumed_bar_starts_where_it_stopped(bar):
    def act(progress):
        assert progress.bar.n == 10_500
        progress.on_batch(100, {"loss": 0.5})

    drawn = bar(act, 100, start=10_500)
    assert " 26%|" in drawn[0]
    assert "epoch 11/40" in drawn[-1]


def test_no_bar(bar):
    assert bar(lambda progress: (progress.on_batch(5, {"loss": 1.0}), progress.on_epoch(EPOCH)), enabled=False) == []
