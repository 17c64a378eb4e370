"""Lightning with a compiled model, beside the same script on one process."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

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
    # Lightning 2.6 asks torch's trees as older torches had them.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
    train = example("lightning_module").train
    torch.set_default_dtype(torch.float64)
    alone = Path(root) / "alone"
    theirs = [train(None, 0, alone, count, dropout=0.0) for count in (2, 4) if is_first()]
    for mesh, zero in meshes:
        folder = Path(root) / f"{mesh}-{zero}"
        with as_launched():
            _, first = train(mesh, zero, folder, 2, dropout=0.0)
            module, then = train(mesh, zero, folder, 4, dropout=0.0)  # goes on
        own = weights(module.model)
        if is_first():
            check_same(first, theirs[0][1], mesh, 1e-9)
            check_same(then, theirs[1][1], mesh, 1e-9)
            check_same(own, weights(theirs[1][0].model), mesh, 1e-9)
            saved = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
            check_same(saved, weights(theirs[1][0]), mesh, 1e-9)


@needs("lightning")
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2", 3), ("tensor=2", 0)])
def test_lightning_accumulates_clips_validates_and_resumes_as_on_one_process(
    tmp_path: Path, mesh: str, zero: int
) -> None:
    run_ranks(trains_as_on_one_process, 2, str(tmp_path), [(mesh, zero)])
