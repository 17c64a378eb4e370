"""offload-activations: exact, away between forward and backward, and the memory that it spares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from xdsl.ir import Operation, SSAValue

from shardweave.backends.distributed.distributed import DistributedBackend
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.reference.virtual_ranks import global_argument, run_op_by_op, virtual_mesh
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.dist import HOST_COPIES, ToDeviceOp, ToHostOp
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.ops.registry import flops_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts
from shardweave.ir.program.storage import is_view, kept_bytes
from shardweave.ir.proof.prove import prove
from shardweave.ir.verify.program import verify
from shardweave.passes.notes import PassNote
from shardweave.passes.pipeline import PassError, as_mesh, run_passes
from shardweave.planners.cost.cluster import ClusterError
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests.backends.test_reference_memory import Held
from shardweave.tests.planners.small_clusters import with_dtype
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron


def offloaded(model: str, mesh: str, **options: Any) -> Program:
    spec = SPECS.get(model, model)
    plan = replace(megatron(spec, mesh), **{"offload": "inputs", **options})
    plan = with_pipeline(plan, captured(spec).program, as_mesh(mesh))
    return run_passes(captured(spec).program, plan_passes(plan), mesh=mesh)


def copies(program: Program) -> list[Any]:
    return [op for op in ops_of_parts(program) if isinstance(op, (ToHostOp, ToDeviceOp))]


MESHES: list[tuple[str, dict[str, Any]]] = [
    ("data=2", {}),
    ("tensor=2", {"recompute": "layer"}),
    ("data=2,tensor=2", {"zero": 3, "recompute": "after-products"}),
    ("stage=2", {}),
    ("data=2", {"pipeline": Pipeline((("*",),), 2), "recompute": "layer"}),
    ("data=2,tensor=2", {"batch_split": 2, "schedule": "cross-pass", "recompute": "layer"}),
    ("tensor=2", {"batch_split": 2, "schedule": "list", "cluster": "testbed"}),
]


@pytest.mark.parametrize("values", ["inputs", "all"])
@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_offloaded_steps_are_eager_s(mesh: str, options: dict[str, Any], values: str) -> None:
    program = offloaded("gpt", mesh, offload=values, **options)
    assert copies(program)
    assert_equals_eager(program, captured(SPECS["gpt"]))
    assert Program.parse(str(program)) == program


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama", "bert", "vit")]


@pytest.mark.parametrize("model", ["t5", *OTHERS])
def test_micro_batches_of_models_are_eager_s(model: str) -> None:
    for values in ("inputs", "all"):
        pipeline = Pipeline((("*",),), 2, schedule="gpipe")
        program = offloaded(model, "data=2", offload=values, pipeline=pipeline)
        assert copies(program)
        assert_equals_eager(program, captured(SPECS[model]))


MIXTURE = "gpt:layers=2,hidden=16,heads=2,vocab=16,seq=8,batch=8,experts=4,choices=2"


def test_experts_weights_that_both_passes_read_do_not_end_the_forward_pass() -> None:
    options = {"zero": 2, "recompute": "after-communication", "recompute_in": ("h.0",)}
    program = offloaded(MIXTURE, "data=2", offload="all", **options)
    ops = list(program.ops)
    turn = next(i for i, op in enumerate(ops) if phase_of(op) == "backward")
    away = [i for i, op in enumerate(ops) if isinstance(op, HOST_COPIES[ToHostOp])]
    assert len(away) > 10
    assert max(away) < turn
    assert any(flops_of(op) for op in ops[away[0] : turn])
    assert_equals_eager(program, captured(MIXTURE))


def test_backward_pass_reads_no_view_of_an_offloaded_value() -> None:
    program = offloaded(MIXTURE, "data=2", offload="all", schedule="blocking")
    for op in copies(program):
        if isinstance(op, ToHostOp):
            assert set(map(phase_of, readers(op.value))) == {"forward"}


def readers(value: SSAValue) -> Iterator[Operation]:
    for use in value.uses:
        yield use.operation
        if is_view(use.operation):
            yield from readers(use.operation.results[0])


def test_kernels_keep_copies() -> None:
    program = offloaded("gpt", "data=2", offload="all")
    fused = run_passes(program, "fuse-kernels")
    assert len(copies(fused)) == len(copies(program))
    assert_equals_eager(fused, captured(SPECS["gpt"]))


def test_offloaded_steps_are_proved() -> None:
    prove(
        offloaded("gpt", "data=2,tensor=2", offload="all"), against=captured(SPECS["gpt"]).program
    )
    prove(offloaded("gpt", "stage=2"), against=captured(SPECS["gpt"]).program)


PASS, ORDER = "offload-activations", "overlap-communication{schedule=in-order}"
DEEP = "gpt:layers=6,hidden=16,heads=2,vocab=16,seq=16,batch=4"


def test_device_holds_what_is_predicted_with_all_inputs_of_blocks_away() -> None:
    case, peaks, size = captured(DEEP), dict[str, int](), 4 * 16 * 16 * 8
    for values in ("none", "inputs", "all"):
        program = local_program(case.program, replace(megatron(DEEP, "data=1"), offload=values))
        held = Held()
        for slot in program.arguments:
            held[slot.value] = [global_argument(program, slot, case.values)]
        list(run_op_by_op(program, held, virtual_mesh(program)))
        memory = peak_memory(program)
        assert memory.peak_bytes == pytest.approx(held.most, rel=0.05)
        assert (memory.host_bytes == 6 * size) == (values == "inputs")
        peaks[values] = memory.peak_bytes
    # That of the last block is on its way back where the device holds most.
    assert peaks["none"] - peaks["inputs"] == 5 * size
    assert peaks["all"] < 0.6 * peaks["none"]


def test_copies_take_what_the_link_to_the_host_gives() -> None:
    program = local_program(
        captured(DEEP).program, replace(megatron(DEEP, "data=1"), offload="all")
    )
    sent = sum(num_bytes(tensor_type_of(op.value)) for op in copies(program))
    testbed = with_dtype(find_cluster("testbed:nodes=1"))
    with pytest.raises(ClusterError, match="'cpu-core' has no bandwidth to its host"):
        simulate(program, testbed)
    simulations = [
        simulate(program, replace(testbed, devices={name: replace(d, host_bandwidth_bytes_s=rate)}))
        for rate in (1e12, 1e6)
        for name, d in testbed.devices.items()
    ]
    for rate, simulation in zip((1e12, 1e6), simulations, strict=True):
        assert simulation.communication_s["host",] == pytest.approx(sent / rate)
        assert simulation.bound.link_s["host"] == pytest.approx(sent / rate)
    assert simulations[0].exposed_communication_s < 1e-6 < simulations[1].exposed_communication_s
    # Bound by the link alone: what is computed runs beside it.
    assert simulations[1].ratio < 1.1
    assert "host memory" in simulations[0].summary()


TEXT = """
builtin.module {
  func.func @step(%x: tensor<4x4xf32> {dist.kind = "input", dist.name = "x"})
      -> (tensor<4x4xf32> {dist.kind = "output", dist.name = "0"}) {
    %y = aten.relu(%x) : tensor<4x4xf32>
    %started = dist.start_to_host(%y) : tensor<4x4xf32>
    %away = dist.wait(%started) : tensor<4x4xf32>
    %back = dist.to_device(%away) : tensor<4x4xf32>
    %z = aten.gelu(%back) : tensor<4x4xf32>
    func.return %z : tensor<4x4xf32>
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gelu(%back)", "gelu(%away)", "reads %away, which is on the host"),
        ("gelu(%back)", "gelu(%started)", "expected one wait"),
        ("to_device(%away)", "to_device(%y)", "%y is on the device; give it what dist.to_host"),
        ("return %z", "return %away", "output '0' is on the host; return what is copied back"),
        ("dist.to_device(%away)", "aten.relu(%away)", "reads %away, which is on the host"),
        ("%away = dist.wait(%started)", "%away = dist.to_host(%y)", "found 0 dist.wait"),
    ],
)
def test_values_are_not_read_while_they_are_away(old: str, new: str, message: str) -> None:
    assert verify(Program.parse(TEXT)) == []
    assert old in TEXT
    assert message in verify(Program.parse(TEXT.replace(old, new)))[0]


