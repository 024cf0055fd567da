"""AG News and 20 Newsgroups: torchrun --nproc-per-node 2 launchers/news.py --data DIR."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastgnl.config import GNLOptions
from fastgnl.experiment import Batches, DataFile
from fastgnl.launch import main
from fastgnl.optimise import TrainConfig
from fastgnl.text_experiment import EMBEDDINGS, TextExperiment


@dataclass(frozen=True, kw_only=True)
class News(TextExperiment):
    """News topics, AG News or 20 Newsgroups, with made noise of three kinds."""

    name: ClassVar[str] = "news"

    dataset: Literal["agnews", "newsgroups20"] = "newsgroups20"
    """Which of the two."""
    batches: Batches = Batches(size=64, order="bucketed")
    gnl: GNLOptions = GNLOptions(warmup_epochs=1)
    train: TrainConfig = TrainConfig(epochs=10, lr=1e-4, weight_decay=0.0, schedule="linear", optimizer="adamw")

    def num_classes(self) -> int:
        return {"agnews": 4, "newsgroups20": 20}[self.dataset]

    def files(self) -> dict[str, DataFile]:
        if self.encoder == EMBEDDINGS:
            return {
                split: DataFile(f"{split}-embeddings.beton", f"npz {split}.npz {{folder}}/{split}-embeddings.beton")
                for split in ("train", "test")
            }
        return {
            split: DataFile(f"{split}.beton", f"{self.dataset} SOURCE {{folder}}/{split}.beton --split {split}")
            for split in ("train", "test")
        }


if __name__ == "__main__":
    main(News)
