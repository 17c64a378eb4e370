"""Checks of an op by itself: its arguments, its types and its annotations."""

from __future__ import annotations

from collections.abc import Iterator

from xdsl.ir import Operation
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.by_identity import ByIdentity
from shardweave.ir.dialects.annotations import annotation_problem, describe
from shardweave.ir.dialects.aten import AtenOp, OpKey, key_of_op
from shardweave.ir.dialects.dist import DistOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.library.grouped import ALL_ROWS, ROW_BOUNDS, ROW_ROUTES
from shardweave.ir.ops.aten_args import problem_of_arguments
from shardweave.ir.ops.infer import infer_types
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program

_right: set[OpKey] = set()
"""Keys (name, types, arguments) of ops that were verified; a program has few distinct keys."""

_right_as_they_stand = ByIdentity[None]()
"""ATen ops that were verified, by the identities of their types and properties."""


def _as_it_stands(op: Operation) -> tuple[object, ...]:
    """Key that is equal for ops of one class whose types and properties are the same objects."""
    types = [id(value.type) for value in (*op.operands, *op.results)]
    return type(op), len(op.results), *types, *op.properties, *map(id, op.properties.values())


def _remember(op: AtenOp) -> None:
    kept = [value.type for value in (*op.operands, *op.results)], [*op.properties.values()]
    _right_as_they_stand.keep(_as_it_stands(op), None, kept)


def _stands_right(op: Operation) -> bool:
    return op.next_op is not None and not op._successors  # pyright: ignore[reportPrivateUsage]


def is_known_right(op: Operation) -> bool:
    """True if an ATen op with the same type and property objects was verified before. This lookup
    is much faster than `problem_of_op`."""
    return _as_it_stands(op) in _right_as_they_stand and _stands_right(op)


def problem_of_op(op: Operation) -> str | None:
    """Check an op, whose types must be tensors, in isolation; returns the problem, or None."""
    return _problem_of_kind(op) if isinstance(op, AtenOp | DistOp) else _problem_of_form(op)


def _problem_of_kind(op: AtenOp | DistOp) -> str | None:
    key, problem = key_of_op(op), None
    if key not in _right or not _stands_right(op) or annotation_problem(op) is not None:
        problem = _problem_of_form(op)
        if problem is None and isinstance(op, AtenOp):
            problem = _problem_of_types(op)
    if problem is None:
        _right.add(key)
        if isinstance(op, AtenOp):
            _remember(op)
    return problem


def _problem_of_form(op: Operation) -> str | None:
    try:
        op.verify(verify_nested_ops=False)
    except VerifyException as error:
        return str(error).splitlines()[-1]
    return problem_of_arguments(op) if isinstance(op, AtenOp) else None


def _problem_of_types(op: AtenOp) -> str | None:
    types = infer_types(op)
    if isinstance(types, str):
        return f"torch refuses these operands: {types.rstrip('.')}"
    if types == tuple(op.result_types):
        return None
    listed, wanted = (", ".join(map(str, some)) for some in (op.result_types, types))
    return f"result type is {listed}, expected {wanted}"


def problems_of_rows(program: Program) -> Iterator[tuple[str, Operation]]:
    """Find ops that differ in number of rows, blocks or parts from the `row_bounds` op that they
    read. Yields (problem, op). Takes time linear in the ops."""
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
