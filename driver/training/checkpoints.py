"""Checkpoints of a training run: saved by all ranks together, and loaded on any mesh."""

from __future__ import annotations

import operator
import os
import pickle
import reprlib
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from shardweave.backends.state.checkpoint import DataReader
from shardweave.backends.state.saved_state import (
    CheckpointError,
    check_entries,
    put_together,
    read_index,
    take_apart,
    targets,
)
from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.backends.watch import watchdog
from shardweave.backends.watch.agreement import gathered_from_ranks
from shardweave.driver.checkpoint_lock import FolderLock
from shardweave.driver.processes import world
from shardweave.driver.training.checkpoint_files import (
    INDEX,
    ChosenCheckpoint,
    begin_checkpoint,
    check_files,
    choose_checkpoint,
    delete_before,
    digests_of,
    finish,
)
from shardweave.ir.notes import warn
from shardweave.planners.cost.quantity import bytes_text

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded. number: the number under which it was saved; path: its folder;
    values: the plain values saved in it."""

    number: int
    path: Path
    values: dict[str, Any]


def save_checkpoint(
    folder: str | os.PathLike[str],
    number: int,
    state: Mapping[str, Any],
    *,
    keep: int | None = None,
) -> Path:
    """Save a state as checkpoint `number` of a folder that all ranks see. Collective.

    number: a whole number, such as the step's; the highest one is loaded. state: by names of your
    choice a step (or other modules), optimizers of its parameters, other objects with a
    `state_dict` (schedulers, scalers), and plain values, saved from rank 0. keep: number
    of last checkpoints to keep; the others are deleted once this one is complete. Returns its path.

    Raises CheckpointError on every rank if a rank cannot write, or if another run is saving into
    the folder; earlier checkpoints stay.
    """
    root, number = Path(folder), _whole("a number >= 0", number, 0)
    keep = None if keep is None else _whole("keep 1 or more", keep, 1)
    with _explained(f"checkpoint {number} was not saved in '{root}'"):
        _check_state(state)
        _check_joined()
        watchdog.meet("sw.save_checkpoint", f"checkpoint {number}")
        _warn_of_gradients(number, state)
        saved = _on_each_rank(lambda: take_apart(state))
        index = _on_each_rank(saved.index)
        goal = root / f"checkpoint-{number}"
        size = sum(tensor.numel() * tensor.element_size() for tensor in saved.tensors.values())
        with _locked(root, number, size) as (unfinished, lock):
            _on_each_rank(lambda: _write_tensors(saved.tensors, unfinished))
            own = _on_each_rank(lambda: digests_of(unfinished, f"__{world.rank()}_*"))
            files = {name: of for each in gathered_from_ranks(own) for name, of in each.items()}
            _on_rank_0(lambda: finish(unfinished, goal, index, files, lock))
            if keep is not None:
                _on_rank_0(lambda: delete_before(root, keep))
    return goal


def load_checkpoint(
    folder: str | os.PathLike[str], state: Mapping[str, Any], *, number: int | None = None
) -> Checkpoint | None:
    """Load the last complete checkpoint of a folder, or the one with `number`, into a state.
    Collective.

    folder: where checkpoints were saved, or one checkpoint in it. state: the modules, optimizers
    and other objects to fill, under the names with which they were saved; the mesh, the plan and
    the number of processes may differ. None if the folder holds none. Newer checkpoints that are
    damaged are skipped with a warning.

    Raises CheckpointError on every rank if all are damaged, or if the one loaded does not fit.
    """
    root = Path(folder)
    with _explained(f"no checkpoint was loaded from '{root}'"):
        wanted = None if number is None else _whole("a number >= 0", number, 0)
        _check_state(state)
        _check_joined()
        watchdog.meet("sw.load_checkpoint", "the last one" if wanted is None else str(wanted))
    chosen = _chosen(root, wanted)
    if chosen is None:
        return None
    if chosen.warning and world.rank() == 0:
        warn(chosen.warning, UserWarning)
    with _explained(f"checkpoint '{chosen.path}' was not loaded"):
        values = _load(chosen.path, state)
    return Checkpoint(chosen.number, chosen.path, values)


def _chosen(root: Path, wanted: int | None) -> ChosenCheckpoint | None:
    """Choose the checkpoint numbered `wanted`, or the last one that is undamaged. Collective."""
    damaged: dict[int, str] = {}
    while True:
        with _explained(f"no checkpoint was loaded from '{root}'"):
            chosen = _on_rank_0(lambda: choose_checkpoint(root, wanted, damaged))
        if chosen is None:
            return None
        path = chosen.path
        try:
            _on_each_rank(lambda path=path: check_files(path, world.rank(), world.world_size()))
        except CheckpointError as error:
            if wanted is not None or path == root:
                raise CheckpointError(f"checkpoint '{path}' was not loaded: {error}") from error
            damaged[chosen.number] = str(error).partition(";")[0]
        else:
            return chosen


# Saving


@contextmanager
def _locked(root: Path, number: int, size: int) -> Iterator[tuple[Path, FolderLock]]:
    """Hold the lock of a folder on rank 0, and a new folder in it until it is renamed. Collective.
    size: the bytes to write. An error says if so many were not free."""
    lock, unfinished, free = FolderLock(root), None, size
    try:
        unfinished, free = _on_rank_0(
            lambda: (begin_checkpoint(root, number, lock), shutil.disk_usage(root).free)
        )
        yield unfinished, lock
    except CheckpointError as error:
        # Of a full disk, torch says how many bytes it has not written where.
        room = f" (it takes {bytes_text(size)}, and {bytes_text(free)} were free there)"
        raise CheckpointError(f"{error}{room if free < size else ''}") from error
    finally:
        if world.rank() == 0:
            if unfinished is not None:
                shutil.rmtree(unfinished, ignore_errors=True)
            lock.release()


def _warn_of_gradients(number: int, state: Mapping[str, Any]) -> None:
    """Warn that a checkpoint does not include gradients that are still being accumulated."""
    for entry, content in state.items():
        is_step = isinstance(content, CompiledModule)
        if is_step and content.gradients.are_unfinished and world.rank() == 0:
            warn(
                f"checkpoint {number} lacks the gradients of '{entry}' that calls under "
                "no_sync() have accumulated so far; a run that resumes from it loses these "
                "micro-batches. Save after the optimizer's step.",
                UserWarning,
            )


def _write_tensors(tensors: Mapping[str, Tensor], unfinished: Path) -> None:
    """Write tensors by key into the folder `unfinished`. Collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process", category=UserWarning)
        save_tensors(
            dict(tensors),
            storage_writer=FileSystemWriter(unfinished),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            no_dist=not dist.is_initialized(),
        )


