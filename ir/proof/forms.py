"""Local forms: what a rule writes for an op on shards, to be recognized in a local program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product
from math import prod

import numpy as np
import torch
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardweave.ir.annotations import arguments_of
from shardweave.ir.aten import AtenOp, create
from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import DimSharding, Placement
from shardweave.ir.positional_attention import ATTENTION, ATTENTION_BACKWARD
from shardweave.ir.proof.cuts import Cuts
from shardweave.ir.proof.expressions import OpForm
from shardweave.ir.proof.held import (
    SUB_BATCH,
    Coordinates,
    Local,
    ProofAxes,
    Relation,
    Shape,
    Value,
)
from shardweave.ir.sharding.localizer import Localizer
from shardweave.ir.sharding.rules import Rule, rule_of
from shardweave.ir.sharding.rules.attention import FLASH, FLASH_BACKWARD
from shardweave.ir.types import dtype_of_value, tensor_type

GLOBAL_NAMES = {ATTENTION: FLASH, ATTENTION_BACKWARD: FLASH_BACKWARD}
"""Ops that stand in local forms of other ops alone, and these."""

MAX_AXES = 3
"""Axes that may cut one dim of a range; each more tries as many times more as there are axes."""


def written(
    form: OpForm, parts: Sequence[Relation], cuts: Cuts, shapes: Sequence[Shape], mesh: Mesh
) -> tuple[Sequence[SSAValue], list[Operation], Sequence[SSAValue]]:
    """The local form of an op on such parts: its arguments, its ops, and its results.

    shapes: local ones of the results. The ops stand in no program.
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


def candidates(form: OpForm, operands: Sequence[Value]) -> Iterator[tuple[Relation, ...]]:
    """The operands that an op of the global program may have where some value is a step of it.

    Each is the operand of that step, or what that is computed of.
    """
    options: list[list[Relation]] = []
    for index, number in enumerate(form.operands):
        value = operands[index] if index < len(operands) else None
        found = value.leaves if isinstance(value, Local) else [value]
        fitting = [p for p in found if isinstance(p, Relation) and p.held.number == number]
        options.append([p for p in fitting if p.held.layout is None])
    yield from product(*options)


def plain_cuts(axes: ProofAxes, size: int, part: int) -> Iterator[tuple[DimSharding, Coordinates]]:
    """The plain shards of a dim that have some size, over any axes, of any sub-batches."""
    if part == 0 or size == part:
        return
    wide = axes.wide(axes.names)
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


@cache
def rule_of_sum(name: str, first: Shape, second: Shape) -> tuple[Rule, Shape]:
    """The rule of a sum of values of these shapes, and the shape of the sum."""
    shape = np.broadcast_shapes(first, second)
    types = [tensor_type(own, torch.float64) for own in (first, second)]
    block = Block(arg_types=types)
    op = create(name, block.args, [tensor_type(shape, torch.float64)])
    return rule_of(op), shape


def other_arguments(op: AtenOp, form: OpForm) -> str:
    """How an op's arguments differ from those of the op that it should be."""
    own, wanted = dict(arguments_of(op)), dict(form.arguments)
    names = sorted(n for n in {*own, *wanted} if own.get(n) != wanted.get(n))
    pairs = [f"{n} = {own.get(n, 'its default')}, expected {wanted.get(n, 'its default')}"
             for n in names]  # fmt: skip
    return "has " + "; ".join(pairs or ["results of another type than it should"])
