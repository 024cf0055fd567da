"""``GNLTrainer``: the method for users of ``transformers.Trainer``. Optional: needs transformers and accelerate.

Axes: B rows, C classes.
"""

import pickle
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from fastgnl.batch import check_below
from fastgnl.errors import InputError, check
from fastgnl.files import written
from fastgnl.objective import GNLObjective

try:
    from transformers import (
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError(
        "transformers is not installed, wanted it for fastgnl.hf_trainer: pip install 'transformers[torch]'"
    ) from error

NOISY_HEAD = "gnl_noisy_head"
"""The noisy head's name in the model."""
STATE = "gnl.pt"
"""The file in a checkpoint's folder that holds the noisy head and the label state."""

Row = Mapping[str, Any]
Batch = MutableMapping[str, Any]


class _Numbered(Dataset[Row]):
    """The rows of a data set, each with its number as "index"."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        row = self.rows[i]
        check(isinstance(row, Mapping), f"row {i} of train_dataset is a {type(row).__name__}, wanted a dict")
        return {**row, "index": i}


class _Collator:
    """Batches as another collator makes them, with the ids of their rows as "index". Its labels must be classes."""

    def __init__(self, collate: Callable[[list[Row]], Batch], num_classes: int) -> None:
        self.collate, self.num_classes = collate, num_classes

    def __call__(self, rows: list[Row]) -> Batch:
        batch = self.collate([{name: value for name, value in row.items() if name != "index"} for row in rows])
        check("labels" in batch, f"a training batch holds {', '.join(batch)}, wanted 'labels' among them")
        check_below("labels", batch["labels"], self.num_classes)
        batch["index"] = torch.tensor([row["index"] for row in rows])
        return batch


class _EndOfEpoch(TrainerCallback):
    """Ends the objective's epoch after the last step of one.

    Not ``on_epoch_end``: a checkpoint of that step is written before it, and a run resumed there never calls it.
    """

    def __init__(self, objective: GNLObjective) -> None:
        self.objective = objective

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if state.epoch == int(state.epoch):
            self.objective.end_epoch()


def _clean_head(model: Any) -> nn.Linear:
    """The last linear layer with as many outputs as there are classes."""
    check(
        isinstance(model, PreTrainedModel),
        f"model is a {type(model).__name__}, wanted a model of transformers with a classification head",
    )
    kind = getattr(model.config, "problem_type", None)
    check(
        kind in (None, "single_label_classification"),
        f"the model's problem_type is {kind!r}, wanted 'single_label_classification'",
    )
    C = model.config.num_labels
    heads = [part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features == C]
    check(len(heads) > 0, f"the model has no linear layer with {C} outputs, wanted one as its last")
    return heads[-1]


class GNLTrainer(Trainer):
    """A ``transformers.Trainer`` that survives wrong labels.

    >>> trainer = GNLTrainer(model, args, train_dataset=rows, gnl={"warmup_epochs": 1, "direction": "y->x"})
    >>> trainer.train()
    >>> trainer.predict(test_rows).predictions  # clean logits, as always
    >>> trainer.noise_probability  # for each row of train_dataset: is its label wrong?

    ``model`` is any transformers model for the classification of sequences, or images, by a last linear layer;
    ``train_dataset`` has a length and gives dicts by number, its collator batches with "labels"; ``gnl`` takes the
    options of ``GNLConfig`` (``warmup_epochs`` is 1 and ``seed`` is the arguments' unless given). The other arguments
    are those of ``Trainer``.

    The loss in training is that of ``GNLObjective``, on t = W_t [feat ; sg(z)] beside the model's logits z = W_c feat.
    W_t is part of the model while it trains, as ``gnl_noisy_head``, and so of what is optimised, clipped and moved.
    It is not part of what ``save_pretrained`` writes: a checkpoint loads with ``from_pretrained``, and ``gnl.pt`` in
    its folder has W_t and the label state, for ``train(resume_from_checkpoint=...)``. Evaluation is as always, its
    loss cross-entropy.

    With ``gradient_accumulation_steps`` a batch stays a batch of the method, with its own p(x given y), and the
    gradient is the mean of theirs. One process and one GPU only: ``Trainer`` sends any row to any process, but a
    process keeps the label state of rows of its own. ``launchers/news.py`` trains on texts with many.
    """

    objective: GNLObjective

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *,
        gnl: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        check(
            hasattr(train_dataset, "__len__") and not isinstance(train_dataset, IterableDataset),
            f"train_dataset is a {type(train_dataset).__name__}, wanted one with a length and rows by number",
        )
        if hasattr(model, NOISY_HEAD):  # of an earlier trainer
            delattr(model, NOISY_HEAD)
        self._clean = clean = _clean_head(model)
        super().__init__(model, args, data_collator, train_dataset, **options)
        self._check_arguments()

        self._noisy = nn.Linear(
            clean.in_features + clean.out_features,
            clean.out_features,
            device=clean.weight.device,
            dtype=clean.weight.dtype,
        )
        model.add_module(NOISY_HEAD, self._noisy)
        model._keys_to_ignore_on_save.update(f"{NOISY_HEAD}.{name}" for name in self._noisy.state_dict())
        # The loss is the mean over a batch: Trainer has to divide it by the batches of a step, never by their rows.
        self.model_accepts_loss_kwargs = False

        chosen = {"warmup_epochs": 1, "seed": self.args.seed, **(gnl or {})}
        for name in ("num_samples", "num_classes"):
            check(name not in chosen, f"gnl has {name!r}, wanted it left to the data set and the model")
        objective = GNLObjective(len(train_dataset), clean.out_features, **chosen)  # type: ignore[arg-type]
        check(objective.bank is None, "denominator is 'bank', wanted another: there is no momentum encoder here")
        check(objective.config.loss_source == "online", "loss_source is 'eval', wanted 'online'")
        self.objective = objective.to(self.args.device)
        self.add_callback(_EndOfEpoch(self.objective))

    def _check_arguments(self) -> None:
        """Refuse what the method would silently leave out."""
        for several, kind in ((self.args.world_size, "processes"), (self.args.n_gpu, "GPUs")):
            check(several <= 1, f"GNLTrainer is run with {several} {kind}, wanted 1 (many: launchers/news.py)")
        smoothing = self.args.label_smoothing_factor
        check(smoothing == 0, f"label_smoothing_factor is {smoothing}, wanted 0: the method has its own loss")
        check(
            self.compute_loss_func is None, "compute_loss_func was given, wanted none: the loss is that of the method"
        )
        check(
            self.optimizer is None,
            "optimizers was given, wanted optimizer_cls_and_kwargs: the noisy head is not among its parameters",
        )

    @property
    def noise_probability(self) -> NDArray[np.float32]:
        """The probability that a label is wrong, for each row of the training set [N]; 0 before warm-up is over."""
        w_N: NDArray[np.float32] = self.objective.w_N.cpu().numpy().copy()
        return w_N

    def get_train_dataloader(self) -> Any:
        rows = self.train_dataset
        self.train_dataset = _Numbered(rows)
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset = rows

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Outermost, so that neither the removal of columns nor the user's collator comes upon the ids."""
        collate = super()._get_collator_with_removed_columns(data_collator, description)
        training = isinstance(self.train_dataset, _Numbered)
        return _Collator(collate, self._clean.out_features) if training else collate

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of the method where rows have ids, which is in training; else that of ``Trainer``."""
        if "index" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        given = {name: value for name, value in inputs.items() if name not in ("labels", "index")}
        with self._clean.register_forward_hook(self._both):
            outputs = model(**given, return_dict=True)
        wanted = (len(inputs["index"]), 2 * self._clean.out_features)
        found = tuple(outputs["logits"].shape)
        check(
            found == wanted,
            f"clean and noisy logits come out of the model with shape {found}, wanted {wanted}: "
            "those of one last linear layer, one row a sample",
        )
        z_BC, t_BC = outputs["logits"].chunk(2, 1)
        outputs["logits"] = z_BC
        loss = self.objective(z_BC, t_BC, inputs["labels"], inputs["index"]).loss
        return (loss, outputs) if return_outputs else loss

    def _both(self, clean: nn.Module, inputs: tuple[Tensor, ...], z: Tensor) -> Tensor:
        """[z ; t] in place of z: what the model does to z after its last layer (pooling) it does to t too."""
        t = self._noisy(torch.cat([inputs[0], z.detach()], -1))
        return torch.cat([z, t], -1)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model as ``Trainer`` saves it, and beside it the noisy head and the label state."""
        with written(Path(output_dir or str(self.args.output_dir)) / STATE, binary=True) as file:
            torch.save({"noisy_head": self._noisy.state_dict(), "objective": self.objective.state_dict()}, file)
        super().save_model(output_dir, _internal_call)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_state(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_state(Path(str(self.state.best_model_checkpoint)))

    def _load_state(self, folder: Path) -> None:
        path, config = folder / STATE, self.objective.config
        check(path.is_file(), f"{path} is not there, wanted a checkpoint that GNLTrainer wrote")
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            self._noisy.load_state_dict(saved["noisy_head"])
            self.objective.load_state_dict(saved["objective"])
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise InputError(
                f"{path} does not fit, wanted one that GNLTrainer wrote with {config.num_samples} samples, "
                f"{config.num_classes} classes and the same options"
            ) from error
