"""Removing dead ops, and how many went."""

from __future__ import annotations

from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.tests.ir_text import lines, step


def test_number_of_removed_ops_is_returned() -> None:
    program = step("""
        input %x : tensor<4xf64>
        %a = aten.neg(%x) : tensor<4xf64>
        %b = aten.relu(%a) : tensor<4xf64>
        %c = aten.exp(%x) : tensor<4xf64>
        output %c
    """)
    assert remove_dead_ops(program) == 2
    assert lines(program)[0] == "%c = aten.exp(%x) : tensor<4xf64>"
    assert remove_dead_ops(program) == 0


def test_long_chain_goes_in_one_walk() -> None:
    chain = "\n".join(f"%v{i + 1} = aten.neg(%v{i}) : tensor<4xf64>" for i in range(300))
    program = step(f"input %v0 : tensor<4xf64>\n{chain}\noutput %v0")
    assert remove_dead_ops(program) == 300
    assert len(lines(program)) == 1
