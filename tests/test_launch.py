"""The launchers: their settings, their command line, what they refuse, their demos under torchrun."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from launcher_files import EXPERIMENTS, FOLDER
from PIL import Image
from safetensors.torch import load_file
from worker_launch import RUN

from fastgnl import cli
from fastgnl.beton_writer import BetonWriter, Blob
from fastgnl.convert import convert
from fastgnl.errors import InputError
from fastgnl.formats.embedded import Digits
from fastgnl.images import encode_jpeg
from fastgnl.launch import check_new, execute, parse
from fastgnl.miniature import PACKAGES
from fastgnl.model import load_model
from fastgnl.optimise import learning_rate, settled

SETTINGS = {
    # backbone, epochs, batch, lr, weight decay, last epoch before the drop, warm-up, direction
    "cifar": ("resnet34-cifar", 150, 128, 0.02, 5e-4, 100, 10, "y->x"),
    "cifar_n": ("resnet34-cifar", 120, 128, 0.02, 5e-4, 80, 10, "y->x"),
    "red_mini_imagenet": ("preact-resnet18", 150, 128, 0.02, 5e-4, 100, 10, "x->y"),
    "animal10n": ("vgg19-bn", 100, 128, 0.02, 1e-3, 50, 10, "y->x"),
    "clothing1m": ("resnet50", 80, 64, 2e-3, 1e-3, 40, 1, "y->x"),
    "webvision": ("inception-resnet-v2", 100, 64, 0.01, 1e-4, 80, 1, "x->y"),
    "news": ("bert-base-uncased", 10, 64, 1e-4, 0.0, None, 1, "y->x"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_published_settings(name):
    found = parse(EXPERIMENTS[name], ["--data", "somewhere"])
    backbone, epochs, batch, lr, decay, drop, warmup, direction = SETTINGS[name]
    assert (found.encoder if name == "news" else found.backbone) == backbone
    assert (found.batches.size, found.gnl.warmup_epochs, found.gnl.direction) == (batch, warmup, direction)
    assert (found.train.epochs, found.train.lr, found.train.weight_decay) == (epochs, lr, decay)
    assert (found.train.momentum, found.gnl.beta, found.draws) == (0.9, 0.9, 1)
    train = settled(found.train, given_alone=False)
    if drop is None:
        assert (train.optimizer, learning_rate(train, 5)) == ("adamw", lr / 2)
    else:
        rates = [learning_rate(train, epoch) for epoch in (drop - 1, drop)]
        assert rates == pytest.approx([lr, lr / 10])


def test_clothing1m_has_balanced_epochs_and_full_webvision_the_data_sets_sums():
    clothing = parse(EXPERIMENTS["clothing1m"], ["--data", "d"])
    assert (clothing.batches.order, clothing.batches.per_epoch, clothing.images.size) == ("balanced", 1000, 224)
    full = parse(EXPERIMENTS["webvision"], ["--data", "d", "--full"])
    assert (full.gnl.denominator, full.num_classes()) == ("dataset", 1000)
    assert parse(EXPERIMENTS["webvision"], ["--data", "d", "--full", "--gnl.denominator", "bank"]).gnl.mix == "auto"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_help_says_where_defaults_come_from(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        parse(EXPERIMENTS[name], ["--help"])
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert stop.value.code == 0
    epochs, lr = SETTINGS[name][1], SETTINGS[name][3]
    assert f"(default: {epochs}, the paper's)" in text
    assert f"(default: {lr}, the paper's)" in text
    assert "(default: 0, fastgnl's)" in text
    assert "--data demo comes with other defaults: " in text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cifar", ["--dataset", "cifar100"]),
        *(("cifar_n", ["--labels", labels]) for labels in ("worst", "aggregate", "random3", "noisy100")),
        ("red_mini_imagenet", ["--rate", "0.8"]),
        ("animal10n", []),
        ("clothing1m", []),
        ("webvision", []),
        ("webvision", ["--full"]),
        ("news", ["--dataset", "agnews"]),
        ("news", ["--encoder", "embeddings"]),
    ],
)
def test_the_commands_that_make_the_data_are_commands(name, options):
    for role, file in parse(EXPERIMENTS[name], ["--data", "d", *options]).files().items():
        words = file.command("DIR").split()
        conversion = cli.parse(words[1:]).conversion
        assert conversion.target == Path("DIR") / file.name
        if getattr(conversion.format, "split", None) is not None:
            assert ("train" in conversion.format.split) == (role == "train")


def test_given_options_come_before_the_demos(tmp_path):
    found = parse(EXPERIMENTS["webvision"], ["--data", "demo", "--train.lr", "0.5", "--out", str(tmp_path)])
    assert (found.train.lr, found.backbone, found.train.epochs) == (0.5, "small-cnn", 30)
    assert parse(EXPERIMENTS["news"], ["--data", "d", "--encoder", "embeddings"]).train.optimizer == "sgd"


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("webvision", [], "--data is missing, wanted --data DIR, a folder with train.beton and val.beton"),
        ("cifar", ["--data", "nowhere"], "fastgnl convert cifar10 SOURCE nowhere/cifar10-train.beton --split train"),
        ("cifar_n", ["--data", "."], "cifar10n-worst.beton does not exist, wanted a folder with cifar10n-worst.beton"),
        ("news", ["--data", __file__], "which is no folder, wanted a folder with train.beton and test.beton"),
        ("cifar", ["--data", "d", "--networks", "2", "--method", "ce"], "networks is 2 with method ce"),
        ("cifar", ["--data", "d", "--networks", "2", "--compare"], "networks is 2 with compare"),
        ("cifar", ["--data", "d", "--draws", "3"], "draws is 3 with transition_input 'logits', wanted 'sample'"),
        ("cifar", ["--data", "d", "--train.epochs", "5"], "gnl.warmup_epochs is 10 of 5 epochs, wanted fewer"),
        ("cifar", ["--data", "d", "--batches.per-epoch", "5"], "batches.per_epoch is 5 with batches.order 'random'"),
        ("cifar", ["--data", "d", "--batches.order", "bucketed"], "which is for texts"),
        ("cifar", ["--data", "d", "--backbone", "resnet3"], "the backbone is 'resnet3', wanted one of"),
        ("cifar", ["--data", "d", "--weights", "no.pth"], "weights is no.pth, which does not exist"),
        ("cifar", ["--data", "d", "--train.zero", "3"], "zero is 3, wanted 0, 1 or 2"),
        ("cifar", ["--resume", "here", "--seed", "1"], "--resume here was given with other options, wanted it alone"),
        ("cifar", ["--resume", "here"], "config.json does not exist, wanted the folder of a run that was begun"),
    ],
)
def test_refused_in_a_sentence(name, args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        parse(EXPERIMENTS[name], args).paths()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def digit_files(tmp_path_factory):
    """A data folder of the CIFAR-10N launcher that holds digits."""
    folder = tmp_path_factory.mktemp("data")
    convert(Digits("train").listing(), folder / "cifar10n-worst.beton", quiet=True)
    convert(Digits("test").listing(), folder / "cifar10-test.beton", quiet=True)
    return folder


def small(folder, run, *more, name="cifar_n"):
    options = "--backbone small-cnn --images.padding 0 --images.crop none --batches.reader builtin --train.epochs 2"
    args = ["--data", str(folder), "--out", str(run), *options.split(), "--gnl.warmup-epochs", "1", *map(str, more)]
    return parse(EXPERIMENTS[name], args)


def test_wrong_files_are_told_of_before_training(digit_files, tmp_path):
    for name, options, words in (
        ("cifar", ("--dataset", "cifar100"), "cifar100-train.beton has 10 classes, wanted 100 for cifar"),
        ("cifar_n", ("--backbone", "inception-resnet-v2"), "become 8 x 8 pixels, wanted at least 75 a side"),
    ):
        for split in ("train", "test"):
            (digit_files / f"cifar100-{split}.beton").write_bytes((digit_files / "cifar10-test.beton").read_bytes())
        experiment = small(digit_files, tmp_path / "run", *options, name=name)
        with pytest.raises(InputError, match=re.escape(words)):
            execute(experiment)
        check_new(experiment)  # the folder is free for the run as it was meant


def test_test_classes_must_be_those_of_training(digit_files, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "cifar10n-worst.beton").write_bytes((digit_files / "cifar10n-worst.beton").read_bytes())
    listing = replace(Digits("test").listing(), classes=tuple("01234567x9"))
    convert(listing, data / "cifar10-test.beton", quiet=True)
    with pytest.raises(InputError, match="calls class 8 'x', the training file '8', wanted the same names"):
        execute(small(data, tmp_path / "run"))


def test_two_networks_averages_export_and_resume(digit_files, tmp_path, capsys):
    """A finished run leaves its configuration, scores, weights and card; a second in its folder is refused."""
    run = tmp_path / "run"
    experiment = small(digit_files, run, "--networks", 2, "--train.ema", 0.9, "--train.epochs", 3)
    check_new(experiment)
    execute(experiment)
    shown = capsys.readouterr().out
    assert "train.epochs = 3" in shown
    assert "test network 2 top1" in shown
    found = json.loads((run / "results.json").read_text())
    assert set(found["last"]) >= {"epoch", "test top1", "test top5", "test network 1 top1", "test EMA top1"}
    assert found["best"]["test top1"] >= found["last"]["test top1"]
    with pytest.raises(InputError, match="holds a run already, wanted --resume"):
        check_new(experiment)
    again = parse(EXPERIMENTS["cifar_n"], ["--resume", str(run)])
    assert again == experiment
    before = (run / "model.safetensors").read_bytes()
    execute(again, resumed=True)
    assert (run / "model.safetensors").read_bytes() == before

    model = load_model(run)
    card = json.loads((run / "model.json").read_text())
    assert card["weights"] == "the moving average"
    assert card["accuracy"] == found
    assert card["experiment"]["train"]["epochs"] == 3
    test = Digits("test").listing()
    predicted = model.predict_proba([test.read(i) for i in range(len(test))]).argmax(1)
    assert (predicted == test.labels).mean() == pytest.approx(found["last"]["test EMA top1"], abs=1e-6)


def test_predict(digit_files, tmp_path, capsys):
    run = tmp_path / "run"
    execute(small(digit_files, run, "--method", "ce", "--train.epochs", 4))
    capsys.readouterr()
    test = Digits("test").listing()
    images = tmp_path / "images"
    images.mkdir()
    for i in range(40):
        Image.fromarray(test.read(i)).save(images / f"{i:02}.png")
    cli.main(["predict", str(run), str(images), "--out", str(tmp_path / "found.csv"), "--top", "2"])
    rows = [line.split(",") for line in (tmp_path / "found.csv").read_text().splitlines()]
    assert rows[0] == ["file", "class", "probability"]
    model = load_model(run)
    wanted = model.predict_proba([images / f"{i:02}.png" for i in range(40)])
    assert [row[1] for row in rows[1::2]] == [str(c) for c in wanted.argmax(1)]
    assert (wanted.argmax(1) == test.labels[:40]).mean() > 0.5
    (images / "40.png").write_bytes(b"no image")
    for path, words in ((images, "40.png cannot be read"), (tmp_path / "none", "none does not exist")):
        with pytest.raises(SystemExit):
            cli.main(["predict", str(run), str(path)])
        assert words in capsys.readouterr().err
    (run / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(run)


def test_embeddings_in_place_of_texts(tmp_path):
    """One hidden layer on files of features, made wrong by the launcher; the exported model takes raw features."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((4, 12))
    for split, count in (("train", 400), ("test", 100)):
        y = np.arange(count) % 4
        x = (3 * (centres[y] + 0.5 * rng.standard_normal((count, 12))) + 5).astype(np.float32)
        np.savez(tmp_path / f"{split}.npz", x=x, y=y)
        cli.main(["convert", "npz", str(tmp_path / f"{split}.npz"), str(tmp_path / f"{split}-embeddings.beton")])
    args = ["--data", tmp_path, "--out", tmp_path / "run", "--encoder", "embeddings", "--dataset", "agnews"]
    args += ["--noise.kind", "symmetric", "--noise.rate", "0.3", "--train.epochs", "12"]
    experiment = parse(EXPERIMENTS["news"], list(map(str, args)))
    execute(experiment)
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert found["last"]["test top1"] > 0.9
    predicted = load_model(tmp_path / "run").predict_proba(x).argmax(1)
    assert (predicted == y).mean() == pytest.approx(found["last"]["test top1"])


