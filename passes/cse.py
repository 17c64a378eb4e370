"""cse: compute equal things once."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.passes import ModulePass

from shardweave.ir.aten import AtenOp, is_random
from shardweave.ir.program import Program
from shardweave.ir.syntax import phase_of

_IGNORED = frozenset({"layer", "phase", "sharding"})

Key = tuple[str, tuple[SSAValue, ...], frozenset[tuple[str, Attribute]], tuple[Attribute, ...]]


@dataclass(frozen=True)
class CsePass(ModulePass):
    """Replace an op by an earlier one of the same name, operands, arguments and types.

    A recomputed op is never merged with its original: recomputing is its point. Nor are two
    random ops: each draws numbers of its own.

    Requires: a verified program. Ensures: numerics unchanged, bit for bit. Linear.
    """

    name = "cse"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        known: dict[Key, Operation] = {}
        for candidate in list(Program(op).ops):
            if candidate.regions:  # equal from outside, they may hold different ops
                continue
            if isinstance(candidate, AtenOp) and is_random(candidate.name):
                continue
            first = known.setdefault(_key(candidate), candidate)
            if first is not candidate:
                for old, new in zip(candidate.results, first.results, strict=True):
                    old.replace_all_uses_with(new)
                candidate.detach()
                candidate.erase()


def _key(op: Operation) -> Key:
    properties = {item for item in op.properties.items() if item[0] not in _IGNORED}
    if phase_of(op) == "recompute":
        properties.add(("phase", op.properties["phase"]))
    return op.name, tuple(op.operands), frozenset(properties), tuple(op.result_types)
