# pyright: reportMissingImports=false
"""A loop with accelerate on a compiled model, beside the same loop on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardweave.tests.integrations.frameworks import (
    as_launched,
    check_same,
    example,
    is_first,
    needs,
    weights,
)
from shardweave.tests.spawn import run_ranks


def trains_as_on_one_process(root: str, meshes: list[tuple[str, int]]) -> None:
    from accelerate.state import AcceleratorState

    train = example("accelerate_loop").train
    torch.set_default_dtype(torch.float64)
    alone = Path(root) / "alone"
    theirs = [train(None, 0, alone, dropout=0.0) for _ in range(2)] if is_first() else []
    for mesh, zero in meshes:
        folder = Path(root) / f"{mesh}-{zero}"
        with as_launched():
            AcceleratorState._reset_state(reset_partial_state=True)
            first = train(mesh, zero, folder, dropout=0.0)
            AcceleratorState._reset_state(reset_partial_state=True)
            model, numbers = train(mesh, zero, folder, dropout=0.0)  # goes on from what was saved
        own = weights(model)
        if not is_first():
            continue
        check_same(first[1], theirs[0][1], mesh, 1e-9)
        check_same(numbers, theirs[1][1], mesh, 1e-9)
        check_same(own, weights(theirs[1][0]), mesh, 1e-9)
        check_same(load_file(folder / "weights" / "model.safetensors"), own, mesh, 1e-9)


@needs("accelerate")
@pytest.mark.parametrize(
    ("mesh", "zero"), [("data=2", 3), pytest.param("tensor=2", 0, marks=pytest.mark.slow)]
)
def test_accelerate_accumulates_clips_saves_and_goes_on_as_on_one_process(
    tmp_path: Path, mesh: str, zero: int
) -> None:
    run_ranks(trains_as_on_one_process, 2, str(tmp_path), [(mesh, zero)])
