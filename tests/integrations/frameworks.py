"""The examples of frameworks as modules, and their results beside those of one process."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardweave as sw

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "frameworks"


def example(name: str) -> Any:
    """An example, imported as its script imports its neighbours."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a test where a framework is not installed."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's state, whole, of a compiled one too."""
    full = getattr(model, "full_state_dict", model.state_dict)()
    return {name: tensor.clone() for name, tensor in full.items() if name != "random_state"}


TOLERANCE = 1e-6
"""Losses of transformers are computed in float32, with weights in float64 too."""


def check_same(ours: Any, theirs: Any, what: str = "", tolerance: float = TOLERANCE) -> None:
    """Raises AssertionError unless two trees of numbers and tensors are equal but for rounding."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), what
        for key, value in theirs.items():
            check_same(ours[key], value, f"{what} {key}", tolerance)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), what
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            check_same(our, their, f"{what} {index}", tolerance)
    else:
        ours, theirs = (torch.as_tensor(x) for x in (ours, theirs))
        torch.testing.assert_close(
            sw.full_tensor(ours),
            theirs,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m: f"{what}: {m}",
        )


def is_first() -> bool:
    """Whether this is rank 0."""
    return dist.get_rank() == 0


@contextmanager
def as_launched(ranks: int | None = None, rank: int = 0) -> Iterator[None]:
    """Meanwhile the environment is that of a process of torchrun: of the process group's, or of a
    given rank of so many."""
    if ranks is None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in names.items()})
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