def test_stages_agree_on_what_is_on_the_host() -> None:
    before, _, text = str(offloaded("gpt", "stage=2")).partition("func.func @forward_0")
    moved = re.search(r"start_to_host\((%[\w.]+)\)", text)
    assert moved is not None
    kept = re.sub(r"(func.return.*)%to_host\b", rf"\1{moved[1]}", text, count=1)
    problems = verify(Program.parse(f"{before}func.func @forward_0{kept}"))
    assert "reads kept 'to_host', but no earlier run returns it" in problems[0]


def test_budget_takes_the_first_values_that_suffice() -> None:
    case = captured(DEEP)
    program = local_program(case.program, replace(megatron(DEEP, "data=1"), schedule="blocking"))
    whole, one = kept_bytes(program), 4 * 16 * 16 * 8
    some = run_passes(program, f"offload-activations{{bytes={whole - 2 * one}}}")
    assert kept_bytes(some) == whole - 2 * one
    names = [op.value.name_hint for op in copies(run_passes(program, PASS))]
    assert [op.value.name_hint for op in copies(some)][:2] == names[:2]
    assert len(copies(run_passes(program, f"{PASS}{{least_bytes={one}}}"))) == 2 * 6


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (f"{PASS},rematerialize", "run rematerialize before offload-activations"),
        (f"{PASS},{PASS}", "offload it once"),
        (f"{PASS}{{values=weights}}", "values 'weights' is unknown; use one of inputs, all"),
        (f"{PASS}{{bytes=1}}", "more; give at least bytes="),
        (f"{PASS},{ORDER},{ORDER}", "run overlap-communication once"),
    ],
)
def test_what_cannot_be_offloaded_is_said(passes: str, message: str) -> None:
    program = run_passes(captured(SPECS["gpt"]).program, "cse")
    with pytest.raises(PassError, match=message):
        run_passes(program, passes)


def test_stages_and_graphs_are_refused() -> None:
    staged = offloaded("gpt", "stage=2", offload="none")
    with pytest.raises(PassError, match="run this pass before cut-stages"):
        run_passes(staged, PASS)
    backend = DistributedBackend(Runtime(), cuda_graph=True)
    with pytest.raises(
        ValueError, match="which a CUDA graph does not support; leave out cuda_graph, or the"
    ):
        backend.load(Program.parse(TEXT))


def test_global_programs_are_refused_and_idle_passes_noted() -> None:
    program = run_passes(captured(SPECS["gpt"]).program, "cse", mesh="data=2")
    with pytest.raises(PassError, match="run insert-collectives before offload-activations"):
        run_passes(program, PASS)
    with pytest.warns(PassNote, match="nothing is offloaded"):
        run_passes(captured(SPECS["gpt"]).program, f"{PASS}{{least_bytes=1000000}}")
