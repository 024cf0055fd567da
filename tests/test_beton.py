"""The file format: FFCV reads what is written here; what was truncated or altered is refused."""

import json
import subprocess
import sys
import zlib

import numpy as np
import pytest

from fastgnl import beton as format
from fastgnl.beton import Beton
from fastgnl.beton_writer import BetonWriter, Blob, Skipped
from fastgnl.errors import InputError

N = 40
RNG = np.random.default_rng(0)
IMAGES = [RNG.integers(0, 256, (4 + i % 3, 5, 3), dtype=np.uint8) for i in range(N)]
LABELS = np.arange(N) % 3
CLEAN = np.where(np.arange(N) % 5 == 0, -1, (np.arange(N) + 1) % 3)


def write(path, labels=LABELS, clean=CLEAN, kind="image", blobs=None, width=None, skip=()):
    blobs = blobs or [Blob(image.tobytes(), format.RAW, image.shape[1], image.shape[0]) for image in IMAGES]
    writer = BetonWriter(path, len(blobs), {"plan": 1})
    writer.append([Skipped(i, "no such file") if i in skip else blob for i, blob in enumerate(blobs)])
    info = {"classes": ["a", "b", "c"], "skipped": [], "source": "test"}
    writer.finish(kind, width, labels, clean, [f"image {i}" for i in range(len(blobs))], info)
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "data.beton")


def test_what_was_written_is_read(file):
    beton = Beton(file)
    assert len(beton) == N
    assert beton.classes == ("a", "b", "c")
    np.testing.assert_array_equal(beton.labels, LABELS)
    np.testing.assert_array_equal(beton.clean, CLEAN)
    np.testing.assert_array_equal(beton.ids, np.arange(N))
    assert beton.names == [f"image {i}" for i in range(N)]
    for i, image in enumerate(IMAGES):
        assert bytes(beton.data(i)) == image.tobytes()
    assert sorted(path.name for path in file.parent.iterdir()) == ["data.beton"]


def test_text_and_features(tmp_path):
    texts = ["", "ein Satz", "größer 🙂", "x" * 10_000]
    beton = Beton(write(tmp_path / "t.beton", LABELS[:4], None, "text", [Blob(text.encode()) for text in texts]))
    assert [beton.text(i) for i in range(4)] == texts
    assert (beton.clean == -1).all()
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    blobs = [Blob(row.tobytes()) for row in x]
    beton = Beton(write(tmp_path / "f.beton", LABELS[:4], None, "features", blobs, width=3))
    np.testing.assert_array_equal(beton.features(np.array([2, 0])), x[[2, 0]])


def test_what_was_skipped_leaves_no_gap_in_the_ids(tmp_path):
    beton = Beton(write(tmp_path / "s.beton", skip={0, 7}))
    assert len(beton) == N - 2
    np.testing.assert_array_equal(beton.ids, np.arange(N - 2))
    np.testing.assert_array_equal(beton.labels, np.delete(LABELS, [0, 7]))
    assert beton.names[:8] == [f"image {i}" for i in (1, 2, 3, 4, 5, 6, 8, 9)]


