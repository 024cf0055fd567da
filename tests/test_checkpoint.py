"""A checkpoint is whole or not there, comes back bit by bit on any number of ranks, and runs nobody's code."""

import errno
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from worker_checkpoint import all_same, plain_state, save, shard_state, shared_state, whole

from fastgnl import checkpoint
from fastgnl.checkpoint import Checkpoints
from fastgnl.errors import InputError

# The package itself says so to Python, but pytest has filters of its own.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

WORKER = Path(__file__).with_name("worker_checkpoint.py")


def outcomes(ranks, task, out, *folders):
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launch, str(WORKER), task, str(out), *map(str, folders)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{out}.{r}of{ranks}.json").read_text()) for r in range(ranks)], done.stderr


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def changed(path, position=-1):
    """One bit of a file is another."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def signed(path):
    """Make the manifest fit what is in the folder now."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["crc32"]
    manifest["files"] = {name: checkpoint._measured(path / name) for name in manifest["files"]}
    (path / "manifest.json").write_text(json.dumps({**manifest, "crc32": checkpoint._crc_of(manifest)}))


@pytest.fixture
def two(tmp_path):
    """A folder with the checkpoints of steps 100 and 200."""
    checkpoints = Checkpoints(tmp_path)
    assert save(checkpoints, 100)
    assert save(checkpoints, 200)
    return checkpoints


@pytest.fixture
def held(monkeypatch):
    """Writes wait until this is set."""
    event, write = threading.Event(), checkpoint._Writer.write_data
    monkeypatch.setattr(checkpoint._Writer, "write_data", lambda *given: event.wait(60) and write(*given))
    return event


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two ranks")
    return folder / "run", *outcomes(2, "write", folder / "out", folder / "run")


@pytest.mark.parametrize("background", [False, True])
def test_comes_back_bit_by_bit(tmp_path, background, capsys):
    checkpoints = Checkpoints(tmp_path / "new" / "folder", background=background)
    assert checkpoints.newest() is None
    assert save(checkpoints, 7)
    checkpoints.wait()
    assert names(checkpoints.folder) == ["step-00000007"]
    saved = Checkpoints(checkpoints.folder).newest()
    assert whole(saved, 7, 1)
    with pytest.raises(InputError, match="rank is 1, wanted one below 1"):
        saved.shard(1)
    assert not capsys.readouterr().err


def test_loads_in_place(two):
    weight = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    into = {name: tensor.clone() for name, tensor in shared_state(1).items()} | {"net.channels_last": weight}
    before = weight.data_ptr(), weight.stride()
    two.newest().load_shared(into)
    assert (weight.data_ptr(), weight.stride()) == before
    assert torch.equal(weight, shared_state(200)["net.channels_last"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"float": None}, "has 'float', wanted none of that name"),
        ({"new": torch.zeros(2)}, "has no 'new', wanted 18 tensors with it"),
        (
            {"empty": torch.zeros(1, 4)},
            "'empty' of shape [0, 4] in torch.float32, wanted shape [1, 4] in torch.float32",
        ),
        ({"half": torch.zeros(2, 3, 4, 5)}, "in torch.float16, wanted shape [2, 3, 4, 5] in torch.float32"),
    ],
)
def test_refuses_what_does_not_fit(two, change, sentence):
    into = {name: tensor.detach().clone() for name, tensor in (shared_state(1) | change).items() if tensor is not None}
    before = {name: tensor.clone() for name, tensor in into.items()}
    with pytest.raises(InputError) as refused:
        two.newest().load_shared(into)
    assert sentence in str(refused.value)
    assert all_same(into, before), "nothing is loaded of what does not fit"


def test_refuses_what_json_cannot_hold(tmp_path):
    with pytest.raises(InputError, match="plain holds what JSON cannot"):
        Checkpoints(tmp_path).save(1, {}, {}, {"a": torch.zeros(1)})


