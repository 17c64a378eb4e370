"""Metadata of a checkpoint is read as data, whichever Python wrote it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from shardweave.backends.state.checkpoint import DataReader

PATH = b"cpathlib._local\nPosixPath\n(Vcheckpoint-1\ntR."
"""A path as Python 3.13 pickles it."""


def test_paths_of_python_3_13_are_read_by_all(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(PATH)
    assert DataReader(tmp_path).read_metadata() == Path("checkpoint-1")


def test_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(PATH.replace(b"PosixPath", b"os"))
    with pytest.raises(pickle.UnpicklingError, match=r"holds no pathlib\.os"):
        DataReader(tmp_path).read_metadata()
