"""unroll-time-axes: what is cloned, what stays single, and how results come together."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.annotations import sharding_attrs_of
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.partition.unroll_time_axes import unroll_time_axes
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import assert_lines, assert_same_values, lines, shardings, step


def unrolled(text: str, mesh: str, expected: str, time: str = "batch") -> Program:
    """Unroll a local text, in which one axis of the mesh is of time; compare lines and values."""
    before = step(text, mesh, local=True)
    assert before.mesh is not None
    before.set_mesh(
        Mesh(Axis(a.name, a.size, "time" if a.name == time else "space") for a in before.mesh.axes)
    )
    after = run_passes(before, "unroll-time-axes")
    assert_lines(lines(after), expected)
    assert_same_values(before, after)
    return after


def test_op_is_cloned_for_each_sub_batch_and_what_does_not_vary_stays_single() -> None:
    after = unrolled(
        """
        param %w : tensor<4x6xf64>
        input %x : tensor<2x4xf64> [{"data", "batch"}, {}]
        %t = aten.tanh(%w) {layer = "h"} : tensor<4x6xf64>
        %y = aten.mm(%x, %t) {layer = "h", phase = forward} : tensor<2x6xf64>
        output %y [{"data", "batch"}, {}]
        """,
        "data=2,batch=2",
        """
        %sub_batch = aten.slice.Tensor(%x, start = 0) {copy = [0 : i64], sharding = [#dist.sharding<[{"data"}, {}]>]} : tensor<2x4xf64>
        %sub_batch_1 = aten.slice.Tensor(%x, start = 2) {copy = [1 : i64], sharding = [#dist.sharding<[{"data"}, {}]>]} : tensor<2x4xf64>
        %t = aten.tanh(%w) : tensor<4x6xf64>
        %y = aten.mm(%sub_batch, %t) : tensor<2x6xf64>
        %y_1 = aten.mm(%sub_batch_1, %t) : tensor<2x6xf64>
        %view = aten.view(%y) : tensor<1x2x6xf64>
        %view_1 = aten.view(%y_1) : tensor<1x2x6xf64>
        %whole = aten.cat([%view, %view_1], dim = 1) : tensor<1x4x6xf64>
        %view_2 = aten.view(%whole) : tensor<4x6xf64>
        """,
    )
    copies = [str(op.properties.get("copy", "")) for op in after.ops if op.name == "aten.mm"]
    assert copies == ["[0 : i64]", "[1 : i64]"]
    assert shardings(after.arguments)["x"] == '[{"data"}, {}]'
    assert shardings(after.results) == {"0": '[{"data"}, {}]'}
    joined = sharding_attrs_of(list(after.ops)[-1])
    assert joined is not None
    assert str(joined[0]) == '#dist.sharding<[{"data"}, {}]>'


def test_sum_over_sub_batches_is_added_up_before_it_is_sent() -> None:
    unrolled(
        """
        input %x : tensor<2x4xf64> [{"data", "batch"}, {}]
        %s = aten.sum.dim_IntList(%x, dim = [0]) {layer = "h", sharding = [#dist.sharding<[{}], unreduced = ["data", "batch"]>]} : tensor<4xf64>
        %r = dist.all_reduce(%s, axes = ["data", "batch"]) {layer = "h", sharding = [#dist.sharding<[{}]>]} : tensor<4xf64>
        output %r
        """,
        "data=2,batch=3",
        """
        ...
        %s = aten.sum.dim_IntList(%sub_batch, dim = [0]) : tensor<4xf64>
        %s_1 = aten.sum.dim_IntList(%sub_batch_1, dim = [0]) : tensor<4xf64>
        %s_2 = aten.sum.dim_IntList(%sub_batch_2, dim = [0]) : tensor<4xf64>
        %total = aten.add.Tensor(%s, %s_1) : tensor<4xf64>
        %total_1 = aten.add.Tensor(%total, %s_2) : tensor<4xf64>
        %r = dist.all_reduce(%total_1, axes = ["data"]) : tensor<4xf64>
        """,
    )


def test_each_sub_batch_sends_its_own_message_over_space_axes() -> None:
    after = unrolled(
        """
        param %w : tensor<4x6xf64> [{"tensor"}, {}]
        input %x : tensor<2x4xf64> [{"batch"}, {"tensor"}]
        %y = aten.mm(%x, %w) {layer = "h"} : tensor<2x6xf64>
        %r = dist.all_reduce(%y, axes = ["tensor"]) {layer = "h"} : tensor<2x6xf64>
        output %r [{"batch"}, {}]
        """,
        "tensor=2,batch=2",
        """
        ...
        %y = aten.mm(%sub_batch, %w) : tensor<2x6xf64>
        %y_1 = aten.mm(%sub_batch_1, %w) : tensor<2x6xf64>
        %r = dist.all_reduce(%y, axes = ["tensor"]) : tensor<2x6xf64>
        %r_1 = dist.all_reduce(%y_1, axes = ["tensor"]) : tensor<2x6xf64>
        ...
        """,
    )
    copies = [str(op.properties["copy"]) for op in after.ops if op.name == "dist.all_reduce"]
    assert copies == ["[0 : i64]", "[1 : i64]"]


def test_value_that_is_one_again_is_used_once() -> None:
    unrolled(
        """
        input %x : tensor<2x4xf64> [{"batch"}, {}]
        %r = dist.all_gather(%x, axes = ["batch"], dim = 0, block = 2) : tensor<4x4xf64>
        %y = aten.relu(%r) : tensor<4x4xf64>
        output %y
        """,
        "data=2,batch=2",
        """
        ...
        %view_2 = aten.view(%whole) : tensor<4x4xf64>
        %y = aten.relu(%view_2) : tensor<4x4xf64>
        """,
    )


def test_strided_shards_of_an_argument_are_cut_in_blocks() -> None:
    unrolled(
        """
        input %x : tensor<4xf64> [{"batch":2}]
        %y = aten.relu(%x) : tensor<4xf64>
        output %y [{"batch":2}]
        """,
        "batch=2",
        """
        %view = aten.view(%x) {copy = [0 : i64]} : tensor<2x2x2xf64>
        %sub_batch = aten.select.int(%view, dim = 1, index = 0) {copy = [0 : i64]} : tensor<2x2xf64>
        ...
        """,
    )


def test_copies_keep_shardings_over_space_axes() -> None:
    after = unrolled(
        """
        input %x : tensor<2x4xf64> [{"data", "batch"}, {}]
        %y = aten.relu(%x) {layer = "h", sharding = [#dist.sharding<[{"data", "batch"}, {}]>]} : tensor<2x4xf64>
        output %y [{"data", "batch"}, {}]
        """,
        "data=2,batch=2",
        "...",
    )
    written = [line for line in lines(after, shardings=True) if "relu" in line]
    assert [line.partition(" <")[2] for line in written] == [
        '[{"data"}, {}]> : tensor<2x4xf64>'
    ] * 2


def test_time_axis_of_size_one_disappears() -> None:
    unrolled(
        """
        input %x : tensor<4xf64> [{"data"}]
        %y = aten.relu(%x) : tensor<4xf64>
        %z = dist.all_reduce(%y, axes = ["batch"]) : tensor<4xf64>
        output %z [{"data"}]
        """,
        "data=2,batch=1",
        "%y = aten.relu(%x) : tensor<4xf64>",
    )


def test_program_without_time_axes_stays_as_it_is() -> None:
    text = """
        input %x : tensor<4xf64> [{"data"}]
        %y = aten.relu(%x) : tensor<4xf64>
        output %y [{"data"}]
    """
    before = step(text, "data=2", local=True)
    assert run_passes(before, "unroll-time-axes") == before


@pytest.mark.parametrize("mesh", ["", "data=2"])
@pytest.mark.parametrize("keep", ["", "batch"])
def test_program_without_other_time_axes_keeps_its_body(mesh: str, keep: str) -> None:
    text = """
        input %x : tensor<4xf64>
        %y = aten.relu(%x) : tensor<4xf64>
        output %y
    """
    program = step(text, mesh)
    if mesh and keep:
        program.set_mesh(Mesh([Axis("data", 2), Axis("batch", 2, "time")]))
    block = program.function.body.block
    unroll_time_axes(program, keep)
    assert program.function.body.block is block


def test_unrolling_twice_changes_nothing() -> None:
    text = """
        input %x : tensor<8xf64> [{"data"}]
        %y = aten.relu(%x) : tensor<8xf64>
        output %y
    """
    once = "split-batch,propagate-shardings,insert-collectives,unroll-time-axes"
    before = run_passes(step(text, "data=2"), once)
    assert run_passes(before, "unroll-time-axes") == before


def test_global_program_is_refused() -> None:
    text = """
        input %x : tensor<8xf64>
        %y = aten.relu(%x) : tensor<8xf64>
        output %y
    """
    with pytest.raises(PassError) as error:
        run_passes(step(text), "split-batch,unroll-time-axes")
    assert str(error.value) == (
        "pass 'unroll-time-axes': the program is global; run insert-collectives first."
    )
