"""GNLTrainer: the loss, the ids and the checkpoints of a transformers.Trainer that survives wrong labels."""

import copy
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from fastgnl import GNLObjective
from fastgnl.errors import InputError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
GNLTrainer = pytest.importorskip("fastgnl.hf_trainer").GNLTrainer

DOCUMENT = Path(__file__).parents[1] / "docs" / "transformers.md"
C, WORDS = 3, 20


def bert(dropout=0.0, **options):
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **{"num_labels": C, **options},
    )
    return transformers.BertForSequenceClassification(config)


def some_rows(n, labels=C):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (n, 6), generator=g)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": i % labels} for i, row in enumerate(ids)
    ]


def arguments(folder, **options):
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "dataloader_pin_memory": False}
    known = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "save_strategy": "no", "learning_rate": 0.01}
    return transformers.TrainingArguments(str(folder), **{**quiet, **known, **options})


def stacked(rows, name):
    return torch.stack([torch.as_tensor(row[name]) for row in rows])


def test_the_example_of_the_documentation_beats_cross_entropy(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    assert names["accuracy"]["GNLTrainer"] > names["accuracy"]["Trainer"] + 0.03  # 0.12 where it was written
    wrong = names["given"] != names["clean"]
    assert wrong[names["suspicious"][:20]].mean() > 0.7


def test_training_equals_a_hand_written_loop_with_accumulated_gradients(tmp_path):
    """Five batches an epoch, the last of two rows, in steps of two batches, two and one."""
    rows = some_rows(18)
    args = arguments(
        tmp_path,
        num_train_epochs=3,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        train_sampling_strategy="sequential",
        seed=7,
    )
    trainer = GNLTrainer(bert(), args, train_dataset=rows, gnl={"direction": "x->y"})
    by_hand = copy.deepcopy(trainer.model)
    trainer.train()

    objective = GNLObjective(18, C, direction="x->y", warmup_epochs=1, seed=7)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for _ in range(3):
        for step in ([0, 4], [8, 12], [16]):
            optimizer.zero_grad()
            for first in step:
                batch = rows[first : first + 4]
                feat = by_hand.bert(stacked(batch, "input_ids")).pooler_output
                z = by_hand.classifier(feat)
                t = by_hand.gnl_noisy_head(torch.cat([feat, z.detach()], 1))
                terms = objective(z, t, stacked(batch, "labels"), torch.arange(first, first + len(batch)))
                (terms.loss / len(step)).backward()
            optimizer.step()
        objective.end_epoch()
    for (name, found), wanted in zip(trainer.model.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6, msg=name)
    assert objective.w_N.max() > 0
    torch.testing.assert_close(torch.from_numpy(trainer.noise_probability), objective.w_N, rtol=0, atol=1e-4)


def test_a_resumed_run_equals_a_whole_one(tmp_path):
    """From the last step of an epoch and from the middle of one, with dropout and shuffled rows."""

    def run(checkpoint=None):
        args = arguments(tmp_path, num_train_epochs=3, save_strategy="steps", save_steps=1)
        torch.manual_seed(0)
        trainer = GNLTrainer(bert(dropout=0.1), args, train_dataset=some_rows(18))
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
        return {**trainer.model.state_dict(), **trainer.objective.state_dict()}

    whole = run()
    assert int(whole["epoch"]) == 3
    for checkpoint in ("checkpoint-5", "checkpoint-7"):
        resumed = run(checkpoint)
        assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_a_checkpoint_is_a_plain_model_and_predictions_are_clean_logits(tmp_path):
    rows, test = some_rows(16), some_rows(10)
    args = arguments(tmp_path, save_strategy="epoch", eval_strategy="epoch")
    trainer = GNLTrainer(bert(), args, train_dataset=rows, eval_dataset=test)
    trainer.train()
    folder = tmp_path / "checkpoint-4"
    model, info = type(trainer.model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    z = model.eval()(stacked(test, "input_ids"), stacked(test, "attention_mask")).logits.detach()
    found = trainer.predict(test)
    torch.testing.assert_close(torch.from_numpy(found.predictions), z)
    loss = float(nn.functional.cross_entropy(z, stacked(test, "labels")))
    assert found.metrics["test_loss"] == pytest.approx(loss, abs=1e-5)
    assert trainer.state.log_history[0]["eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert trainer.predict(trainer.train_dataset).predictions.shape == (16, C)
    assert trainer.noise_probability.shape == (16,)


def test_the_best_checkpoint_comes_back_with_its_label_state(tmp_path):
    args = arguments(
        tmp_path,
        num_train_epochs=2,
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="epochs_done",
        greater_is_better=False,
    )
    trainer = GNLTrainer(bert(), args, train_dataset=some_rows(16), eval_dataset=some_rows(4))
    trainer.compute_metrics = lambda _: {"epochs_done": int(trainer.objective.epoch)}
    trainer.train()
    assert int(trainer.objective.epoch) == 1


def test_a_decoder_that_pools_its_logits(tmp_path):
    """z and t are those of the last token that is no padding."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=1, n_head=2, num_labels=C, pad_token_id=0
    )
    rows = some_rows(4)
    rows[1]["input_ids"][4:] = 0
    trainer = GNLTrainer(transformers.GPT2ForSequenceClassification(config), arguments(tmp_path), train_dataset=rows)
    model = trainer.model.eval()
    twin = copy.deepcopy(trainer.objective)
    ids, labels, index = stacked(rows, "input_ids"), stacked(rows, "labels"), torch.arange(4)
    found, outputs = trainer.compute_loss(model, {"input_ids": ids, "labels": labels, "index": index}, True)
    feat = model.transformer(ids).last_hidden_state[index, torch.tensor([5, 3, 5, 5])]
    z = model.score(feat)
    t = model.gnl_noisy_head(torch.cat([feat, z], 1))
    torch.testing.assert_close(outputs.logits, z)
    torch.testing.assert_close(found, twin(z, t, labels, index).loss)


def test_columns_and_collators_are_those_of_the_user(tmp_path):
    seen = set()

    def collate(batch):
        seen.update(*batch)
        return transformers.default_data_collator(batch)

    rows = [{**row, "text": "a text"} for row in some_rows(8)]
    trainer = GNLTrainer(bert(), arguments(tmp_path), collate, rows)
    trainer.train()
    assert seen == {"input_ids", "attention_mask", "labels"}
    assert torch.isfinite(trainer.objective.loss_N).all()
    assert trainer.train_dataset is rows


def test_a_second_trainer_on_the_same_model(tmp_path):
    model = bert()
    for _ in range(2):
        GNLTrainer(model, arguments(tmp_path), train_dataset=some_rows(4)).train()
    assert sum(name.startswith("gnl_noisy_head") for name in model.state_dict()) == 2


class Stream(IterableDataset):
    def __len__(self):
        return 4

    def __iter__(self):
        return iter(some_rows(4))


@pytest.mark.parametrize(
    ("sentence", "given", "options"),
    [
        ("model is a Linear, wanted a model of transformers", {"model": nn.Linear(2, 2)}, {}),
        ("model is a NoneType, wanted a model", {"model": None, "model_init": bert}, {}),
        ("problem_type is 'regression', wanted", {"model": bert(problem_type="regression")}, {}),
        ("train_dataset is a Stream, wanted one with a length", {"train_dataset": Stream()}, {}),
        ("train_dataset is a NoneType, wanted", {"train_dataset": None}, {}),
        ("row 0 of train_dataset is a int, wanted a dict", {"train_dataset": [0]}, {}),
        ("labels holds 3, wanted 0 to 2", {"train_dataset": some_rows(4, labels=4)}, {}),
        ("a training batch holds input_ids, wanted 'labels'", {"train_dataset": [{"input_ids": [1, 2]}]}, {}),
        ("GNLObjective has no option 'depth'", {"gnl": {"depth": 1}}, {}),
        ("gnl has 'num_samples', wanted it left to", {"gnl": {"num_samples": 1}}, {}),
        ("denominator is 'bank', wanted another", {"gnl": {"denominator": "bank"}}, {}),
        ("loss_source is 'eval', wanted 'online'", {"gnl": {"loss_source": "eval"}}, {}),
        ("label_smoothing_factor is 0.1, wanted 0", {}, {"label_smoothing_factor": 0.1}),
        ("compute_loss_func was given, wanted none", {"compute_loss_func": lambda *_: None}, {}),
        (
            "optimizers was given, wanted optimizer_cls",
            {"optimizers": (torch.optim.SGD(bert().parameters()), None)},
            {},
        ),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, sentence, given, options):
    with pytest.raises(InputError, match=sentence):
        GNLTrainer(
            **{"model": bert(), "args": arguments(tmp_path, **options), "train_dataset": some_rows(4), **given}
        ).train()


def test_logits_that_are_no_rows_of_classes_are_refused(tmp_path):
    tags = transformers.BertForTokenClassification(bert().config)
    with pytest.raises(InputError, match=r"shape \(4, 6, 6\), wanted \(4, 6\)"):
        GNLTrainer(tags, arguments(tmp_path), train_dataset=some_rows(4)).train()


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    with pytest.raises(InputError, match=r"run with 2 processes, wanted 1 \(many: launchers/news.py\)"):
        GNLTrainer(bert(), arguments(tmp_path), train_dataset=some_rows(4))


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    args = arguments(tmp_path, save_strategy="epoch")
    GNLTrainer(bert(), args, train_dataset=some_rows(4)).train()
    folder = tmp_path / "checkpoint-1"
    with pytest.raises(InputError, match=r"gnl\.pt does not fit, wanted one .* with 8 samples"):
        GNLTrainer(bert(), args, train_dataset=some_rows(8)).train(resume_from_checkpoint=str(folder))
    (folder / "gnl.pt").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"gnl\.pt does not fit"):
        GNLTrainer(bert(), args, train_dataset=some_rows(4)).train(resume_from_checkpoint=True)
    (folder / "gnl.pt").unlink()
    with pytest.raises(InputError, match=r"gnl\.pt is not there, wanted a checkpoint that GNLTrainer wrote"):
        GNLTrainer(bert(), args, train_dataset=some_rows(4)).train(resume_from_checkpoint=True)


def test_without_transformers_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "fastgnl.hf_trainer")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"^transformers is not installed, wanted it for fastgnl.hf_trainer: pip"):
        importlib.import_module("fastgnl.hf_trainer")
