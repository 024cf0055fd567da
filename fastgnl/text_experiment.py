"""Experiments on texts: an encoder that is fine-tuned, or embeddings that were made before."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler

from fastgnl import miniature
from fastgnl.backbones import make_backbone
from fastgnl.beton import Beton
from fastgnl.encoder import Pooling, load_encoder, load_tokenizer
from fastgnl.errors import check
from fastgnl.experiment import Data, Experiment, Noise, described, noisy_labels
from fastgnl.loader import Source
from fastgnl.model import save_encoder
from fastgnl.samples import Samples
from fastgnl.task import Task, observed
from fastgnl.text_file import TextFile

EMBEDDINGS = "embeddings"
TINY = "tiny"

DEMO: dict[str, Any] = {
    "encoder": TINY,
    "max_length": 48,
    "pooling": "mean",
    "batches.size": 32,
    "train.epochs": 8,
    "train.lr": 5e-4,
    "gnl.warmup_epochs": 3,
}
FROZEN: dict[str, Any] = {
    "batches.size": 128,
    "batches.order": "random",
    "train.epochs": 20,
    "train.optimizer": "sgd",
    "train.schedule": "step",
    "train.lr": 0.02,
    "train.weight_decay": 5e-4,
    "gnl.warmup_epochs": 5,
}
"""One hidden layer on embeddings that do not change."""


@dataclass(frozen=True, kw_only=True)
class TextExperiment(Experiment):
    """An experiment on texts in .beton files."""

    variants: ClassVar[dict[str, dict[str, Any]]] = {"data demo": DEMO, f"encoder {EMBEDDINGS}": FROZEN}

    encoder: str = "bert-base-uncased"
    """A model of Hugging Face's transformers: the folder of one, or a name where the hub can be reached. "embeddings"
    trains one hidden layer on files of features."""
    max_length: int = 128
    """Tokens of a text that are read."""
    pooling: Pooling = "auto"
    """One vector a text: that of the first token, or the mean; "auto" is the mean for sentence-transformers."""
    noise: Noise = Noise("instance")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.batches.order in ("random", "balanced") or self.encoder != EMBEDDINGS,
            f"batches.order is {self.batches.order!r} for embeddings, wanted random or balanced",
        )

    def make_demo(self, paths: dict[str, Path]) -> None:
        check(self.encoder != EMBEDDINGS, "encoder is 'embeddings' for the demo, which has texts only, wanted another")
        miniature.docstrings(paths["train"], paths["test"], self.seed)
        if self.encoder == TINY:
            miniature.tiny_encoder(self._tiny, paths["train"])

    @property
    def _tiny(self) -> Path:
        return self.folder / "data" / "encoder"

    def open(self, paths: dict[str, Path]) -> Data:
        betons = {role: Beton(path) for role, path in paths.items()}
        kind = "features" if self.encoder == EMBEDDINGS else "text"
        for role, beton in betons.items():
            check(beton.kind == kind, f"{paths[role]} holds {beton.kind}, wanted {kind} for the encoder {self.encoder}")
            self.check_classes(paths[role], beton.classes, betons["train"].classes)
        noisy = noisy_labels(paths["train"], self.noise, self.seed)
        files = {role: described(beton) for role, beton in betons.items()}
        if kind == "features":
            return self._embeddings(betons, noisy, files)
        encoder = str(self._tiny) if self.is_demo and self.encoder == TINY else self.encoder
        tokenizer = load_tokenizer(encoder)
        sources = {
            role: TextFile(path, tokenizer, self.max_length, noisy if role == "train" else None)
            for role, path in paths.items()
        }
        first = load_encoder(encoder, self.pooling)  # what cannot be loaded is told of before training
        limit = getattr(first.model.config, "max_position_embeddings", self.max_length)
        check(self.max_length <= limit, f"max_length is {self.max_length}, wanted at most {limit} for {encoder}")
        network = {"kind": "text", "pooling": first.pooling, "max_length": self.max_length}
        tests: Mapping[str, Source] = {role: source for role, source in sources.items() if role != "train"}
        task = self._task(betons["train"], sources["train"], tests, lambda: load_encoder(encoder, self.pooling))
        return Data(task, tests, network, files, lambda folder: save_encoder(folder, first, tokenizer))

    def _embeddings(self, betons: dict[str, Beton], noisy: Any, files: dict[str, Any]) -> Data:
        scaler = StandardScaler()
        sources: dict[str, Source] = {}
        for role, beton in betons.items():
            rows = np.argsort(beton.ids)
            x = beton.features(rows)
            x = (scaler.fit_transform(x) if role == "train" else scaler.transform(x)).astype(np.float32)
            given = noisy if role == "train" and noisy is not None else beton.labels[rows]
            labels, clean = (torch.from_numpy(np.array(part)) for part in (given, beton.clean[rows]))
            sources[role] = Samples(torch.from_numpy(x), labels, clean if bool((clean >= 0).any()) else None)
        width = int(betons["train"].info["width"])
        network = {
            "kind": "features",
            "backbone": "mlp",
            "inputs": width,
            "mean": scaler.mean_.tolist(),
            "scale": scaler.scale_.tolist(),
        }
        tests = {role: source for role, source in sources.items() if role != "train"}
        task = self._task(betons["train"], sources["train"], tests, lambda: make_backbone("mlp", width))
        return Data(task, tests, network, files)

    def _task(self, beton: Beton, train: Source, tests: Mapping[str, Source], backbone: Any) -> Task:
        clean = np.full(len(beton), -1) if train.clean is None else train.clean.numpy()
        matrix = observed(train.labels.numpy(), clean, len(beton.classes))
        title = "docstrings of four packages" if self.is_demo else self.name
        return Task(title, beton.classes, train, next(iter(tests.values())), matrix, backbone, None)
