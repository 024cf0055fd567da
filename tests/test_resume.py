"""A run that is killed at any place, or told to stop, ends as one that was not."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from worker_engine import HAS_DEEPSPEED
from worker_resume import CASES, STEPS, Kill, run_case

from fastgnl.checkpoint import Checkpoints
from fastgnl.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

WORKER = Path(__file__).with_name("worker_resume.py")
KILLED = {
    "bank": Kill("worker", 10, 1),
    "dataset": Kill("end_epoch", 3, 0),
    "top_k": Kill("save", 12, 1),
    "background": Kill("group", 15),
    **({"zero": Kill("worker", 14, 0)} if HAS_DEEPSPEED else {}),
}
PLAIN = ("plain bank", "plain dataset", "plain top_k")


def launched(folder, ranks, restarts=0, **plan):
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command = [sys.executable, *launch, str(WORKER), str(folder), json.dumps(plan)]
    return subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def ended(process):
    try:
        return process.communicate(timeout=300)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def run(folder, ranks, restarts=0, **plan):
    process = launched(folder, ranks, restarts, **plan)
    said = ended(process)
    assert process.returncode == 0, said
    return folder


def content(folder):
    """Every tensor of the newest checkpoint, as each rank wrote it, and where the run was."""
    saved = Checkpoints(folder / "checkpoints").newest()
    entries = saved._metadata.state_dict_metadata
    into = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    saved._read(into)
    return into, saved.plain["position"]


def by_sample(tensors):
    """The same with the ranks' shards put together in the order of the samples."""
    found = {name: value for name, value in tensors.items() if name.startswith("shared/")}
    ranks = sorted({name.partition("/")[0] for name in tensors} - {"shared"})
    shard = {
        name: torch.cat([tensors[f"{r}/{name}"] for r in ranks])
        for name in (name.partition("/")[2] for name in tensors if name.startswith("rank0/"))
        if "batch" not in name
    }
    order, rows = shard["ids"].argsort(), len(shard["ids"])
    assert torch.equal(shard["ids"][order], torch.arange(rows)), "each sample is kept once"
    found |= {name: value[order] for name, value in shard.items() if not name.startswith("bank")}
    if "bank ids" in shard:
        of_bank = (shard["bank steps"] * rows + shard["bank ids"]).argsort()
        found |= {name: value[of_bank] for name, value in shard.items() if name.startswith("bank")}
        found["batches"] = torch.cat([tensors["rank0/bank batch steps"], tensors["rank0/bank batch rows"]])
    return found


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_equal(folder, wanted_folder):
    """Bit by bit, but for the seconds of the epochs."""
    (found, position), (wanted, wanted_position) = content(folder), content(wanted_folder)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(bits(found[name]), bits(value)), name
    assert {"epoch", "step", "taken"} <= position.keys()
    for name in ("epoch", "batch", "step", "taken", "between", "skipped"):
        assert position[name] == wanted_position[name]
    assert_same_history(position["history"], wanted_position["history"])


