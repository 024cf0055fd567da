"""Data by name or file to a trained network."""

import numpy as np
import pytest
import torch

from fastgnl.convert import convert
from fastgnl.demo import DemoConfig, run
from fastgnl.errors import InputError
from fastgnl.formats.listing import UNKNOWN, Listing
from fastgnl.formats.synthetic import Web
from fastgnl.image_file import ImageFile
from fastgnl.task import check_data, make_task


def task(data, folder, test=None, noise="auto", rate=0.4):
    return make_task(str(data), test, noise, rate, 0, folder)


def test_synthetic_images_come_with_their_own_noise(tmp_path):
    made = task("web-400x10", tmp_path)
    assert isinstance(made.train, ImageFile)
    known = made.train.clean != UNKNOWN
    assert 0.85 < known.double().mean() < 0.95
    wrong = (made.train.labels != made.train.clean)[known]
    assert 0.22 < wrong.double().mean() < 0.38
    assert torch.equal(made.test.labels, made.test.clean)
    assert len(made.test.labels) == 80
    assert made.picture(3).shape == (64, 64, 3)
    assert made.train.output == (32, 32), "the small network gets small images"
    np.testing.assert_allclose(made.transition.sum(1), 1)
    before = (tmp_path / "web-400x10-train.beton").stat().st_mtime_ns
    task("web-400x10", tmp_path)
    assert (tmp_path / "web-400x10-train.beton").stat().st_mtime_ns == before, "converted once"


def test_noise_is_added_to_right_labels(tmp_path):
    made = task("digits", tmp_path, noise="symmetric", rate=0.3)
    assert 0.25 < (made.train.labels != made.train.clean).double().mean() < 0.35
    assert (tmp_path / "digits-train.symmetric-0.3-seed0.npz").exists()
    assert torch.equal(made.test.labels, made.test.clean)
    clean = task("digits", tmp_path, noise="none")
    assert torch.equal(clean.train.labels, clean.train.clean)


def test_embeddings(tmp_path, monkeypatch):
    folder = tmp_path / "newsgroups20"
    folder.mkdir()
    rng = np.random.default_rng(0)
    y = np.arange(200) % 20
    x = (rng.normal(size=(200, 8)) + y[:, None]).astype(np.float16)
    np.savez(folder / "embeddings.npz", train_x=x, train_y=y.astype("u1"), test_x=x[:40], test_y=y[:40].astype("u1"))
    (folder / "classes.json").write_text(str([f"group {i}" for i in range(20)]).replace("'", '"'))
    monkeypatch.setenv("FASTGNL_DATA", str(tmp_path))
    made = task("newsgroups20", tmp_path)
    np.testing.assert_allclose(made.train.x.mean(0), 0, atol=1e-5)
    assert 0.25 < (made.train.labels != made.train.clean).double().mean() < 0.55
    assert made.picture is None
    assert made.backbone()(made.train.x).shape == (200, 512)


def test_files_without_true_labels_train_and_get_their_page(tmp_path, capsys):
    for split, samples in (("train", 300), ("test", 60)):
        made = Web(samples=samples, num_classes=4, size=24, split=split).listing()
        clean = None if split == "train" else made.clean
        listing = Listing("web", "image", made.classes, made.labels, clean, made.names, made.read)
        convert(listing, tmp_path / f"{split}.beton", quiet=True)
    config = DemoConfig(
        str(tmp_path / "train.beton"), tmp_path / "test.beton", noise="none", epochs=2, out=tmp_path / "page"
    )
    results = run(config)
    assert results["gnl"].auroc is None
    assert len(results["gnl"].history) == 2
    page = (tmp_path / "page" / "index.html").read_text()
    assert "With doubtful labels" in page
    assert "Most suspicious labels" in page
    assert "How labels went wrong" not in page
    assert page.count('class="tile"') == 32
    assert "waited for data" in capsys.readouterr().out


def test_what_is_refused(tmp_path):
    convert(Web(samples=20, num_classes=4, size=8).listing(), tmp_path / "a.beton", quiet=True)
    convert(Web(samples=20, num_classes=5, size=8).listing(), tmp_path / "b.beton", quiet=True)
    arrays = Listing("f", "features", ("a", "b"), np.array([0, 1]), None, ["x", "y"], lambda i: np.ones(3, np.float32))
    convert(arrays, tmp_path / "f.beton", quiet=True)
    for data, test, sentence in (
        ("nothing", None, "data set is 'nothing', wanted one of digits"),
        (tmp_path / "a.beton", None, "without a test file, wanted one"),
        ("digits", tmp_path / "a.beton", "which has its own test samples, wanted none"),
        (tmp_path / "a.beton", tmp_path / "b.beton", "name different classes, wanted the same in both"),
        (tmp_path / "f.beton", tmp_path / "f.beton", "holds features, wanted images"),
        (tmp_path / "a.beton", tmp_path / "no.beton", "does not exist, wanted a .beton file"),
    ):
        with pytest.raises(InputError, match=sentence):
            check_data(str(data), test)
