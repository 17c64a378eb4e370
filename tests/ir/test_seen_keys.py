"""The share of keys that causal queries see, on the device that sees most."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.ops.registry import is_attention
from shardweave.ir.ops.seen_keys import is_causal, seen_share
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import step

LENGTH = 16


def local(cut: str, mesh: str, passes: str = "", causal: str = "true") -> Program:
    """Attention of queries, keys and values that are cut along the sequence, on each rank."""
    name, type_ = "aten._scaled_dot_product_flash_attention_for_cpu", f"tensor<1x2x{LENGTH}x4xf32>"
    arguments = "\n".join(f"input %{n} : {type_} [{{}}, {{}}, {cut}, {{}}]" for n in "qkv")
    op = f"{name}(%q, %k, %v, is_causal = {causal}) : {type_}, tensor<1x2x{LENGTH}xf32>"
    text = f"{arguments}\n%o, %l = {op}\noutput %o [{{}}, {{}}, {cut}, {{}}]"
    return run_passes(step(text, mesh), f"{passes}propagate-shardings,insert-collectives,cse,dce")


def shares(program: Program) -> list[float]:
    mesh = program.needed_mesh()
    ops = [op for op in program.ops if isinstance(op, AtenOp) and is_attention(op)]
    return [seen_share(op, mesh) for op in ops]


@pytest.mark.parametrize(
    ("cut", "mesh", "positions"),
    [
        ('{"context":1}', "context=4", range(3, LENGTH, 4)),
        ('{"context"}', "context=4", range(12, LENGTH)),
        ('{"context":2}', "context=4", [6, 7, 14, 15]),
        ('{"outer", "inner"}', "outer=2,inner=2", range(12, LENGTH)),
        ('{"outer":8, "inner":1}', "outer=2,inner=2", range(9, LENGTH, 2)),
        ("{}", "context=4", range(LENGTH)),
    ],
)
def test_the_last_device_sees_most(cut: str, mesh: str, positions: list[int]) -> None:
    (found,) = shares(local(cut, mesh))
    seen = [position + 1 for position in positions]
    if cut == "{}":  # a kernel of all queries, whose half it is but for the diagonal
        assert found == 0.5
    else:
        assert found == pytest.approx(sum(seen) / len(seen) / LENGTH)


def test_parts_of_keys_share_what_the_whole_has() -> None:
    cut, mesh = '{"context":1}', "context=4"
    parts = shares(local(cut, mesh, "split-attention{parts=2},"))
    assert parts[0] > 0.7 > 0.4 > parts[1]
    assert [sum(parts) / 2] == pytest.approx(shares(local(cut, mesh)))


def test_without_a_mask_all_is_seen() -> None:
    program = local('{"context":1}', "context=4", causal="false")
    assert shares(program) == [1.0]
    assert not any(
        is_causal(op) for op in program.ops if isinstance(op, AtenOp) and is_attention(op)
    )
