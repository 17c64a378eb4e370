"""Two runs that save into one folder: one at a time, and nothing is left of who was killed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardweave.backends.state.saved_state import CheckpointError
from shardweave.backends.watch.alive import own_identity
from shardweave.driver.checkpoint_lock import LOCK, STALE_S, FolderLock
from shardweave.driver.training import checkpoints
from shardweave.driver.training.checkpoints import load_checkpoint, save_checkpoint


def holder_of(root: Path) -> FolderLock:
    lock = FolderLock(root)
    lock.acquire()
    return lock


def test_folder_into_which_another_run_saves_is_refused_and_names_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    lock = holder_of(tmp_path)
    said = rf"process {os.getpid()} on .* \(since 20.*\) is saving into this folder"
    with pytest.raises(CheckpointError, match=said):
        save_checkpoint(tmp_path, 3, {"model": model})
    lock.release()
    save_checkpoint(tmp_path, 3, {"model": model})
    assert os.listdir(tmp_path) == ["checkpoint-3"]


def changed_holder(root: Path, **fields: Any) -> None:
    record = json.loads((root / LOCK).read_text())
    (root / LOCK).write_text(json.dumps(record | fields))


def test_lock_of_a_process_that_ended_is_taken_over_and_said(tmp_path: Path) -> None:
    lock = holder_of(tmp_path)
    boot, pid, start = own_identity().split()
    changed_holder(tmp_path, process=77, identity=f"{boot} {pid} {int(start) + 1}")
    with pytest.warns(UserWarning, match="process 77 on .* has ended and left the lock") as at:
        save_checkpoint(tmp_path, 1, {"model": nn.Linear(2, 2)})
    assert at[0].filename == __file__
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    with pytest.raises(CheckpointError, match="took over this save"):
        lock.check()


@pytest.mark.parametrize("text", ['{"identity": "elsewhere 1 1", "host": "far"}', "", "[]"])
def test_lock_of_another_machine_is_stale_once_nobody_touches_it(text: str, tmp_path: Path) -> None:
    lock, state = tmp_path / LOCK, {"model": nn.Linear(2, 2)}
    lock.write_text(text)
    with pytest.raises(CheckpointError, match="is saving into this folder"):
        save_checkpoint(tmp_path, 1, state)
    then_s = time.time() - 2 * STALE_S
    os.utime(lock, (then_s, then_s))
    with pytest.warns(UserWarning, match="has not touched it for 120 s"):
        save_checkpoint(tmp_path, 1, state)
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_save_that_was_taken_over_meanwhile_is_refused_and_mixes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoints._write_tensors

    def write_slowly(tensors: Any, unfinished: Path) -> None:
        write(tensors, unfinished)
        monkeypatch.setattr(checkpoints, "_write_tensors", write)
        changed_holder(tmp_path, identity="")
        then_s = time.time() - 2 * STALE_S
        os.utime(tmp_path / LOCK, (then_s, then_s))
        with pytest.warns(UserWarning, match="has not touched it"):
            save_checkpoint(tmp_path, 1, {"model": nn.Linear(2, 2), "who": "other"})

    monkeypatch.setattr(checkpoints, "_write_tensors", write_slowly)
    with pytest.raises(CheckpointError, match="1 was not saved"):
        save_checkpoint(tmp_path, 1, {"model": nn.Linear(2, 2), "who": "own"})
    loaded = load_checkpoint(tmp_path, {})
    assert loaded is not None
    assert loaded.values["who"] == "other"


def test_next_save_deletes_what_killed_processes_left_of_asking_for_the_lock(
    tmp_path: Path,
) -> None:
    boot, pid, start = own_identity().split()
    for name, identity in {
        "own": own_identity(), "ended": f"{boot} {pid} {int(start) + 1}", "far": "far 1 1",
        "old": "elsewhere 1 1",
    }.items():  # fmt: skip
        (tmp_path / f"{LOCK}-{name}").write_text(json.dumps({"identity": identity}))
    (tmp_path / f"{LOCK}-empty").touch()
    then_s = time.time() - 2 * STALE_S
    for name in ("old", "empty"):
        os.utime(tmp_path / f"{LOCK}-{name}", (then_s, then_s))
    save_checkpoint(tmp_path, 1, {"model": nn.Linear(2, 2)})
    left = [f"{LOCK}-far", f"{LOCK}-own", "checkpoint-1"]
    assert sorted(os.listdir(tmp_path)) == left