def test_background_copies_the_state_first(tmp_path, held):
    checkpoints, state = Checkpoints(tmp_path, background=True), shared_state(1)
    mine = shard_state(1, 0)
    assert checkpoints.save(1, state, mine, plain_state(1))
    for tensor in (state["float"], state["scalar"], state["transposed"], mine["rows"]):
        tensor.zero_()
    assert not (tmp_path / "step-00000001").exists()
    held.set()
    assert whole(checkpoints.newest(), 1, 1)


def test_background_saves_wait_for_each_other(tmp_path, held):
    checkpoints = Checkpoints(tmp_path, background=True)
    save(checkpoints, 1)
    threading.Timer(0.2, held.set).start()
    save(checkpoints, 2)
    assert (tmp_path / "step-00000001").exists()
    checkpoints.wait()
    assert (tmp_path / "step-00000002").exists()


def test_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 99_999_999, 100_000_000):
        save(checkpoints, step)
    assert names(tmp_path) == ["step-100000000", "step-99999999"]
    assert checkpoints.newest().step == 100_000_000


def test_keeps_what_it_wrote_though_damaged_ones_are_newer(two):
    changed(two.folder / "step-00000200" / "plain.json")
    once = Checkpoints(two.folder, keep=1)
    save(once, 150)
    assert names(two.folder) == ["step-00000150", "step-00000200"]
    assert whole(once.newest(), 150, 1)


def test_saves_a_step_again(two):
    two.save(200, {"a": torch.ones(2)}, {}, {})
    assert names(two.folder) == ["step-00000100", "step-00000200"]
    into = {"a": torch.zeros(2)}
    two.newest().load_shared(into)
    assert into["a"].sum() == 2


def test_clears_what_killed_runs_left(two, tmp_path):
    (tmp_path / ".step-00000300.part-dead").mkdir()
    (tmp_path / ".step-00000300.part-dead" / "__0_0.distcp").touch()
    shutil.copytree(tmp_path / "step-00000100", tmp_path / ".step-00000100.replaced")
    checkpoints = Checkpoints(tmp_path)
    assert names(tmp_path) == ["step-00000100", "step-00000200"]
    assert whole(checkpoints.newest(), 200, 1)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("file", "damage", "why"),
    [
        ("__0_0.distcp", changed, "its checksum does not fit"),
        ("__0_0.distcp", cut, "bytes, wanted"),
        ("__0_0.distcp", Path.unlink, "No such file or directory"),
        (".metadata", changed, "its checksum does not fit"),
        ("plain.json", cut, "bytes, wanted"),
        ("manifest.json", Path.unlink, "No such file or directory"),
        ("manifest.json", cut, ""),
        ("manifest.json", lambda path: path.write_text("[]"), "not a manifest"),
        ("manifest.json", lambda path: path.write_text('{"format": 2}'), "its format is 2, wanted 1"),
    ],
)
def test_goes_back_from_a_damaged_one(two, capsys, file, damage, why):
    damage(two.folder / "step-00000200" / file)
    assert whole(two.newest(), 100, 1)
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"the checkpoint {two.folder / 'step-00000200'} is damaged ({file}: ")
    assert why in sentence
    assert sentence.endswith("), going back to that of step 100\n")
    assert names(two.folder) == ["step-00000100", "step-00000200"], "it is left for the user to look at"


def test_says_that_all_are_damaged(two, capsys):
    for step in names(two.folder):
        changed(two.folder / step / "plain.json")
    assert two.newest() is None
    assert capsys.readouterr().err.endswith("), and there is no earlier one\n")


def test_any_byte_of_the_manifest_counts(tmp_path):
    Checkpoints(tmp_path).save(1, {"a": torch.ones(2)}, {}, {})
    path = tmp_path / "step-00000001"
    assert not checkpoint._damage(path, 0, 1)
    for position in range((path / "manifest.json").stat().st_size):
        changed(path / "manifest.json", position)
        assert checkpoint._damage(path, 0, 1).startswith("manifest.json: ")
        changed(path / "manifest.json", position)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the names of open files cannot be known here")
