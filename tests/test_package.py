"""What is installed, and that nothing optional is needed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fastgnl

ROOT = Path(__file__).parents[1]


def python(code, cwd):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


def test_kernels_is_not_a_top_level_package(tmp_path):
    done = python("import fastgnl.kernels.philox; import kernels", tmp_path)
    assert done.returncode == 1
    assert "No module named 'kernels'" in done.stderr


def test_a_wheel_holds_the_package_and_nothing_else(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, ROOT]
    pytest.importorskip("setuptools")
    done = subprocess.run(list(map(str, build)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"fastgnl", f"fastgnl-{fastgnl.__version__}.dist-info"}
    assert "fastgnl/kernels/philox.py" in names
    assert "fastgnl/formats/cifar.py" in names
    assert "fastgnl/backbones/vgg.py" in names
    assert "fastgnl/kernels/step.cpp" in names
    assert "fastgnl/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_everything_imports_without_the_optional_packages(tmp_path):
    code = """
import importlib, pkgutil, sys
for name in ("ffcv", "deepspeed", "transformers", "tokenizers", "triton", "pytest", "torchvision", "timm", "cleanlab"):
    sys.modules[name] = None  # importing it now raises ImportError
import fastgnl, fastgnl.backbones, fastgnl.formats, fastgnl.kernels, fastgnl.methods
for package in (fastgnl, fastgnl.backbones, fastgnl.formats, fastgnl.kernels, fastgnl.methods):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name.split(".")[-1] not in ("triton_kernels", "triton_step", "ahead", "ffcv_reader", "hf_trainer"):
            importlib.import_module(module.name)

from pathlib import Path
from fastgnl.convert import convert
from fastgnl.formats import EMBEDDED
from fastgnl.image_file import ImageFile
from fastgnl.loader import Loader
convert(EMBEDDED["digits"]().listing(), Path("digits.beton"), quiet=True)
assert sum(len(batch.labels) for batch in Loader(ImageFile("digits.beton")).epoch(0)) == 1437
print("ok")
"""
    done = python(code, tmp_path)
    assert done.stdout.strip() == "ok", done.stderr
    assert "FFCV is not installed: the built-in loader reads the images" in done.stderr


def test_the_public_names():
    assert fastgnl.__all__ == ["GNLClassifier", "GNLObjective", "GNLPair", "Terms", "with_transition"]
    for name in fastgnl.__all__:
        assert getattr(fastgnl, name).__doc__
