"""Local forms: the ops that a rule writes for a sharded op that no clone on shards computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardweave.ir.dialects.annotations import arguments_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, tensor_type
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.proof.relations.held import Cuts, Relation, Shape
from shardweave.ir.sharding.localizer import Localizer
from shardweave.ir.sharding.rules import Rule, rule_of


@dataclass(frozen=True)
class OpForm:
    """An op of global types, with the expression numbers of its operands and results."""

    op: AtenOp
    operands: tuple[int, ...]
    results: tuple[int, ...]

    @cached_property
    def rule(self) -> Rule:
        return rule_of(self.op)

    @cached_property
    def arguments(self) -> frozenset[tuple[str, Attribute]]:
        return arguments_of(self.op)


FormsOf = Callable[[str, tuple[int, ...]], Sequence[OpForm]]
"""Returns the ops of the global program with a given name and given operand numbers."""


def written(
    form: OpForm, parts: Sequence[Relation], cuts: Cuts, shapes: Sequence[Shape], mesh: Mesh
) -> tuple[Sequence[SSAValue], list[Operation], Sequence[SSAValue]]:
    """Write the local form of an op outside any program: return its arguments, its ops, its
    results.

    parts: the relations of its operands. cuts: the sharding of each factor. shapes: the results'
    local shapes.
    """
    types: list[Attribute] = []
    for part, operand in zip(parts, form.op.operands, strict=True):
        shape = part.held.local_shape
        assert shape is not None
        types.append(tensor_type(shape, dtype_of_value(operand)))
    arguments = Block(arg_types=types).args
    made = [
        tensor_type(shape, dtype_of_value(result))
        for shape, result in zip(shapes, form.op.results, strict=True)
    ]
    ops: list[Operation] = []
    sizes = [factor.size for factor in form.rule.factors]
    localizer = Localizer(form.op, arguments, cuts, sizes, made, mesh, ops.append)
    localize = form.rule.localize
    assert localize is not None
    return arguments, ops, localize(localizer)
