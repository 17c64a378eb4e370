"""plan_random on a small program, in the simulator."""

from pathlib import Path

import pytest

from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.planners.planning import plan


@pytest.mark.usefixtures("baselines")
def test_plan_is_the_fastest_of_its_trials_and_follows_from_the_seed(tmp_path: Path) -> None:
    example = build_example("gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=4")
    program = capture(example.module, kwargs=example.kwargs)
    cluster = "perlmutter:nodes=1"
    file = str(tmp_path / "t.jsonl")
    found = plan(program, None, "random", cluster=cluster, trials=8, file=file, seed=1)
    assert found.planner == "random"
    assert found.predicted is not None
    assert all(found.predicted.time_s <= one.predicted.time_s for one in found.candidates)
    assert "the fastest of 8 trials" in found.reasons[0]
    again = plan(program, None, "random", cluster=cluster, trials=8, seed=1)
    assert again.to_json() == found.to_json()
    with pytest.raises(ValueError, match="another search: it has cluster"):
        plan(program, None, "random", cluster="testbed", file=file)
