"""Ops that only move elements: views, slices and their gradients, concatenations, padding."""

from __future__ import annotations

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.spec import OpSpec, family, result_shape


def _end_of(op: AtenOp, part: SSAValue) -> int:
    """The index after the last element of a slice op, whose elements are `part`."""
    length: int = shape_of(part)[int(op.value("dim"))]
    return (op.value("start") or 0) + (length - 1) * op.value("step") + 1


def _takes_neighbours(op: AtenOp) -> bool:
    return op.value("step") == 1


def padded_dim(op: AtenOp) -> tuple[int, int] | None:
    """The only dim that an op pads, and the number of elements put before; None otherwise."""
    pad: list[int] = op.value("pad")
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    wide = [number for number, pair in enumerate(pairs) if pair != (0, 0)]
    if len(wide) != 1 or min(pairs[wide[0]]) < 0:
        return None
    return len(shape_of(op.results[0])) - 1 - wide[0], pairs[wide[0]][0]


SPECS = (
    OpSpec(
        "aten.view",
        rule="view",
        view="reshape",
        zero="all",
        works_in_parts=True,
        role="view",
        # A view may not exist under the strides of a shard.
        runs_as="aten.reshape",
        is_direct=True,
        derived={"size": result_shape},
    ),
    OpSpec(
        "aten.permute",
        rule="permute",
        view="permute",
        zero="all",
        works_in_parts=True,
        role="view",
        is_direct=True,
    ),
    OpSpec(
        "aten.expand",
        rule="expand",
        view="expand",
        zero="all",
        works_in_parts=True,
        role="view",
        derived={"size": result_shape},
    ),
    OpSpec(
        "aten.slice.Tensor",
        rule="take_slice",
        view="part",
        zero="all",
        resizes=True,
        role="move",
        fits=_takes_neighbours,
        derived={"end": lambda op: _end_of(op, op.results[0])},
    ),
    OpSpec(
        "aten.slice_backward",
        rule="slice_backward",
        zero="all",
        places=True,
        role="move",
        fits=_takes_neighbours,
        derived={"input_sizes": result_shape, "end": lambda op: _end_of(op, op.operands[0])},
    ),
    OpSpec(
        "aten.select.int",
        rule="part_of_whole_dim",
        view="part",
        zero="all",
        is_direct=True,
        role="move",
    ),
    OpSpec(
        "aten.select_backward",
        rule="part_of_whole_dim",
        zero="all",
        places=True,
        role="move",
        derived={"input_sizes": result_shape},
    ),
    *family("slice_scatter select_scatter", rule="part_of_whole_dim", overwrites=True),
    *family("as_strided_scatter diagonal_scatter", overwrites=True),
    OpSpec("aten.stack", rule="part_of_whole_dim", zero="all", is_direct=True),
    OpSpec("aten.cat", rule="cat", zero="all", is_direct=True, role="move"),
    OpSpec(
        "aten.constant_pad_nd",
        rule="constant_pad_nd",
        resizes=True,
        role="move",
        fits=lambda op: padded_dim(op) is not None,
    ),
    *family("flip roll rot90 tril triu", rule="move_within_dims", zero="all"),
    OpSpec("aten.diagonal_copy", rule="diagonal", zero="all"),
    OpSpec("aten.diag_embed", rule="diagonal", zero="all"),
    OpSpec(
        "aten.diagonal_backward", rule="diagonal", zero="all", derived={"input_sizes": result_shape}
    ),
    OpSpec("aten.unfold_copy", rule="windows_of_dim", zero="all"),
    OpSpec(
        "aten.unfold_backward",
        rule="windows_of_dim",
        zero="all",
        derived={"input_sizes": result_shape},
    ),
    OpSpec("aten.repeat", rule="repeat", zero="all"),
    # A view of pairs does not exist under all strides.
    OpSpec("aten.view_as_complex", rule="complex_view", view="pairs", needs_contiguous=True),
    OpSpec("aten.view_as_real", rule="complex_view", view="pairs"),
    OpSpec("aten.view.dtype", rule="other_dtype", view="pairs", needs_contiguous=True),
)
