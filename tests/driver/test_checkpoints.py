"""Checkpoints: what resumes goes on as if nothing had happened, and what fails leaves the others."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardweave.backends.state.saved_state import CheckpointError
from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.driver.training.checkpoint_files import MANIFEST, complete, digests_of
from shardweave.driver.training.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from shardweave.tests.compiled import compile_copy as compile_step
from shardweave.tests.spawn import importable, run_ranks, warm_context


class Model(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, hidden), nn.BatchNorm1d(hidden)
        self.down = nn.Linear(hidden, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu()).square().mean()


class Run:
    """A training run: a step, an optimizer that keeps two states for each parameter, a schedule."""

    def __init__(
        self, mesh: str, seed: int = 0, hidden: int = 8, backend: str = "reference"
    ) -> None:
        torch.manual_seed(seed)
        self.x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)
        self.step: CompiledModule = compile_step(
            Model(hidden).double(), (self.x,), mesh=mesh, backend=backend
        )
        self.optimizer = torch.optim.AdamW(self.step.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.state = {
            "model": self.step,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    def train(self, num_steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            losses.append(self.step(self.x).item())
            self.optimizer.step()
            self.schedule.step()
        return losses


def test_resumed_run_has_the_losses_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    run = Run("data=2,tensor=2")
    run.train(2)
    path = save_checkpoint(tmp_path, 2, {**run.state, "where": {"epoch": 3, "seen": [1, 2.5]}})
    wanted = run.train(3)
    assert path == tmp_path / "checkpoint-2"
    other = Run("data=2,tensor=2", seed=1)
    loaded = load_checkpoint(tmp_path, other.state)
    assert loaded is not None
    assert (loaded.number, loaded.path) == (2, path)
    assert loaded.values == {"where": {"epoch": 3, "seen": [1, 2.5]}}
    assert other.train(3) == wanted


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.up(x), 0.5, self.training).square().mean()


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    x = torch.ones(8, 4)
    run = compile_step(Dropped(), (x,), mesh="data=2", backend="reference", seed=1)
    run(x)
    save_checkpoint(tmp_path, 1, {"model": run})
    wanted = [run(x) for _ in range(3)]
    # A step that has drawn none so far takes the state as well.
    other = compile_step(Dropped(), (x,), mesh="data=2", backend="reference", seed=2, train=False)
    load_checkpoint(tmp_path, {"model": other})
    other.train()
    assert [other(x) for _ in range(3)] == wanted
    assert len(set(wanted)) == 3


def test_folder_without_a_checkpoint_gives_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "new", {}) is None
    with pytest.raises(CheckpointError, match="no complete checkpoint 3, only none"):
        load_checkpoint(tmp_path, {}, number=3)


def train_and_save(mesh: str, folder: str) -> list[float]:
    run = Run(mesh, backend="distributed")
    run.train(2)
    save_checkpoint(folder, 2, run.state)
    return run.train(3)


def load_and_train(mesh: str, folder: str) -> list[float]:
    run = Run(mesh, backend="distributed", seed=1)
    assert load_checkpoint(folder, run.state) is not None
    return run.train(3)


def test_run_goes_on_with_other_meshes_and_numbers_of_processes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    wanted = torch.tensor(run_ranks(train_and_save, 4, "data=2,tensor=2", folder)[0])
    for mesh in ("data=2", "tensor=2"):
        found = run_ranks(load_and_train, 2, mesh, folder)
        torch.testing.assert_close(torch.tensor(found), torch.stack([wanted] * 2))
    alone = Run("", seed=1)
    load_checkpoint(folder, alone.state)
    torch.testing.assert_close(torch.tensor(alone.train(3)), wanted)
    save_checkpoint(folder, 5, alone.state)
    wanted = torch.tensor(alone.train(3))
    found = run_ranks(load_and_train, 2, "tensor=2", folder)
    torch.testing.assert_close(torch.tensor(found), torch.stack([wanted] * 2))


# What fails


def save_with_little_room(folder: str) -> tuple[str, list[str], list[int], list[int]]:
    """Save 1; then 2 where rank 1 may write small files alone, as the store is; then 2 without."""
    run = Run("tensor=2", backend="distributed", hidden=8192)
    save_checkpoint(folder, 1, run.state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, limits[1]))
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(folder, 2, run.state)
    torch.distributed.barrier()
    left, before = sorted(os.listdir(folder)), sorted(complete(Path(folder)))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    save_checkpoint(folder, 2, run.state)
    return str(caught.value), left, before, sorted(complete(Path(folder)))


def test_disk_that_is_full_on_one_rank_is_told_on_all_and_leaves_the_last(tmp_path: Path) -> None:
    for said, left, before, after in run_ranks(save_with_little_room, 2, str(tmp_path)):
        assert "checkpoint 2 was not saved in" in said
        assert "rank 1: " in said
        assert left == ["checkpoint-1"]
        assert (before, after) == ([1], [1, 2])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_leaves_the_last_checkpoint_and_its_room(small_disk: Path) -> None:
    model = nn.Linear(150, 200)
    save_checkpoint(small_disk, 1, {"model": model})
    wanted = model.weight.detach().clone()
    model.weight.data.zero_()
    with pytest.raises(CheckpointError, match=r"checkpoint 2 was not saved.*B were free there"):
        save_checkpoint(small_disk, 2, {"model": model})
    assert os.listdir(small_disk) == ["checkpoint-1"]
    loaded = load_checkpoint(small_disk, {"model": model})
    assert loaded is not None
    assert torch.equal(model.weight, wanted)


def save_for_ever(folder: str, first: int) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for number in range(first, first + 1000):
        with torch.no_grad():
            model.weight.fill_(number)
        state = {"model": model, "optimizer": optimizer, "number": number}
        save_checkpoint(folder, number, state, keep=2)


def is_saving(folder: Path) -> bool:
    return any(name.startswith(".saving-") for name in os.listdir(folder))


def test_kill_while_saving_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    context, last = warm_context(), -1
    chance = random.Random(0)
    unfinished = 0
    for turn in range(6):
        arguments = (str(tmp_path), last + 1)
        process = context.Process(target=importable(save_for_ever), args=arguments)
        process.start()
        until = time.monotonic() + 60
        while max(complete(tmp_path), default=-1) < last + 2 and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)
        while turn % 2 and not is_saving(tmp_path) and time.monotonic() < until:
            pass  # every second time it is killed in a save, however slow the machine is
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        unfinished += is_saving(tmp_path)
        model = nn.Linear(64, 64)
        loaded = load_checkpoint(tmp_path, {"model": model})
        assert loaded is not None
        assert loaded.number >= last + 2
        assert bool((model.weight == loaded.number).all())
        assert loaded.values["number"] == loaded.number
        last = loaded.number
    assert unfinished > 0, "no process was killed while it saved"


def test_checkpoint_that_is_replaced_is_there_at_each_moment(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, 1, {"model": model, "turn": 1})
    save_checkpoint(tmp_path, 1, {"model": model, "turn": 2})
    loaded = load_checkpoint(tmp_path, {"model": model})
    assert loaded is not None
    assert loaded.values == {"turn": 2}
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    # As a process leaves it that is killed between the two renames.
    loaded.path.rename(tmp_path / "checkpoint-1.old")
    loaded = load_checkpoint(tmp_path, {"model": model})
    assert loaded is not None
    assert loaded.number == 1


def test_free_room_is_said_only_where_it_was_too_little(tmp_path: Path) -> None:
    (tmp_path / ".saving-1").write_text("")  # no folder
    with pytest.raises(CheckpointError, match="NotADirectory") as caught:
        save_checkpoint(tmp_path, 1, {"model": nn.Linear(2, 2)})
    assert "were free" not in str(caught.value)


def test_checkpoints_beyond_those_to_keep_are_deleted(tmp_path: Path) -> None:
    for number in (5, 10, 15, 20):
        save_checkpoint(tmp_path, number, {"model": nn.Linear(2, 2)}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-15", "checkpoint-20"]
    with pytest.raises(CheckpointError, match="keep 1 or more"):
        save_checkpoint(tmp_path, 25, {}, keep=0)


def two_checkpoints(folder: Path) -> nn.Module:
    model = nn.Linear(2, 2)
    for number in (1, 2):
        save_checkpoint(folder, number, {"model": model})
    return model


@pytest.mark.parametrize("name", ["values.pt", ".metadata", "__0_0.distcp"])
def test_file_that_changed_is_named(name: str, tmp_path: Path) -> None:
    model = two_checkpoints(tmp_path)
    path = tmp_path / "checkpoint-2" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"checkpoint-2' was not loaded.*{name} was changed"):
        load_checkpoint(tmp_path, {"model": model}, number=2)
    said = f"checkpoint-2' .file {name} was changed after it was saved: .*; loading '.*-1'"
    with pytest.warns(UserWarning, match=said) as warned:
        loaded = load_checkpoint(tmp_path, {"model": model})
    assert len(warned) == 1
    assert loaded is not None
    assert loaded.number == 1
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(
        CheckpointError, match=f"no checkpoint in the folder is complete: .*{name} was changed"
    ):
        load_checkpoint(tmp_path, {"model": model})


@pytest.mark.parametrize("name", ["values.pt", ".metadata", "__0_0.distcp", MANIFEST])
def test_checkpoint_without_one_of_its_files_does_not_count(name: str, tmp_path: Path) -> None:
    model = two_checkpoints(tmp_path)
    (tmp_path / "checkpoint-2" / name).unlink()
    with pytest.warns(UserWarning, match=f"checkpoint-2' .{name}: No such.*loading '.*-1'") as at:
        loaded = load_checkpoint(tmp_path, {"model": model})
    assert at[0].filename == __file__
    assert loaded is not None
    assert loaded.number == 1


def test_damaged_checkpoint_is_an_error_if_there_is_no_other(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = save_checkpoint(tmp_path, 1, {"model": model})
    os.truncate(path / "__0_0.distcp", 10)
    for number in (None, 1):
        with pytest.raises(CheckpointError, match="distcp has 10 bytes, and was written with"):
            load_checkpoint(tmp_path, {"model": model}, number=number)
    with pytest.raises(CheckpointError, match="a single checkpoint, which is damaged: __0_0"):
        load_checkpoint(path, {"model": model})
    with pytest.raises(CheckpointError, match="the path is a file"):
        load_checkpoint(path / MANIFEST, {"model": model})
    # An older one that is damaged is not asked for.
    save_checkpoint(tmp_path, 2, {"model": model})
    loaded = load_checkpoint(tmp_path, {"model": model})
    assert loaded is not None
    assert loaded.number == 2


def test_path_of_one_checkpoint_loads_it_and_takes_no_other_into_it(tmp_path: Path) -> None:
    model = two_checkpoints(tmp_path)
    path = tmp_path / "checkpoint-1"
    with pytest.warns(UserWarning, match=r"checkpoint-1' is one checkpoint.*folder that it is in"):
        loaded = load_checkpoint(path, {"model": model})
    assert loaded == Checkpoint(1, path, {})
    with pytest.raises(CheckpointError, match="the folder is checkpoint 1, not 2"):
        load_checkpoint(path, {"model": model}, number=2)
    with pytest.raises(CheckpointError, match=r"is itself a checkpoint, .* give its parent folder"):
        save_checkpoint(path, 3, {"model": model})
    best = path.rename(tmp_path / "best")
    with pytest.warns(UserWarning, match="one checkpoint"):
        assert load_checkpoint(best, {"model": model}) == Checkpoint(1, best, {})


ODD_NUMBERS = {
    "float": 100.0, "half": 1.5, "bool": True, "none": None, "text": "1", "negative": -1,
    "large": 10**18, "huge": 1 << 20_000, "tensor": torch.ones(2),
}  # fmt: skip


@pytest.mark.parametrize("number", ODD_NUMBERS.values(), ids=ODD_NUMBERS)
def test_number_that_is_no_whole_one_is_refused(number: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must be a whole number from 0.*give a number >= 0"):
        save_checkpoint(tmp_path, number, {})
    if number is not None:
        with pytest.raises(CheckpointError, match="must be a whole number"):
            load_checkpoint(tmp_path, {}, number=number)
    assert os.listdir(tmp_path) == []


def test_whole_numbers_of_other_types_are_taken(tmp_path: Path) -> None:
    for number in (np.int64(3), torch.tensor(4)):
        save_checkpoint(tmp_path, number, {"model": nn.Linear(2, 2)})  # pyright: ignore[reportArgumentType]
    assert sorted(complete(tmp_path)) == [3, 4]


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("name", ["values.pt", ".metadata"])
def test_checkpoint_that_holds_code_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = two_checkpoints(tmp_path)
    folder = tmp_path / "checkpoint-2"
    (folder / name).write_bytes(pickle.dumps(Harmful()))
    record = json.loads((folder / MANIFEST).read_text())
    record["files"] |= digests_of(folder, name)
    (folder / MANIFEST).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="checkpoint-2' was not loaded"):
        load_checkpoint(tmp_path, {"model": model})
    assert not (tmp_path / "harm").exists()


# What does not fit


def test_gradients_that_others_are_to_be_added_to_are_said_to_be_left_out(tmp_path: Path) -> None:
    run = Run("data=2")
    with run.step.no_sync():
        run.step(run.x)
    with pytest.warns(
        UserWarning, match="7 lacks the gradients of 'model'.*optimizer's step"
    ) as at:
        save_checkpoint(tmp_path, 7, run.state)
    assert at[0].filename == __file__
    run.step(run.x)
    save_checkpoint(tmp_path, 8, run.state)
    with run.step.no_sync():
        run.step(run.x)
    run.optimizer.zero_grad()
    save_checkpoint(tmp_path, 9, run.state)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="entry 'log' of the state cannot be saved"):
        save_checkpoint(tmp_path, 1, {"log": lambda: None})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(
        CheckpointError, match="'sgd' updates a parameter that belongs to no module"
    ):
        save_checkpoint(tmp_path, 1, {"sgd": optimizer})
    with pytest.raises(CheckpointError, match="has an entry 'a/b'; name it by text without '/'"):
        save_checkpoint(tmp_path, 1, {"a/b": model})
    assert complete(tmp_path) == {}


def test_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(tmp_path, 1, {"model": model, "optimizer": optimizer})
    with pytest.raises(
        CheckpointError, match=r"'0.weight'.*shape \(3, 2\), but \(2, 2\) in the checkpoint"
    ):
        load_checkpoint(tmp_path, {"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 2))})
    with pytest.raises(CheckpointError, match=r"has no tensor '1\.\w+', which the checkpoint has"):
        load_checkpoint(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2))})
    with pytest.raises(CheckpointError, match="no entry 'modell', only model, optimizer"):
        load_checkpoint(tmp_path, {"modell": model})
    with pytest.raises(CheckpointError, match=r"entry 'model' was saved as no optimizer's"):
        load_checkpoint(tmp_path, {"model": optimizer, "optimizer": model})
    with pytest.raises(CheckpointError, match=r"'optimizer' was saved as an optimizer's state"):
        load_checkpoint(tmp_path, {"optimizer": model})
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer)], []
    )
    with pytest.raises(CheckpointError, match=r"a SequentialLR cannot load entry 'model'"):
        load_checkpoint(tmp_path, {"model": schedule})
    half = torch.optim.AdamW(model[0].parameters())
    with pytest.raises(CheckpointError, match="other parameter groups"):
        load_checkpoint(tmp_path, {"model": model, "optimizer": half})
