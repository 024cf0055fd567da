"""The command line, used as a person would: what it prints, writes and refuses."""

import csv
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix, save_npz

from fastgnl.cli import main
from fastgnl.files import written
from fastgnl.kernels import backends
from fastgnl.noise import symmetric


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def fastgnl(monkeypatch, capfd):
    """The command, run in a folder."""

    def run(*args, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            main(list(map(str, args)))
        except SystemExit as stop:
            code = stop.code
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with features, string labels of which a fifth is wrong, and spoilt files."""
    folder = tmp_path_factory.mktemp("audit")
    g = np.random.default_rng(0)
    clean = np.arange(600) % 4
    X = g.standard_normal((600, 10)).astype(np.float32) + 3 * np.eye(10, dtype=np.float32)[clean]
    names = np.array(["ash", "<b>elm</b>", "fir", "oak"])
    given = names[symmetric(clean, 0.2, 0).labels]
    np.save(folder / "X.npy", X)
    np.save(folder / "y.npy", given)
    np.save(folder / "clean.npy", names[clean])
    (folder / "y.txt").write_text("\n".join(given) + "\n")
    save_npz(folder / "X.npz", csr_matrix(X))
    np.save(folder / "short.npy", given[:5])
    np.save(folder / "float.npy", clean.astype(float))
    np.save(folder / "one.npy", clean * 0)
    np.save(folder / "flat.npy", X[:, 0])
    np.save(folder / "words.npy", given[:, None])
    np.save(folder / "objects.npy", np.array([{}] * 600, dtype=object))
    np.save(folder / "nan.npy", np.where(X > 4, np.nan, X))
    np.save(folder / "complex.npy", X * 1j)
    np.save(folder / "images.npy", X.reshape(600, 2, 5))
    np.save(folder / "empty.npy", X[:0, :4])
    np.save(folder / "big.npy", X.astype(float) * np.where(np.arange(600) < 300, 1e200, 1e-200)[:, None])
    np.save(folder / "bytes.npy", np.char.encode(given, "utf-8"))
    (folder / "folder.csv").mkdir()
    (folder / "page.html").mkdir()
    (folder / "junk.npy").write_bytes(b"not an array")
    np.savez(folder / "archive.npz", X)
    archive = (folder / "archive.npz").read_bytes()
    (folder / "archive.npy").write_bytes(archive)
    (folder / "cut.npz").write_bytes(archive[:100])
    (folder / "cut.npy").write_bytes((folder / "X.npy").read_bytes()[:-8])
    return folder


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


class Page(HTMLParser):
    """Collects what a page would load and the text it shows."""

    def __init__(self, path):
        super().__init__()
        self.links, self.shown = [], ""
        self.source = path.read_text()
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.shown += data

    @property
    def self_contained(self):
        return all(link.startswith(("data:", "#")) for link in self.links) and "@import" not in self.source


def test_audit_finds_the_wrong_labels(fastgnl, data):
    done = fastgnl("audit", "X.npy", "y.npy", "--out", "found/suspects.csv", cwd=data)
    assert done.code == 0, done.err
    assert "labels look wrong" in done.out
    rows = read(data / "found/suspects.csv")
    given, clean = np.load(data / "y.npy"), np.load(data / "clean.npy")
    index = np.array([int(row["index"]) for row in rows])
    assert [int(row["rank"]) for row in rows] == list(range(1, len(rows) + 1))
    assert (given[index] != clean[index]).mean() > 0.85
    assert np.isin(np.flatnonzero(given != clean), index).mean() > 0.85
    assert np.mean([row["suggested_label"] == clean[int(row["index"])] for row in rows]) > 0.85
    assert all(row["given_label"] == given[int(row["index"])] for row in rows)
    assert all(row["given_label"] != row["suggested_label"] for row in rows)
    probabilities = [float(row["noise_probability"]) for row in rows]
    assert probabilities == sorted(probabilities, reverse=True)
    assert min(probabilities) >= 0.5
    page = Page(data / "found/suspects.html")
    assert f"{len(rows):,} of 600 labels look wrong" in page.shown
    assert "<b>elm</b>" in page.shown  # a label is text, not markup
    assert page.self_contained
    assert sorted(path.name for path in (data / "found").iterdir()) == ["suspects.csv", "suspects.html"]


def test_audit_of_sparse_features_and_a_text_file_of_labels(fastgnl, data):
    done = fastgnl("audit", "X.npz", "y.txt", "--out", "sparse.csv", "--threshold", 0.9, cwd=data)
    assert done.code == 0, done.err
    assert len(read(data / "sparse.csv")) > 50


def test_audit_twice_gives_the_same_list(fastgnl, data):
    for name, labels in (("a.csv", "y.npy"), ("b.csv", "bytes.npy")):
        assert fastgnl("audit", "X.npy", labels, "--out", name, cwd=data).code == 0
    assert (data / "a.csv").read_bytes() == (data / "b.csv").read_bytes()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("nope.npy", "y.npy"), "nope.npy does not exist"),
        (("X.npy", "short.npy"), r"short.npy has shape \(5,\), wanted \(600,\)"),
        (("X.npy", "float.npy"), "float.npy holds float64, wanted whole numbers or strings"),
        (("X.npy", "one.npy"), "one.npy holds one class, wanted at least 2"),
        (("flat.npy", "y.npy"), r"flat.npy has shape \(600,\), wanted \(samples, features\)"),
        (("words.npy", "y.npy"), "wanted real numbers"),
        (("complex.npy", "y.npy"), "wanted real numbers"),
        (("images.npy", "y.npy"), r"images.npy has shape \(600, 2, 5\), wanted \(samples, features\)"),
        (("empty.npy", "y.npy"), r"empty.npy has shape \(0, 4\), wanted \(samples, features\)"),
        (("big.npy", "y.npy"), r"X holds a value of size \d.\de\+200, wanted at most"),
        (("X.npy", "y.npy", "--seed", "-1"), "seed is -1, wanted a whole number"),
        (("X.npy", "y.npy", "--out", "folder.csv"), "cannot write folder.csv: it is a folder"),
        (("X.npy", "y.npy", "--out", "page.csv"), "cannot write page.html: it is a folder"),
        (("nan.npy", "y.npy"), "nan.npy holds NaN or infinity, wanted finite features"),
        (("X.npy", "objects.npy"), "objects.npy cannot be read as plain numbers or strings"),
        (("junk.npy", "y.npy"), "junk.npy cannot be read as plain numbers or strings"),
        (("archive.npz", "y.npy"), "archive.npz cannot be read as plain numbers or strings"),
        (("archive.npy", "y.npy"), "archive.npy cannot be read as plain numbers or strings"),
        (("cut.npz", "y.npy"), "cut.npz cannot be read as plain numbers or strings"),
        (("cut.npy", "y.npy"), "cut.npy cannot be read as plain numbers or strings"),
        (("X.npy", "y.npy", "--out", "s.txt"), "out is s.txt, wanted a name that ends in .csv"),
        (("X.npy", "y.npy", "--threshold", "7"), "threshold is 7.0, wanted a number from 0 to 1"),
        (("X.npy", "y.npy", "--out", "X.npy/s.csv"), "cannot write X.npy/s.csv"),
    ],
)
def test_audit_refuses_bad_input_in_one_sentence(fastgnl, data, args, sentence):
    before = sorted(path.name for path in data.iterdir())
    done = fastgnl("audit", *args, cwd=data)
    assert done.code == 2
    assert re.search(sentence, done.err), done.err
    assert "Traceback" not in done.err
    assert sorted(path.name for path in data.iterdir()) == before


def test_a_file_from_before_survives_a_failure(tmp_path):
    kept = tmp_path / "kept.csv"
    kept.write_text("earlier work")
    kept.chmod(0o600)
    with pytest.raises(ZeroDivisionError), written(kept) as file:
        file.write(f"half {1 / 0}")
    assert kept.read_text() == "earlier work"
    assert list(tmp_path.iterdir()) == [kept]
    link = tmp_path / "link.csv"
    link.symlink_to(kept)
    with written(link) as file:
        file.write("whole")
    assert kept.read_text() == "whole"
    assert link.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_doctor(fastgnl, tmp_path):
    done = fastgnl("doctor", cwd=tmp_path)
    assert done.code == 0, done.err
    for word in ("torch", "triton", "ffcv", "deepspeed", "speed this machine up"):
        assert word in done.out
    chosen, obstacle = backends.choose("cuda" if torch.cuda.is_available() else "cpu")
    assert f"objective backend: {chosen} (" in done.out
    assert obstacle is None or obstacle in done.out
    assert "reference: works, " in done.out


def demo(*args, cwd):
    """The command in a process of its own: it becomes torchrun."""
    command = [sys.executable, "-c", "from fastgnl.cli import main; main()", "demo", *map(str, args)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_demo_under_torchrun(tmp_path):
    """The real demo with two workers, cut to four epochs."""
    process = demo("--epochs", 4, "--out", "page", cwd=tmp_path)
    done = Done(0, *process.communicate())
    assert process.returncode == 0, done.err
    table = [line.split() for line in done.out.splitlines() if line.startswith(("cross-entropy", "GNL"))]
    assert [row[0] for row in table] == ["cross-entropy", "GNL"]
    assert all(row[1].endswith("%") for row in table)
    assert "epoch 4/4" in done.err
    page = Page(tmp_path / "page/index.html")
    assert page.self_contained
    assert page.source.count("<svg") == 3
    assert page.source.count('class="tile"') == 32
    assert "2 worker(s)" in page.shown
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == ["ce", "gnl", "index.html"]
    for method in ("ce", "gnl"):
        kept = sorted(path.name for path in (tmp_path / "page" / method).iterdir())
        assert {"checkpoints", "metrics.jsonl"} <= set(kept)


def test_a_stopped_demo_leaves_no_worker_behind(tmp_path):
    process = demo("--out", "page", cwd=tmp_path)
    for line in process.stderr:  # the bar: the workers are training
        if "img/s" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    command = "fastgnl.demo --data digits --noise auto --rate 0.4 --epochs 40 --seed 0 --out page"
    running = [p for p in Path("/proc").glob("[0-9]*/cmdline") if command in read_quietly(p)]
    assert running == []


def read_quietly(path):
    try:
        return path.read_text().replace("\0", " ")
    except OSError:  # it ended meanwhile
        return ""


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("demo", "--seed", str(2**32)), "seed is 4294967296, wanted one below 2**32"),
        (("demo", "--out", "/proc/nowhere"), "cannot write /proc/nowhere/index.html"),
        (("demo", "--data", "nothing"), "data set is 'nothing', wanted one of digits"),
        (("demo", "--data", "photos.beton"), "data is the file photos.beton without a test file, wanted one"),
        (("demo", "--rate", "2"), "rate is 2.0, wanted a number from 0.01 to 0.9"),
        (("demo", "--workers", "0"), "workers is 0, wanted a whole number of at least 1"),
        (("demo", "--epochs", "1"), "epochs is 1, wanted a whole number of at least 2"),
        (("train",), "train"),
        ((), "demo"),
    ],
)
def test_bad_commands(fastgnl, tmp_path, args, sentence):
    done = fastgnl(*args, cwd=tmp_path)
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []
