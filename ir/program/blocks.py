"""The repeated blocks of a model: each is recomputed, priced and shown as one part of a program.

`capture` reads them off the module tree and stores them in the program as `dist.blocks`, unless
the layers' names say the same. A program without that attribute has a block for each path up to a
number (`h.3`, `encoder.block.0`); without numbers, for each of several siblings that hold layers
and do the same ops.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
        return _derived(program)
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
    implied = _derived(program)
    if names != implied.names or (names and names != _numbered(program)):
        strings = [builtin.StringAttr(name) for name in names]
        program.module.attributes[BLOCKS] = builtin.ArrayAttr(strings)


def _used(blocks: Blocks, program: Program) -> tuple[str, ...]:
    return tuple(dict.fromkeys(b for op in program.ops if (b := blocks.of_op(op)) is not None))


def _derived(program: Program) -> Blocks:
    return Blocks(_numbered(program) or tuple(_equal_siblings(program)))


def _numbered(program: Program) -> tuple[str, ...]:
    """The paths of layers up to their first number."""
    matches = (_UP_TO_NUMBER.match(layer) for layer in dict.fromkeys(map(layer_of, program.ops)))
    return tuple(dict.fromkeys(match[0] for match in matches if match))


@dataclass
class _Module:
    """A module, rebuilt from the ops' layer names: its ops in order, and its children."""

    path: str
    ops: list[str] = field(default_factory=list[str])
    layers: set[str] = field(default_factory=set[str])
    children: dict[str, _Module] = field(default_factory=dict[str, "_Module"])

    @property
    def body(self) -> tuple[str, ...] | None:
        """Names of the module's ops, to compare modules; None if all ops are of one layer."""
        return tuple(self.ops) if len(self.layers) > 1 else None


def _equal_siblings(program: Program) -> Iterator[str]:
    """Yield paths of the outermost modules whose ops equal a sibling's, in order of first use."""
    root = _Module("")
    for op in program.ops:
        if phase_of(op) != "forward":
            continue
        module, layer = root, layer_of(op)
        for part in layer.split(".") if layer else ():
            path = f"{module.path}.{part}" if module.path else part
            module = module.children.setdefault(part, _Module(path))
            module.ops.append(op.name)
            module.layers.add(layer)
    yield from _repeated_in(list(root.children.values()))


def _repeated_in(siblings: Sequence[_Module]) -> Iterator[str]:
    bodies = [module.body for module in siblings]
    counts = Counter(body for body in bodies if body is not None)
    for module, body in zip(siblings, bodies, strict=True):
        if body is not None and counts[body] > 1:
            yield module.path
        else:
            yield from _repeated_in(list(module.children.values()))


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
