"""block-experts: between grouped products of sharded experts nothing is reduced."""

from __future__ import annotations

import pytest

from shardweave.ir.ops.registry import flops_of
from shardweave.ir.program.program import Program
from shardweave.ir.proof.prove import prove
from shardweave.passes.notes import PassNote
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.tests.ir_text import assert_same_values, lines, step

TEXT = """
    input %x : tensor<12x4xf64>
    input %up : tensor<4x4x6xf64> [{"expert"}, {}, {}]
    input %down : tensor<4x6x4xf64> [{"expert"}, {}, {}]
    input %score : tensor<12x1xf64>
    %n = aten.arange.start_step(start = 3, step = 3) : tensor<4xi64>
    %s = aten.constant_pad_nd(%n, pad = [1, -1], value = 0) : tensor<4xi64>
    %a = dist.grouped_mm(%x, %up, %s, %n, groups = 4) : tensor<12x6xf64>
    %b = aten.cos(%a) : tensor<12x6xf64>
    %c = dist.grouped_mm(%b, %down, %s, %n, groups = 4) : tensor<12x4xf64>
    %d = aten.mul.Tensor(%c, %score) : tensor<12x4xf64>
    %e = dist.grouped_outer(%b, %d, %s, %n, groups = 4) : tensor<4x6x4xf64>
    output %d
    output 1 = %e
"""


def experts(mesh: str = "expert=2") -> Program:
    return step(TEXT, mesh)


def test_what_leaves_the_rows_is_added_up_once() -> None:
    local = run_passes(experts(), "preset:partition")
    messages = [op.name for op in local.ops if op.name in ("dist.all_reduce", "dist.all_gather")]
    assert messages == ["dist.all_reduce"]
    plain = run_passes(experts(), "propagate-shardings,insert-collectives")
    assert len([op for op in plain.ops if op.name == "dist.all_reduce"]) > 1


@pytest.mark.parametrize("mesh", ["expert=2", "expert=4", "expert=2,data=2"])
def test_values_stay(mesh: str) -> None:
    program = experts(mesh)
    blocked = run_passes(program, "block-experts")
    assert blocked != program
    assert_same_values(program, blocked)
    assert Program.parse(str(blocked)) == blocked
    local = run_passes(program, "preset:partition")
    assert_same_values(program, local)
    prove(local, against=blocked)


def test_each_device_computes_the_rows_of_its_experts() -> None:
    program = experts()
    local = run_passes(program, "preset:partition")
    assert sum(map(flops_of, local.ops)) * 2 == sum(map(flops_of, program.ops))


@pytest.mark.parametrize("sharded", ["{}", '{"data"}'])
def test_experts_that_are_not_sharded_alike_stay(sharded: str) -> None:
    text = TEXT.replace(
        '%down : tensor<4x6x4xf64> [{"expert"}', f"%down : tensor<4x6x4xf64> [{sharded}"
    )
    program = step(text, "expert=2,data=4")
    assert run_passes(program, "block-experts") == program
    assert_same_values(program, run_passes(program, "preset:partition"))


def test_rows_are_looked_up_in_shards_of_the_axes_of_tokens() -> None:
    text = TEXT.replace("input %x : tensor<12x4xf64>", 'input %t : tensor<6x4xf64> [{"data"}, {}]')
    rows = """
    %i = aten.arange.start_step(start = 0, step = 1) : tensor<12xi64>
    %j = aten.remainder.Scalar(%i, other = 6) : tensor<12xi64>
    %x = aten.index.Tensor(%t, [%j]) : tensor<12x4xf64>
    %a = dist"""
    program = step(text.replace("%a = dist", rows.strip(), 1), "data=2,expert=2")
    local = run_passes(program, "preset:partition")
    assert_same_values(program, local)
    (product,) = [line for line in lines(local) if "%a = " in line]
    assert "tensor<3x6xf64>" in product


def test_a_propagated_program_is_refused() -> None:
    program = run_passes(experts(), "propagate-shardings")
    with pytest.raises(PassError, match="run block-experts before propagate-shardings"):
        run_passes(program, "block-experts")


@pytest.mark.parametrize(("load", "counted"), [("1.5", 1.5), ("9", 2)])
def test_a_load_counts_more_rows_and_computes_the_same(load: str, counted: float) -> None:
    program = experts()
    others = "add-pending-sums,propagate-shardings,insert-collectives"
    balanced, local = (
        run_passes(program, f"block-experts{options},{others}")
        for options in ("", f"{{load={load}}}")
    )
    assert sum(map(flops_of, local.ops)) == counted * sum(map(flops_of, balanced.ops))
    assert_same_values(program, local)
    assert Program.parse(str(local)) == local


def test_a_load_below_one_is_refused_and_one_without_effect_said() -> None:
    with pytest.raises(ValueError, match=r"load=0\.5; give 1 or more"):
        run_passes(experts(), "block-experts{load=0.5}")
    with pytest.warns(PassNote, match="load=2 has no effect"):
        run_passes(step(TEXT.replace('"expert"', ""), "expert=2"), "block-experts{load=2}")
    with pytest.raises(PlanError, match="'expert_load' must be a number, 1 or more"):
        Plan.from_dict({"expert_load": 0.5})
