"""Backbones of timm and torchvision, where these are installed."""

import importlib
from typing import Any

from torch import nn

from fastgnl.errors import InputError, check


def _made(package: str, module: str, function: str, name: str, **options: Any) -> Any:
    """A network of a package by its name there."""
    try:
        make = getattr(importlib.import_module(module), function)
    except Exception as error:  # one built for another torch raises what it likes
        raise InputError(
            f"the backbone is {package}:{name} and {package} cannot be imported ({_said(error)}), wanted it installed"
        ) from error
    try:
        return make(name, **options)
    except Exception as error:  # the same
        raise InputError(
            f"the backbone is {package}:{name}, which {package} cannot make ({_said(error)}), wanted one it has"
        ) from error


def _said(error: Exception) -> str:
    return f"{error}".partition("\n")[0] or type(error).__name__


def from_timm(name: str) -> nn.Module:
    """timm's network without its classifier."""
    model = _made("timm", "timm", "create_model", name, pretrained=False, num_classes=0)
    # Where a layer stands between the pooled features and the classifier, its width has a name of its own.
    model.num_features = getattr(model, "head_hidden_size", model.num_features)
    classifiers = getattr(model, "default_cfg", {}).get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    model.classifier_keys = tuple(f"{classifier}." for classifier in classifiers)
    return model


def from_torchvision(name: str) -> nn.Module:
    """torchvision's network; its last Linear becomes the identity."""
    model = _made("torchvision", "torchvision.models", "get_model", name, weights=None)
    linear = [(path, part) for path, part in model.named_modules() if isinstance(part, nn.Linear)]
    check(bool(linear), f"the backbone is torchvision:{name}, which has no Linear layer, wanted one that ends in it")
    path, last = linear[-1]
    model.set_submodule(path, nn.Identity())
    model.num_features = last.in_features
    model.classifier_keys = (f"{path}.",)
    return model
