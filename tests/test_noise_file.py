"""Noise for files: the same as for arrays, streamed, saved beside the data."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from fastgnl.beton import Beton
from fastgnl.cli import main
from fastgnl.convert import convert
from fastgnl.errors import InputError
from fastgnl.formats.listing import Listing
from fastgnl.noise import CIFAR10_PAIRS, asymmetric, cifar100_pairs, class_matrix, instance_dependent, symmetric
from fastgnl.noise_file import NoiseConfig, load_noise, make_noise, rows_path

N, C = 900, 10
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (N, 6, 6, 3), dtype=np.uint8)
CLEAN = RNG.integers(C, size=N)


def listing(clean=CLEAN, classes=C, **options):
    names = [str(i) for i in range(N)]
    fields = {"kind": "image", "labels": (CLEAN + 1) % classes, "clean": clean, "read": IMAGES.__getitem__} | options
    return Listing(source="test", classes=tuple(f"c{i}" for i in range(classes)), names=names, **fields)


@pytest.fixture
def data(tmp_path):
    convert(listing(), tmp_path / "data.beton", quiet=True)
    return tmp_path / "data.beton"


def saved(data, **options):
    return load_noise(make_noise(NoiseConfig(data, **options), quiet=True), Beton(data))


def test_instance_noise_is_that_of_the_arrays(data, monkeypatch):
    flat = IMAGES.reshape(N, -1) / np.float32(255)
    wanted = instance_dependent(flat, CLEAN, 0.3, seed=4, num_classes=C)
    found = saved(data, rate=0.3, seed=4)
    np.testing.assert_array_equal(found.labels, wanted.labels)
    np.testing.assert_allclose(found.rows, wanted.transition, atol=1e-6)
    np.testing.assert_allclose(found.transition, class_matrix(wanted.transition, CLEAN, C))
    assert found.described | {"rate": 0.3, "seed": 4, "kind": "instance"} == found.described
    # The same when it is read a few samples at a time (products may round otherwise: a label in a thousand).
    monkeypatch.setattr("fastgnl.noise.CHUNK", 7)
    assert (saved(data, rate=0.3, seed=4).labels != wanted.labels).mean() < 0.005


def test_class_noise_and_its_pairs(data):
    np.testing.assert_array_equal(saved(data, kind="symmetric", seed=2).labels, symmetric(CLEAN, 0.4, 2, C).labels)
    paired = saved(data, kind="asymmetric", pairs="cifar10", rate=0.5)
    np.testing.assert_array_equal(paired.labels, asymmetric(CLEAN, 0.5, 0, C, CIFAR10_PAIRS).labels)
    assert paired.transition[9, 1] == 0.5
    assert paired.transition[0, 0] == 1
    assert paired.rows is None


def test_cifar100_stays_within_its_superclasses():
    pairs = cifar100_pairs()
    assert sorted(pairs) == sorted(pairs.values()) == list(range(100))
    for first in pairs:
        chain = [first]
        while len(chain) < 6:
            chain.append(pairs[chain[-1]])
        assert chain[5] == first
        assert len(set(chain)) == 5
    # beaver, dolphin, otter, seal, whale: the aquatic mammals
    assert [pairs[c] for c in (4, 30, 55, 72, 95)] == [30, 55, 72, 95, 4]


def test_larger_images_text_and_features(tmp_path):
    def png(i):
        buffer = io.BytesIO()
        Image.fromarray(IMAGES[i]).resize((40 + i % 3, 50)).save(buffer, "PNG")
        return buffer.getvalue()

    features = RNG.random((N, 5), dtype=np.float32)
    for kind, read in (
        ("image", png),
        ("text", lambda i: f"word{i % 7} other{CLEAN[i]}"),
        ("features", features.__getitem__),
    ):
        path = tmp_path / f"{kind}.beton"
        convert(listing(kind=kind, read=read), path, quiet=True)
        noise = saved(path, rate=0.4)
        assert 0.33 < (noise.labels != CLEAN).mean() < 0.47
        np.testing.assert_allclose(noise.rows.sum(1), 1, atol=1e-5)
    assert (noise.labels == instance_dependent(features, CLEAN, 0.4, 0, C).labels).all()


def test_given_labels_count_as_true_where_none_is_known(tmp_path):
    convert(listing(clean=None), tmp_path / "g.beton", quiet=True)
    noise = saved(tmp_path / "g.beton", kind="symmetric")
    np.testing.assert_array_equal(noise.labels, symmetric((CLEAN + 1) % C, 0.4, 0, C).labels)
    half = np.where(np.arange(N) % 2, -1, CLEAN)
    convert(listing(clean=half), tmp_path / "h.beton", quiet=True)
    with pytest.raises(
        InputError, match=r"h\.beton has the true label of 50% of its samples, wanted that of all or of none"
    ):
        make_noise(NoiseConfig(tmp_path / "h.beton"))


def test_rows_that_would_not_fit_are_left_out(data, monkeypatch):
    make_noise(NoiseConfig(data), quiet=True)
    monkeypatch.setattr("fastgnl.noise_file.ROWS_UP_TO", 100)
    noise = saved(data)
    assert noise.rows is None
    assert not rows_path(NoiseConfig(data).target).exists()
    np.testing.assert_allclose(noise.transition.sum(1), 1)


def test_noise_belongs_to_its_data(data, tmp_path):
    path = make_noise(NoiseConfig(data), quiet=True)
    convert(listing(clean=(CLEAN + 2) % C), tmp_path / "other.beton", quiet=True)
    with pytest.raises(
        InputError, match=r"was made for data\.beton, wanted noise made for .*other\.beton as it is now"
    ):
        load_noise(path, Beton(tmp_path / "other.beton"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read"):
        load_noise(path, Beton(data))
    with pytest.raises(InputError, match="does not exist, wanted the labels that fastgnl noise saved"):
        load_noise(tmp_path / "no.npz", Beton(data))


def test_the_command(data, capsys):
    main(["noise", str(data), "--kind", "symmetric", "--rate", "0.2", "--seed", "9"])
    path = data.with_name("data.symmetric-0.2-seed9.npz")
    assert str(path) in capsys.readouterr().out
    assert path.exists()
    for options, sentence in (
        (["--pairs", "cifar10"], "pairs is 'cifar10' for instance noise, wanted kind asymmetric"),
        (["--kind", "asymmetric", "--pairs", "cifar100"], "has 10 classes, wanted 100"),
        (["--rate", "1.5"], "rate is 1.5, wanted a number from 0 to 1"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["noise", str(data), *options])
        assert stop.value.code == 2
        assert sentence in " ".join(re.sub("[│╭╮╰╯─|+-]", " ", capsys.readouterr().err).split())
