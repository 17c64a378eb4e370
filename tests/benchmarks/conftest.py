"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardweave.benchmarks.baselines.registered import register_baselines
from shardweave.passes.registry import GENERATED
from shardweave.planners.registry import PLANNERS


@pytest.fixture
def baselines() -> Iterator[None]:
    """Let the baselines be planners while a test runs."""
    tables = PLANNERS, GENERATED
    before = [dict(table) for table in tables]
    register_baselines()
    yield
    for table, names in zip(tables, before, strict=True):
        table.clear()
        table.update(names)
