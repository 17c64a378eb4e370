"""benchmarks/starting.py: presets have the constant that it finds, and rows left out are nearer by it."""

from __future__ import annotations

import pytest

from shardweave.benchmarks.starting import error, read_calls, start_overhead_us
from shardweave.planners.cost.presets import find_cluster


@pytest.mark.parametrize(("kind", "preset"), [("A100", "dgx-a100"), ("V100", "dgx-v100")])
def test_presets_have_what_starting_an_all_reduce_takes(kind: str, preset: str) -> None:
    calls = [call for call in read_calls() if call.kind == kind]
    found = start_overhead_us([call for call in calls if not call.is_held_out])
    assert find_cluster(preset).start_overhead_s * 1e6 == pytest.approx(found, abs=1)
    rest = [call for call in calls if call.is_held_out]
    assert len(rest) > 30
    assert error(rest, found) < 0.75 * error(rest, 0.0)
