"""Measuring this machine: what is measured, what becomes of it, and a whole run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardweave.driver.cli import main
from shardweave.driver.models.models import build_example
from shardweave.driver.processes.launch import WorkerError
from shardweave.driver.profile import profile, profile_gpu, profile_ops
from shardweave.driver.profile.profile import cluster_of, profile_machine, profiled_programs
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.staged import ops_of_parts
from shardweave.passes.notes import heard_by
from shardweave.planners.cost.cluster_file import cluster_text, load_cluster, parse_cluster
from shardweave.planners.cost.model import kind_of, signature_text
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests.ir_text import step
from shardweave.tests.planners.small_clusters import local

TEXT = """
    param %w : @
    input %x : @
    %a = aten.mm(%x, %w) : @
    %b = dist.all_reduce(%a, axes = ["tensor"]) : @
    %c = aten.relu(%b) : @
    %t = aten.permute(%c, dims = [1, 0]) : @
    %f = dist.start_all_reduce(%t, axes = ["tensor"]) : @
    %g = dist.wait(%f) : @
    %s = dist.slice(%g, axes = ["tensor"], dim = 0, block = 50) : tensor<50x100xf32>
    output %s
"""

MEASURED: dict[str, Any] = {
    "ops": {
        "default": [[100.0, 1e-6], [1e6, 1e-4]],
        "aten.mm": [[1e6, 2e-3], [1e3, 3e-3], [1e9, 1.0]],
    },
    "peaks": {"float32": 1e9, "float64": 5e8},
    "measured": {"aten.relu(float32[8]) -> float32[8]": 1e-5},
    "collectives": [
        {"kind": "all_reduce", "ranks": 2, "points": [[1e3, 1e-3], [1.001e6, 1.001]]},
    ],
    "start": [1e-4, 1e9],
    "message": [5e-5, 2e9],
    "overlap": [1.2, 1.1],
}


def test_measurements_become_a_cluster_that_survives_being_written() -> None:
    found = cluster_of(MEASURED, "mine", 2, 1)
    assert (found.num_nodes, found.num_devices) == (2, 2)
    assert found.nodes[0].nic_bandwidth_bytes_s == pytest.approx(1e6)
    assert (found.overlap_slowdown, found.link_slowdown) == (1.2, 1.1)
    assert (found.start_overhead_s, found.start_bandwidth_bytes_s) == (1e-4, 1e9)
    assert found.message_work_s(1e6) == pytest.approx(5e-5 + 5e-4)
    without = replace(found, message_overhead_s=0.0, message_bandwidth_bytes_s=0.0)
    assert without.message_work_s(1e6) == 1e-4
    assert found.collectives[0].nodes == 2
    assert parse_cluster(cluster_text(found)) == found


def test_processes_of_one_node_are_joined_within_it() -> None:
    found = cluster_of(MEASURED, "mine", 2, 2)
    assert (found.num_nodes, found.nodes[0].devices, found.collectives[0].nodes) == (1, 2, 1)
    assert found.nodes[0].bandwidth_bytes_s == pytest.approx(1e6)


def test_time_that_something_larger_undercuts_is_taken_for_a_disturbance() -> None:
    curve = cluster_of(MEASURED, "mine", 2, 1).devices["cpu"].op_times["aten.mm"]
    assert curve == ((1e3, 2e-3), (1e6, 2e-3), (1e9, 1.0))


def test_simulation_of_a_measured_program_uses_the_exact_times() -> None:
    program = local(TEXT)
    names = [signature_text(op) for op in program.ops if kind_of(op) == "compute"]
    measured = MEASURED | {"measured": dict.fromkeys(names, 0.125)}
    found = simulate(program, cluster_of(measured, "mine", 2, 1))
    assert found.compute_s == pytest.approx(3 * 0.125 + 2 * (1e-4 + 40_000 / 1e9))


def test_ops_of_a_program_are_measured_where_they_run() -> None:
    program = local(TEXT)
    found = profile_ops.measure_program(program, 0.0)
    assert found.keys() == {signature_text(op) for op in program.ops if kind_of(op) == "compute"}
    assert all(seconds > 0 for times in found.values() for seconds in times)


def test_of_a_global_program_what_ranks_run_under_plans_is_measured() -> None:
    example = build_example("gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=4")
    program = capture(example.module, kwargs=example.kwargs)
    measured = {signature_text(op) for one in profiled_programs(program, 2) for op in one.ops}
    for plan in (
        Plan(mesh={"data": 2}, pipeline=Pipeline((("*",),), 2)),
        replace(plan_megatron(program, Mesh(data=1, tensor=2)), recompute="layer"),
        plan_megatron(program, Mesh(data=2, tensor=2), sequence_parallel=True),
        replace(plan_megatron(program, Mesh(data=2, context=2)), schedule="cross-pass"),
    ):
        run = [op for op in ops_of_parts(local_program(program, plan)) if kind_of(op) == "compute"]
        # Beside those, micro-batches add up their losses, which are numbers.
        ops = {signature_text(op) for op in run if any(map(shape_of, op.results))}
        assert ops <= measured, plan.mesh


def test_of_a_program_without_a_batch_the_program_itself_is_measured() -> None:
    text = "    param %w : tensor<4x4xf32>\n    %a = aten.relu(%w) : tensor<4x4xf32>\n    output %a"
    program = step(text)
    assert profiled_programs(program, 2) == [program]


def test_ops_by_size_are_measured_in_the_work_of_the_cost_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def once(call: Callable[[], object]) -> float:
        call()
        return 1.0

    monkeypatch.setattr(profile_ops, "median_s", once)
    monkeypatch.setattr(profile_ops, "ELEMENTS", (2**12,))
    monkeypatch.setattr(profile_ops, "PRODUCTS", ((32, 32, 32),))
    monkeypatch.setattr(profile_ops, "SEQUENCES", (16,))
    found = profile_ops.measure_ops()
    assert found["aten.mm"] == [(2 * 32**3, 1.0)]
    assert found["aten.add.Tensor"] == found["default"] == [(3 * 4 * 2**12, 1.0)]


def test_a_gpu_is_measured_as_a_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which says that every call takes a millisecond, a hundredth of it of overhead."""

    def measured(call: Callable[[], object]) -> float:
        call()
        return 1e-5 if call.func is torch.neg and call.args[0].dim() == 0 else 1e-3  # pyright: ignore[reportFunctionMemberAccess]

    for name, value in {
        "device_s": measured,
        "SIZES": (16, 32, 64),
        "LARGE": 64,
        "SEQUENCES": (8, 16),
        "COPIED_BYTES": 2**14,
        "_host_bandwidth": lambda: 5e10,
    }.items():
        monkeypatch.setattr(profile_gpu, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**36)
    )
    record = {"gpu": profile_gpu.measure_gpu(), "measured": {}, "collectives": []}
    cluster = parse_cluster(cluster_text(cluster_of(record, "mine", 1, 1)))
    (device,) = cluster.devices.values()
    assert (device.name, device.memory_bytes) == ("A GPU", 2**36)
    assert device.flops["bfloat16"] == pytest.approx(2 * 64**3 / 0.99e-3)
    assert device.memory_bandwidth_bytes_s == pytest.approx(2 * 2**14 / 0.99e-3)
    program = step(
        "    param %w : tensor<32x32xbf16>\n    input %x : tensor<32x32xbf16>\n"
        "    %a = aten.mm(%x, %w) : tensor<32x32xbf16>\n    output %a"
    )
    assert simulate(program, cluster).compute_s == pytest.approx(1e-3)


