"""The command line that the examples beside this file share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


def run(train: Callable[[str | None, int, Path], _T], folder: str) -> _T:
    """Call `train(mesh, zero, folder)` with the options of the command line.

    folder: where checkpoints go, unless `--folder` names another one.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("mesh", nargs="?", help="such as data=2; without it, one process trains")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(folder))
    options = parser.parse_args()
    return train(options.mesh, options.zero, options.folder)
