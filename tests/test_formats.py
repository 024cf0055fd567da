"""Readers of data sets: a miniature of each published layout, and what they refuse."""

import io
import os
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import tyro

from fastgnl.errors import InputError
from fastgnl.formats.cifar import Cifar10, Cifar10N, Cifar100, Cifar100N, load_batch
from fastgnl.formats.clothing1m import CLASSES, Clothing1M
from fastgnl.formats.folders import ANIMALS, Animal10N, ImageFolder, ImageNetVal, RedMiniImageNet
from fastgnl.formats.listing import UNKNOWN
from fastgnl.formats.tables import ImageCsv, Npz
from fastgnl.formats.webvision import WebVision


def refused(*parts: str):
    """An InputError of one line that holds these parts, in this order."""
    return pytest.raises(InputError, match="^[^\n]*" + "[^\n]*".join(map(re.escape, parts)) + "[^\n]*$")


def write(path: Path, content: str | bytes = b"image") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


class Python2(pickle._Pickler):
    """Writes strings as Python 2 did, which wrote CIFAR's files: every one of them a BINSTRING."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text):
        data = text.encode("latin1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_string


def python2(content: object) -> bytes:
    file = io.BytesIO()
    Python2(file, protocol=2).dump(content)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


PIXELS = np.random.default_rng(0).integers(256, size=(12, 3072), dtype=np.uint8)


class Exploit:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def batch(data: np.ndarray, **labels: object) -> dict:
    return {"data": data, "batch_label": "training batch", "filenames": ["a.png"] * len(data), **labels}


@pytest.fixture
def cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    for k in range(5):
        rows = PIXELS[2 * k : 2 * k + 2]
        write(folder / f"data_batch_{k + 1}", python2(batch(rows, labels=[k, 9 - k])))
    write(folder / "test_batch", python2(batch(PIXELS[10:], labels=[3, 4])))
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    write(folder / "batches.meta", python2({"num_cases_per_batch": 2, "label_names": names, "num_vis": 3072}))
    return tmp_path


@pytest.fixture
def cifar100(tmp_path):
    folder = tmp_path / "cifar-100-python"
    write(folder / "train", python2(batch(PIXELS[:4], fine_labels=[0, 99, 5, 5], coarse_labels=[4, 13, 6, 6])))
    write(folder / "test", python2(batch(PIXELS[4:5], fine_labels=[7], coarse_labels=[7])))
    fine, coarse = [f"fine {i}" for i in range(100)], [f"coarse {i}" for i in range(20)]
    write(folder / "meta", python2({"fine_label_names": fine, "coarse_label_names": coarse}))
    return tmp_path


def test_cifar10_from_its_python2_pickles(cifar10):
    assert (
        pickle.BINSTRING + struct.pack("<i", 4) + b"data" in (cifar10 / "cifar-10-batches-py/test_batch").read_bytes()
    )
    train = Cifar10().listing(cifar10)
    assert train.kind == "image"
    assert train.classes[3] == "cat"
    assert train.labels.tolist() == train.clean.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert train.names[3] == "data_batch_2[1]"
    image = train.read(3)
    assert image.shape == (32, 32, 3)
    assert image.dtype == np.uint8
    assert image[5, 7].tolist() == [PIXELS[3, c * 1024 + 5 * 32 + 7] for c in range(3)]
    test = Cifar10("test").listing(cifar10 / "cifar-10-batches-py")  # the folder itself will do
    assert test.labels.tolist() == [3, 4]
    assert test.names == ["test_batch[0]", "test_batch[1]"]


def test_cifar100_has_two_sets_of_labels(cifar100):
    assert Cifar100().listing(cifar100).labels.tolist() == [0, 99, 5, 5]
    coarse = Cifar100("train", "coarse").listing(cifar100)
    assert coarse.labels.tolist() == [4, 13, 6, 6]
    assert len(coarse.classes) == 20
    assert Cifar100("test").listing(cifar100).names == ["test[0]"]


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_batch_that_holds_code_is_refused_and_the_code_not_run(tmp_path, protocol):
    made = tmp_path / "made"
    path = write(tmp_path / "batch", pickle.dumps({b"data": Exploit(made)}, protocol=protocol))
    with refused(str(path), "tries to load", "mkdir", "only lists and arrays"):
        load_batch(path)
    assert not made.exists()
    pickle.loads(path.read_bytes())  # the file does do harm elsewhere
    assert made.exists()


@pytest.mark.parametrize("module", ["os", "builtins", "numpy.core.multiarray", "numpy", "_codecs"])
def test_other_names_of_the_allowed_modules_are_refused(tmp_path, module):
    path = write(tmp_path / "batch", f"c{module}\nscalar\n.")
    with refused(str(path), f"tries to load {module}.scalar"):
        load_batch(path)


def test_every_cut_of_a_batch_is_refused(tmp_path):
    whole = python2(batch(PIXELS[:1], labels=[1]))
    assert load_batch(write(tmp_path / "batch", whole))[b"labels"].tolist() == [1]
    for length in [*range(0, len(whole) - 1, 97), len(whole) - 1]:
        with refused(str(tmp_path / "batch"), "cut short or not a pickle"):
            load_batch(write(tmp_path / "batch", whole[:length]))


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ([1, 2], ["holds a list", "a dict"]),
        ({b"labels": [1]}, ["data is NoneType", "uint8 [n, 3072]"]),
        ({b"data": PIXELS[:2].astype(np.int16), b"labels": [1, 2]}, ["data is int16 [2, 3072]"]),
        ({b"data": PIXELS[:2, :100], b"labels": [1, 2]}, ["data is uint8 [2, 100]"]),
        ({b"data": np.array([[None] * 3072]), b"labels": [1]}, ["data is object [1, 3072]"]),
        ({b"data": PIXELS[:2]}, ["has no labels"]),
        ({b"data": PIXELS[:2], b"labels": [1]}, ["labels has 1 labels for 2 images"]),
        ({b"data": PIXELS[:2], b"labels": [1, 0.5]}, ["labels is float64", "whole number"]),
        ({b"data": PIXELS[:2], b"labels": [1, [2]]}, ["labels is no list of numbers"]),
        ({b"data": PIXELS[:2], b"labels": np.array([1, None])}, ["labels is object"]),
    ],
)
def test_wrong_batches_are_refused(tmp_path, content, parts):
    path = write(tmp_path / "batch", pickle.dumps(content, protocol=2))
    with refused(str(path), *parts):
        load_batch(path)


def test_cifar_layout_and_labels_are_checked(cifar10, cifar100):
    with refused("data_batch_1 does not exist", "cifar-10-batches-py with data_batch_1", "batches.meta"):
        Cifar10().listing(cifar10 / "elsewhere")
    folder = cifar10 / "cifar-10-batches-py"
    write(folder / "data_batch_3", python2(batch(PIXELS[:2], labels=[1, 10])))
    with refused("data_batch_3[1] has label 10, wanted 0 to 9"):
        Cifar10().listing(cifar10)
    (folder / "data_batch_5").unlink()
    with refused("data_batch_5 does not exist"):
        Cifar10().listing(cifar10)
    write(folder / "batches.meta", python2({"other": []}))
    with refused("batches.meta has no list label_names"):
        Cifar10("test").listing(cifar10)
    write(cifar100 / "cifar-100-python/test", python2(batch(PIXELS[:1], labels=[1])))
    with refused("cifar-100-python/test has no coarse_labels"):
        Cifar100("test", "coarse").listing(cifar100)


def people(folder: Path, old_names: bool = False, **change: object) -> Path:
    clean = np.array([0, 9, 1, 8, 2, 7, 3, 6, 4, 5])
    labels = {"clean_label": clean}
    for shift, key in enumerate(["worse_label", "aggre_label", "random_label1", "random_label2", "random_label3"], 1):
        labels[key] = (clean + shift) % 10
    path = folder / "CIFAR-10_human.pt"
    folder.mkdir(exist_ok=True)
    torch.save(labels | change, path, _use_new_zipfile_serialization=not old_names)
    if old_names:
        path.write_bytes(path.read_bytes().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    return path


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-py", "data"])
@pytest.mark.parametrize("old_names", [False, True])
def test_cifar10n(cifar10, folder, old_names):
    people(cifar10 / folder, old_names)
    kinds = ["worst", "aggregate", "random1", "random2", "random3"]
    for shift, kind in enumerate(kinds, 1):
        listing = Cifar10N(kind).listing(cifar10)
        assert listing.clean.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
        assert ((listing.labels - listing.clean) % 10 == shift).all()
    assert np.array_equal(listing.read(3), Cifar10().listing(cifar10).read(3))
    assert listing.names[3] == "data_batch_2[1]"


def test_cifar100n_whose_coarse_labels_are_lists(cifar100):
    labels = {
        "clean_label": np.array([0, 99, 5, 5]),
        "noisy_label": np.array([1, 99, 5, 6]),
        "clean_coarse_label": [4, 13, 6, 6],
        "noisy_coarse_label": [1, 13, 6, 7],
    }
    torch.save(labels, cifar100 / "CIFAR-100_human.pt")
    fine, coarse = Cifar100N().listing(cifar100), Cifar100N("noisy_coarse").listing(cifar100)
    assert (fine.labels.tolist(), fine.clean.tolist()) == ([1, 99, 5, 6], [0, 99, 5, 5])
    assert (coarse.labels.tolist(), coarse.clean.tolist()) == ([1, 13, 6, 7], [4, 13, 6, 6])
    assert (len(fine.classes), len(coarse.classes)) == (100, 20)


def test_cifar10n_refuses_other_images_and_other_files(cifar10):
    with refused("CIFAR-10_human.pt does not exist", "CIFAR-10_human.pt of CIFAR-N"):
        Cifar10N().listing(cifar10)
    path = people(cifar10, clean_label=np.array([0, 9, 1, 8, 2, 7, 3, 6, 5, 4]))
    with refused(str(path), "clean_label differs", "at 2 of 10 images", "same order"):
        Cifar10N().listing(cifar10)
    people(cifar10, worse_label=np.arange(9))
    with refused("labels 9 images, wanted the 10 of"):
        Cifar10N().listing(cifar10)
    people(cifar10, worse_label=np.arange(10) + 1)
    with refused("has label 10, wanted 0 to 9"):
        Cifar10N().listing(cifar10)
    people(cifar10, worse_label=np.arange(10) / 2)
    with refused(str(path), "only whole numbers"):
        Cifar10N().listing(cifar10)
    torch.save({"clean_label": np.arange(10), "noise": np.arange(10)}, path)
    with refused("has no aggre_label", "clean_label, noise"):
        Cifar10N("aggregate").listing(cifar10)
    torch.save([1], path)
    with refused("holds a list", "dict of labels"):
        Cifar10N().listing(cifar10)
    write(path, b"PK no zip")
    with refused(str(path), "cannot be read as a torch file"):
        Cifar10N().listing(cifar10)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_pt_file_that_holds_code_is_refused_and_the_code_not_run(cifar10, zipped):
    made = cifar10 / "made"
    path = people(cifar10)
    torch.save({"clean_label": Exploit(made)}, path, _use_new_zipfile_serialization=zipped)
    assert zipfile.is_zipfile(path) == zipped
    with refused(str(path), "tries to load", "mkdir", "only whole numbers"):
        Cifar10N().listing(cifar10)
    assert not made.exists()


def test_a_pt_file_of_object_arrays_is_refused(cifar10):
    people(cifar10, worse_label=np.array([None] * 10))
    with refused("CIFAR-10_human.pt", "only whole numbers"):
        Cifar10N().listing(cifar10)


def jpeg(mode: str) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new(mode, (5, 4)).save(file, "JPEG")
    return file.getvalue()


def test_image_folder(tmp_path):
    grey, cmyk = jpeg("L"), jpeg("CMYK")
    write(tmp_path / "b/2.JPG", cmyk)
    write(tmp_path / "b/deep/1.webp")
    write(tmp_path / "a/x y.jpeg", grey)
    for passed in ("a/.hidden.jpg", "a/.cache/1.jpg", ".git/1.jpg", "a/notes.txt", "readme.jpg"):
        write(tmp_path / passed)
    listing = ImageFolder().listing(tmp_path)
    assert listing.classes == ("a", "b")
    assert list(listing.names) == ["a/x y.jpeg", "b/2.JPG", "b/deep/1.webp"]
    assert listing.labels.tolist() == [0, 1, 1]
    assert listing.clean is None
    assert (listing.read(0), listing.read(1)) == (grey, cmyk)
    assert ImageFolder(trusted=True).listing(tmp_path).clean.tolist() == [0, 1, 1]


def test_image_folder_refuses(tmp_path):
    with refused("nothing is not a folder", "one a class"):
        ImageFolder().listing(tmp_path / "nothing")
    write(tmp_path / "a/notes.txt")
    with refused("holds no image", "CLASS/IMAGE"):
        ImageFolder().listing(tmp_path)
    write(tmp_path / "a/1.png")
    with refused("names 1 class(es)"):
        ImageFolder().listing(tmp_path)


def test_animal10n(tmp_path):
    write(tmp_path / "training/9_10.jpg", b"nine")
    write(tmp_path / "training/0_54321.jpg")
    write(tmp_path / "testing/5_1.jpg")
    train, test = Animal10N().listing(tmp_path), Animal10N("test").listing(tmp_path)
    assert train.labels.tolist() == [0, 9]
    assert train.clean is None
    assert train.read(1) == b"nine"
    assert list(train.names) == ["training/0_54321.jpg", "training/9_10.jpg"]
    assert test.labels.tolist() == test.clean.tolist() == [5]
    assert test.classes == ANIMALS
    assert ANIMALS[5] == "Jaguar"
    for wrong in ("training/cat.jpg", "training/10_3.jpg"):
        path = write(tmp_path / wrong)
        with refused(str(path), "no label in its name", "LABEL_ID.jpg"):
            Animal10N().listing(tmp_path)
        path.unlink()
    with refused("testing does not exist", "ANIMAL-10N"):
        Animal10N("test").listing(tmp_path / "training")


RED = "n0153282900000005.jpg 0\n5922767e5677aef4.jpg 0\r\n\n0a1b.jpg 99 \n"


@pytest.mark.parametrize("pattern", ["all_images/{0}", "training/red_noise_nl_0.4/{1}/{0}"])
@pytest.mark.parametrize("above", [False, True])
def test_red_mini_imagenet(tmp_path, pattern, above):
    root = tmp_path / "mini-imagenet"
    write(root / "split/red_noise_nl_0.4", RED)
    path = write(root / pattern.format("0a1b.jpg", 99), b"web")
    write(root / pattern.format("n0153282900000005.jpg", 0))
    source = tmp_path if above else root
    listing = RedMiniImageNet("0.4").listing(source)
    assert listing.labels.tolist() == [0, 0, 99]
    assert listing.clean.tolist() == [0, UNKNOWN, UNKNOWN]
    assert listing.names[2] == path.relative_to(source).as_posix()
    assert listing.read(2) == b"web"
    with pytest.raises(FileNotFoundError):
        listing.read(1)
    assert listing.classes == tuple(map(str, range(100)))
    write(root / "class_name.txt", "".join(f"thing {c}\n" for c in range(100)))
    assert RedMiniImageNet("0.4").listing(source).classes[99] == "thing 99"


@pytest.mark.parametrize("pattern", ["validation/{1}/{0}", "validation/{0}"])
def test_red_mini_imagenet_test_images_are_clean(tmp_path, pattern):
    write(tmp_path / "split/clean_validation", "ILSVRC2012_val_00000293.jpg 7\n")
    write(tmp_path / pattern.format("ILSVRC2012_val_00000293.jpg", 7), b"val")
    listing = RedMiniImageNet(split="test").listing(tmp_path)
    assert listing.labels.tolist() == listing.clean.tolist() == [7]
    assert listing.read(0) == b"val"


def test_red_mini_imagenet_refuses(tmp_path):
    with refused("red_noise_nl_0.2 does not exist", "Controlled Noisy Web Labels"):
        RedMiniImageNet().listing(tmp_path)
    write(tmp_path / "split/red_noise_nl_0.2", RED)
    with refused("no folder for the images of red_noise_nl_0.2", "all_images/IMAGE or training/"):
        RedMiniImageNet().listing(tmp_path)
    (tmp_path / "all_images").mkdir()
    write(tmp_path / "split/red_noise_nl_0.2", "a.jpg 100\n")
    with refused("a.jpg has label 100, wanted 0 to 99"):
        RedMiniImageNet().listing(tmp_path)


SYNSETS = "n01443537 goldfish, Carassius auratus\nn01440764 tench\nn01484850 great white shark\n"


@pytest.mark.parametrize("val", ["", "val"])
def test_imagenet_val_by_folder(tmp_path, val):
    source = tmp_path / "imagenet"
    for synset in ("n01440764", "n01443537", "n01484850", "n01491361"):
        write(source / val / synset / "ILSVRC2012_val_00000001.JPEG", synset)
    plain = ImageNetVal().listing(source)
    assert plain.classes == ("n01440764", "n01443537", "n01484850", "n01491361")
    assert plain.labels.tolist() == plain.clean.tolist() == [0, 1, 2, 3]
    two = ImageNetVal(synsets=write(tmp_path / "synsets.txt", SYNSETS), num_classes=2).listing(source)
    assert two.classes == ("n01443537 goldfish, Carassius auratus", "n01440764 tench")
    assert [two.read(i) for i in range(len(two))] == [b"n01443537", b"n01440764"]
    assert two.labels.tolist() == [0, 1]
    assert two.names[0] == str(Path(val, "n01443537/ILSVRC2012_val_00000001.JPEG"))
    with refused("num_classes is 7, wanted at most the 4 classes"):
        ImageNetVal(num_classes=7).listing(source)
    more = write(tmp_path / "more.txt", SYNSETS + "n09999999 nothing\n")
    with refused("n09999999 does not exist", "each of the 4 classes"):
        ImageNetVal(synsets=more).listing(source)


@pytest.mark.parametrize("file", ["val.txt", "val_list.txt"])
def test_imagenet_val_with_a_list_counts_sorted_synsets_from_0(tmp_path, file):
    image = write(tmp_path / "val/ILSVRC2012_val_00000002.JPEG", b"second").name
    write(tmp_path / "val/ILSVRC2012_val_00000001.JPEG")
    prefix = "" if file == "val.txt" else "val/"
    write(tmp_path / file, f"{prefix}ILSVRC2012_val_00000001.JPEG 2\n{prefix}{image} 0\n")
    plain = ImageNetVal().listing(tmp_path)
    assert plain.labels.tolist() == plain.clean.tolist() == [2, 0]
    assert list(plain.names) == ["val/ILSVRC2012_val_00000001.JPEG", f"val/{image}"]
    assert plain.read(1) == b"second"
    assert len(plain.classes) == 1000
    synsets = write(tmp_path / "synsets", SYNSETS)
    ordered = ImageNetVal(synsets=synsets).listing(tmp_path)
    assert [ordered.classes[label].split()[0] for label in ordered.labels] == ["n01484850", "n01440764"]
    kept = ImageNetVal(synsets=synsets, num_classes=2).listing(tmp_path)
    assert list(kept.names) == [f"val/{image}"]
    assert kept.labels.tolist() == [1]
    write(tmp_path / file, f"{prefix}{image} 3\n")
    with refused("has label 3", "3 synsets", "one for each label"):
        ImageNetVal(synsets=synsets).listing(tmp_path)


@pytest.mark.parametrize("folder", ["", "data", "ILSVRC2012_devkit_t12/data"])
def test_imagenet_val_with_the_devkit_counts_ids_from_1(tmp_path, folder):
    write(tmp_path / "ILSVRC2012_val_00000002.JPEG", b"second")
    truth = write(tmp_path / folder / "ILSVRC2012_validation_ground_truth.txt", "490\n1\n1000\n")
    listing = ImageNetVal().listing(tmp_path)
    assert listing.labels.tolist() == [489, 0, 999]
    assert listing.classes[489] == "ILSVRC2012_ID 490"
    assert listing.names[1] == "ILSVRC2012_val_00000002.JPEG"
    assert listing.read(1) == b"second"
    with refused(str(truth), "ILSVRC2012_ID", "cannot order"):
        ImageNetVal(synsets=write(tmp_path / "synsets", SYNSETS)).listing(tmp_path)
    for wrong in ("0", "1001", "x", "12345678901"):
        write(truth, f"1\n{wrong}\n")
        with refused(f"{truth}, line 2", repr(wrong), "from 1 to 1000"):
            ImageNetVal().listing(tmp_path)


def test_imagenet_val_layout_can_be_chosen(tmp_path):
    write(tmp_path / "n01440764/1.JPEG")
    write(tmp_path / "n01443537/2.JPEG")
    write(tmp_path / "ILSVRC2012_validation_ground_truth.txt", "5\n")
    assert ImageNetVal().listing(tmp_path).labels.tolist() == [0, 1]
    assert ImageNetVal("devkit").listing(tmp_path).labels.tolist() == [4]
    with refused("val.txt does not exist", "ILSVRC2012_val_00000001.JPEG 65"):
        ImageNetVal("list").listing(tmp_path)


def clothing(folder: Path) -> Path:
    noisy, both, clean = "images/0/00/1,2&3.jpg", "images/1/01/4,5.jpg", "images/2/02/6,7.jpg"
    write(folder / "noisy_train_key_list.txt", f"{both}\n{noisy}\n")
    for split in ("train", "val", "test"):
        write(folder / f"clean_{split}_key_list.txt", f"{clean}\n")
    write(folder / "noisy_label_kv.txt", f"{noisy} 5\n{both} 0\n")
    write(folder / "clean_label_kv.txt", f"{both} 13\n{clean} 2\n")
    return folder


@pytest.mark.parametrize("folder", ["", "annotations"])
def test_clothing1m_with_commas_and_missing_images(tmp_path, folder):
    clothing(tmp_path / folder)
    write(tmp_path / "images/0/00/1,2&3.jpg", b"there")
    listing = Clothing1M().listing(tmp_path)
    assert list(listing.names) == ["images/1/01/4,5.jpg", "images/0/00/1,2&3.jpg"]
    assert listing.labels.tolist() == [0, 5]
    assert listing.clean.tolist() == [13, UNKNOWN]
    assert listing.classes == CLASSES
    assert len(CLASSES) == 14
    assert listing.read(1) == b"there"
    with pytest.raises(FileNotFoundError):
        listing.read(0)
    for split in ("clean_train", "clean_val", "clean_test"):
        clean = Clothing1M(split).listing(tmp_path)
        assert clean.labels.tolist() == clean.clean.tolist() == [2]
    write(tmp_path / folder / "category_names_eng.txt", "".join(f"c{i}\n" for i in range(14)))
    assert Clothing1M().listing(tmp_path).classes[13] == "c13"


def test_clothing1m_refuses(tmp_path):
    with refused("noisy_train_key_list.txt does not exist", "Clothing1M"):
        Clothing1M().listing(tmp_path)
    clothing(tmp_path)
    keys = write(tmp_path / "clean_val_key_list.txt", "images/2/02/6,7.jpg\nimages/9/99/0,0.jpg\n")
    with refused(f"{keys}, line 2: images/9/99/0,0.jpg has no label in", "clean_label_kv.txt"):
        Clothing1M("clean_val").listing(tmp_path)
    write(tmp_path / "noisy_label_kv.txt", "images/0/00/1,2&3.jpg 14\nimages/1/01/4,5.jpg 0\n")
    with refused("images/0/00/1,2&3.jpg has label 14, wanted 0 to 13"):
        Clothing1M().listing(tmp_path)
    write(tmp_path / "noisy_label_kv.txt", "images/0/00/1,2&3.jpg,5\n")
    with refused("noisy_label_kv.txt, line 1", "a path, a space and a whole number"):
        Clothing1M().listing(tmp_path)


GOOGLE = "\ufeffgoogle/q0001/a.jpg 0\r\n\r\n  \ngoogle/q0002/with two spaces.jpg 7  \ngoogle/q0003/c.jpg\t50\n"


@pytest.fixture
def webvision(tmp_path):
    write(tmp_path / "info/train_filelist_google.txt", GOOGLE)
    write(tmp_path / "info/train_filelist_flickr.txt", "flickr/q0001/f.jpg 1\n")
    write(tmp_path / "info/val_filelist.txt", "val000001.jpg 3\nval000002.jpg 60\n")
    write(tmp_path / "google/q0002/with two spaces.jpg", b"spaces")
    write(tmp_path / "flickr/q0001/f.jpg", b"flickr")
    write(tmp_path / "val_images_256/val000001.jpg", b"val")
    return tmp_path


def test_webvision_lines(webvision):
    listing = WebVision().listing(webvision)
    assert list(listing.names) == ["google/q0001/a.jpg", "google/q0002/with two spaces.jpg", "google/q0003/c.jpg"]
    assert listing.labels.tolist() == [0, 7, 50]
    assert listing.clean is None
    assert listing.read(1) == b"spaces"
    assert listing.classes == tuple(map(str, range(1000)))


def test_webvision_sources_classes_and_validation(webvision):
    write(webvision / "info/synsets.txt", "".join(f"n{c:08d} thing, {c}\n" for c in range(1000)))
    both = WebVision(sources=("google", "flickr"), num_classes=50).listing(webvision)
    assert both.labels.tolist() == [0, 7, 1]
    assert both.read(2) == b"flickr"
    assert len(both.classes) == 50
    assert both.classes[7] == "n00000007 thing, 7"
    val = WebVision("val", num_classes=50).listing(webvision)
    assert list(val.names) == ["val_images_256/val000001.jpg"]
    assert val.labels.tolist() == val.clean.tolist() == [3]
    assert val.read(0) == b"val"


@pytest.mark.parametrize(
    "line", ["google/q0001/a.jpg", "google/q0001/a.jpg -1", "google/q0001/a.jpg 1.5", "7", "a.jpg 9999999999"]
)
def test_webvision_malformed_lines(webvision, line):
    path = write(webvision / "info/train_filelist_google.txt", f"google/q0001/a.jpg 0\n\n{line}\n")
    with refused(f"{path}, line 3", repr(line), "a path, a space and a whole number"):
        WebVision().listing(webvision)


def test_webvision_refuses(webvision):
    with refused("google does not exist", "WebVision 1.0"):
        WebVision().listing(webvision / "info")
    with refused("sources is empty"):
        WebVision(sources=()).listing(webvision)
    with refused("num_classes is 1,"):
        WebVision(num_classes=1).listing(webvision)
    path = webvision / "info/train_filelist_google.txt"
    write(path, "google/q0001/a.jpg 1000\n")
    with refused("google/q0001/a.jpg has label 1000, wanted 0 to 999"):
        WebVision(num_classes=50).listing(webvision)
    for outside in ("google/../../a.jpg", "/etc/passwd"):
        write(path, f"{outside} 1\n")
        with refused(f"{path}, line 1", repr(outside), "stays below"):
            WebVision().listing(webvision)
    write(path, b"google/\xff.jpg 1\n")
    with refused(str(path), "cannot be read as text"):
        WebVision().listing(webvision)
    path.unlink()
    with refused("train_filelist_google.txt does not exist"):
        WebVision().listing(webvision)
    write(webvision / "info/train_filelist_flickr.txt", "\n")
    with refused("lists no samples"):
        WebVision(sources=("flickr",)).listing(webvision)


def test_csv_of_names(tmp_path):
    table = write(tmp_path / "t.csv", '\ufefffile,label\r\n"a, b.png",dog\r\nsub/c.png,cat\r\n')
    write(tmp_path / "a, b.png", b"ab")
    listing = ImageCsv().listing(table)
    assert listing.classes == ("cat", "dog")
    assert listing.labels.tolist() == [1, 0]
    assert listing.clean is None
    assert list(listing.names) == ["a, b.png", "sub/c.png"]
    assert listing.read(0) == b"ab"


def test_csv_of_numbers_columns_splits_and_clean_labels(tmp_path):
    rows = "part,y,path,true\ntrain,10,a.png,2\ntrain,9,b.png,\ntest,3,c.png,3\n"
    table, images = write(tmp_path / "t.csv", rows), write(tmp_path / "images/b.png", b"b").parent
    names = {"file_column": "path", "label_column": "y", "clean_column": "true", "split_column": "part"}
    listing = ImageCsv(images, split="train", **names).listing(table)
    assert listing.classes == ("2", "9", "10")  # as numbers; a class may occur among the true ones only
    assert listing.labels.tolist() == [2, 1]
    assert listing.clean.tolist() == [0, UNKNOWN]
    assert listing.read(1) == b"b"
    assert ImageCsv(images, **names).listing(table).labels.tolist() == [3, 2, 1]


def test_csv_with_a_list_of_classes(tmp_path):
    table = write(tmp_path / "t.csv", "file,label\na.png,dog\n\nb.png,cow\n")
    classes = write(tmp_path / "classes.txt", "dog\ncat\ncow\n")
    listing = ImageCsv(classes=classes).listing(table)
    assert listing.classes == ("dog", "cat", "cow")
    assert listing.labels.tolist() == [0, 2]
    with refused(f"{table}, line 4 has label 'cow', wanted one of the 2 classes"):
        ImageCsv(classes=write(classes, "dog\ncat\n")).listing(table)
    with refused(f"{classes}, line 3 repeats the class 'dog'"):
        ImageCsv(classes=write(classes, "dog\ncat\ndog\n")).listing(table)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("name,label\na,1\n", ["no column 'file'", "name, label"]),
        ("", ["no column 'file'"]),
        ("file,label\na.png\n", ["line 2", "2 cells of the header"]),
        ("file,label\na.png,1,2\n", ["line 2", "2 cells of the header"]),
        ("file,label\na.png,1\nb.png, \n", ["line 3 has nothing in 'label'"]),
        ("file,label\n,1\n", ["line 2 has nothing in 'file'"]),
        ("file,label\nx/../../b.png,1\n", ["line 2 names 'x/../../b.png'", "stays below"]),
        ("file,label\n..\\b.png,1\n", ["line 2 names", "stays below"]),
        ("file,label\n/b.png,1\n", ["line 2 names '/b.png'", "stays below"]),
        (b"file,label\n\xff,1\n", ["cannot be read"]),
        ("file,label\n", ["lists no samples"]),
    ],
)
def test_csv_refuses(tmp_path, content, parts):
    table = write(tmp_path / "t.csv", content)
    with refused(str(table), *parts):
        ImageCsv().listing(table)


def test_csv_needs_its_folder_of_images(tmp_path):
    with refused("none is not a folder", "images of"):
        ImageCsv(tmp_path / "none").listing(write(tmp_path / "t.csv", "file,label\na,1\n"))


def npz(folder: Path, **arrays: object) -> Path:
    np.savez(folder / "d.npz", **arrays)
    return folder / "d.npz"


def test_npz_images_grey_and_colour(tmp_path):
    grey = np.arange(2 * 4 * 5, dtype=np.uint8).reshape(2, 4, 5)
    listing = Npz().listing(npz(tmp_path, x=grey, y=[0, 2]))
    assert listing.kind == "image"
    assert listing.classes == ("0", "1", "2")
    assert listing.read(1).shape == (4, 5, 3)
    assert all(np.array_equal(listing.read(1)[..., c], grey[1]) for c in range(3))
    assert listing.names[1] == "d.npz[1]"
    colour = np.stack([grey, grey + 1, grey + 2], -1)
    path = npz(tmp_path, pictures=colour, given=["dog", "cat"], true=["dog", ""], classes=["dog", "cow", "cat"])
    named = Npz("pictures", "given", "true").listing(path)
    assert np.array_equal(named.read(0), colour[0])
    assert named.classes == ("dog", "cow", "cat")
    assert named.labels.tolist() == [0, 2]
    assert named.clean.tolist() == [0, UNKNOWN]


def test_npz_features(tmp_path):
    x = np.random.default_rng(0).random((3, 2))
    arrays = {"x": x, "y": np.array([0, 1, 1], np.uint8), "t": [1, -1, 1], "classes": ["no", "yes"]}
    listing = Npz(clean="t").listing(npz(tmp_path, **arrays))
    assert listing.kind == "features"
    assert listing.read(2).dtype == np.float32
    np.testing.assert_array_equal(listing.read(2), x[2].astype(np.float32))
    assert listing.classes == ("no", "yes")
    assert listing.clean.tolist() == [1, UNKNOWN, 1]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"x": np.array([[0.0], [np.nan], [np.inf]])}, ["row [1] of x has NaN or inf"]),
        ({"x": np.array([[0.0], [1.0], [1e300]])}, ["row [2] of x has NaN or inf"]),
        ({"x": np.zeros((3, 2), np.int64)}, ["x is int64 [3, 2]", "uint8 [N, H, W]"]),
        ({"x": np.zeros((3, 2, 2, 4), np.uint8)}, ["x is uint8 [3, 2, 2, 4]"]),
        ({"x": np.float32(1)}, ["labels int64 [3] for 0 samples"]),
        ({"x": np.array([[None]] * 3)}, ["cannot be read", "plain arrays"]),
        ({"y": np.array([0, 1])}, ["labels int64 [2] for 3 samples"]),
        ({"y": np.array([0.0, 1, 2])}, ["labels float64 [3]", "whole number, or a string"]),
        ({"y": np.array([0, -1, 1])}, ["d.npz[1] has label -1, wanted 0 to 1"]),
        ({"y": np.array([0, 1, 10**9])}, ["has label 1000000000", "below a million"]),
        ({"classes": ["a", "b", "c"], "y": [0, 1, 3]}, ["d.npz[2] has label 3, wanted 0 to 2"]),
        ({"classes": ["a", "b"], "y": ["a", "b", "z"]}, ["d.npz[2] has label 'z', wanted one of the 2 classes"]),
        ({"classes": ["a", "a"]}, ["classes is not a list of different strings"]),
    ],
)
def test_npz_refuses(tmp_path, change, parts):
    path = npz(tmp_path, **({"x": np.zeros((3, 2)), "y": np.array([0, 1, 1])} | change))
    with refused(str(path) if "d.npz[" not in parts[0] else "", *parts):
        Npz().listing(path)


def test_npz_refuses_other_files(tmp_path):
    with refused("has no array 'y'", "x, labels"):
        Npz().listing(npz(tmp_path, x=np.zeros((2, 2)), labels=[0, 1]))
    with refused("no.npz does not exist", ".npz file"):
        Npz().listing(tmp_path / "no.npz")
    with refused("cannot be read", ".npz file of plain arrays"):
        Npz().listing(write(tmp_path / "d.npz", b"PK\x03\x04 cut"))
    np.save(tmp_path / "d.npy", np.zeros(3))
    with refused("cannot be read", ".npz file of plain arrays"):
        Npz().listing(tmp_path / "d.npy")


FORMATS = [
    *(Cifar10, Cifar100, Cifar10N, Cifar100N, ImageFolder, Animal10N, RedMiniImageNet, ImageNetVal),
    *(Clothing1M, WebVision, ImageCsv, Npz),
]


@pytest.mark.parametrize("form", FORMATS)
def test_options_can_be_given_on_a_command_line(form):
    assert tyro.cli(form, args=[]) == form()
    assert len(form.__doc__.splitlines()[0]) < 120


def test_options_of_several_kinds():
    given = tyro.cli(WebVision, args=["--sources", "google", "flickr", "--num-classes", "50"])
    assert given == WebVision(sources=("google", "flickr"), num_classes=50)
    assert tyro.cli(ImageNetVal, args=["--synsets", "s.txt"]).synsets == Path("s.txt")
    assert tyro.cli(ImageFolder, args=["--trusted"]) == ImageFolder(trusted=True)
