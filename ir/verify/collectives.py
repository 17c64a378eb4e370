"""Do a collective's operand and result hold what its axes, dim and blocks say they hold?

An all-reduce over an axis on which its operand is whole counts it once for each rank; a gather
of what is not cut repeats it. Types cannot tell: the shapes are right.
"""

from __future__ import annotations

from shardweave.ir.dialects.dist import (
    AllGatherOp,
    AllReduceOp,
    AllToAllOp,
    BroadcastOp,
    DistOp,
    ReduceScatterOp,
    SliceOp,
    WaitOp,
)
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding, block_of


def problem_of_move(op: DistOp, operand: Sharding, result: Sharding, mesh: Mesh) -> str | None:
    """Why `op` does not make `result` of a value in `operand`; None if it does.

    Both are of one operand and the result of its position. Cuts are compared where the op joins
    one axis, as all the collectives of the passes that cut or gather do.
    """
    axes = tuple(axis for axis in op.axes if mesh.size(axis) > 1)
    if isinstance(op, (AllReduceOp, ReduceScatterOp)):
        problem = _problem_of_reduction(op, operand, axes)
        if problem is not None:
            return problem
    left = reduced(op, operand)
    if (result.unreduced, result.reduction) != (left.unreduced, left.reduction):
        return (
            f"its result is an unreduced {left.reduction} over {list(left.unreduced)}, but its "
            f"sharding says {list(result.unreduced)}; correct the one or the other"
        )
    if isinstance(op, (AllReduceOp, WaitOp, BroadcastOp)):
        same = operand.dims == result.dims
        return None if same else "its sharding must cut the result as the operand is cut"
    return _problem_of_cut(op, left, result, axes[0]) if len(axes) == 1 else None


def reduced(op: DistOp, operand: Sharding) -> Sharding:
    """The operand's sharding without the axes that the op reduces over."""
    if not isinstance(op, (AllReduceOp, ReduceScatterOp)):
        return operand
    return operand.reduced(op.axes)


def _problem_of_reduction(op: DistOp, operand: Sharding, axes: tuple[str, ...]) -> str | None:
    whole = [axis for axis in axes if axis not in operand.unreduced]
    if whole:
        return (
            f"its operand is no unreduced sum over {whole}, so that reducing over these axes "
            "counts it several times; leave them out"
        )
    kind = op.reduction if isinstance(op, AllReduceOp) else "sum"
    if axes and kind != operand.reduction:
        return (
            f'it reduces by op = "{kind}", but its operand is an unreduced {operand.reduction}; '
            f'write op = "{operand.reduction}"'
        )
    return None


def _problem_of_cut(op: DistOp, operand: Sharding, result: Sharding, axis: str) -> str | None:
    """Whether `axis` appears and disappears in the cuts where the op says so."""
    before, after = operand, result
    if isinstance(op, (AllGatherOp, AllToAllOp)):
        is_move = isinstance(op, AllToAllOp)
        dim, block = (op.from_dim, op.from_block) if is_move else (op.dim, op.block)
        if not _is_cut(operand, axis, dim, block):
            return (
                f"its operand is not cut over ['{axis}'] along dim {dim} in blocks of {block}; "
                "gather what is cut, as it is cut"
            )
        before = operand.without((axis,))
    if isinstance(op, (SliceOp, ReduceScatterOp, AllToAllOp)):
        if isinstance(op, SliceOp) and axis in operand.axes:
            return f"its operand is not whole over ['{axis}']; slice a whole value"
        if not _is_cut(result, axis, op.dim, op.block):
            return (
                f"its sharding does not cut the result over ['{axis}'] along dim {op.dim} in "
                f"blocks of {op.block}; write the sharding that the op leaves"
            )
        after = result.without((axis,))
    if before.dims != after.dims:
        return f"its sharding cuts the result otherwise than the operand over more than '{axis}'"
    return None


def _is_cut(sharding: Sharding, axis: str, dim: int, block: int) -> bool:
    seat = sharding.seat_of(axis)
    if seat is None or seat[0] != dim:
        return False
    return block_of(sharding.dims[dim], seat[1]) == block
