"""The repeated blocks of a model: each is recomputed, priced and shown as one part of a program.

`capture` reads them off the module tree and stores them in the program as `dist.blocks`, unless
the layers' names say the same. A program without that attribute has a block for each path up to a
number (`h.3`, `encoder.block.0`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

from xdsl.dialects import builtin
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.dialects.dist import STARTS, CollectiveOp, SliceOp
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program

BLOCKS = "dist.blocks"
"""Attribute of a program's module: the paths of its blocks, in order of first use."""

_UP_TO_NUMBER = re.compile(r"(?:[^.]*\.)*?\d+(?![^.])")


@dataclass(frozen=True)
class Blocks:
    """Paths of a program's repeated modules, none inside another, in order of first use."""

    names: tuple[str, ...]
    _by_layer: dict[str, str | None] = field(
        default_factory=dict[str, str | None], repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self._by_layer.update({name: name for name in self.names})

    def of_layer(self, layer: str) -> str | None:
        """The block that a layer, or a parameter by its name, lies in."""
        if layer not in self._by_layer:
            parent = layer.rpartition(".")[0]
            self._by_layer[layer] = self.of_layer(parent) if parent else None
        return self._by_layer[layer]

    def of_op(self, op: Operation) -> str | None:
        return self.of_layer(layer_of(op))

    def __or__(self, other: Blocks) -> Blocks:
        return Blocks(tuple(dict.fromkeys((*self.names, *other.names))))


def shared_modules(a: str, b: str) -> int:
    """Count the enclosing modules that two paths share: 1 for `heads.a` and `heads.b`."""
    pairs = zip(a.split("."), b.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) if a and b else 0


def blocks_of(program: Program) -> Blocks:
    """The blocks that a program stores. ValueError if `dist.blocks` is not a list of strings."""
    stored = program.module.attributes.get(BLOCKS)
    if stored is None:
        return Blocks(_numbered(program))
    if not isinstance(stored, builtin.ArrayAttr) or not all(
        isinstance(name, builtin.StringAttr) for name in cast("builtin.ArrayAttr", stored)
    ):
        raise ValueError(
            f'{BLOCKS} is {stored}, expected a list of module paths, as ["h.0", "h.1"].'
        )
    names = cast("builtin.ArrayAttr[builtin.StringAttr]", stored)
    return Blocks(tuple(name.data for name in names))


def store_blocks(program: Program, paths: Iterable[str]) -> None:
    """Store the modules at `paths` as the program's blocks, except modules without ops. Stores
    nothing if the numbers in layers' names imply these blocks, as no pass changes the names."""
    names = _used(Blocks(tuple(paths)), program)
    if names != _numbered(program):
        strings = [builtin.StringAttr(name) for name in names]
        program.module.attributes[BLOCKS] = builtin.ArrayAttr(strings)


def _used(blocks: Blocks, program: Program) -> tuple[str, ...]:
    return tuple(dict.fromkeys(b for op in program.ops if (b := blocks.of_op(op)) is not None))


def _numbered(program: Program) -> tuple[str, ...]:
    """The paths of layers up to their first number."""
    matches = (_UP_TO_NUMBER.match(layer) for layer in dict.fromkeys(map(layer_of, program.ops)))
    return tuple(dict.fromkeys(match[0] for match in matches if match))


def weight_ops(program: Program) -> list[Operation]:
    """The ops that turn stored shards of parameters into the weights that layers compute with.

    They are all-gathers, views, casts, and slices or resizes of gathered weights."""
    known = {slot.value for slot in program.arguments if slot.kind == "param"}
    gathered: set[SSAValue] = set()
    ops: list[Operation] = []
    for op in program.ops:
        is_gather = isinstance(op, CollectiveOp) and op.is_gather and type(op) in STARTS
        recuts = isinstance(op, SliceOp) or spec_of(op).resizes
        brings = spec_of(op).keeps_weight or is_gather
        brings = brings or (recuts and gathered.issuperset(op.operands))
        if brings and all(value in known for value in op.operands):
            known.update(op.results)
            ops.append(op)
            if is_gather or not gathered.isdisjoint(op.operands):
                gathered.update(op.results)
    return ops


def split_at_backward(program: Program) -> tuple[list[Operation], list[Operation]]:
    """The ops before the first backward op, and the rest."""
    ops = list(program.ops)
    for index, op in enumerate(ops):
        if phase_of(op) in ("backward", "recompute"):
            return ops[:index], ops[index:]
    return ops, []
