"""FFCV and the built-in reader deliver the same batches in the same order."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image

import fastgnl.image_file
from fastgnl.augment import CIFAR_MEAN, CIFAR_STD, Augment
from fastgnl.convert import Storage, convert
from fastgnl.errors import InputError
from fastgnl.formats.listing import Listing
from fastgnl.image_file import ImageFile
from fastgnl.images import encode_jpeg
from fastgnl.loader import Loader, once

N = 60
needs_ffcv = pytest.mark.skipif(
    fastgnl.image_file.ffcv_problem() is not None, reason="FFCV is not installed: the built-in reader has no peer here"
)


def smooth(i, height, width):
    """An image without fine detail, so that ways to shrink it differ little."""
    rng = np.random.default_rng(i)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def listing(sizes):
    images = [smooth(i, *sizes[i % len(sizes)]) for i in range(N)]
    labels = np.arange(N) % 4
    clean = np.where(np.arange(N) % 7 == 0, -1, (labels + 1) % 4)
    names = [f"image {i}" for i in range(N)]
    return Listing("test", "image", tuple("abcd"), labels, clean, names, images.__getitem__)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images of one size uncompressed; of several sizes as JPEG."""
    folder = tmp_path_factory.mktemp("readers")
    convert(listing([(12, 16)]), folder / "raw.beton", quiet=True)
    convert(listing([(40, 52), (52, 40), (33, 90)]), folder / "jpeg.beton", Storage(mode="jpeg"), quiet=True)
    return folder


def both(path, augment, **options):
    return [ImageFile(path, augment, seed=5, reader=reader, **options) for reader in ("ffcv", "builtin")]


def batches(source, epoch, **options):
    return [(batch, batch.x.clone()) for batch in Loader(source, 16, seed=3, **options).epoch(epoch)]


def assert_same(a, b, exactly=True):
    assert len(a) == len(b)
    for (batch_a, x_a), (batch_b, x_b) in zip(a, b, strict=True):
        for name in ("labels", "index", "clean"):
            assert torch.equal(getattr(batch_a, name), getattr(batch_b, name))
        assert (x_a.shape, x_a.dtype, x_a.stride()) == (x_b.shape, x_b.dtype, x_b.stride())
        if exactly:
            assert torch.equal(x_a, x_b)
        else:
            assert (x_a - x_b).abs().mean() < 3 / 255