def test_no_sample_lies_in_two_pages(tmp_path, monkeypatch):
    monkeypatch.setattr("fastgnl.beton_writer.PAGE_SIZE", 1 << 12)
    sizes = [1000, 3000, 97, 4096, 1, 4095, 2, 4096, 500]
    blobs = [Blob(RNG.integers(0, 256, size, dtype=np.uint8).tobytes()) for size in sizes]
    beton = Beton(write(tmp_path / "p.beton", LABELS[:9], None, "text", blobs))
    starts = beton.pointers.astype(int)
    assert (starts // 4096 == (starts + sizes - 1) // 4096).all()
    assert [bytes(beton.data(i)) for i in range(9)] == [blob.data for blob in blobs]


def test_ffcv_reads_it(file, tmp_path):
    reader = pytest.importorskip("ffcv.reader", reason="FFCV is not installed")
    found = reader.Reader(str(file))
    assert found.field_names == ["image", "label", "clean", "id", "crc"]
    np.testing.assert_array_equal(found.metadata["f1"], LABELS)
    np.testing.assert_array_equal(found.metadata["f3"], np.arange(N))
    from ffcv.fields import IntField, RGBImageField
    from ffcv.types import get_metadata_type

    assert get_metadata_type([RGBImageField(), *[IntField()] * 4]) == format.record_type("image")
    features = write(
        tmp_path / "f.beton", LABELS[:2], None, "features", [Blob(np.ones(7, np.float32).tobytes())] * 2, width=7
    )
    handler = reader.Reader(str(features)).handlers["features"]
    assert (handler.shape, handler.dtype) == ((7,), np.dtype("float32"))


@pytest.mark.parametrize("cut", [0, 1, 100, 5000, 8_388_700, -1, -1000])
def test_a_truncated_file_is_refused(file, cut):
    data = file.read_bytes()
    file.write_bytes(data[:cut])
    with pytest.raises(InputError, match=rf"{file} (is truncated|is empty|has \d+ bytes, fewer)"):
        Beton(file)


def regions(file):
    """Parts of the file that hold something, as (name, first byte, last byte)."""
    beton = Beton(file)
    return {
        "header": (0, format.HEADER.itemsize),
        "fields": (format.HEADER.itemsize, format.records_start()),
        "records": (format.records_start(), format.records_start() + beton.records.nbytes),
        "data": (int(beton.pointers[0]), int(beton.pointers[-1] + beton.sizes[-1])),
        "allocations": (int(beton.header["alloc_table_ptr"]), len(beton.map)),
        "description": (beton.info["names_offset"] + beton.info["names_size"], int(beton.header["alloc_table_ptr"])),
        "names": (beton.info["names_offset"], beton.info["names_offset"] + beton.info["names_size"]),
    }


@pytest.mark.parametrize("region", ["header", "fields", "records", "data", "allocations", "description"])
def test_any_altered_byte_is_noticed(file, region):
    first, last = regions(file)[region]
    good = file.read_bytes()
    for place in np.linspace(first, last - 1, 60).astype(int):
        data = bytearray(good)
        data[place] ^= 0x40
        file.write_bytes(data)
        with pytest.raises(InputError, match=str(file)):
            Beton(file)


def test_an_altered_record_is_named(file):
    row = 17
    data = bytearray(file.read_bytes())
    data[int(Beton(file).pointers[row]) + 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match=rf"{file} was altered: record 17 \(image 17\) has a wrong checksum"):
        Beton(file)
    assert len(Beton(file, verify=False)) == N


def test_altered_names_are_noticed_when_they_are_read(file):
    first, last = regions(file)["names"]
    data = bytearray(file.read_bytes())
    data[(first + last) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="checksum of its samples' names"):
        _ = Beton(file).names


def forge(file, column, row, value):
    """Alter a number of the table of records and set the checksums right."""
    beton = Beton(file)
    records = beton.records.copy()
    records[f"f{1 + format.NUMBERS.index(column)}"][row] = value
    info = beton.info | {"records_crc": zlib.crc32(records.tobytes())}
    data = bytearray(beton.map[:])
    end = int(beton.header["alloc_table_ptr"])
    offset = beton.info["names_offset"] + beton.info["names_size"]
    text = json.dumps(info).encode().ljust(end - offset)
    data[offset:end] = text
    locator = np.array([(format.MAGIC, offset, len(text), zlib.crc32(text))], format.LOCATOR)
    start = format.records_start()
    data[format.HEADER.itemsize : start] = format.descriptors("image", None, locator).tobytes()
    data[start : start + records.nbytes] = records.tobytes()
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("label", 3, "has label 3 in record 6, wanted 0 to 2"),
        ("label", -1, "has label -1 in record 6, wanted 0 to 2"),
        ("clean", 7, "has clean label 7 in record 6, wanted -1 to 2"),
        ("id", 5, "has sample id 5 twice, in records 5 and 6, wanted each id once"),
        ("id", N, f"has sample id {N} in record 6, wanted 0 to {N - 1}"),
        ("id", -2, "has sample id -2 in record 6, wanted 0 to"),
    ],
)
def test_what_the_tables_must_not_hold(file, column, value, sentence):
    forge(file, column, 6, value)
    with pytest.raises(InputError, match=sentence):
        Beton(file)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "does not exist, wanted a .beton file"),
        (lambda path: path.mkdir(), "is no file, wanted a .beton file"),
        (lambda path: path.write_bytes(b"x" * 9000), "is no .beton file of fastgnl's"),
        (lambda path: path.write_text("hello"), "has 5 bytes, fewer than a .beton file's header"),
    ],
)
def test_what_is_no_such_file(tmp_path, make, sentence):
    make(tmp_path / "x.beton")
    with pytest.raises(InputError, match=sentence):
        Beton(tmp_path / "x.beton")


def test_a_killed_writer_goes_on_where_it_was(tmp_path):
    """The journal's last line may be torn, and data may have been written after it."""
    path = tmp_path / "k.beton"
    blobs = [Blob(image.tobytes(), format.RAW, image.shape[1], image.shape[0]) for image in IMAGES]
    first = BetonWriter(path, N, {"plan": 1})
    first.append(blobs[:10])
    first.append([Skipped(10, "gone"), *blobs[11:20]])
    first.file.close()
    with open(path.with_name("k.beton.part"), "ab") as part:
        part.write(b"half an image")
    with open(path.with_name("k.beton.journal"), "a") as journal:
        journal.write('{"done": 30, "end": 99')
    assert not path.exists()
    second = BetonWriter(path, N, {"plan": 1})
    assert (second.resumed, second.done, len(second.entries)) == (True, 20, 19)
    assert second.skipped == [Skipped(10, "gone")]
    second.append(blobs[20:])
    second.finish("image", None, LABELS, CLEAN, [str(i) for i in range(N)], {"classes": list("abc"), "skipped": []})
    whole = write(tmp_path / "w.beton", skip={10})
    resumed, straight = Beton(path), Beton(whole)
    assert [bytes(resumed.data(i)) for i in range(39)] == [bytes(straight.data(i)) for i in range(39)]
    assert resumed.records.tobytes() == straight.records.tobytes()
    assert not path.with_name("k.beton.journal").exists()


@pytest.mark.parametrize("spoil", ["plan", "data", "journal"])
def test_what_does_not_fit_is_started_anew(tmp_path, spoil):
    path = tmp_path / "k.beton"
    writer = BetonWriter(path, N, {"plan": 1})
    writer.append([Blob(b"abc")] * 10)
    writer.file.close()
    if spoil == "data":
        path.with_name("k.beton.part").write_bytes(b"")
    if spoil == "journal":
        path.with_name("k.beton.journal").unlink()
    again = BetonWriter(path, N, {"plan": 2 if spoil == "plan" else 1})
    assert (again.resumed, again.done, again.entries) == (False, 0, [])


def test_two_writers_of_one_file(tmp_path):
    code = (
        "from pathlib import Path\nfrom fastgnl.beton_writer import BetonWriter\n"
        f"BetonWriter(Path({str(tmp_path)!r}) / 'k.beton', 1, {{}})"
    )
    with BetonWriter(tmp_path / "k.beton", N, {}):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "k.beton.part is being written by another conversion, wanted another target" in other.stderr
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
