"""overlap-communication: `list` is the fastest, memory caps hold, and wrong input is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from shardweave.ir.dialects.dist import StartedOp, WaitOp
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.cost.cluster_file import save_cluster
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.presets import FOLDER
from shardweave.planners.overlap.overlap_communication import SCHEDULES
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests.ir_text import assert_same_values
from shardweave.tests.passes.steps import blocks, order, random_step
from shardweave.tests.planners.small_clusters import cluster

POLICIES = ("none", "layer", "after-communication")


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of clusters on which compute or communication takes longer, one with slowdowns."""
    plain = cluster(4, nic=1e8)
    found = [
        plain,
        cluster(4, nic=1e7),
        cluster(2, 2, nic=3e7),
        replace(plain, overlap_slowdown=1.3, link_slowdown=1.1, start_overhead_s=2e-6),
    ]
    paths = [tmp_path_factory.mktemp("clusters") / f"{i}.yaml" for i in range(len(found))]
    for one, path in zip(found, paths, strict=True):
        save_cluster(one, path)
    return paths


def overlapped(program: Program, schedule: str, path: Path, options: str = "") -> Program:
    spec = f'overlap-communication{{schedule={schedule} cluster="{path}"{options}}}'
    return run_passes(program, spec)


def started(seed: int) -> Program:
    """A random step, recomputed by a random policy, with or without deleted messages."""
    deletes = "delete-redundant-collectives," if seed % 2 else ""
    policy = POLICIES[seed // 2 % 3]
    return run_passes(
        random_step(seed), f"rematerialize{{policy={policy}}},{deletes}start-collectives"
    )


def assert_list_is_fastest(seed: int, path: Path) -> None:
    """And that every schedule is a permutation with one wait a start, of equal values."""
    program = started(seed)
    times: dict[str, float] = {}
    for schedule in SCHEDULES:
        after = overlapped(program, schedule, path)
        assert sorted(order(after)) == sorted(order(program))
        times[schedule] = simulate(after, path).time_s
        if schedule == "list" and seed % 5 == 0:
            assert_same_values(program, after)
    assert times["list"] <= min(times.values())


def test_list_is_never_slower_than_other_schedules(clusters: Sequence[Path]) -> None:
    for seed in range(20):
        assert_list_is_fastest(seed, clusters[seed % len(clusters)])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 20))
def test_list_is_never_slower_over_200_random_programs(
    start: int, clusters: Sequence[Path]
) -> None:
    for seed in range(start, start + 20):
        assert_list_is_fastest(seed, clusters[seed % len(clusters)])


def test_list_hides_more_than_the_fixed_schedules(clusters: Sequence[Path]) -> None:
    gains = []
    for seed in range(12):
        program = started(seed)
        path = clusters[seed % len(clusters)]
        times = {s: simulate(overlapped(program, s, path), path).time_s for s in SCHEDULES}
        gains.append(min(times[s] for s in SCHEDULES[:-1]) / times["list"])
    assert sum(gains) / len(gains) > 1.05


def test_memory_cap_holds_and_costs_as_little_time_as_may_be(clusters: Sequence[Path]) -> None:
    for seed in range(12):
        program, path = started(seed), clusters[seed % len(clusters)]
        free = simulate(overlapped(program, "list", path), path)
        fixed = [simulate(overlapped(program, s, path), path) for s in SCHEDULES[:-1]]
        cap = min(one.peak_bytes for one in fixed)
        found = simulate(overlapped(program, "list", path, f" memory-cap={cap}"), path)
        assert found.peak_bytes <= cap
        assert free.time_s <= found.time_s
        assert found.time_s <= min(one.time_s for one in fixed if one.peak_bytes <= cap)


def test_memory_cap_that_no_order_fits_says_how_much_is_missing(clusters: Sequence[Path]) -> None:
    for seed in range(4):
        program = started(seed)
        with pytest.raises(PassError) as error:
            overlapped(program, "list", clusters[0], " memory-cap=1000")
        missing = int(str(error.value).partition(" on a device, ")[2].split()[0])
        assert str(error.value) == (
            f"pass 'overlap-communication': schedule list needs {1000 + missing} bytes on a device, {missing} "
            "more than memory_cap=1000; recompute more (rematerialize), split the batch into more "
            "sub-batches, or raise memory_cap."
        )
        for schedule in SCHEDULES:
            needed = peak_memory(overlapped(program, schedule, clusters[0])).peak_bytes
            assert 1000 + missing <= needed


