"""Places in a program's text: line, column, and the excerpt that a message shows."""

from __future__ import annotations

import pytest

from shardweave.ir.inspect.diff_table import Lines
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import ProgramTextError, excerpt, position
from shardweave.ir.verify.program import VerifyError, check
from shardweave.tests.real_step import captured, local


def test_line_and_column_count_from_one() -> None:
    assert position("ab\ncd", 0) == (1, 1)
    assert position("ab\ncd", 4) == (2, 2)


def test_caret_stands_below_its_character() -> None:
    line, caret = excerpt("first\n  second\n", 8).splitlines()
    assert line == "    2 |   second"
    assert line[caret.index("^")] == "s"


def test_tab_does_not_move_the_caret() -> None:
    line, caret = excerpt("\t\tx", 2).splitlines()
    assert line[caret.index("^")] == "x"


@pytest.mark.parametrize("at", [0, 5, 150, 200, 399])
def test_long_line_is_cut_around_its_caret(at: int) -> None:
    text = "." * at + "!" + "." * (399 - at)
    line, caret = excerpt(text, at).splitlines()
    assert len(line) < 170
    assert line[caret.index("^")] == "!"


def test_every_op_of_a_real_program_knows_its_place() -> None:
    program = Program.parse(str(local()))
    assert program.source is not None
    lines, printed = program.source.text.splitlines(), Lines(program)
    for op in program.ops:
        offset = program.source.offset_of(op)
        assert offset is not None
        row, column = position(program.source.text, offset)
        assert lines[row - 1][column - 1 :].startswith(printed.line(op)[:20])
    for slot in program.arguments:
        offset = program.source.offset_of(slot.value)
        assert offset is not None
        assert program.source.text[offset:].startswith(f"{printed.name(slot.value)}:")


def test_parse_error_carries_its_line() -> None:
    with pytest.raises(ProgramTextError) as error:
        Program.parse(str(captured()).replace("aten.gelu(", "aten.gelu(,", 1), "step.mlir")
    (note,) = error.value.__notes__
    assert "aten.gelu(," in note
    assert "\n" not in str(error.value)


def test_verify_error_of_a_parsed_program_carries_its_line_and_of_a_copy_none() -> None:
    text = str(captured()).replace("= aten.gelu(", "= aten.erf(", 1)
    text = text.replace(', approximate = "tanh")', ")", 1).replace("4x8x64xf64", "4x8x32xf64", 1)
    program = Program.parse(text, "step.mlir")
    with pytest.raises(VerifyError, match=r"^step.mlir:\d+:5: ") as error:
        check(program)
    assert error.value.__notes__[0].endswith("^")
    with pytest.raises(VerifyError) as of_copy:
        check(program.clone())
    assert str(error.value).endswith(str(of_copy.value))
    assert not hasattr(of_copy.value, "__notes__")
