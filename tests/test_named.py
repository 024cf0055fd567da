"""Data sets by name: a miniature FASTGNL_DATA in the true layout, and the true one where it is at hand."""

import gzip
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastgnl import named as module
from fastgnl.errors import InputError
from fastgnl.formats.listing import UNKNOWN, Listing
from fastgnl.named import NAMES, data_folder, features, named

FILES = [name for name in NAMES if name not in ("digits", "web-<N>x<C>")]
CLEAN, WORST, AGGREGATE, TEST = [0, 9, 4, 1], [0, 3, 3, 1], [0, 9, 3, 1], [2, 5]
RNG = np.random.default_rng(0)


def jpeg(level):
    file = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), level, np.uint8)).save(file, "JPEG")
    return file.getvalue()


def write_jpegs(folder, part, levels, **labels):
    images = [jpeg(level) for level in levels]
    (folder / f"{part}.jpegs").write_bytes(b"".join(images))
    offsets = np.cumsum([0, *map(len, images)])
    arrays = {name: np.array(values, np.uint8) for name, values in labels.items()}
    np.savez(folder / f"{part}_labels.npz", offsets=offsets, **arrays)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGNL_DATA", str(tmp_path))
    cifar, news = tmp_path / "cifar10", tmp_path / "newsgroups20"
    cifar.mkdir()
    news.mkdir()
    write_jpegs(cifar, "train", [10, 60, 110, 160], clean=CLEAN, human_worst=WORST, human_aggregate=AGGREGATE)
    write_jpegs(cifar, "test", [200, 250], clean=TEST)
    half = {name: RNG.random((n, 3)).astype(np.float16) for name, n in (("train_x", 4), ("test_x", 2))}
    np.savez(cifar / "embeddings.npz", **half)
    (news / "classes.json").write_text('["sci.space", "alt.atheism"]')
    for part, labels in (("train", [1, 0, 1, 0]), ("test", [0, 1])):
        lines = [json.dumps({"text": f"{part} {i}", "label": label}) for i, label in enumerate(labels)]
        (news / f"{part}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    labels = {"train_y": np.array([1, 0, 1, 0], np.uint8), "test_y": np.array([0, 1], np.uint8)}
    np.savez(news / "embeddings.npz", **half, **labels)
    np.savez(
        tmp_path / "omniglot242.npz",
        train_x=np.arange(3 * 32 * 32, dtype=np.uint64).astype(np.uint8).reshape(3, 32, 32),
        train_y=np.array([0, 1, 1], np.int16),
        test_x=np.full((1, 32, 32), 7, np.uint8),
        test_y=np.array([1], np.int16),
        classes=np.array(["Balinese/character01", "Balinese/character02"]),
    )
    return tmp_path


def test_every_name_but_the_pattern_has_a_loader():
    assert set(module.LOADERS) == set(FILES)


@pytest.mark.parametrize(
    ("name", "given", "noise"),
    [("cifar10", CLEAN, False), ("cifar10n-worst", WORST, True), ("cifar10n-aggregate", AGGREGATE, True)],
)
def test_cifar10_images_and_features_with_each_kind_of_labels(folder, name, given, noise):
    for data in (named(name), named(f"{name}-embeddings")):
        assert data.human_noise is noise
        assert data.train.labels.tolist() == given
        assert data.train.clean.tolist() == CLEAN
        assert data.test.labels.tolist() == data.test.clean.tolist() == TEST
        assert data.train.classes[9] == "truck"
        assert len(data.train.classes) == 10
        assert data.train.labels.dtype == data.train.clean.dtype == np.int64


def test_cifar10_images_are_the_bytes_of_their_files(folder):
    train, test, _ = named("cifar10")
    assert train.kind == "image"
    for listing, levels in ((train, [10, 60, 110, 160]), (test, [200, 250])):
        for i, level in enumerate(levels):
            content = listing.read(i)
            assert type(content) is bytes
            pixels = np.asarray(Image.open(io.BytesIO(content)))
            assert pixels.shape == (32, 32, 3)
            assert abs(pixels.mean() - level) < 2
    assert train.names[2] == "train.jpegs:2"


@pytest.mark.parametrize("name", ["cifar10-embeddings", "newsgroups20"])
def test_features_are_float32_and_come_all_at_once(folder, name):
    train, test, noise = named(name)
    path = folder / name.removesuffix("-embeddings") / "embeddings.npz"
    with np.load(path) as file:
        for listing, key in ((train, "train_x"), (test, "test_x")):
            assert listing.kind == "features"
            assert listing.read(1).dtype == np.float32
            assert features(listing).dtype == np.float32
            assert np.array_equal(features(listing), file[key].astype(np.float32))
            assert np.array_equal(features(listing)[1], listing.read(1))
    assert not noise
    assert np.shares_memory(features(train), train.read(0))


def test_features_of_any_reader(folder):
    labels = np.array([0, 1])
    listing = Listing("x", "features", ("a", "b"), labels, None, ["0", "1"], lambda i: np.full(3, i, np.float32))
    assert features(listing).tolist() == [[0, 0, 0], [1, 1, 1]]
    with pytest.raises(InputError, match="holds image, wanted features"):
        features(named("cifar10").train)


def test_newsgroups20_as_features_and_text_agree(folder):
    x, text = named("newsgroups20"), named("newsgroups20-text")
    assert text.train.kind == "text"
    assert text.train.read(2) == "train 2"
    assert text.test.read(1) == "test 1"
    for data in (x, text):
        assert data.train.classes == ("sci.space", "alt.atheism")  # the file's order, not a sorted one
        assert data.train.labels.tolist() == data.train.clean.tolist() == [1, 0, 1, 0]
        assert data.test.labels.tolist() == data.test.clean.tolist() == [0, 1]
        assert not data.human_noise


def test_omniglot_is_grey_in_three_channels(folder):
    train, test, noise = named("omniglot242")
    assert train.kind == "image"
    assert train.classes[1] == "Balinese/character02"
    assert train.labels.tolist() == train.clean.tolist() == [0, 1, 1]
    image = train.read(1)
    assert image.shape == (32, 32, 3)
    assert image.dtype == np.uint8
    assert image[0, 5].tolist() == [5, 5, 5]
    assert (test.read(0) == 7).all()
    assert not noise


def test_digits_and_web_need_no_folder(monkeypatch):
    monkeypatch.delenv("FASTGNL_DATA", raising=False)
    digits = named("digits", seed=1)
    assert (len(digits.train), len(digits.test), digits.human_noise) == (1437, 360, False)
    assert list(digits.train.names) != list(named("digits", seed=2).train.names)
    web = named("web-1000x50", seed=1)
    assert (len(web.train), len(web.test), len(web.train.classes), web.human_noise) == (1000, 200, 50, True)
    assert (web.train.clean == UNKNOWN).any()
    assert np.array_equal(web.test.labels, web.test.clean)
    assert not np.array_equal(web.train.labels, named("web-1000x50", seed=2).train.labels)
    assert len(named("web-300000x21841").test) == 50_000


@pytest.mark.parametrize("name", ["cifar", "web-10", "web-10x5x2", "web-<N>x<C>", "digits-embeddings", ""])
def test_an_unknown_name_lists_those_that_exist(name):
    with pytest.raises(InputError) as error:
        named(name)
    assert repr(name) in str(error.value)
    for known in NAMES:
        assert known in str(error.value)


def test_web_names_must_make_sense():
    with pytest.raises(InputError, match="samples is 0, wanted"):
        named("web-0x5")
    with pytest.raises(InputError, match="num_classes is 1, wanted"):
        named("web-5x1")


@pytest.mark.parametrize("value", [None, "", "/nowhere/at/all"])
def test_the_folder_must_be_there(monkeypatch, value):
    monkeypatch.delenv("FASTGNL_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("FASTGNL_DATA", value)
    for call in (data_folder, lambda: named("cifar10")):
        with pytest.raises(InputError) as error:
            call()
        assert f"FASTGNL_DATA is {value!r}, wanted the folder that holds" in str(error.value)


@pytest.mark.parametrize("name", FILES)
def test_an_empty_folder_is_refused_with_the_missing_file(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FASTGNL_DATA", str(tmp_path))
    with pytest.raises(InputError, match="does not exist, wanted") as error:
        named(name)
    assert str(tmp_path) in str(error.value)


def test_damaged_files_are_refused(folder):
    jpegs = folder / "cifar10" / "train.jpegs"
    jpegs.write_bytes(jpegs.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"train.jpegs has \d+ bytes, wanted as many as the offsets"):
        named("cifar10")
    np.savez(folder / "cifar10" / "train_labels.npz", offsets=[0], clean=CLEAN)
    with pytest.raises(InputError, match=r"train_labels.npz cannot be read .*, wanted the arrays offsets, human_worst"):
        named("cifar10n-worst")
    (folder / "omniglot242.npz").write_bytes(b"PK not a zip")
    with pytest.raises(InputError, match=r"omniglot242.npz cannot be read"):
        named("omniglot242")
    np.savez(folder / "newsgroups20" / "embeddings.npz", train_x=[0.0], train_y=[1], test_x=[[0.0]], test_y=[0])
    with pytest.raises(InputError, match=r"has train_x of shape \(1,\), wanted \(samples, features\)"):
        named("newsgroups20")
    np.savez(folder / "newsgroups20" / "embeddings.npz", train_x=[[0.0]], train_y=[1, 0], test_x=[[0.0]], test_y=[0])
    with pytest.raises(InputError, match="has 1 samples and 2 labels"):
        named("newsgroups20")


@pytest.mark.skipif("FASTGNL_DATA" not in os.environ, reason="FASTGNL_DATA is not set: no real data sets here")
def test_the_real_folder():
    data = {name: named(name) for name in FILES}
    sizes = {name: (len(d.train), len(d.test), len(d.train.classes)) for name, d in data.items()}
    cifar, news = (50_000, 10_000, 10), (11_314, 7_532, 20)
    assert sizes == {
        name: news if "news" in name else (3_630, 1_210, 242) if "omni" in name else cifar for name in FILES
    }
    wrong = {name: round(100 * float((d.train.labels != d.train.clean).mean()), 1) for name, d in data.items()}
    assert {name: share for name, share in wrong.items() if share} == {
        "cifar10n-worst": 40.2,
        "cifar10n-worst-embeddings": 40.2,
        "cifar10n-aggregate": 9.0,
        "cifar10n-aggregate-embeddings": 9.0,
    }
    assert {name for name, d in data.items() if d.human_noise} == {name for name, share in wrong.items() if share}
    for listing in data["cifar10"][:2]:
        for i in (0, 4321, len(listing) - 1):
            assert Image.open(io.BytesIO(listing.read(i))).size == (32, 32)
    assert features(data["newsgroups20"].train).shape == (11_314, 384)
    assert features(data["cifar10-embeddings"].test).shape == (10_000, 256)
    text = data["newsgroups20-text"]
    assert np.array_equal(text.train.labels, data["newsgroups20"].train.labels)
    assert "Atheist Resources" in text.train.read(0)
    assert data["omniglot242"].train.read(0).shape == (32, 32, 3)
    assert Path(text.train.source).name == "train.jsonl.gz"
