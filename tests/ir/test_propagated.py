"""Propagated global programs, as people edit them: what verify and insert-collectives say."""

from __future__ import annotations

import pytest

from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.tests.ir_text import assert_same_values, collectives, step
from shardweave.tests.marks import slow
from shardweave.tests.zoo import SPECS, captured, megatron

PAIR = """
    param %up : tensor<8x16xf64> [{}, {"tensor"}]
    param %down : tensor<16x8xf64> [{"tensor"}, {}]
    input %x : tensor<4x8xf64>
    %h = aten.mm(%x, %up) : tensor<4x16xf64>
    %a = aten.relu(%h) : tensor<4x16xf64>
    %y = aten.mm(%a, %down) : tensor<4x8xf64>
    %z = aten.neg(%y) : tensor<4x8xf64>
    %r = aten.relu(%z) : tensor<4x8xf64>
    output %r
"""


def propagated() -> Program:
    return run_passes(step(PAIR, "tensor=2"), "propagate-shardings")


def reshard_line(program: Program) -> str:
    (line,) = [line for line in str(program).splitlines() if "dist.reshard" in line]
    return line


def test_deleted_reshard_is_named_by_verify_and_refused_by_insertion() -> None:
    text = str(propagated())
    line = reshard_line(propagated())
    reshard, source = line.split(" = ")[0].strip(), line.split("(")[1].split(",")[0]
    edited = Program.parse(text.replace(line + "\n", "").replace(f"{reshard})", f"{source})"))
    (problem,) = verify(edited)
    assert problem.startswith("aten.relu (%r)")
    assert "is an unreduced sum that the op cannot carry; add a dist.reshard before it" in problem
    with pytest.raises(PassError, match=r"insert-collectives.*add a dist\.reshard before it"):
        run_passes(edited, "insert-collectives")


def test_reshard_that_is_moved_up_moves_the_message() -> None:
    before = propagated()
    assert "meets aten.relu" in reshard_line(before)
    line = reshard_line(before)
    moved = line.replace("%z_1 = dist.reshard(%z,", "%y_1 = dist.reshard(%y,")
    text = str(before).replace(line + "\n", "").replace("%z_1)", "%z)")
    mm = next(one for one in text.splitlines() if "%y = aten.mm" in one)
    neg = next(one for one in text.splitlines() if "%z = aten.neg" in one)
    whole = neg.replace("aten.neg(%y)", "aten.neg(%y_1)").replace(', unreduced = ["tensor"]', "")
    edited = Program.parse(text.replace(mm, f"{mm}\n{moved}").replace(neg, whole))
    assert verify(edited) == []
    local = run_passes(edited, "insert-collectives")
    assert len(collectives(local)) == 1
    assert_same_values(step(PAIR, "tensor=2"), local)


def test_sharding_that_an_op_cannot_give_is_named() -> None:
    text = str(propagated()).replace(
        '[{}, {"tensor"}]>]} : tensor<4x16xf64>', "[{}, {}]>]} : tensor<4x16xf64>"
    )
    problems = verify(Program.parse(text))
    assert problems[0].startswith("aten.mm (%h)")


def test_op_without_sharding_among_others_is_named() -> None:
    text = str(propagated()).replace(
        " {sharding = [#dist.sharding<[{}, {}]>]} : tensor<4x8xf64>", " : tensor<4x8xf64>"
    )
    assert any(
        "has no sharding, but other ops do" in problem for problem in verify(Program.parse(text))
    )


@pytest.mark.parametrize("name", ["gpt", slow("cnn")])
def test_propagated_models_verify_read_back_and_stay_as_they_are(name: str) -> None:
    plan = megatron(SPECS[name], "data=2,tensor=2")
    passes = [ApplyPlanPass.of(plan), "split-addmm,add-pending-sums,propagate-shardings"]
    program = run_passes(captured(SPECS[name]).program, passes, mesh="data=2,tensor=2")
    assert verify(program) == []
    assert Program.parse(str(program)) == program
    assert run_passes(program, "propagate-shardings") == program
