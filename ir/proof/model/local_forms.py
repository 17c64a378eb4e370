"""Local forms: the ops that a rule writes for a sharded op that no clone on shards computes, and
how a proof recognizes them in a local program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from math import prod

from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardweave.ir.dialects.annotations import arguments_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, tensor_type
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement
from shardweave.ir.proof.relations.held import (
    RING,
    SUB_BATCH,
    Coordinates,
    Cuts,
    Local,
    ProofAxes,
    Relation,
    Shape,
    Value,
)
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


# In a local program

MAX_AXES = 3
"""Limit on the axes tried for one dim of a range; each more multiplies the tries by all axes."""


def candidates(form: OpForm, operands: Sequence[Value]) -> Iterator[tuple[Relation, ...]]:
    """Yield possible operands of global op `form`, if a local op on `operands` is a step of its
    local form. Each is an operand of the local op, or a relation from which that is computed."""
    options: list[list[Relation]] = []
    for index, number in enumerate(form.operands):
        value = operands[index] if index < len(operands) else None
        values = value.leaves if isinstance(value, Local) else [value]
        fitting = [p for p in values if isinstance(p, Relation) and p.held.number == number]
        options.append([p for p in fitting if p.held.layout is None])
    yield from product(*options)


def plain_cuts(axes: ProofAxes, size: int, part: int) -> Iterator[tuple[DimSharding, Coordinates]]:
    """Yield all shardings of a dim of `size` into shards of `part`; with sub-batch coordinates."""
    if part == 0 or size == part:
        return
    wide = [name for name in axes.wide(axes.names) if not name.startswith(RING)]
    for count in range(1, MAX_AXES + 1):
        for names in permutations(wide, count):
            sizes = [axes.size(name) for name in names]
            has_padding = prod(sizes) * part != size
            if -(-size // prod(sizes)) != part or (has_padding and size % part == 0):
                continue
            strides = [part * prod(sizes[i + 1 :]) for i in range(count)]
            triples = zip(names, sizes, strides, strict=True)
            cut = tuple([Placement(*triple) for triple in triples])
            times = [name for name in names if name.startswith(SUB_BATCH)]
            for at in product(*(range(axes.size(name)) for name in times)):
                own = zip(times, at, strict=True)
                yield cut, tuple(sorted((n, frozenset({c})) for n, c in own))


def other_arguments(op: AtenOp, form: OpForm) -> str:
    """Describe how an op's arguments differ from the arguments of the global op `form`."""
    own, wanted = dict(arguments_of(op)), dict(form.arguments)
    names = sorted(n for n in {*own, *wanted} if own.get(n) != wanted.get(n))
    pairs = [f"{n} = {own.get(n, 'its default')}, expected {wanted.get(n, 'its default')}"
             for n in names]  # fmt: skip
    return "has " + "; ".join(pairs or ["results of another type than it should"])
