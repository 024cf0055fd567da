"""Backbones by name: modules that return features [B, F], with F as ``num_features`` and no classifier."""

from typing import Any

from torch import nn

from fastgnl.backbones.inception_resnet_v2 import InceptionResNetV2
from fastgnl.backbones.packages import from_timm, from_torchvision
from fastgnl.backbones.preact import PreActResNet18
from fastgnl.backbones.resnet import ResNet34Cifar, ResNet50
from fastgnl.backbones.vgg import VGG19BN
from fastgnl.errors import check, check_count
from fastgnl.networks import MLP, FastCNN

BACKBONES: dict[str, Any] = {
    "resnet34-cifar": ResNet34Cifar,
    "preact-resnet18": PreActResNet18,
    "vgg19-bn": VGG19BN,
    "resnet50": ResNet50,
    "inception-resnet-v2": InceptionResNetV2,
    "small-cnn": FastCNN,
    "mlp": MLP,
}
PACKAGES = {"timm": from_timm, "torchvision": from_torchvision}


def check_backbone(name: str) -> None:
    """Refuse a name that is none, before anything is made of it."""
    package, _, model = name.partition(":")
    check(
        name in BACKBONES or (package in PACKAGES and bool(model)),
        f"the backbone is {name!r}, wanted one of {', '.join(BACKBONES)}, timm:NAME or torchvision:NAME",
    )


def make_backbone(name: str, inputs: int | None = None) -> nn.Module:
    """A new backbone, at random weights. ``inputs``: how many features a sample has, for "mlp" alone; all others take
    images [B, 3, H, W]."""
    check_backbone(name)
    if name == "mlp":
        check(inputs is not None, "the backbone is 'mlp' and inputs is None, wanted the number of features of a sample")
        assert inputs is not None
        check_count("inputs", inputs, 1)
        return MLP(inputs)
    check(inputs is None, f"the backbone is {name!r} and inputs is {inputs}, wanted images, or the backbone 'mlp'")
    package, _, model = name.partition(":")
    return PACKAGES[package](model) if model else BACKBONES[name]()


def min_side(name: str) -> int:
    """The smallest side of images that a backbone takes; 1 where it is not known (timm, torchvision)."""
    check_backbone(name)
    return getattr(BACKBONES.get(name), "smallest", 1)
