"""Folders of checkpoints on the disk: each is there whole, or not at all.

A checkpoint is written under another name, with a list of its files and their digests, brought to
the disk, and renamed. So whatever ends a process meanwhile, the checkpoints before it stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardweave.backends.state.saved_state import CheckpointError

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
    """The checkpoints of a folder that are complete, by number."""
    found: dict[int, Path] = {}
    # The name without a suffix sorts first: what replaces a checkpoint is newer than it.
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and _is_complete(path):
            found[int(match[1])] = path
    return found


# Saving


def begin(root: Path, unfinished: Path) -> None:
    """Make the root, without what a killed process left in it, and a folder for a checkpoint."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.iterdir():
        if left.name.startswith((SAVING, _DELETING)):
            shutil.rmtree(left)
    unfinished.mkdir()


def finish(unfinished: Path, goal: Path, index: bytes, files: dict[str, Described]) -> None:
    """Write what makes a checkpoint complete, and give it its name."""
    _write(unfinished / INDEX, index)
    files = files | digests_of(unfinished, INDEX) | digests_of(unfinished, METADATA)
    _write(unfinished / MANIFEST, json.dumps({"format": 1, "files": files}, indent=1).encode())
    _sync(unfinished)
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
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(root: Path, paths: Sequence[Path]) -> None:
    """Delete checkpoints, none of which is ever there in part."""
    for path in paths:
        doomed = root / f"{_DELETING}{path.name}"
        path.rename(doomed)
        shutil.rmtree(doomed)


def delete_before(root: Path, keep: int) -> None:
    """Delete all complete checkpoints but the last `keep`."""
    paths = complete(root)
    delete(root, [paths[number] for number in sorted(paths)[:-keep]])


def digests_of(folder: Path, pattern: str) -> dict[str, Described]:
    """Size and digest of the files whose names match, by name."""
    return {path.name: _digest_of(path) for path in sorted(folder.glob(pattern))}


def _digest_of(path: Path) -> Described:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


# Loading


def choose(root: Path, number: int | None) -> tuple[int, Path] | None:
    """Number and folder of a complete checkpoint; without a number of the last, if there is one.

    Raises CheckpointError for a number of which there is none.
    """
    found = complete(root)
    if number is None:
        return max(found.items(), default=None)
    if number not in found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise CheckpointError(f"there is no complete checkpoint {number}, only {there}.")
    return number, found[number]


def _is_complete(path: Path) -> bool:
    """Whether all files of a checkpoint are there, with all their bytes."""
    try:
        files = _manifest(path)
        return all((path / name).stat().st_size == of["bytes"] for name, of in files.items())
    except (OSError, CheckpointError):
        return False


def _manifest(path: Path) -> dict[str, Described]:
    """The files of a checkpoint. Raises CheckpointError for a manifest that is not one."""
    try:
        record = json.loads((path / MANIFEST).read_bytes())
        files = {
            str(name): {"bytes": of["bytes"], "sha256": of["sha256"]}
            for name, of in record["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}; {_INSTEAD}.") from error
    strange = [name for name in files if not _FILE.fullmatch(name)]
    if record.get("format") != 1 or strange or not {INDEX, METADATA} <= files.keys():
        raise CheckpointError(f"{MANIFEST} is of another version, or is damaged; {_INSTEAD}.")
    return files


def check_files(path: Path, rank: int, num_ranks: int) -> None:
    """Raises CheckpointError if one of this rank's part of the files is not what was written."""
    for name, of in sorted(_manifest(path).items())[rank::num_ranks]:
        if _digest_of(path / name) != of:
            raise CheckpointError(
                f"{name} is not what was written: its digest is another; {_INSTEAD}."
            )
