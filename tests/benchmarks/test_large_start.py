"""A model on the meta device starts in the memory of its shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardweave.benchmarks import large_start

RESULT = Path(large_start.__file__).parent / "results" / "large_start.json"


def test_measured_peak_is_the_shards_and_less_than_two_parameters() -> None:
    for row in json.loads(RESULT.read_text())["rows"]:
        assert row["peak"] < row["shards"] + 2 * row["largest"]


@pytest.mark.slow
def test_quick_run_measures_every_rank(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert large_start.main(["--quick", "--json", str(out)]) == 0
    assert [row["rank"] for row in json.loads(out.read_text())["rows"]] == [0, 1]
