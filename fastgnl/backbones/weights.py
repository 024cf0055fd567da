"""Published weights from a local file into a backbone."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fastgnl.errors import InputError, check, some

WRAPPERS = ("state_dict", "model")
"""Keys under which a checkpoint may keep its weights."""
PREFIX = "module."
"""What DataParallel and DDP put before every name."""
COUNTER = ".num_batches_tracked"
"""Of a BatchNorm; old files have none."""


def load_weights(backbone: nn.Module, path: Path) -> None:
    """Load a .safetensors, .pth, .pt or .bin file, in place: a state dict, or one under "state_dict" or "model".

    Names and shapes must be the backbone's own. The file may have a classifier besides (the backbone's
    ``classifier_keys`` say how its names begin), which is left out. Nothing is changed unless everything fits.
    """
    given, wanted = _tensors(path), backbone.state_dict()
    classifier: tuple[str, ...] = getattr(backbone, "classifier_keys", ())
    given = {name: value for name, value in given.items() if not name.startswith(classifier)}
    missing = [name for name in wanted if name not in given and not name.endswith(COUNTER)]
    unknown = [name for name in given if name not in wanted]
    shapes = [
        f"{name} of shape {tuple(given[name].shape)} for {tuple(wanted[name].shape)}"
        for name in wanted
        if name in given and given[name].shape != wanted[name].shape
    ]
    problems = [
        f"{kind} {some(names)}".strip()
        for kind, names in (("no", missing), ("unknown", unknown), ("", shapes))
        if names
    ]
    check(
        not problems,
        f"{path} has {'; '.join(problems)}, wanted the {len(wanted)} tensors of {type(backbone).__name__}",
    )
    backbone.load_state_dict(given, strict=False)  # a counter may be missing, nothing else


def _tensors(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, without the wrapper and the prefix."""
    content = _content(path)
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    check(isinstance(content, dict), f"{path} holds a {type(content).__name__}, wanted a state dict")
    check(len(content) > 0, f"{path} is empty, wanted a state dict")
    for name, value in content.items():
        check(
            isinstance(name, str) and isinstance(value, Tensor),
            f"{path} has a {type(value).__name__} under {name!r}, wanted names of tensors alone, or these under "
            + " or ".join(map(repr, WRAPPERS)),
        )
    if all(name.startswith(PREFIX) for name in content):
        return {name.removeprefix(PREFIX): value for name, value in content.items()}
    return content


def _content(path: Path) -> Any:
    """What a file holds, read without running anything in it."""
    check(path.exists(), f"{path} does not exist, wanted a file of weights")
    check(path.is_file(), f"{path} is no file, wanted a file of weights")
    check(
        path.suffix in (".safetensors", ".pth", ".pt", ".bin"),
        f"the weights are {path}, wanted a .safetensors, .pth, .pt or .bin file",
    )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and the file decide what it is
        loaded = re.search(r"GLOBAL (\S+)", str(error))
        what = f"tries to load {loaded[1]}" if loaded else f"cannot be read as a {path.suffix} file"
        raise InputError(f"{path} {what}, wanted a whole file with tensors alone in it") from error
