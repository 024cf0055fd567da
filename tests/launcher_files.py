"""The launchers of launchers/, which is no package, as modules."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "launchers"
CLASSES = {
    "cifar": "Cifar",
    "cifar_n": "CifarN",
    "red_mini_imagenet": "RedMiniImageNet",
    "animal10n": "Animal10N",
    "clothing1m": "Clothing1M",
    "webvision": "WebVision",
    "news": "News",
}


def load(name):
    """The experiment of a launcher."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the options' descriptions are looked up
    spec.loader.exec_module(module)
    return getattr(module, CLASSES[name])


EXPERIMENTS = {name: load(name) for name in CLASSES}
