"""Every optimizer of torch, and others, on shards: parameters as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardweave.backends.optimizers.spread import GATHERED
from shardweave.passes.pipeline import as_mesh
from shardweave.tests.driver.optimizer_steps import cases, errors_of, errors_of_resumed
from shardweave.tests.spawn import run_ranks

FEW = (
    "Muon",
    "Adafactor",
    "Rprop",
    "AdamW",
    "BySize",
    "SometimesNormed",
    "Noisy",
    "EightBit",
    "Lookahead",
    "ThroughViews",
    "Lamb",
    "ASGD",
    "TurnsAndPicks",
    "Wrapper",
)

LAYOUTS: list[tuple[str, int, bool]] = [
    ("data=2", 1, False),
    ("data=2", 2, False),
    ("data=2", 3, False),
    ("tensor=2", 0, False),
    ("data=2,tensor=2", 3, True),
    ("stage=2", 0, False),
    ("expert=2", 0, False),
]
"""Mesh, zero, and whether all sizes divide."""


def worker(options: dict[str, Any], is_even: bool, names: list[str]) -> dict[str, float]:
    chosen = [case for case in cases() if not names or case[0] in names]
    return errors_of(options, chosen, is_even=is_even)


def check(mesh: str, zero: int, is_even: bool, *names: str) -> None:
    options = {"mesh": mesh, "zero": zero}
    ranks = as_mesh(mesh).num_devices
    for errors in run_ranks(worker, ranks, options, is_even, list(names)):
        assert not {name: error for name, error in errors.items() if not error < 1e-9}


def test_optimizers_that_read_more_than_elements_train_as_on_one_process() -> None:
    check("data=2", 3, False, *FEW)


def gathered(names: list[str]) -> list[tuple[str, ...]]:
    """The ops for which the last step of each optimizer has gathered full values."""
    options, ops = {"mesh": "data=2", "zero": 3}, list[tuple[str, ...]]()
    for case in cases():
        if case[0] in names:
            errors_of(options, [case], is_even=False)
            ops.append(tuple(GATHERED))
    with pytest.raises(ValueError, match=r"^the step of Averaging communicates itself \(c10d"):
        errors_of(options, [("Averaging", {})], is_even=False)
    return ops


def test_scalars_and_vectors_travel_where_an_optimizer_decides_by_norms() -> None:
    for ops in run_ranks(gathered, 2, ["Adafactor", "Lamb", "ASGD", "Noisy"]):
        assert ops == [()] * 4


def test_sizes_and_what_is_known_by_identity_are_the_same_on_all_stages() -> None:
    check("stage=2", 0, False, "BySize", "InObjects")


def test_a_checkpoint_of_any_state_goes_on_with_another_mesh(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"mesh": "data=2", "zero": 3}, {"mesh": "tensor=2"}]
    names = ["AdamW", "Muon", "Soap"]
    for errors in run_ranks(errors_of_resumed, 2, *options, names, str(tmp_path)):
        assert not {name: error for name, error in errors.items() if not error < 1e-9}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero", "is_even"), LAYOUTS)
def test_every_optimizer_trains_as_on_one_process(mesh: str, zero: int, is_even: bool) -> None:
    check(mesh, zero, is_even)
