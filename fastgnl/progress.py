"""A bar for long work: rate, time left, epoch and current accuracy."""

import sys

from tqdm import tqdm

from fastgnl.trainer import Epoch


class Progress:
    """Counts the rows of training; a live bar on a terminal, a line now and then in a log."""

    def __init__(self, label: str, rows: int, epochs: int, enabled: bool = True) -> None:
        self.epochs = epochs
        self.bar = tqdm(
            total=rows * epochs,
            desc=label,
            unit="row",
            unit_scale=True,
            disable=not enabled,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 5.0,
            smoothing=0.1,
        )

    def on_batch(self, rows: int) -> None:
        self.bar.update(rows)

    def on_epoch(self, epoch: Epoch) -> None:
        shown = f"epoch {epoch.number + 1}/{self.epochs}, loss {epoch.loss:.3f}"
        if epoch.test_accuracy is not None:
            shown += f", test {100 * epoch.test_accuracy:.1f}%"
        shown += f", waited {epoch.wait:.0%}"
        self.bar.set_postfix_str(shown, refresh=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.close()
