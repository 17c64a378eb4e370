"""Folders of checkpoints on the disk: each is there whole, or not at all.

A checkpoint is written under a temporary name, with a list of its files and their digests, synced
to disk, and renamed. So if a process is killed meanwhile, the earlier checkpoints stay. One process
at a time saves into a folder (`checkpoint_lock`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardweave.backends.state.saved_state import CheckpointError
from shardweave.driver.checkpoint_lock import FolderLock

MANIFEST = "checkpoint.json"
INDEX = "values.pt"
METADATA = ".metadata"
_FILE = re.compile(r"__\d+_\d+\.distcp|values\.pt|\.metadata")
_NAME = re.compile(r"checkpoint-(\d+)(\.old)?")
SAVING = ".saving-"
_DELETING = ".deleting-"

_INSTEAD = "load one before it (number=..), and delete this one"

Described = dict[str, Any]
"""Size and digest of a file: `{"bytes": .., "sha256": ..}`."""


def complete(root: Path) -> dict[int, Path]:
    """Paths of a folder's complete checkpoints, by checkpoint number."""
    return {number: path for number, path in _named(root).items() if not _damage(path)}


def _named(root: Path) -> dict[int, Path]:
    """Path of the newest folder for each checkpoint number; complete ones take precedence."""
    paths: dict[int, Path] = {}
    # The name without a suffix sorts first: what replaces a checkpoint is newer than it.
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and not (int(match[1]) in paths and _damage(path)):
            paths[int(match[1])] = path
    return paths


# Saving


def begin_checkpoint(root: Path, number: int, lock: FolderLock) -> Path:
    """Create `root` if needed, acquire its lock, and create a folder in it for a checkpoint.
    Deletes unfinished folders of killed processes. Returns the new folder's path."""
    if _is_checkpoint(root):
        raise CheckpointError(
            f"'{root}' is itself a checkpoint, not a folder of checkpoints; give its parent "
            f"folder '{root.parent}'."
        )
    root.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    for left in root.iterdir():
        if left.name.startswith((SAVING, _DELETING)):
            shutil.rmtree(left)
    unfinished = root / f"{SAVING}{number}-{lock.token}"
    unfinished.mkdir()
    return unfinished


def finish(
    unfinished: Path, goal: Path, index: bytes, files: dict[str, Described], lock: FolderLock
) -> None:
    """Write the manifest that makes a checkpoint complete, and rename it to its final name."""
    _write(unfinished / INDEX, index)
    files = files | digests_of(unfinished, INDEX) | digests_of(unfinished, METADATA)
    record = {"format": 1, "number": int(goal.name.rpartition("-")[2]), "files": files}
    _write(unfinished / MANIFEST, json.dumps(record, indent=1).encode())
    _sync(unfinished)
    lock.check()
    before = goal.with_name(goal.name + ".old")
    if goal.exists():
        shutil.rmtree(before, ignore_errors=True)
        goal.rename(before)
    unfinished.rename(goal)
    _sync(goal.parent)
    if before.exists():
        delete(goal.parent, [before])


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(root: Path, paths: Sequence[Path]) -> None:
    """Delete checkpoints, each atomically: none is ever visible in part."""
    for path in paths:
        doomed = root / f"{_DELETING}{path.name}"
        path.rename(doomed)
        shutil.rmtree(doomed)


def delete_before(root: Path, keep: int) -> None:
    """Delete all complete checkpoints but the last `keep`."""
    paths = complete(root)
    delete(root, [paths[number] for number in sorted(paths)[:-keep]])


def digests_of(folder: Path, pattern: str) -> dict[str, Described]:
    """Size and digest of each file in a folder whose name matches `pattern`, by name."""
    return {path.name: _digest_of(path) for path in sorted(folder.glob(pattern))}


def _digest_of(path: Path) -> Described:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


# Loading


class ChosenCheckpoint(NamedTuple):
    """A checkpoint to load. warning: text for the user, "" if none."""

    number: int
    path: Path
    warning: str = ""


