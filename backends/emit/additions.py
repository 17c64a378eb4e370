"""What adds gradients to those that the caller of an emitted module has."""

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
"""Kinds of results that are added to what the caller has of them, if it gives that."""


@dataclass
class Additions:
    """Lines of an emitted module that add gradients to the caller's, by the ops before or behind
    which they stand, or in whose place they do, as some products'. Where results that kernels left
    in parts are needed, the line that joins them comes first."""

    names: Mapping[SSAValue, Code]
    before: dict[Operation, list[str]]
    behind: dict[Operation, list[str]] = field(default_factory=dict[Operation, list[str]])
    products: dict[Operation, str] = field(default_factory=dict[Operation, str])

    def add(self, value: SSAValue, after: Operation, key: str) -> None:
        """Add a value behind an op, or, where that is a product that can, by the product itself:
        so it is not written to memory and read again."""
        if after is value.owner and adds_its_result(after):
            left, right = (self.names[operand] for operand in after.operands)
            product = f"rt.added_product(given, ({key}), {left}, {right})"
            self.products[after] = f"{self.names[value]} = {product}"
        else:
            self.behind.setdefault(after, []).append(self._addition(value, key))

    def add_joined(self, value: SSAValue, key: str, before: Operation) -> None:
        """Add a value that is joined before an op."""
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
    """What adds each gradient to the caller's after the last op that reads it, or makes it.

    So no second set of gradients is ever in memory: neither of a step nor, of sums over
    micro-batches, of a stage. One that is returned twice is left as it is. terms: of pending
    gradients, by name, added as soon as they are there. joined: where values in parts are joined;
    one that nobody reads until then is added there.
    """
    num_kernels = sum(isinstance(op, FusedOp) for op in program.ops)
    join = f"kernels[{num_kernels}]()  # joins results that are in parts"
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
