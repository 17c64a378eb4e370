"""Every optimizer of torch, and others, on shards: parameters as on one process."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.tests.driver.optimizer_steps import cases, errors_of
from shardweave.tests.spawn import run_ranks

FEW = ("Muon", "Adafactor", "Rprop", "AdamW", "BySize", "SometimesNormed", "Noisy", "Lookahead")

LAYOUTS: list[tuple[dict[str, Any], bool]] = [
    ({"mesh": "data=2", "zero": 1}, False),
    ({"mesh": "data=2", "zero": 3}, False),
    ({"mesh": "tensor=2"}, True),
]
"""Options of compile, and whether all sizes divide."""


def worker(options: dict[str, Any], is_even: bool, names: list[str]) -> dict[str, float]:
    chosen = [case for case in cases() if not names or case[0] in names]
    return errors_of(options, chosen, is_even=is_even)


def check(options: dict[str, Any], is_even: bool, *names: str) -> None:
    for errors in run_ranks(worker, 2, options, is_even, list(names)):
        # Muon iterates in bfloat16: 2e-4 is 1% of an update.
        limits = {name: 2e-4 if name.startswith("Muon") else 1e-9 for name in errors}
        assert not {name: error for name, error in errors.items() if not error < limits[name]}


def test_optimizers_that_read_more_than_elements_train_as_on_one_process() -> None:
    check({"mesh": "data=2", "zero": 3}, False, *FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "is_even"), LAYOUTS)
def test_every_optimizer_trains_as_on_one_process(options: dict[str, Any], is_even: bool) -> None:
    check(options, is_even)
