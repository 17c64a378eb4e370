"""Computing equal things once."""

from __future__ import annotations

from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.annotations import arguments_of, phase_of
from shardweave.ir.facts import is_random
from shardweave.ir.program import Program

Key = tuple[str, tuple[SSAValue, ...], frozenset[tuple[str, Attribute]], tuple[Attribute, ...]]


def merge_equal_ops(program: Program) -> None:
    """Replace each op by an earlier one of the same name, operands, arguments and types. Linear."""
    known: dict[Key, Operation] = {}
    for candidate in list(program.ops):
        if candidate.regions:  # equal from outside, they may hold different ops
            continue
        if is_random(candidate):
            continue
        first = known.setdefault(_key(candidate), candidate)
        if first is not candidate:
            Rewriter.replace_op(candidate, [], first.results)


def _key(op: Operation) -> Key:
    is_recomputed = phase_of(op) == "recompute"
    arguments = arguments_of(op, "copy", "origin", *(["phase"] if is_recomputed else []))
    return op.name, tuple(op.operands), arguments, tuple(op.result_types)
