"""Recognize, in a local program, the local forms that rules write for ops on shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import prod

from shardweave.ir.dialects.annotations import arguments_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.mesh.placement import DimSharding, Placement
from shardweave.ir.proof.model.local_forms import OpForm
from shardweave.ir.proof.relations.held import (
    RING,
    SUB_BATCH,
    Coordinates,
    Local,
    ProofAxes,
    Relation,
    Value,
)

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