def test_all_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """Also DCP's metadata, which it syncs before they are flushed."""
    synced, before, fsync, rename = {}, {}, os.fsync, os.rename

    def noting_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[path.name] = path.is_dir() or os.fstat(descriptor).st_size
        fsync(descriptor)

    def noting_rename(source, target):
        if Path(target).name == "step-00000001":
            before.update(synced)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    files = {path.name: path.stat().st_size for path in (tmp_path / "step-00000001").iterdir()}
    assert files.keys() == {".metadata", "manifest.json", "plain.json", "__0_0.distcp"}
    assert before == {**files, checkpoints._part(1).name: True, ".metadata.tmp": before[".metadata.tmp"]}
    assert tmp_path.name in synced, "and then the rename itself"


@pytest.mark.parametrize("background", [False, True])
def test_goes_on_when_the_disk_is_full(tmp_path, monkeypatch, capsys, background):
    checkpoints = Checkpoints(tmp_path, keep=1, background=background)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert save(checkpoints, 90) is background
        checkpoints.wait()
        assert capsys.readouterr().err == (
            "could not write the checkpoint of step 90: No space left on device; there is none yet\n"
        )
    assert save(checkpoints, 100)
    checkpoints.wait()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert save(checkpoints, 123) is background
        checkpoints.wait()
    assert capsys.readouterr().err == (
        "could not write the checkpoint of step 123: No space left on device; the one of step 100 stays\n"
    )
    assert names(tmp_path) == ["step-00000100"]
    assert whole(checkpoints.newest(), 100, 1)


@pytest.mark.parametrize("where", ["finish", "rename"])
def test_goes_on_when_the_last_part_fails(two, monkeypatch, capsys, where):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if where == "finish":
        monkeypatch.setattr(checkpoint, "_measured", fails)
    else:
        monkeypatch.setattr(os, "rename", fails)
    assert not save(two, 300)
    assert "step 300: Input/output error; the one of step 200 stays" in capsys.readouterr().err
    assert names(two.folder) == ["step-00000100", "step-00000200"]


@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_really_fails(two, capsys, background):
    """The system refuses files of this size, and torch.save hides its error."""
    checkpoints = Checkpoints(two.folder, background=background)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        assert checkpoints.save(300, {"big": torch.zeros(1 << 18)}, {}, {}) is background
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step 300: File too large; the one of step 200 stays" in capsys.readouterr().err
    assert names(two.folder) == ["step-00000100", "step-00000200"]


def test_a_disk_that_is_really_full(tmp_path, capsys):
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        checkpoints = Checkpoints(tmp_path)
        assert save(checkpoints, 1)
        for numbers in (1 << 20, *range(49_000, 56_000, 500)):  # full in the tensors, the metadata or the manifest
            if checkpoints.save(2, {"big": torch.zeros(numbers)}, {}, {}):
                shutil.rmtree(tmp_path / "step-00000002")
            else:
                assert "step 2: No space left on device; the one of step 1 stays\n" in capsys.readouterr().err
            assert names(tmp_path) == ["step-00000001"]
        assert whole(checkpoints.newest(), 1, 1)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_refuses_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        InputError, match=r"cannot write checkpoints to .*/file/below: Not a directory, wanted a folder"
    ):
        Checkpoints(tmp_path / "file" / "below")


def test_a_bug_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
    def bug(descriptor):
        raise ValueError("a bug")

    monkeypatch.setattr(os, "fsync", bug)
    with pytest.raises(ValueError, match="a bug"):
        save(Checkpoints(tmp_path), 1)
    assert names(tmp_path) == []


class Evil:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_does_not_run_what_the_metadata_ask_for(two, tmp_path):
    path, target = two.folder / "step-00000200", tmp_path / "owned"
    (path / ".metadata").write_bytes(pickle.dumps(Evil(target)))
    signed(path)
    with pytest.raises(InputError, match=r"holds something other than tensors \(.*\), wanted one that fastgnl wrote"):
        two.newest()
    assert not target.exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert target.exists(), "the file would have done it"


