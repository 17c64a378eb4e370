"""Lines of an emitted module that add gradients to the caller's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from shardweave.backends.emit.statements import Code, key_text
from shardweave.backends.programs import last_touches
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import adds_its_result

_ADDED = ("grad", "sum")
"""Kinds of results that are added to the caller's tensor of that name, if `given` has one."""


@dataclass
class Additions:
    """Lines of an emitted module that add gradients to the caller's. before, behind: lines by the
    op that they precede or follow. products: lines that replace a matrix product by one that adds
    to the gradient. In `before`, the line that joins kernels' partial results comes first."""

    names: Mapping[SSAValue, Code]
    before: dict[Operation, list[str]]
    behind: dict[Operation, list[str]] = field(default_factory=dict[Operation, list[str]])
    products: dict[Operation, str] = field(default_factory=dict[Operation, str])

    def add(self, value: SSAValue, after: Operation, key: str) -> None:
        """Add `value` to the caller's gradient `key`, a pair of kind and name, after an op. If the
        op is a matrix product that can add its result itself, it does, which saves a write and a
        read of memory."""
        if after is value.owner and adds_its_result(after):
            left, right = (self.names[operand] for operand in after.operands)
            product = f"rt.added_product(given, ({key}), {left}, {right})"
            self.products[after] = f"{self.names[value]} = {product}"
        else:
            self.behind.setdefault(after, []).append(self._addition(value, key))

    def add_joined(self, value: SSAValue, key: str, before: Operation) -> None:
        """Add `value` to gradient `key` before an op, where it is joined from partial results."""
        self.before[before].append(self._addition(value, key))

    def _addition(self, value: SSAValue, key: str) -> str:
        name = self.names[value]
        return f"{name} = rt.added(given, ({key}), {name})"


def additions_of(
    program: Program,
    names: Mapping[SSAValue, Code],
    terms: Mapping[str, SSAValue],
    joined: Mapping[SSAValue, Operation],
) -> Additions:
    """Write lines that add each gradient to the caller's, after the last op that touches it.

    So memory never holds a second set of gradients, whether of a step or of a stage's sums over
    micro-batches. Values that are returned twice are not added. terms: unreduced terms of pending
    gradients, by name, added as soon as they are computed. joined: the op before which a partial
    result is joined; it is added there if no later op reads it.
    """
    num_kernels = sum(isinstance(op, FusedOp) for op in program.ops)
    join = f"kernels[{num_kernels}]()  # joins partial results"
    additions = Additions(names, {op: [join] for op in joined.values()})
    gradients = [s for s in program.results if s.kind in _ADDED and s.name not in terms]
    returned = Counter(program.return_op.operands)
    places = {op: place for place, op in enumerate((*program.ops, program.return_op))}
    last = last_touches(program)
    for slot in gradients:
        value = slot.value
        if isinstance(value.owner, Operation) and returned[value] == 1:
            join = joined.get(value)
            if join is not None and places[join] > places[last[value]]:
                additions.add_joined(value, key_text(slot), join)
            else:
                additions.add(value, last[value], key_text(slot))
    for gradient, term in terms.items():
        key = f'"pending", {json.dumps(gradient)}'
        assert isinstance(term.owner, Operation)
        if term in joined:
            additions.add_joined(term, key, joined[term])
        else:
            additions.add(term, term.owner, key)
    return additions