@pytest.mark.gpu
def test_profile_of_a_gpu_predicts_a_step_there(tmp_path: Path) -> None:
    example = build_example("gpt:layers=2,hidden=1024,heads=16,vocab=1024", dtype=torch.bfloat16)
    program = capture(example.module, kwargs=example.kwargs)
    cluster = profile_machine(1, [program])
    (device,) = cluster.devices.values()
    assert device.name == torch.cuda.get_device_name()
    assert len(device.measured) > 20
    assert 0 < simulate(program, cluster).time_s < 0.1


def test_launcher_gets_the_number_of_each_rank_from_its_shell() -> None:
    shell, option, text = profile._prefixed(["python", "a b"], "ip netns exec sw{rank}")
    assert (shell, option) == ("sh", "-c")
    assert text.startswith("exec ip netns exec sw$RANK env MALLOC_")
    assert text.endswith("python 'a b'")


def test_processes_that_do_not_fill_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 processes do not divide into nodes of 2"):
        profile_machine(3, per_node=2)


@pytest.mark.parametrize(
    ("processes", "launcher", "said"),
    [
        (2, None, []),
        (4, None, ["4 processes share 2 cores: they are measured while all of them compute"]),
        (4, "ssh {rank}", ["if they all run on this machine, 4 processes share 2 cores"]),
    ],
)
def test_processes_that_share_cores_are_noted(
    processes: int, launcher: str | None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise WorkerError("stopped")

    monkeypatch.setattr(profile, "num_cores", lambda: 2)
    monkeypatch.setattr(profile, "launch", stop)
    notes: list[str] = []
    with heard_by(notes.append), pytest.raises(WorkerError, match="stopped"):
        profile_machine(processes, launcher=launcher)
    assert [note[: len(one)] for note, one in zip(notes, said, strict=True)] == said


@pytest.mark.slow
def test_profile_of_this_machine_can_be_simulated_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    local(TEXT).save(tmp_path / "step.mlir")
    path = tmp_path / "cluster.yaml"
    launcher = "env RANK_IS={rank}"
    arguments = ["profile", str(tmp_path / "step.mlir"), "-o", str(path), "--launcher", launcher]
    assert main([*arguments, "--time-limit", "300"]) == 0
    said = capfd.readouterr().out
    assert "measured collectives of 2 ranks" in said
    found = load_cluster(path)
    assert (found.num_nodes, found.num_devices) == (2, 2)
    assert {table.kind for table in found.collectives} >= {"all_reduce", "all_gather"}
    assert 0 < found.message_work_s(2**10) < found.message_work_s(2**20)
    assert simulate(local(TEXT), found).time_s > 0
