"""Plans with stages, simulated as their programs, and what AMP's closed form says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.amp.planner import plan_amp
from shardweave.planners.cost.cluster import Cluster, on_devices
from shardweave.planners.cost.links import transfer_s
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.predict.predict import simulation_of
from shardweave.tests.benchmarks.test_played_stages import HET, UNIT, lowerings, staged
from shardweave.tests.planners.small_clusters import cluster


def test_amp_takes_the_fastest_of_the_best_estimates_and_says_so() -> None:
    plan = plan_amp(lowerings(), None, cluster=HET, simulate=3, top=5)
    assert plan.predicted is not None
    assert plan.predicted.source == "simulated"
    assert "the 3 best estimates were simulated, and of those this one" in plan.reasons[0]
    assert "number " in plan.reasons[0]
    sources = [one.predicted.source for one in plan.candidates]
    assert sources == ["simulated"] * 3 + ["estimated"] * 2
    times = [one.predicted.time_s for one in plan.candidates[:3]]
    assert times == sorted(times)
    assert all(one.reason.startswith("not simulated; by") for one in plan.candidates[3:])


def test_amp_with_zero_fits_where_it_did_not() -> None:
    def fullest(zero: int, on: Cluster) -> Plan:
        mesh = Mesh(pipeline=2, data=8)
        return plan_amp(lowerings(), mesh, cluster=on, zero=zero, simulate=1)

    plain, divided = fullest(0, HET), fullest(3, HET)
    assert plain.predicted is not None
    assert divided.predicted is not None
    assert divided.zero == 3
    assert divided.predicted.peak_bytes < plain.predicted.peak_bytes
    middle = int(plain.predicted.peak_bytes + divided.predicted.peak_bytes) // 2
    devices = {name: replace(one, memory_bytes=middle) for name, one in HET.devices.items()}
    small = replace(HET, devices=devices)
    assert fullest(3, small).zero == 3
    with pytest.raises(PlanError, match="GiB too many"):
        fullest(0, small)
    with pytest.raises(PlanError, match="zero is 4; use 0, 1, 2 or 3"):
        plan_amp(lowerings(), None, cluster=HET, zero=4)


def test_summary_record_trace_and_picture_tell_of_each_stage(tmp_path: Path) -> None:
    found = simulation_of(lowerings(), staged(), UNIT)
    assert "2 stages, 4 micro-batches, 1f1b" in found.summary()
    assert found.summary().count("in flight") == 2
    record = found.record()
    assert [one["in_flight"] for one in record["stages"]] == [2, 1]
    found.save_trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert '"stage 00"' in text
    assert '"stage 01"' in text
    found.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_transfers_that_leave_or_enter_a_node_at_once_share_its_nics() -> None:
    found = cluster(nodes=2, devices=4)  # 100 MB/s inside, 10 MB/s between
    apart_s = transfer_s(found, [0], [4], 0)
    assert transfer_s(found, [0], [1], 1e8) - transfer_s(found, [0], [1], 0) == pytest.approx(1)
    assert transfer_s(found, [0, 1], [4, 5], 5e6) - apart_s == pytest.approx(1)
    assert transfer_s(found, [0, 5], [4, 1], 1e7) - apart_s == pytest.approx(1)


def test_some_devices_of_a_cluster_keep_their_nodes_and_types() -> None:
    found = on_devices(HET, (12, 3, 4))
    assert [found.place(rank) for rank in range(3)] == [(3, 0), (0, 3), (1, 0)]
    assert [one.name for one in found.device_types(1)] == ["T4"]
    assert [one.name for one in found.device_types(3)] == ["T4", "V100-16GB"]
    with pytest.raises(ValueError, match="has only 16"):
        on_devices(HET, (16,))
