"""Fused regions as ops: their text, what verify says of them, and going back."""

from __future__ import annotations

import pytest
import torch

from shardweave.backends.reference.reference import run_reference
from shardweave.ir.dialects.kernel import fuse
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import ProgramTextError
from shardweave.ir.verify.program import verify
from shardweave.passes.kernels.unfuse_kernels import unfuse, without_regions
from shardweave.tests.ir_text import step

TEXT = """
    input %x : tensor<4x8xf64>
    input %y : tensor<4x8xf64>
    %a = aten.add.Tensor(%x, %y) {layer = "h.0", phase = forward} : tensor<4x8xf64>
    %n = aten.neg(%y) {layer = "h.0", phase = forward} : tensor<4x8xf64>
    %e = aten.exp(%a) {layer = "h.0", phase = forward} : tensor<4x8xf64>
    %m = aten.mul.Tensor(%e, %n) {layer = "h.0", phase = forward} : tensor<4x8xf64>
    output %m
"""


def fused_program() -> tuple[Program, Program]:
    """A program, and the same with its add and exp in a region after the neg."""
    program = step(TEXT)
    fused = program.clone()
    ops = list(fused.ops)
    fuse([ops[0], ops[2]], ops[3], [0, 2])
    return program, fused


def test_region_prints_and_parses_back() -> None:
    _, fused = fused_program()
    text = str(fused)
    assert "%e = kernel.fused(%x, %y, at = [0, 2]) : tensor<4x8xf64> {" in text
    assert "kernel.yield(" in text
    again = Program.parse(text)
    assert again == fused
    assert str(again) == text
    assert verify(again) == []


def test_unfusing_puts_every_op_where_it_stood() -> None:
    program, fused = fused_program()
    assert [op.name for op in fused.ops] == ["aten.neg", "kernel.fused", "aten.mul.Tensor"]
    assert unfuse(fused) == 1
    assert fused == program
    assert str(fused) == str(program)


def test_unfusing_keeps_regions_together_where_places_are_stale() -> None:
    program, fused = fused_program()
    stale = Program.parse(str(fused).replace("at = [0, 2]", "at = [0, 9]"))
    unfuse(stale)
    assert verify(stale) == []
    assert [op.name for op in stale.ops] == [
        "aten.neg", "aten.add.Tensor", "aten.exp", "aten.mul.Tensor",
    ]  # fmt: skip
    values = {("input", name): torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    wanted, found = run_reference(program, values), run_reference(stale, values)
    torch.testing.assert_close(found, wanted)


def test_reference_backend_runs_regions() -> None:
    program, fused = fused_program()
    values = {("input", name): torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    torch.testing.assert_close(run_reference(fused, values), run_reference(program, values))


def test_program_without_regions_is_not_copied() -> None:
    program, fused = fused_program()
    assert without_regions(program) is program
    assert without_regions(fused) == program


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "kernel.yield(%e_1)",
            "",
            "kernel.fused: the region of a fused op must end in kernel.yield",
        ),
        (
            "kernel.yield(%e_1)",
            "kernel.yield(%e_1, %e_1)",
            "kernel.fused: the op gives tensor<4x8xf64>, but",
        ),
        ("at = [0, 2]", "at = [0]", "'at' must list 2 indices"),
        (
            "at = [0, 2]",
            'at = [0, 2], of = "x"',
            "kernel.fused: missing [], unknown ['of']; it takes at",
        ),
        ("aten.exp(%a)", "aten.expm1(%q)", "used before it is defined"),
    ],
)
def test_broken_regions_are_refused(old: str, new: str, message: str) -> None:
    _, fused = fused_program()
    text = str(fused)
    assert old in text
    try:
        problems = verify(Program.parse(text.replace(old, new)))
    except ProgramTextError as error:
        problems = [str(error)]
    assert message in " ".join(problems)


def test_wrong_type_inside_a_region_is_found() -> None:
    _, fused = fused_program()
    text = str(fused)
    line = next(line for line in text.splitlines() if "aten.add.Tensor" in line)
    broken = text.replace(line, line.replace("tensor<4x8xf64>", "tensor<4x9xf64>"))
    assert (
        "result type is tensor<4x9xf64>, expected tensor<4x8xf64>"
        in verify(Program.parse(broken))[0]
    )
