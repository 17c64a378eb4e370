"""decompose-collectives: exact and proved, what becomes a ring, and what it gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardweave.backends.reference.reference import run_reference
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects import dist
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import as_mesh, run_passes
from shardweave.planners.call import call_planner
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.ir_text import random_values, step
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron, random_plan


def decomposed(model: str, mesh: str, **options: Any) -> Program:
    spec = SPECS.get(model, model)
    plan = megatron(spec, mesh, sequence_parallel=True)
    plan = replace(plan, **{"decompose": ("*",), **options})
    plan = with_pipeline(plan, captured(spec).program, as_mesh(mesh))
    return run_passes(captured(spec).program, plan_passes(plan), mesh=mesh)


def kinds(program: Program) -> list[str]:
    return [op.kind() for op in ops_of_parts(program) if isinstance(op, dist.DistOp)]


MESHES: list[tuple[str, dict[str, Any]]] = [
    ("tensor=2", {}),
    ("tensor=4", {"recompute": "layer"}),
    ("tensor=8", {"schedule": "list", "cluster": "testbed:nodes=8"}),
    ("data=2,tensor=2", {"zero": 3, "recompute": "after-products"}),
    ("tensor=2,data=2", {"batch_split": 2, "schedule": "cross-pass", "recompute": "layer"}),
    ("tensor=2", {"batch_split": 2, "loss_chunks": 2, "offload": "all"}),
    ("stage=2,tensor=2", {"recompute": "layer"}),
    ("tensor=2", {"pipeline": Pipeline((("*",),), 2)}),
]


@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_decomposed_steps_are_eager_s(mesh: str, options: dict[str, Any]) -> None:
    program = decomposed("gpt", mesh, **options)
    assert "shift" in kinds(program)
    assert not verify(program)
    assert Program.parse(str(program)) == program
    assert_equals_eager(program, captured(SPECS["gpt"]))
    prove(program, against=captured(SPECS["gpt"]).program)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert", "t5")]


@pytest.mark.parametrize("model", ["llama", *SLOW])
def test_models_are_eager_s(model: str) -> None:
    program = decomposed(model, "data=2,tensor=4")
    assert "shift" in kinds(program)
    assert_equals_eager(program, captured(SPECS[model]))
    prove(program, against=captured(SPECS[model]).program)


def test_auto_decomposes_where_the_simulated_step_is_faster() -> None:
    example = build_example("gpt:layers=1,hidden=256,heads=4,vocab=64,seq=512,batch=1,tie=false")
    program = capture(example.module, kwargs=example.kwargs)
    options = {"fix": "sequence_parallel=true", "propose": False, "simulate": 4}
    cluster = find_cluster("testbed")
    plan = call_planner("auto", program, Mesh(tensor=2), cluster=cluster, options=options)
    assert plan.decompose == ("*",)
    assert any(reason.startswith("decompose=true is worth") for reason in plan.reasons)
    options["forbid"] = "decompose=true"
    other = call_planner("auto", program, Mesh(tensor=2), cluster=cluster, options=options)
    assert plan.predicted is not None
    assert other.predicted is not None
    assert plan.predicted.time_s < other.predicted.time_s


def test_turns_that_are_mixed_up_are_refused() -> None:
    program = decomposed("gpt", "tensor=4")
    against = captured(SPECS["gpt"]).program
    for old, new in (("turn = 2", "turn = 3"), ("turn = 1", "turn = 0")):
        changed = Program.parse(str(program).replace(old, new, 1))
        assert not verify(changed)
        with pytest.raises(ProofError):
            prove(changed, against=against)


def test_only_chosen_layers_are_decomposed() -> None:
    all_layers = kinds(decomposed("gpt", "tensor=2")).count("shift")
    some = kinds(decomposed("gpt", "tensor=2", decompose=("h.0.mlp.*",))).count("shift")
    assert 0 < some < all_layers


WHOLE = """
    input %a : tensor<8x8xf64> [{"tensor"}, {}]
    input %b : tensor<8x8xf64> [{}, {"tensor"}]
    %e = aten.exp(%b) {layer = "one", phase = forward} : tensor<8x8xf64>
    %m = aten.mm(%a, %e) {layer = "one", phase = forward} : tensor<8x8xf64>
    %s = aten.sin(%e) {layer = "two", phase = forward} : tensor<8x8xf64>
    %v = aten.view(%e) {layer = "two", phase = forward} : tensor<1x8x8xf64>
    %c = aten.cos(%v) {layer = "two", phase = forward} : tensor<1x8x8xf64>
    output m = %m [{"tensor"}, {}]
    output s = %s
    output c = %c
"""
GATHER = """
    %g = dist.all_gather(%e, axes = ["tensor"], dim = 1, block = 2) {layer = "one", phase = forward} : tensor<8x8xf64>
"""


def local(axes: str = "tensor") -> tuple[Program, Program]:
    """A program that gathers a product's second operand, and the program of a rank."""
    mesh, names = ("tensor=4", '"tensor"') if axes == "tensor" else ("a=2,b=2", '"a", "b"')
    head, product, rest = WHOLE.partition("    %m = ")
    head = head.replace("%a : tensor<8x8", "%a : tensor<2x8").replace(
        "%b : tensor<8x8", "%b : tensor<8x2"
    )
    head = head.replace("phase = forward} : tensor<8x8", "phase = forward} : tensor<8x2")
    rest = rest.replace("%e", "%g").replace("tensor<8x8", "tensor<2x8", 1)
    texts = [WHOLE, head + GATHER + product + rest]
    whole, part = (text.replace('"tensor"', names) for text in texts)
    return step(whole, mesh), step(part, mesh, local=True)


def test_gathers_of_second_operands_that_other_ops_read_are_exact_and_proved() -> None:
    whole, before = local()
    prove(before, against=whole)
    after = run_passes(before, "decompose-collectives")
    assert kinds(after).count("shift") == 3
    values = random_values(whole)
    found, wanted = run_reference(after, values), run_reference(whole, values)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    prove(after, against=whole)
    with pytest.raises(ProofError):
        prove(Program.parse(str(after).replace("(%a, %e)", "(%a, %shift)", 1)), against=whole)


def test_messages_over_several_axes_stay_with_a_note() -> None:
    _, before = local("a, b")
    with pytest.warns(match="over one mesh axis"):
        assert "shift" not in kinds(run_passes(before, "decompose-collectives"))


def test_layers_that_no_op_is_in_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no op is in a layer 'nope\.\*'"):
        run_passes(local()[1], 'decompose-collectives{layers="one,nope.*"}')
    with pytest.warns(match="no product of these layers"):
        run_passes(local()[1], "decompose-collectives{layers=two}")


def test_dims_that_other_axes_shard_too_are_proved_in_blocks() -> None:
    case = captured(SPECS["gpt"])
    plan, mesh = random_plan(case.program, 27)
    program = run_passes(case.program, plan_passes(replace(plan, decompose=("*",))), mesh=mesh)
    rings = [op for op in ops_of_parts(program) if "shift" in op.name]
    assert {op.axes for op in rings if isinstance(op, dist.DistOp)} == {("a",), ("b",)}
    prove(program, against=case.program)
