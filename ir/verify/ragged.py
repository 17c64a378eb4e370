"""Check that each op that reads bounds of rows splits the same rows as the bounds do."""

from __future__ import annotations

from collections.abc import Iterator

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import describe
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.library.grouped import ALL_ROWS, ROW_BOUNDS, ROW_ROUTES
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program


def problems_of_rows(program: Program) -> Iterator[tuple[str, Operation]]:
    """Find ops that split other rows than the `row_bounds` op whose bounds (rows of each group)
    they read. Yields (problem, op). Takes time linear in the ops."""
    for op in program.function.body.block.ops:
        if not isinstance(op, AtenOp) or op.name != ROW_BOUNDS:
            continue
        for use in op.results[0].uses:
            user = use.operation
            problem = _problem(op, user) if isinstance(user, AtenOp) else None
            if problem is not None:
                yield f"{describe(user)}: {problem}.", user


def _problem(bounds: AtenOp, user: AtenOp) -> str | None:
    if spec_of(user).ragged or spec_of(user).grouped:
        for name in ("blocks", "parts"):
            if user.value(name) != bounds.value(name):
                wanted = bounds.value(name)
                return f"{name} = {user.value(name)}, but its bounds have {wanted}; make them equal"
        if spec_of(user).grouped:
            return None  # its rows are those of one device
    elif user.name != ROW_ROUTES:
        return None
    split = user.value("num_rows") if user.name == ALL_ROWS else shape_of(user.operands[0])[0]
    if split != bounds.value("rows"):
        return f"it splits {split} rows, but its bounds are those of {bounds.value('rows')}"
    return None
