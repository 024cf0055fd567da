"""A trained model as files: its weights (model.safetensors), a card (model.json), for texts also its encoder/."""

import json
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fastgnl.augment import Augment
from fastgnl.backbones import make_backbone
from fastgnl.builtin_reader import normalise
from fastgnl.encoder import load_encoder, load_tokenizer
from fastgnl.errors import InputError, check
from fastgnl.files import written
from fastgnl.images import decode, resize, window_of
from fastgnl.transition import PairNet, TransitionNet, with_transition

WEIGHTS, CARD, ENCODER = "model.safetensors", "model.json", "encoder"
WANTED = "the folder of a finished run, with model.safetensors and model.json"
ROWS = 64
"""Samples that are predicted at a time."""


def save_model(folder: Path, net: nn.Module, card: dict[str, Any]) -> None:
    """Write the weights, then the card that says what they are."""
    state = {name: value.detach().cpu().contiguous() for name, value in net.state_dict().items()}
    with written(folder / WEIGHTS, binary=True) as file:
        file.write(save(state))
    about = {"fastgnl": version("fastgnl"), "torch": torch.__version__, "written": time.strftime("%Y-%m-%d %H:%M:%S")}
    with written(folder / CARD) as file:
        json.dump(about | card, file, indent=1)


def save_encoder(folder: Path, backbone: Any, tokenizer: Any) -> None:
    """Write what a text model needs besides its weights: the encoder's configuration and the tokenizer."""
    backbone.model.config.save_pretrained(folder / ENCODER)
    tokenizer.save_pretrained(folder / ENCODER)


class Model:
    """A trained classifier: inputs of the kind it was trained on to classes.

    Images are paths, PIL images' arrays uint8 [H, W, 3] or the bytes of files; texts are strings; features are rows of
    an array."""

    def __init__(self, net: TransitionNet | PairNet, card: dict[str, Any], folder: Path) -> None:
        self.net, self.card = net.eval(), card
        self.classes: tuple[str, ...] = tuple(card["classes"])
        self.network: dict[str, Any] = card["network"]
        self.tokenizer = load_tokenizer(str(folder / ENCODER)) if self.network["kind"] == "text" else None

    @torch.no_grad()
    def predict_proba(self, inputs: Sequence[Any]) -> NDArray[np.float32]:
        """p(class) of each input, [N, C]."""
        found = [self.net.predict_proba(x).numpy() for x in self._batches(inputs)]
        return np.concatenate([np.zeros((0, len(self.classes)), np.float32), *found])

    def predict(self, inputs: Sequence[Any]) -> list[str]:
        """The name of the class of each input."""
        return [self.classes[c] for c in self.predict_proba(inputs).argmax(1)]

    def _batches(self, inputs: Sequence[Any]) -> Iterator[Tensor]:
        kind = self.network["kind"]
        make = {"image": self._images, "text": self._texts, "features": self._features}[kind]
        for start in range(0, len(inputs), ROWS):
            yield make(inputs[start : start + ROWS])

    def _images(self, images: Sequence[Any]) -> Tensor:
        augment = Augment(**{name: _tuple(value) for name, value in self.network["images"].items()})
        pixels = np.stack([self._window(image, augment) for image in images])
        x = np.empty(pixels.shape, np.float32)
        normalise(pixels, augment, x)
        return torch.from_numpy(x).permute(0, 3, 1, 2)

    def _window(self, image: Any, augment: Augment) -> NDArray[np.uint8]:
        """The part of an image that evaluation looks at, as it was in training."""
        where = image if isinstance(image, str | Path) else "an image"
        try:
            data = Path(image).read_bytes() if isinstance(image, str | Path) else image
            pixels = data if isinstance(data, np.ndarray) else decode(data)
        except (OSError, ValueError) as error:
            raise InputError(f"{where} cannot be read ({error}), wanted an image") from error
        check(
            pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8,
            f"{where} is {pixels.dtype} of shape {pixels.shape}, wanted uint8 (height, width, 3)",
        )
        pixels = resize(pixels, self.network["stored_side"], self.network["stored_square"])
        height, width = self.network["output"]
        high, wide = (np.array([side]) for side in pixels.shape[:2])
        window = augment.windows(np.zeros(1, np.int64), high, wide, (height, width), 0, None)
        top, left, rows, cols = (int(part[0]) for part in window[:4])
        return window_of(Image.fromarray(pixels), top, left, rows, cols, height, width)

    def _texts(self, texts: Sequence[str]) -> Tensor:
        assert self.tokenizer is not None
        for text in texts:
            check(isinstance(text, str), f"an input is {type(text).__name__}, wanted a text")
        options = {"truncation": True, "max_length": self.network["max_length"], "padding": True}
        return torch.as_tensor(np.asarray(self.tokenizer(list(texts), **options)["input_ids"]))

    def _features(self, rows: Sequence[Any]) -> Tensor:
        x = np.asarray(rows, np.float32)
        width = self.network["inputs"]
        check(x.ndim == 2 and x.shape[1] == width, f"features have shape {x.shape}, wanted (samples, {width})")
        return torch.from_numpy((x - np.float32(self.network["mean"])) / np.float32(self.network["scale"]))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _backbone(network: dict[str, Any], folder: Path) -> Any:
    if network["kind"] == "text":
        return load_encoder(str(folder / ENCODER), network["pooling"], weights=False)
    return make_backbone(network["backbone"], network.get("inputs"))


def load_model(folder: Path | str) -> Model:
    """The model that a run exported."""
    folder = Path(folder)
    for name in (WEIGHTS, CARD):
        check((folder / name).exists(), f"{folder / name} does not exist, wanted {WANTED}")
    try:
        card = json.loads((folder / CARD).read_text())
        network = card["network"]
        backbones = [_backbone(network, folder) for _ in range(network["networks"])]
        net = with_transition(
            backbones[0] if len(backbones) == 1 else (backbones[0], backbones[1]),
            backbones[0].num_features,
            len(card["classes"]),
            transition_input=network["transition_input"],
            draws=network["draws"],
        )
        net.load_state_dict(load((folder / WEIGHTS).read_bytes()))
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the model in {folder} cannot be loaded ({why}), wanted {WANTED}") from error
    return Model(net, card, folder)
