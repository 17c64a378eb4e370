"""Collectives over time and space axes at once: their steps, against ranks run one by one."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from shardweave.ir.dialects import dist
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.partition.time_collectives import CollectiveStep, steps_of
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import assert_same_values, collectives, step

MESH = "data=2,tensor=2,batch=2,micro=2"
TIMES = ("batch", "micro")


def timed(text: str) -> Program:
    """A local program on `MESH`, whose axes `batch` and `micro` are of time."""
    program = step(text, MESH, local=True)
    assert program.mesh is not None
    program.set_mesh(
        Mesh(
            Axis(a.name, a.size, "time" if a.name in TIMES else "space") for a in program.mesh.axes
        )
    )
    return program


def assert_unrolls(text: str) -> Program:
    """The reference backend runs sub-batches that are not written out as ranks of their own."""
    before = timed(text)
    after = run_passes(before, "unroll-time-axes")
    assert after.mesh is not None
    assert after.mesh.names == ("data", "tensor")
    assert_same_values(before, after)
    return after


AXES = [
    *permutations(("data", "batch")),
    *permutations(("data", "batch", "tensor")),
    *permutations(("batch", "micro")),
    ("data", "micro", "tensor", "batch"),
    ("micro", "data", "tensor", "batch"),
]

mixed_axes = pytest.mark.parametrize("axes", AXES, ids="-".join)
# Blocks are whole local dims, or shorter: then the shards are strided.
any_block = pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])


def listed(axes: tuple[str, ...]) -> str:
    return ", ".join(f'"{axis}"' for axis in axes)


def cut(axes: tuple[str, ...], block: int) -> str:
    """A dim cut over axes in blocks, as `dist.sharding` writes it; each axis has size 2."""
    count = len(axes)
    return ", ".join(f'"{axis}":{block * 2 ** (count - 1 - i)}' for i, axis in enumerate(axes))


@mixed_axes
def test_all_reduce(axes: tuple[str, ...]) -> None:
    after = assert_unrolls(f"""
        input %x : tensor<2x3xf64> [{{{listed(axes)}}}, {{}}]
        %s = aten.sum.dim_IntList(%x, dim = [0]) : tensor<3xf64>
        %m = aten.amax(%x, dim = [0]) : tensor<3xf64>
        %a = dist.all_reduce(%s, axes = [{listed(axes)}]) : tensor<3xf64>
        %b = dist.all_reduce(%m, axes = [{listed(axes)}], op = "max") : tensor<3xf64>
        output %a
        output %b
    """)
    is_only_time = set(axes) <= set(TIMES)
    assert len(collectives(after)) == (0 if is_only_time else 2)


@mixed_axes
@any_block
def test_all_gather(axes: tuple[str, ...], strided: bool) -> None:
    length, block = (4, 2) if strided else (2, 2)
    assert_unrolls(f"""
        input %x : tensor<{length}x3xf64> [{{{cut(axes, block)}}}, {{}}]
        %y = dist.all_gather(%x, axes = [{listed(axes)}], dim = 0, block = {block}) : tensor<{length * 2 ** len(axes)}x3xf64>
        output %y
    """)


@mixed_axes
@any_block
def test_reduce_scatter(axes: tuple[str, ...], strided: bool) -> None:
    length, block = (4, 2) if strided else (2, 2)
    whole = length * 2 ** len(axes)
    assert_unrolls(f"""
        input %x : tensor<2x{whole}xf64> [{{{listed(axes)}}}, {{}}]
        %s = aten.sum.dim_IntList(%x, dim = [0]) : tensor<{whole}xf64>
        %y = dist.reduce_scatter(%s, axes = [{listed(axes)}], dim = 0, block = {block}) : tensor<{length}xf64>
        output %y [{{{cut(axes, block)}}}]
    """)


@mixed_axes
@any_block
def test_slice(axes: tuple[str, ...], strided: bool) -> None:
    length, block = (4, 2) if strided else (2, 2)
    assert_unrolls(f"""
        input %x : tensor<3x{length * 2 ** len(axes)}xf64>
        %y = dist.slice(%x, axes = [{listed(axes)}], dim = 1, block = {block}) : tensor<3x{length}xf64>
        output %y [{{}}, {{{cut(axes, block)}}}]
    """)


@mixed_axes
@any_block
def test_all_to_all(axes: tuple[str, ...], strided: bool) -> None:
    length, block = (4, 2) if strided else (2, 2)
    whole = length * 2 ** len(axes)
    assert_unrolls(f"""
        input %x : tensor<{length}x{whole}xf64> [{{{cut(axes, block)}}}, {{}}]
        %y = dist.all_to_all(%x, axes = [{listed(axes)}], dim = 1, block = {block}, from_dim = 0, from_block = {block}) : tensor<{whole}x{length}xf64>
        output %y [{{}}, {{{cut(axes, block)}}}]
    """)


@mixed_axes
def test_shard_index(axes: tuple[str, ...]) -> None:
    assert_unrolls(f"""
        input %x : tensor<2xf64> [{{{listed(axes)}}}]
        %i = dist.shard_index(axes = [{listed(axes)}]) : tensor<i64>
        %y = aten.add.Tensor(%x, %i) : tensor<2xf64>
        output %y [{{{listed(axes)}}}]
    """)


def gather(axes: tuple[str, ...]) -> tuple[list[CollectiveStep], list[CollectiveStep]]:
    program = timed(f"""
        input %x : tensor<2xf64> [{{{listed(axes)}}}]
        %y = dist.all_gather(%x, axes = [{listed(axes)}], dim = 0, block = 2) : tensor<{2 * 2 ** len(axes)}xf64>
        output %y
    """)
    (op,) = program.ops
    assert isinstance(op, dist.DistOp)
    assert program.mesh is not None
    return steps_of(op, program.mesh)


def test_space_axes_around_a_time_axis_are_gathered_one_by_one_minor_first() -> None:
    over_time, over_space = gather(("data", "batch", "tensor"))
    assert over_time == [CollectiveStep(("batch",), cut=2, gathered=1)]
    assert over_space == [
        CollectiveStep(("tensor",), cut=1, gathered=1),
        CollectiveStep(("data",), cut=1, gathered=4),
    ]


def test_space_axes_side_by_side_are_gathered_in_one_message() -> None:
    over_time, over_space = gather(("data", "tensor", "batch"))
    assert [step.axes for step in (*over_time, *over_space)] == [("batch",), ("data", "tensor")]
    assert over_space[0].gathered == 2


def test_sum_over_space_needs_one_message_wherever_the_time_axes_stand() -> None:
    for axes, block in product(permutations(("data", "batch", "tensor")), (1, 2)):
        after = assert_unrolls(f"""
            input %x : tensor<2x16xf64> [{{{listed(axes)}}}, {{}}]
            %s = aten.sum.dim_IntList(%x, dim = [0]) : tensor<16xf64>
            %y = dist.reduce_scatter(%s, axes = [{listed(axes)}], dim = 0, block = {block}) : tensor<2xf64>
            output %y [{{{cut(axes, block)}}}]
        """)
        sent = [op for op in after.ops if isinstance(op, dist.ReduceScatterOp)]
        assert len(sent) == 2  # one for each sub-batch's shard