def test_memory_cap_of_a_fixed_schedule_is_checked_too() -> None:
    program = run_passes(blocks(), "start-collectives")
    needed = peak_memory(run_passes(program, "overlap-communication{schedule=blocking}")).peak_bytes
    for cap in (needed, needed - 1):
        options = f"schedule=blocking memory-cap={cap}"
        if cap == needed:
            run_passes(program, f"overlap-communication{{{options}}}")
            continue
        with pytest.raises(PassError, match="1 more than memory_cap="):
            run_passes(program, f"overlap-communication{{{options}}}")


def test_blocking_waits_right_behind_each_start(clusters: Sequence[Path]) -> None:
    program = overlapped(run_passes(blocks(), "start-collectives"), "cross-pass", clusters[0])
    ops = list(overlapped(program, "blocking", clusters[0]).ops)
    for op, behind in pairwise(ops):
        if isinstance(op, StartedOp):
            assert isinstance(behind, WaitOp)
            assert behind.operands[0].owner is op


def test_other_schedules_can_be_made_of_any_of_them(clusters: Sequence[Path]) -> None:
    program = started(3)
    values = {name: overlapped(program, name, clusters[0]) for name in SCHEDULES}
    for before in values.values():
        for schedule in SCHEDULES:
            after = overlapped(before, schedule, clusters[0])
            assert sorted(order(after)) == sorted(order(program))
            assert_same_values(program, after)


def test_what_is_kept_does_not_depend_on_the_schedule(clusters: Sequence[Path]) -> None:
    for seed in range(8):
        program = started(seed)
        kept = {overlapped(program, s, clusters[0]).stats().kept_bytes for s in SCHEDULES[:-1]}
        assert kept == {program.stats().kept_bytes}


def test_program_without_messages_stays_as_it_is() -> None:
    program = run_passes(blocks(1, 1), "dce")
    for op in list(program.ops):
        if op.name == "dist.all_reduce":
            op.results[0].replace_all_uses_with(op.operands[0])
            op.detach()
            op.erase()
    assert run_passes(program, "overlap-communication{schedule=list}") == program


WITHOUT_MEMORY = (FOLDER / "testbed.yaml").read_text().replace("    memory_bytes: 12GiB\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "schedule=some",
            "schedule 'some' is unknown; use one of blocking, sub-batch, cross-pass, in-order, list, "
            "axonn-a, axonn-ab, axonn-abc.",
        ),
        (
            'cluster="none.yaml"',
            "cluster file 'none.yaml' cannot be read: No such file or directory; ",
        ),
        (
            'cluster="field.yaml"',
            "field.yaml: devices.cpu-core: field 'memory_bytes' is missing; write the memory of one "
            "device, such as 24GiB.",
        ),
        ("cluster=testbeds", "cluster 'testbeds' is neither a preset nor a file; did you mean "),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "field.yaml").write_text(WITHOUT_MEMORY)
    monkeypatch.chdir(tmp_path)
    program = run_passes(blocks(), "start-collectives")
    with pytest.raises(PassError) as error:
        run_passes(program, f"overlap-communication{{{options}}}")
    assert str(error.value).startswith(f"pass 'overlap-communication': {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_that_are_not_started_are_refused(schedule: str) -> None:
    with pytest.raises(PassError) as error:
        run_passes(blocks(), f"overlap-communication{{schedule={schedule}}}")
    assert str(error.value) == (
        "pass 'overlap-communication': dist.all_reduce (%y0.0) in layer 'h.0' is a blocking "
        "collective; run start-collectives before overlap-communication."
    )


def test_mesh_larger_than_the_cluster_is_refused() -> None:
    program = run_passes(random_step(0), "start-collectives")
    assert program.mesh is not None
    assert program.mesh.num_devices == 4
    with pytest.raises(PassError, match=r"has 4 devices, but cluster 'testbed' has only 2"):
        run_passes(program, "overlap-communication{cluster=testbed}")
