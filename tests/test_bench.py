"""Every benchmark runs at its smallest size and writes its rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastgnl.errors import InputError

BENCH = Path(__file__).parents[1] / "bench"


def run(folder, script, *args, **env):
    command = [sys.executable, str(BENCH / script), *map(str, args)]
    return subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("script", "args", "columns"),
    [
        (
            "accuracy.py",
            ("--problems", "digits IDN 40%", "--methods", "ce", "gnl", "--seeds", 1, "--epochs", 2),
            {"problem", "method", "last epoch"},
        ),
        (
            "training_time.py",
            (
                *("--backbones", "small-cnn", "--small-steps", 1, "--batch", 16),
                *("--rounds", 1, "--slow-rounds", 1, "--threads", 1),
            ),
            {"backbone", "method", "ratio_to_ce", "paper_ratio"},
        ),
        ("noise_filter.py", ("--samples", 2000, "--repeats", 1), {"samples", "ratio"}),
        ("instance_noise.py", ("--samples", 200, "--features", 20), {"classes", "seconds"}),
        ("kernels.py", ("--shapes", 2, 10001, "--no-threads", "--no-memory"), {"backend", "against", "ratio"}),
        (
            "loader.py",
            ("--data", "digits", "--epochs", 1),
            {"data", "loader", "images_per_second", "ratio_to_dataloader"},
        ),
        (
            "scaling.py",
            ("--batch", 8, "--steps", 2, "--epochs", 2, "--rounds", 1),
            {"engine", "ratio, equal rows each"},
        ),
        ("npc.py", ("--data", "digits", "--seeds", 1, "--epochs", 2), {"data", "classifier", "alone", "with NPC"}),
        ("faults.py", ("--runs", 1, "--kills", 1), {"kills", "recovered"}),
        (
            "label_state.py",
            ("--data", "webvision", "--samples", 2000, "--batch-size", 8, "--steps", 2),
            {"bytes a sample", "peak, GB", "met"},
        ),
    ],
)
def test_smallest_size(tmp_path, script, args, columns):
    out = tmp_path / "rows.json"
    done = run(tmp_path, script, *args, "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert rows
    assert all(columns <= row.keys() for row in rows)
    assert out.with_suffix(".svg").read_text().startswith("<svg")
    assert "- commit: " in out.with_suffix(".md").read_text()
    for column in columns:
        assert column in done.stdout


def test_settings_that_are_noted_are_not_run_again(tmp_path):
    """bench/large_label_sets.py: one real run, and one of another schedule that was noted before there was a choice."""
    found, out = tmp_path / "found.jsonl", tmp_path / "rows.json"
    options = ("--data", "digits", "--settings", "paper", "--batch", 720, "--jobs", 1, "--found", found, "--json", out)
    assert run(tmp_path, "large_label_sets.py", *options, "--lr-warmup", 1).returncode == 0
    (row,) = json.loads(out.read_text())
    assert 0 < row["last epoch"] <= row["best epoch"]
    noted = json.loads(found.read_text())
    assert noted.pop("lr_warmup") == 1
    lines = found.read_text() + json.dumps(noted | {"last": 12.5}) + "\n"
    found.write_text(lines)
    assert run(tmp_path, "large_label_sets.py", *options).returncode == 0
    assert json.loads(out.read_text())[0]["last epoch"] == 12.5
    assert found.read_text() == lines


def test_kernel_report(tmp_path):
    """Of one shape; the traffic only where the emulator is."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = run(tmp_path, "kernel_report.py", "--shapes", 8, 10, "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("8 x 10")]
    assert {(line[3], line[4]) for line in lines} >= {("live", "column_sums"), ("live", "rows"), ("given", "rows")}
    assert {line[5] for line in lines} == {"80", "86", "90", "100"}
    assert {line[7] for line in lines} == {"0"}
    if "ptxrun is not here" not in done.stdout:
        live, given = json.loads((tmp_path / "rows.json").read_text())
        assert (live["launches"], given["launches"]) == (3, 1)
        assert 1 <= given["of minimum"] < 1.2 < live["of minimum"]


