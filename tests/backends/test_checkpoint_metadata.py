"""Metadata of a checkpoint is read as data, whichever Python wrote it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardweave.backends.state.checkpoint import DataReader

PATH = b"cpathlib._local\nPosixPath\n(Vcheckpoint-1\ntR."
"""A path as Python 3.13 pickles it."""


def test_paths_of_python_3_13_are_read_by_all(tmp_path: Path) -> None:
    saved = Metadata({}, storage_data=Path("checkpoint-1"))
    text = pickle.dumps(saved, protocol=2)
    written = text.replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath")
    (tmp_path / ".metadata").write_bytes(written)
    assert DataReader(tmp_path).read_metadata() == saved


def test_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(PATH.replace(b"PosixPath", b"os"))
    with pytest.raises(pickle.UnpicklingError, match=r"may not refer to pathlib\.os"):
        DataReader(tmp_path).read_metadata()


@pytest.mark.parametrize("damage", ["dtype", "properties", "size", "chunks"])
def test_damaged_metadata_of_a_tensor_is_named(tmp_path: Path, damage: str) -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    properties = TensorProperties(dtype=torch.float32)
    entry = TensorStorageMetadata(properties, torch.Size([2]), [chunk])
    saved = Metadata({"w": entry})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(saved))
    assert DataReader(tmp_path).read_metadata() == saved
    if damage == "dtype":
        entry.properties.dtype = "float32"  # pyright: ignore[reportAttributeAccessIssue]
    elif damage == "size":
        entry.size = torch.Size([2, 1])
    else:
        del entry.__dict__[damage]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(saved))
    with pytest.raises(pickle.UnpicklingError, match="its tensor 'w' is damaged"):
        DataReader(tmp_path).read_metadata()
