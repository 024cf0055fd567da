"""A bar for long work: rate, time left, epoch, loss and its terms, accuracy, share of the time waited for data."""

import math
import sys

from tqdm import tqdm

from fastgnl.tally import Epoch

LINE = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining} {rate_fmt}{postfix}"
SPARE = 6
"""Columns that the bar itself gives up for the figures: of tqdm's 10 it keeps 4."""


class Progress:
    """Counts the rows of training; a live bar on a terminal, a line now and then in a log."""

    def __init__(self, label: str, rows: int, epochs: int, enabled: bool = True, start: int = 0) -> None:
        """``start`` rows were done before, by a run that is resumed."""
        self.rows = rows
        self.epochs = epochs
        self.values: dict[str, float] = {}
        terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=rows * epochs,
            initial=start,
            desc=label,
            unit="img",
            unit_scale=True,
            disable=not enabled,
            dynamic_ncols=True,
            bar_format=LINE if terminal else None,
            mininterval=0.2 if terminal else 5.0,
            smoothing=0.1,
        )

    def on_batch(self, rows: int, shown: dict[str, float] | None = None) -> None:
        """``shown``, given now and then: any of loss, ce, prior, estep, wait, coverage, set_size."""
        if shown is not None:
            self._show(math.ceil((self.bar.n + rows) / self.rows), shown)
        self.bar.update(rows)

    def on_epoch(self, epoch: Epoch) -> None:
        values = {
            "wait": epoch.wait,
            "loss": epoch.loss,
            "ce": epoch.ce,
            "prior": epoch.prior,
            "estep": epoch.estep,
            "coverage": epoch.coverage,
            "clean_size": epoch.clean_size,
            "noisy_size": epoch.noisy_size,
        }
        if epoch.test_accuracy is not None:
            values["test"] = epoch.test_accuracy
        self._show(epoch.number + 1, values)

    def _show(self, epoch: int, values: dict[str, float]) -> None:
        """The figures, the more important first, as many as a terminal's line has room for."""
        self.values.update(values)
        if self.bar.disable:
            return
        layout = dict(self.bar.format_dict)
        room = math.inf
        if layout["ncols"]:
            room = layout["ncols"] - len(tqdm.format_meter(**layout | {"postfix": None, "ncols": None})) + SPARE - 2
        line = f"epoch {epoch}/{self.epochs}"
        for part in self._parts():
            if len(line) + 1 + len(part) <= room:
                line += f" {part}"
        self.bar.set_postfix_str(line, refresh=False)

    def _parts(self) -> list[str]:
        known = {name: value for name, value in self.values.items() if not math.isnan(value)}
        parts = [f"loss {known['loss']:.3f}"] if "loss" in known else []
        if "test" in known:
            parts.append(f"test {known['test']:.1%}")
        if "wait" in known:
            parts.append(f"wait {known['wait']:.0%}")
        if any(known.get(name) for name in ("prior", "estep")):  # else the loss is its first term
            short = (("ce", "ce"), ("pri", "prior"), ("kl", "estep"))
            parts.append(" ".join(f"{name} {known[term]:.2f}" for name, term in short if term in known))
        if "coverage" in known:
            parts.append(f"cov {known['coverage']:.0%}")
        if "clean_size" in known and "noisy_size" in known:
            parts.append(f"unc {known['clean_size']:.1f}/{known['noisy_size']:.1f}")
        elif "set_size" in known:
            parts.append(f"set {known['set_size']:.1f}")
        return parts

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.close()