def test_every_demo_whole_and_killed(tmp_path):
    """bench/demos.py: one launcher with one engine."""
    options = ("--launchers", "webvision", "--engines", "ddp", "--options=--train.epochs 2 --gnl.warmup-epochs 1")
    done = run(tmp_path, "demos.py", *options, "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["launcher"], row["engine"], row["same bits"]) == ("webvision", "ddp", "yes")


@pytest.mark.skipif("FASTGNL_DATA" not in os.environ, reason="FASTGNL_DATA is not set: no real data sets here")
def test_end_to_end(tmp_path, monkeypatch, capsys):
    """Of a few images; where a run fails, nothing is compared."""
    begin = ("end_to_end.py", "--data", "cifar10n-worst", "--samples", 64, "--json", tmp_path / "rows.json")
    done = run(tmp_path, *begin, "--options=--train.epochs 1 --gnl.warmup-epochs 0 --train.precision float32")
    assert done.returncode == 0, done.stderr
    ce, gnl = json.loads((tmp_path / "rows.json").read_text())
    assert gnl["GNL - CE, last"] == round(gnl["last"] - ce["last"], 2)

    monkeypatch.syspath_prepend(BENCH)
    import end_to_end

    (tmp_path / "cifar_n.py").write_text("raise SystemExit('-gnl-' in __import__('sys').argv[-1])")
    monkeypatch.setattr(end_to_end, "LAUNCHERS", tmp_path)
    config = {"data": ("cifar10n-worst",), "samples": 64, "work": tmp_path / "runs/end-to-end"}
    with pytest.raises(InputError, match=r"--resume .*-gnl-seed0 failed, wanted it to end well"):
        end_to_end.main(end_to_end.Config(**config, json=tmp_path / "none.json"))
    assert "GNL - CE" not in capsys.readouterr().out
    assert not (tmp_path / "none.json").exists()


def test_no_ratio_where_a_side_failed(tmp_path, monkeypatch, capsys):
    """bench/training_time.py: GNL stops in its third epoch, the first that is timed."""
    monkeypatch.syspath_prepend(BENCH)
    import training_time

    def failing(name, backbone, setting):
        net, objective = make_method(name, backbone, setting)
        if name == "gnl":
            end = objective.end_epoch
            monkeypatch.setattr(objective, "end_epoch", lambda *of: 1 / 0 if int(objective.epoch) == 2 else end(*of))
        return net, objective

    monkeypatch.chdir(tmp_path)
    make_method = training_time.make_method
    monkeypatch.setattr(training_time, "make_method", failing)
    sizes = {"backbones": ("small-cnn",), "small_steps": 1, "batch": 16, "rounds": 1, "threads": 1}
    with pytest.raises(ZeroDivisionError):
        training_time.main(training_time.Config(methods=("ce", "gnl"), **sizes, json=tmp_path / "rows.json"))
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "rows.json").exists()


def test_missing_data_is_said_in_one_sentence(tmp_path):
    done = run(tmp_path, "npc.py", "--data", "newsgroups20", "--seeds", 1, FASTGNL_DATA="")
    assert done.returncode == 2
    assert "FASTGNL_DATA is '', wanted the folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif("FASTGNL_DATA" not in os.environ, reason="FASTGNL_DATA is not set: no real data sets here")
@pytest.mark.parametrize("name", ["newsgroups20", "newsgroups20-sn", "newsgroups20-asn"])
def test_real_data_loads(name):
    sys.path.insert(0, str(BENCH))
    try:
        from npc import LOADERS
    finally:
        sys.path.pop(0)
    d = LOADERS[name](0)
    assert len(d.x) == len(d.given) == len(d.clean)
    assert 0.3 < (d.given != d.clean).mean() < 0.5