def choose_checkpoint(
    root: Path, number: int | None, damaged: Mapping[int, str]
) -> ChosenCheckpoint | None:
    """Choose a complete checkpoint: the one with `number`, or the last one in the folder.

    None if the folder holds no checkpoint. damaged: by number, reasons not to choose a checkpoint.
    The warning names damaged checkpoints that are newer than the choice, or says that the root is
    itself a checkpoint.

    Raises CheckpointError if there is none of that number, and if all checkpoints are damaged.
    """
    if _is_checkpoint(root):
        return _chosen_itself(root, number)
    if root.exists() and not root.is_dir():
        raise CheckpointError(
            "the path is a file; give the folder in which checkpoints were saved."
        )
    paths = _named(root)
    damage = {n: text for n, path in paths.items() if (text := _damage(path))}
    if number is not None:
        if number in damage:
            raise CheckpointError(f"checkpoint {number} is damaged: {damage[number]}.")
        if number not in paths:
            there = ", ".join(map(str, sorted(paths.keys() - damage))) or "none"
            raise CheckpointError(
                f"there is no complete checkpoint {number}, only {there}; load one of these."
            )
        return ChosenCheckpoint(number, paths[number])
    damage |= damaged
    last = max(paths.keys() - damage, default=-1)
    skipped = [f"'{paths[n]}' ({damage[n]})" for n in sorted(damage, reverse=True) if n > last]
    if skipped and last < 0:
        raise CheckpointError(
            f"no checkpoint in the folder is complete: {', '.join(skipped)}. Give another "
            "folder, or delete the damaged checkpoints to start anew."
        )
    warning = (
        f"the newest checkpoint is damaged, and skipped: {', '.join(skipped)}; loading "
        f"'{paths[last]}', which is older."
        if skipped
        else ""
    )
    return None if last < 0 else ChosenCheckpoint(last, paths[last], warning)


def _is_checkpoint(path: Path) -> bool:
    return any((path / name).exists() for name in (MANIFEST, INDEX, METADATA))


def _chosen_itself(path: Path, number: int | None) -> ChosenCheckpoint:
    """Choose `path`, a single checkpoint. CheckpointError if it is damaged or has another
    number."""
    damage = _damage(path)
    if damage:
        raise CheckpointError(f"the folder is a single checkpoint, which is damaged: {damage}.")
    match = _NAME.fullmatch(path.resolve().name)
    own = int(match[1]) if match else json.loads((path / MANIFEST).read_bytes()).get("number", 0)
    if number not in (None, own):
        raise CheckpointError(
            f"the folder is checkpoint {own}, not {number}; give the folder it is in."
        )
    return ChosenCheckpoint(
        own,
        path,
        f"'{path}' is one checkpoint, and is loaded; to load the last one, and to save more, give "
        f"the folder that it is in, '{path.parent}'.",
    )


def _damage(path: Path) -> str:
    try:
        for name, described in _manifest(path).items():
            size = (path / name).stat().st_size
            if size != described["bytes"]:
                return f"{name} has {size} bytes, and was written with {described['bytes']}"
    except OSError as error:
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    except CheckpointError as error:
        return str(error).partition(";")[0]
    return ""


def _manifest(path: Path) -> dict[str, Described]:
    """Read a checkpoint's manifest: files by name. Raises CheckpointError for an invalid one."""
    try:
        record = json.loads((path / MANIFEST).read_bytes())
        files = {
            str(name): {"bytes": of["bytes"], "sha256": of["sha256"]}
            for name, of in record["files"].items()
        }
        number = record.get("number", 0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{MANIFEST} is damaged: {text}; {_INSTEAD}.") from error
    strange = [name for name in files if not _FILE.fullmatch(name)]
    is_known = record.get("format") == 1 and isinstance(number, int)
    if not is_known or strange or not {INDEX, METADATA} <= files.keys():
        raise CheckpointError(f"{MANIFEST} has another version, or is damaged; {_INSTEAD}.")
    return files


def check_files(path: Path, rank: int, num_ranks: int) -> None:
    """Check the digests of this rank's share of the files. Raises CheckpointError on a mismatch."""
    for name, of in sorted(_manifest(path).items())[rank::num_ranks]:
        if _digest_of(path / name) != of:
            raise CheckpointError(
                f"file {name} was changed after it was saved: its digest differs; {_INSTEAD}."
            )
