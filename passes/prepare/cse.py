"""Common subexpression elimination."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from xdsl.ir import Operation
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects.annotations import arguments_of, phase_of, sharding_attrs_of
from shardweave.ir.ops.registry import is_random
from shardweave.ir.program.program import Program
from shardweave.passes.program_pass import PassOnProgram


def _distinguishing(op: Operation) -> tuple[str, ...]:
    names = ("copy", "origin")
    names += ("phase",) if phase_of(op) == "recompute" else ()
    # Along dims of length 1, shards of other dims look alike.
    is_sharded = any(dim.data for attr in sharding_attrs_of(op) or () for dim in attr.dims)
    return (*names, "sharding") if is_sharded else names


def merge_where_equal(
    ops: Iterable[Operation], annotations_of: Callable[[Operation], tuple[str, ...]]
) -> int:
    """Merge equal ops for which `annotations_of` is equal too; return the number of ops erased."""
    known: dict[Hashable, Operation] = {}
    count = 0
    for op in ops:
        arguments = arguments_of(op, *annotations_of(op))
        key = (op.name, tuple(op.operands), arguments, tuple(op.result_types))
        first = known.setdefault(key, op)
        if first is not op:
            Rewriter.replace_op(op, [], first.results)
            count += 1
    return count


@dataclass(frozen=True)
class CsePass(PassOnProgram):
    """Replace an op by an earlier one of the same name, operands, arguments and types.

    A recomputed op is never merged with its original, which would undo the recomputation; nor are
    random ops, which draw different numbers.

    Requires: a verified program. Ensures: numerics unchanged, bit for bit. Linear in the ops.
    """

    name = "cse"

    def run(self, program: Program) -> None:
        # Equal from outside, regions may hold different ops.
        ops = [op for op in program.ops if not op.regions and not is_random(op)]
        merge_where_equal(ops, _distinguishing)