def test_a_config_of_another_launcher_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"launcher": "news", "options": {"data": "d"}}))
    with pytest.raises(InputError, match="is of news, wanted one of cifar"):
        parse(EXPERIMENTS["cifar"], ["--resume", str(tmp_path)])
    (tmp_path / "config.json").write_text(json.dumps({"launcher": "cifar", "options": {"data": "d"}}))
    with pytest.raises(InputError, match="has no option"):
        parse(EXPERIMENTS["cifar"], ["--resume", str(tmp_path)])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        check_new(parse(EXPERIMENTS["cifar"], ["--data", "demo", "--out", str(tmp_path)]))


def torchrun(*args, workers=2, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *map(str, args)], env=env, text=True, **options)


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """The demos of all launchers with an engine, run once: their folder, and what was printed."""
    found = {}

    def run(engine):
        pytest.importorskip("transformers", reason="transformers is not installed")
        if engine == "deepspeed":
            pytest.importorskip("deepspeed", reason="deepspeed is not installed")
        if engine not in found:
            folder = tmp_path_factory.mktemp(engine)
            worker = Path(__file__).with_name("worker_launch.py")
            done = torchrun(worker, engine, folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            out, err = done.communicate()
            assert done.returncode == 0, err
            found[engine] = folder, out
        return found[engine]

    return run


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_every_demo_runs_to_its_end(engine, demos):
    """With DeepSpeed one of images and one of texts; bench/demos.py runs all with both, killed and resumed too."""
    folder, out = demos(engine)
    names = RUN[engine]
    assert re.findall("done: (.*)", out) == list(names)
    for name in names:
        found = json.loads((folder / name / "results.json").read_text())
        assert found["last"]["epoch"] == 3
        assert load_file(folder / name / "model.safetensors")
        config = json.loads((folder / name / "config.json").read_text())
        assert (config["workers"], config["options"]["train"]["engine"]) == (2, engine)
    assert "imagenet top1" in json.loads((folder / "webvision" / "results.json").read_text())["last"]
    assert load_model(folder / "news").predict(["Return the nodes of a graph."])[0] in PACKAGES


def test_an_image_that_cannot_be_decoded_stops_the_run_with_a_sentence(tmp_path):
    """Of rank 1, in the middle of an epoch; files of people's own, so stored as they were found."""
    data = tmp_path / "data"
    data.mkdir()
    listing = Digits("train").listing()
    for name, count, bad in (("cifar10n-worst", 256, 201), ("cifar10-test", 64, None)):
        blobs = [Blob(encode_jpeg(listing.read(i), 90), 0, 8, 8) for i in range(count)]
        if bad is not None:
            blobs[bad] = Blob(b"\xff\xd8 no image", 0, 8, 8)
        with BetonWriter(data / f"{name}.beton", count, {}) as writer:
            writer.append(blobs)
            labels = np.asarray(listing.labels[:count])
            info = {"classes": listing.classes, "source": "test", "plan": {}, "skipped": []}
            writer.finish("image", None, labels, labels, list(listing.names[:count]), info)
    options = "--backbone small-cnn --images.padding 0 --images.crop none --train.epochs 3 --gnl.warmup-epochs 1"
    done = torchrun(
        FOLDER / "cifar_n.py", "--data", data, "--out", tmp_path / "run", "--batches.reader", "builtin",
        "--batches.size", 32, *options.split(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    _, err = done.communicate()
    assert done.returncode != 0
    lines = [line for line in err.splitlines() if "cannot be decoded" in line]
    assert len(lines) == 1, err
    assert lines[0].startswith("fastgnl: ")
    assert "record 201" in lines[0]