def assert_same_history(found, wanted, room=1e-12):
    """The sums of an epoch are added up in another order where it was resumed."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        for name in a.keys() - {"seconds", "wait", "images_per_second"}:
            assert a[name] == pytest.approx(b[name], rel=room, abs=room, nan_ok=True), name
        assert a["seconds"] > 0
        assert 0 < a["wait"] < 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The runs that nobody touched, of two ranks."""
    return run(tmp_path_factory.mktemp("whole"), 2, cases=[*KILLED, *PLAIN])


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The same, each killed at another place; torchrun starts them again."""
    kills = {case: vars(kill) for case, kill in KILLED.items()}
    return run(tmp_path_factory.mktemp("killed"), 2, len(kills), cases=list(KILLED), kills=kills)


def part_of(whole, case, step, folder):
    """A folder with one checkpoint of the run."""
    name = f"step-{step:08d}"
    shutil.copytree(whole / case / "checkpoints" / name, folder / case / "checkpoints" / name)
    return folder / case


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_run_ends_as_one_that_was_not(whole, killed, case):
    """Weights, optimizer, momentum encoder, table, w and bank, bit by bit."""
    kill = KILLED[case]
    assert len(list((killed / case).glob(f"{kill.kind}-*"))) == (2 if kill.kind == "group" else 1), "it was killed"
    assert not list((killed / case / "checkpoints").glob(".step*")), "what it left is cleared away"
    assert_equal(killed / case, whole / case)
    assert_same_history(*(json.loads((place / case / "history.json").read_text()) for place in (killed, whole)))
    events = [json.loads(line) for line in (killed / case / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("event") == "resumed" for line in events)


def test_what_is_compared_is_all_there_is(whole):
    tensors, position = content(whole / "bank")
    kinds = {name.split("/")[0] + "/" + name.split("/")[1].split(".")[0] for name in tensors}
    assert {"shared/net", "shared/optimizer", "shared/encoder", "shared/objective", "rank1/M", "rank1/w"} <= kinds
    assert {"rank0/bank q", "rank0/bank ids"} <= kinds
    assert float(tensors["rank0/w"].max()) > 0.1
    assert (position["step"], position["epoch"]) == (STEPS, 4)
    other = content(whole / "dataset")[0]
    assert not torch.equal(other["shared/net.clean.weight"], tensors["shared/net.clean.weight"])


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_go_on(whole, others, case, ranks):
    (found, position), (wanted, wanted_position) = content(others[ranks] / case), content(whole / case)
    assert len({name.partition("/")[0] for name in found} - {"shared"}) == ranks
    found, wanted = by_sample(found), by_sample(wanted)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # Two entries of a row as good as equal may change places, and what was float16 is rounded by 1e-3.
        room = 2e-3 if name in ("share", "class", "bank q") else 2e-5
        if name == "class":
            continue
        if name == "share":
            found[name], value = found[name].float().sort(1).values, value.float().sort(1).values
        torch.testing.assert_close(found[name], value, rtol=room, atol=room, msg=lambda m, n=name: f"{n}: {m}")
    assert_same_history(position["history"], wanted_position["history"], 1e-5)


@pytest.fixture(scope="module")
def others(whole, tmp_path_factory):
    """Begun by two ranks; gone on with from step 8, in the middle of an epoch, by one and by three."""
    folders = {ranks: tmp_path_factory.mktemp(f"{ranks} ranks") for ranks in (1, 3)}
    for folder in folders.values():
        for case in PLAIN:
            part_of(whole, case, 8, folder)
    run(folders[3], 3, cases=PLAIN)
    for case in PLAIN:
        run_case(folders[1] / case, **CASES[case])
    return folders


def test_torchrun_is_told_to_stop(whole, tmp_path):
    """The signal comes after step 9 and is seen at step 16; the checkpoint is written in the background."""
    process = launched(tmp_path, 2, cases=["background"], **{"wait at": 9})
    place = tmp_path / "background"
    while process.poll() is None and len(list(place.glob("waits-*"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = ended(process)
    sentence = "fastgnl: stopped by SIGTERM after step 16; a checkpoint is written, the same command goes on from it"
    assert said.count(sentence) == 1, said
    assert "[rank" not in said, "no worker ended with an error"
    saved = Checkpoints(place / "checkpoints").newest()
    assert (saved.step, saved.plain["position"]["batch"]) == (16, 4)
    run(tmp_path, 2, cases=["background"])
    assert_equal(place, whole / "background")


class Crash(Exception):
    pass


def crash_at(wanted):
    def on_step(step):
        if step == wanted:
            raise Crash

    return on_step


def whole_and_resumed(tmp_path, step, **options):
    """Two folders of one process: never stopped, and stopped by an error."""
    run_case(tmp_path / "whole", **options)
    with pytest.raises(Crash):
        run_case(tmp_path / "resumed", crash_at(step), **options)
    run_case(tmp_path / "resumed", **options)
    return tmp_path / "resumed", tmp_path / "whole"


def steps(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def test_checkpoints_are_not_made_between_the_batches_of_a_step(tmp_path):
    """Steps of 4 and 2 batches, an epoch of 6; a checkpoint is due every 3 and comes with the next step."""
    resumed, wanted = whole_and_resumed(tmp_path, 17, accumulate=4, every=3, dropout=0.3)
    assert steps(resumed) == steps(wanted) == [4, 6, 10, 12, 16, 18, 22, 24]
    assert_equal(resumed, wanted)


def test_the_loss_scale_of_float16_goes_on(tmp_path):
    resumed, wanted = whole_and_resumed(tmp_path, 11, precision="float16")
    assert_equal(resumed, wanted)
    scale, since = content(wanted)[0]["shared/optimizer.loss scale"].tolist()
    assert scale > 1
    assert since > 0


def test_the_average_of_the_weights_goes_on(tmp_path):
    resumed, wanted = whole_and_resumed(tmp_path, 15, ema=0.9, dropout=0.3)
    assert_equal(resumed, wanted)
    tensors = content(wanted)[0]
    assert not torch.equal(tensors["shared/ema.clean.weight"], tensors["shared/net.clean.weight"])


@pytest.mark.parametrize("step", [6, 9])
def test_a_single_process_is_told_to_stop(tmp_path, capfd, step):
    """After the last batch of an epoch, and amid one."""
    run_case(tmp_path / "whole", dropout=0.3)

    def on_step(now):
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        run_case(tmp_path / "told", on_step, dropout=0.3)
    assert left.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is before
    sentence = f"stopped by SIGTERM after step {step}; a checkpoint is written, the same command goes on from it"
    assert sentence in capfd.readouterr().err
    assert steps(tmp_path / "told")[-1] == step
    run_case(tmp_path / "told", dropout=0.3)
    assert_equal(tmp_path / "told", tmp_path / "whole")


def test_told_to_stop_on_a_full_disk(tmp_path, capfd, monkeypatch):
    def on_step(now):
        if now == 9:
            monkeypatch.setattr(os, "fsync", full)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run_case(tmp_path, on_step)
    said = capfd.readouterr().err
    assert "could not write the checkpoint of step 9: No space left on device; the one of step 8 stays" in said
    assert "stopped by SIGTERM after step 9; its checkpoint could not be written" in said


def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_does_not_stop_training(tmp_path, capfd, monkeypatch):
    run_case(tmp_path / "whole")
    real = os.fsync
    run_case(tmp_path / "full", lambda step: monkeypatch.setattr(os, "fsync", full if 5 < step < 20 else real))
    said = capfd.readouterr().err
    for step in (6, 8, 12, 16, 18):
        assert (
            f"could not write the checkpoint of step {step}: No space left on device; the one of step 4 stays" in said
        )
    assert steps(tmp_path / "full") == [4, 20, 24]
    assert_equal(tmp_path / "full", tmp_path / "whole")


def test_goes_back_to_the_checkpoint_before_a_damaged_one(tmp_path, capfd):
    run_case(tmp_path / "whole", dropout=0.3)
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    newest = tmp_path / "damaged" / "checkpoints" / f"step-{STEPS:08d}"
    data = newest / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    run_case(tmp_path / "damaged", dropout=0.3)
    sentence = f"{newest} is damaged (__0_0.distcp: its checksum does not fit), going back to that of step 20"
    assert sentence in capfd.readouterr().err
    assert_equal(tmp_path / "damaged", tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"denominator": "dataset"},
            "the run in {} has denominator batch, this one dataset, wanted the same or another",
        ),
        ({"beta": 0.5}, "the run in {} has beta 0.9, this one 0.5, wanted the same or another folder"),
        ({"optimizer": "adamw"}, "has no 'optimizer.backbone.0.weight.exp_avg'"),
    ],
)
def test_refuses_to_go_on_with_another_run(tmp_path, options, sentence):
    run_case(tmp_path, epochs=1)
    with pytest.raises(InputError) as refused:
        run_case(tmp_path, **options)
    assert sentence.format(tmp_path) in str(refused.value)


def test_a_finished_run_does_nothing_more(tmp_path):
    history = run_case(tmp_path)
    assert_same_history(
        *([vars(epoch) for epoch in part] for part in (run_case(tmp_path, crash_at(STEPS + 1)), history))
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [0, 1, 2, 3]
    assert [line["event"] for line in lines if line["kind"] == "event"][-2:] == ["resumed", "finished"]


@pytest.mark.parametrize("background", [False, True])
def test_bad_steps_leave_the_last_good_checkpoint(tmp_path, monkeypatch, background):
    """After step 9 no gradient is finite; the run stops at step 19 with the checkpoint of step 8."""
    from fastgnl.engine import Ddp

    real, calls = Ddp.backward, []

    def backward(self, loss, last):
        calls.append(0)
        real(self, loss * math.nan if len(calls) > 9 else loss, last)

    monkeypatch.setattr(Ddp, "backward", backward)
    with pytest.raises(InputError, match=r"not finite in 10 steps in a row, up to step 19: .* weights are finite"):
        run_case(tmp_path, background=background)
    assert steps(tmp_path) == [4, 6, 8]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "skipped step"] == list(range(10, 19))
    assert lines[-1]["event"] == "stopped"