@needs_ffcv
def test_equal_batches_without_and_with_augmentation(files):
    """Uncompressed images: bit by bit, padded random crops and flips included."""
    augment = Augment(crop="random", padding=3, flip=True, mean=CIFAR_MEAN, std=CIFAR_STD)
    ffcv, builtin = both(files / "raw.beton", augment)
    plain = list(zip(once(ffcv), once(builtin), strict=True))
    assert all(torch.equal(a.x, b.x) for a, b in plain)
    for epoch in (0, 1, 7):
        assert_same(batches(ffcv, epoch), batches(builtin, epoch))
    first, again, later = (torch.cat([x for _, x in batches(ffcv, epoch)]) for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


@needs_ffcv
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_numbers(files, dtype):
    augment = Augment(dtype=dtype, channels_last=dtype == "float16", mean=CIFAR_MEAN, std=CIFAR_STD)
    ffcv, builtin = both(files / "raw.beton", augment)
    assert_same(batches(ffcv, 0), batches(builtin, 0))
    x = batches(ffcv, 0)[0][1]
    assert x.dtype == getattr(torch, dtype)
    assert x.is_contiguous(memory_format=torch.channels_last) == (dtype == "float16")


@needs_ffcv
def test_jpegs_of_several_sizes(files):
    """Two decoders and two ways to resize: equal to about two levels of 255."""
    for augment in (Augment(32), Augment(24, "resized", flip=True)):
        ffcv, builtin = both(files / "jpeg.beton", augment)
        assert_same(batches(ffcv, 0), batches(builtin, 0), exactly=False)
        assert_same([(b, b.x.clone()) for b in once(ffcv)], [(b, b.x.clone()) for b in once(builtin)], exactly=False)


@needs_ffcv
def test_reading_page_by_page(files, monkeypatch):
    """A file of many pages, of which only those in use are kept in memory."""
    monkeypatch.setattr("fastgnl.beton_writer.PAGE_SIZE", 1 << 12)
    paged = files / "paged.beton"
    convert(listing([(12, 16)]), paged, quiet=True)
    monkeypatch.undo()
    ffcv, builtin = both(paged, Augment(), os_cache=False)
    assert len(set(ffcv.pages)) > 5
    options = {"order": "quasi-random", "pages_in_memory": 2}
    assert_same(batches(ffcv, 0, **options), batches(builtin, 0, **options))


@needs_ffcv
def test_what_ffcv_must_not_change(files):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        source = ImageFile(files / "raw.beton", reader="ffcv", workers=1)
        assert len(batches(source, 0)) == 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(params=["builtin", pytest.param("ffcv", marks=needs_ffcv)])
def reader(request):
    return request.param


def test_pixels_are_those_of_the_images(files, reader):
    source = ImageFile(files / "raw.beton", reader=reader)
    for batch in once(source):
        for x, i in zip(batch.x, batch.index, strict=True):
            wanted = torch.from_numpy(smooth(int(i), 12, 16).copy()).permute(2, 0, 1)
            assert torch.equal((x * 255).round().to(torch.uint8), wanted)


def test_an_epoch_may_be_left_early(files, reader):
    """At any batch, the first and the last but one included, and whichever way the file is read."""
    for os_cache in (True, False):
        source = ImageFile(files / "raw.beton", reader=reader, os_cache=os_cache)
        loader = Loader(source, 8)
        for stop in (0, 1, 6):
            for number, _batch in enumerate(loader.epoch(0)):
                if number == stop:
                    break
        assert sum(len(batch.labels) for batch in loader.epoch(0)) == N
    assert not [thread.name for thread in threading.enumerate() if "reader" in thread.name]


def test_a_record_that_cannot_be_decoded_is_named(tmp_path, monkeypatch, reader):
    """A broken JPEG with a right checksum: what a faulty writer would leave."""
    made = listing([(20, 20)])

    def encode(pixels, quality):
        data = encode_jpeg(pixels, quality)
        return data[:40] + b"\0" * (len(data) - 40) if np.array_equal(pixels, smooth(9, 20, 20)) else data

    monkeypatch.setattr("fastgnl.convert.encode_jpeg", encode)
    convert(made, tmp_path / "broken.beton", Storage(mode="jpeg"), workers=1, quiet=True)
    source = ImageFile(tmp_path / "broken.beton", reader=reader)
    with pytest.raises(InputError, match=r"broken\.beton: record 9 \(image 9\) cannot be decoded"):
        list(Loader(source, 8).epoch(0))


def test_labels_in_place_of_the_file_s(files):
    labels = np.arange(N)[::-1] % 4
    source = ImageFile(files / "raw.beton", reader="builtin", labels=labels)
    for batch in once(source):
        np.testing.assert_array_equal(batch.labels, labels[batch.index])
    with pytest.raises(InputError, match=r"labels has shape \(3,\) for .*raw.beton, wanted \(60,\)"):
        ImageFile(files / "raw.beton", labels=np.zeros(3, int))
    with pytest.raises(InputError, match=r"raw.beton: image 5 has label 4, wanted 0 to 3"):
        ImageFile(files / "raw.beton", labels=np.where(np.arange(N) == 5, 4, 0))


def test_without_ffcv_the_built_in_reader_takes_over_and_says_so(files, monkeypatch, capsys):
    monkeypatch.setattr("fastgnl.image_file.find_spec", lambda name: None)
    fastgnl.image_file.ffcv_problem.cache_clear()
    fastgnl.image_file._notice.cache_clear()
    try:
        sources = [ImageFile(files / "raw.beton") for _ in range(2)]
        assert [source.reader_name for source in sources] == ["builtin", "builtin"]
        notice = capsys.readouterr().err
        assert notice.count("\n") == 1
        assert "FFCV is not installed: the built-in loader reads the images" in notice
        with pytest.raises(InputError, match="reader is 'ffcv' but FFCV is not installed, wanted 'auto' or 'builtin'"):
            ImageFile(files / "raw.beton", reader="ffcv")
    finally:
        monkeypatch.undo()
        fastgnl.image_file.ffcv_problem.cache_clear()


def test_what_a_loader_refuses(files):
    source = ImageFile(files / "raw.beton", reader="builtin")
    for options, sentence in (
        ({"batch_size": 0}, "batch_size is 0"),
        ({"order": "sorted"}, "order is 'sorted', wanted one of"),
        ({"batches_per_epoch": 5}, "batches_per_epoch is 5 with order='random', wanted order='balanced'"),
        ({"batch_size": 100, "drop_last": True}, "drop_last leaves no batch of 100 from 60 samples"),
    ):
        with pytest.raises(InputError, match=sentence):
            list(Loader(source, **options).epoch(0))
    texts = Listing("t", "text", ("a", "b"), np.array([0, 1]), None, ["x", "y"], lambda i: "text")
    convert(texts, files / "text.beton", quiet=True)
    with pytest.raises(InputError, match="holds text, wanted images"):
        ImageFile(files / "text.beton")


def test_balanced_batches_and_their_number(files):
    source = ImageFile(files / "raw.beton", reader="builtin")
    loader = Loader(source, 12, order="balanced", batches_per_epoch=7)
    found = list(loader.epoch(0))
    assert len(loader) == len(found) == 7
    assert all(torch.bincount(batch.labels, minlength=4).tolist() == [3, 3, 3, 3] for batch in found)
    assert all(batch.global_rows == 12 for batch in found)