# Loading


def _load(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Load a checkpoint into `state`; returns saved values that `state` lacks. Collective."""
    reader = DataReader(path)
    saved = _on_each_rank(lambda: _read(reader.read_metadata))
    index = _on_each_rank(
        lambda: read_index((path / INDEX).read_bytes(), saved.state_dict_metadata)
    )
    _on_each_rank(lambda: check_entries(index, state))
    into = _on_each_rank(lambda: targets(index, state, saved))
    _on_each_rank(lambda: _read(lambda: _read_tensors(into, reader)))
    _on_each_rank(lambda: put_together(index, state, into))
    return {entry: value for entry, value in index.values.items() if entry not in state}


def _read(make: Callable[[], T]) -> T:
    """Run torch's checkpoint reader `make`; turns any of its errors into a CheckpointError."""
    try:
        return make()
    except Exception as error:
        raise CheckpointError(f"it cannot be read: {type(error).__name__}: {error}.") from error


def _read_tensors(into: dict[str, Tensor], reader: DataReader) -> None:
    """Fill tensors, by key, with their saved values. Collective."""
    if not into:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process", category=UserWarning)
        load_tensors(
            into,
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=not dist.is_initialized(),
        )


# Together

HIGHEST = 10**18


def _whole(what: str, number: object, least: int) -> int:
    """Convert `number` to int by `operator.index`. Raises CheckpointError for True, 100.0, etc."""
    if isinstance(number, int) and abs(number) >= HIGHEST:
        described = f"of {number.bit_length()} bits"
    else:
        described = reprlib.repr(number)
    try:
        index = -1 if isinstance(number, bool) else operator.index(cast("Any", number))
    except (TypeError, ValueError, RuntimeError):  # as tensors raise, of several numbers
        index = -1
    if not least <= index < HIGHEST:
        raise CheckpointError(
            f"{type(number).__name__} {described} must be a whole number from {least} to "
            f"{HIGHEST:.0e}; give {what}."
        )
    return index


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"the state is a {type(state).__name__}; give a dict of what to save by names of your "
            "choice, such as {'model': step, 'optimizer': optimizer}."
        )


def _check_joined() -> None:
    if world.world_size() > 1 and not dist.is_initialized():
        raise CheckpointError(
            f"{world.world_size()} processes run, but they are not connected; compile a step for "
            "a mesh of them, or call torch.distributed.init_process_group()."
        )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error


def _on_rank_0(make: Callable[[], T]) -> T:
    """Return on every rank the result of `make` on rank 0, or raise its error. Collective."""
    return world.from_rank_0(lambda: _tried(make))


def _on_each_rank(make: Callable[[], T]) -> T:
    """Return the result of `make` on this rank; if it fails on one, raise on all. Collective."""
    result, error = None, None
    try:
        result = _tried(make)
    except Exception as own:  # noqa: BLE001  the others wait for this rank: it tells them first
        error = own
    texts = gathered_from_ranks("" if error is None else str(error) or type(error).__name__)
    failed = next((rank for rank, text in enumerate(texts) if text), None)
    if error is not None and not isinstance(error, CheckpointError):
        raise error
    if failed is not None:
        where = f"on rank {failed}: " if len(texts) > 1 else ""
        raise CheckpointError(f"{where}{texts[failed]}") from error
    return cast("T", result)


def _tried(make: Callable[[], T]) -> T:
    """Call `make`; turns errors of files and of torch's checkpoints into CheckpointError."""
    try:
        return make()
    except CheckpointError:
        raise
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        text = " ".join(str(cause).split())
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {text}") from error
    except (OSError, RuntimeError, ValueError, KeyError, pickle.PickleError) as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