def forged(path, change):
    """A checkpoint whose metadata were changed by somebody who knows the format."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    signed(path)


def test_refuses_entries_that_are_no_tensors(two):
    """DCP would unpickle them."""
    forged(
        two.folder / "step-00000200",
        lambda metadata: metadata.state_dict_metadata.update({"shared/float": BytesStorageMetadata()}),
    )
    with pytest.raises(InputError, match=r"holds something other than tensors \(shared/float\)"):
        two.newest()


def test_refuses_files_from_elsewhere(two):
    def elsewhere(metadata):
        next(iter(metadata.storage_data.values())).relative_path = "../step-00000100/__0_0.distcp"

    forged(two.folder / "step-00000200", elsewhere)
    with pytest.raises(InputError, match="holds something other than tensors"):
        two.newest()


def test_does_not_run_what_a_tensor_asks_for(two, tmp_path):
    path, target = two.folder / "step-00000200", tmp_path / "owned"
    data = path / "__0_0.distcp"
    start = data.stat().st_size
    with data.open("ab") as file:
        torch.save(Evil(target), file)

    def redirect(metadata):
        for info in metadata.storage_data.values():
            info.offset, info.length = start, data.stat().st_size - start

    forged(path, redirect)
    saved = two.newest()
    with pytest.raises(InputError, match="holds something other than tensors"):
        saved.load_shared({name: tensor.clone() for name, tensor in shared_state(1).items()})
    assert not target.exists()


def killed(checkpoints, name):
    """In a process of its own: save, and be killed before a folder gets this name."""
    real = os.rename

    def rename(source, target):
        if Path(target).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target)

    child = os.fork()
    if child == 0:
        os.rename = rename
        save(checkpoints, 200)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def test_killed_before_the_rename(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 100)
    assert killed(checkpoints, "step-00000200")
    (part,) = tmp_path.glob(".step-00000200.part-*")
    assert (part / "manifest.json").exists(), "it was killed at the last moment"
    assert whole(Checkpoints(tmp_path).newest(), 100, 1)
    assert names(tmp_path) == ["step-00000100"]


def test_killed_between_the_two_renames_of_a_step_saved_again(two):
    assert killed(two, "step-00000200")
    assert not (two.folder / "step-00000200").exists()
    assert whole(Checkpoints(two.folder).newest(), 200, 1)


def test_two_ranks_save_and_fail_together(by_two_ranks):
    """A full disk under one of them is a failure for both, and no reason to stop; a bug is."""
    folder, found, stderr = by_two_ranks
    for outcome in found:
        assert outcome["first"]
        assert outcome["behind"]
        assert outcome["full on rank 1"] is False
        assert outcome["full on rank 1, behind"] is True
        assert outcome["bug on rank 1"] == "a bug"
        assert outcome["sums"] == 2**20
        assert outcome["unwritable"].startswith(f"cannot write checkpoints to {folder / 'a file' / 'below'}: ")
    assert found[0]["left"] == ["step-00000010"]
    for step in (20, 21):
        sentence = f"could not write the checkpoint of step {step}: No space left on device; the one of step 10 stays"
        assert stderr.count(sentence) == 1
    assert names(folder) == ["a file", "step-00000010", "step-00000030"]
    manifest = json.loads((folder / "step-00000030" / "manifest.json").read_text())
    assert manifest["ranks"] == 2
    assert [sorted(part) for part in manifest["shards"]] == [["none", "rows"], ["extra", "none", "rows"]]
    sizes = [manifest["files"][f"__{r}_0.distcp"]["size"] for r in range(2)]
    assert min(sizes) > max(sizes) / 3, "they share the work"


def test_other_numbers_of_ranks_read_it(by_two_ranks, tmp_path):
    folder = by_two_ranks[0]
    assert whole(Checkpoints(folder).newest(), 30, 2)
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    changed(damaged / "step-00000030" / "__1_0.distcp")
    found, stderr = outcomes(3, "read", tmp_path / "out", folder, damaged)
    assert found == [{"good": True, "damaged": True, "rank 1 of it": 4}] * 3
    assert stderr.count(f"{damaged / 'step-00000030'} is damaged (__1_0.distcp: its checksum does not fit)") == 1
