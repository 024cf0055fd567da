"""fastgnl convert: real layouts through the command, unreadable files, a kill in the middle."""

import io
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastgnl.beton import Beton
from fastgnl.builtin_reader import image_of
from fastgnl.cli import main
from fastgnl.convert import Storage, convert, converted
from fastgnl.errors import InputError
from fastgnl.formats import EMBEDDED, FORMATS
from fastgnl.formats.listing import Listing


def picture(i, size=(40, 30), mode="RGB", kind="JPEG"):
    """The bytes of an image file whose colour tells its number."""
    buffer = io.BytesIO()
    Image.new("RGB", size, ((37 * i) % 256, (91 * i) % 256, 128)).convert(mode).save(buffer, kind, quality=95)
    return buffer.getvalue()


@pytest.fixture
def webvision(tmp_path):
    """A miniature of WebVision 1.0 with its known troubles: grey and CMYK files, a truncated one, a missing one."""
    source = tmp_path / "webvision"
    lines = []
    for i in range(24):
        name = f"google/q{i % 4:04d}/image {i}.jpg"
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        mode = {5: "L", 6: "CMYK"}.get(i, "RGB")
        data = picture(i, (40 + i, 30), mode)
        if i == 9:
            data = data[: len(data) // 2]
        if i != 17:
            (source / name).write_bytes(data)
        lines.append(f"{name} {i % 4}\n")
    (source / "info").mkdir()
    (source / "info" / "train_filelist_google.txt").write_text("".join(lines))
    return source


def test_a_web_set_with_its_troubles(webvision, tmp_path, capsys):
    target = tmp_path / "web.beton"
    with pytest.raises(SystemExit) as stop:
        main(["convert", "webvision", str(webvision), str(target), "--size", "24"])
    assert stop.value.code == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "google/q0001/image 9.jpg cannot be read" in sentence
    assert "--unreadable skip" in sentence
    assert not target.exists()
    main(["convert", "webvision", str(webvision), str(target), "--size", "24", "--unreadable", "skip"])
    printed = capsys.readouterr().out
    assert "22 samples of" in printed
    assert "2 unreadable file(s) skipped" in printed
    listed = target.with_suffix(".unreadable.txt").read_text()
    assert "image 9.jpg\t" in listed
    assert "image 17.jpg\tNo such file or directory" in listed
    beton = Beton(target)
    assert len(beton) == 22
    assert beton.info["plan"]["described"]["format"] == "WebVision"
    kept = [i for i in range(24) if i not in (9, 17)]
    np.testing.assert_array_equal(beton.labels, [i % 4 for i in kept])
    assert (beton.clean == -1).all()
    for row, i in enumerate(kept):
        pixels = np.asarray(image_of(beton, row))
        assert pixels.shape[0] == 24, "the shorter side"
        if i not in (5, 6):
            wanted = [(37 * i) % 256, (91 * i) % 256, 128]
            assert abs(pixels.mean((0, 1)) - wanted).max() < 8, f"image {i}"
    grey = np.asarray(image_of(beton, 5))
    assert (grey[..., 0] == grey[..., 1]).all()


def test_a_text_set_and_an_embedded_one(tmp_path, capsys):
    (tmp_path / "posts.jsonl").write_text('{"text": "good", "label": 1}\n{"text": "bad - 🙂", "label": 0}\n')
    main(["convert", "jsonl", str(tmp_path / "posts.jsonl"), str(tmp_path / "t.beton")])
    beton = Beton(tmp_path / "t.beton")
    assert [beton.text(0), beton.text(1)] == ["good", "bad - 🙂"]
    main(["convert", "digits", str(tmp_path / "d.beton"), "--split", "test"])
    assert "360 samples of 10 classes" in capsys.readouterr().out
    digits = Beton(tmp_path / "d.beton")
    assert np.asarray(image_of(digits, 0)).shape == (8, 8, 3)
    main(["check", str(tmp_path / "d.beton")])
    assert "d.beton is whole: 360 samples" in capsys.readouterr().out


def test_every_format_has_a_command(capsys):
    for name, layout in (FORMATS | EMBEDDED).items():
        with pytest.raises(SystemExit) as stop:
            main(["convert", name, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        for option in layout.__dataclass_fields__:
            assert f"--{option.replace('_', '-')}" in shown
        assert ("--quality" in shown) == (name in FORMATS)


def test_an_altered_file_fails_the_check(tmp_path, capsys):
    main(["convert", "digits", str(tmp_path / "d.beton")])
    beton = Beton(tmp_path / "d.beton")
    with open(tmp_path / "d.beton", "r+b") as file:
        file.seek(int(beton.pointers[700]))
        file.write(b"\xff")
    with pytest.raises(SystemExit) as stop:
        main(["check", str(tmp_path / "d.beton")])
    assert stop.value.code == 2
    assert "d.beton was altered: record 700 (digit" in capsys.readouterr().err


def listing(images, labels=None, **options):
    labels = np.arange(len(images)) % 2 if labels is None else labels
    names = [f"image {i}" for i in range(len(images))]
    fields = {"source": "test", "kind": "image", "classes": ("a", "b"), "labels": labels, "clean": None, "names": names}
    return Listing(**{**fields, "read": images.__getitem__, **options})


def test_sizes_and_qualities(tmp_path):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (90, 70 + i, 3), dtype=np.uint8) for i in range(4)]
    sizes = {}
    for name, storage in {
        "raw": Storage(mode="raw"),
        "good": Storage(mode="jpeg", quality=95),
        "poor": Storage(mode="jpeg", quality=10),
        "square": Storage(size=20, square=True),
    }.items():
        beton = convert(listing(images), tmp_path / f"{name}.beton", storage, quiet=True)
        sizes[name] = int(beton.sizes.sum())
        assert {int(mode) for mode in beton.records["f0"]["mode"]} == ({1} if name in ("raw", "square") else {0})
    assert sizes["raw"] > sizes["good"] > sizes["poor"]
    np.testing.assert_array_equal(np.asarray(image_of(Beton(tmp_path / "raw.beton"), 2)), images[2])
    assert np.asarray(image_of(Beton(tmp_path / "square.beton"), 2)).shape == (20, 20, 3)


def test_the_number_of_workers_changes_nothing(tmp_path):
    images = [picture(i) for i in range(600)]
    for workers in (1, 2):
        convert(listing(images), tmp_path / f"{workers}.beton", workers=workers, quiet=True)
    assert (tmp_path / "1.beton").read_bytes() == (tmp_path / "2.beton").read_bytes()


def test_another_size_of_the_same_samples_is_not_a_continuation(tmp_path, monkeypatch):
    """The listings of two sizes have the same names and labels."""

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("fastgnl.beton_writer.BetonWriter.finish", killed)
    with pytest.raises(SystemExit):
        main(["convert", "web", str(tmp_path / "w.beton"), "--samples", "300", "--size", "8"])
    monkeypatch.undo()
    main(["convert", "web", str(tmp_path / "w.beton"), "--samples", "300", "--size", "16"])
    assert {int(height) for height in Beton(tmp_path / "w.beton").records["f0"]["height"]} == {16}


def test_conversions_are_kept_until_the_listing_changes(tmp_path):
    images = [picture(i) for i in range(8)]
    target = tmp_path / "kept.beton"
    converted(listing(images), target)
    first = target.stat().st_mtime_ns
    converted(listing(images), target)
    assert target.stat().st_mtime_ns == first
    converted(listing(images, np.arange(8) // 4), target)
    np.testing.assert_array_equal(Beton(target).labels, np.arange(8) // 4)


@pytest.mark.parametrize(
    ("images", "options", "sentence"),
    [
        (
            [b"x", b"y"],
            {},
            r"image 0 cannot be read \(no image, or of a kind that PIL does not know\), wanted a readable file",
        ),
        ([b"x", b"y"], {"unreadable": "skip"}, "none of the 2 samples could be read"),
        ([np.zeros((2000, 2000, 3), np.uint8)] * 2, {"storage": Storage(mode="raw")}, "12,000,000 bytes when stored"),
        ([np.zeros((2, 70_000, 3), np.uint8)] * 2, {}, "70000 x 2 pixels, wanted sides below 65,536"),
    ],
)
def test_what_cannot_be_stored(tmp_path, images, options, sentence):
    with pytest.raises(InputError, match=sentence):
        convert(listing(images), tmp_path / "x.beton", quiet=True, **options)
    assert not (tmp_path / "x.beton").exists()


def test_where_it_cannot_be_written(tmp_path):
    images = [picture(0), picture(1)]
    with pytest.raises(InputError, match=r"the target is .*x\.npz, wanted a name that ends in \.beton"):
        convert(listing(images), tmp_path / "x.npz")
    with pytest.raises(InputError, match="cannot write /proc/x/y"):
        convert(listing(images), Path("/proc/x/y.beton"))


SLOW = """
import sys, time
from pathlib import Path
import numpy as np
from fastgnl.convert import convert
from fastgnl.formats.listing import Listing
def read(i):
    time.sleep(float(sys.argv[2]))
    return np.full((8, 8, 3), i % 251, np.uint8)
N = 3000
listing = Listing("slow", "image", ("a", "b"), np.arange(N) % 2, None, [str(i) for i in range(N)], read)
convert(listing, Path(sys.argv[1]), workers=2, quiet=True)
"""


def test_kill_and_go_on(tmp_path):
    """Killed twice in the middle: never a file under the final name, then the same bytes as a run that was not."""
    target = tmp_path / "k.beton"
    journal = target.with_name("k.beton.journal")
    lengths = []
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", SLOW, str(target), "0.002"])
        before = journal.stat().st_size if journal.exists() else 0
        deadline = time.monotonic() + 60
        while not journal.exists() or journal.stat().st_size <= max(before, 300):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()  # the workers are left to themselves
        process.wait()
        assert not target.exists()
        lengths.append(journal.read_bytes().count(b"\n"))
    assert lengths[1] > lengths[0] >= 2
    subprocess.run([sys.executable, "-c", SLOW, str(target), "0"], check=True)
    subprocess.run([sys.executable, "-c", SLOW, str(tmp_path / "whole.beton"), "0"], check=True)
    assert target.read_bytes() == (tmp_path / "whole.beton").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.beton", "whole.beton"]
