"""Names in a plan, and the arguments, layers and ops of a program that they match.

A layer's name alone matches all its outputs. The two additions of a transformer layer's residual
stream are outputs of the same layer; a plan that treats them differently names the op as well, as
in `h.0:add.Tensor:1` or `h.0:mm:backward.3`: layer, ATen name, and the index of the op among those
of this name in the layer's forward pass (from 0) or backward pass (from `backward.0`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache

from xdsl.ir import Operation
from xdsl.utils.exceptions import ParseError

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Sharding
from shardweave.ir.program.program import Program, Slot
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError

OP_MARK = ":"
"""Separator in names of ops; module names never contain it."""


def named_ops(program: Program) -> dict[str, Operation]:
    """Return the forward and backward ops with one result, by name (`h.0:add.Tensor:1`)."""
    counts: Counter[str] = Counter()
    ops: dict[str, Operation] = {}
    for op in program.ops:
        phase = phase_of(op)
        if phase not in ("forward", "backward") or len(op.results) != 1:
            continue
        kind = OP_MARK.join((layer_of(op), op.name.removeprefix("aten."), ""))
        kind += "" if phase == "forward" else "backward."
        ops[f"{kind}{counts[kind]}"] = op
        counts[kind] += 1
    return ops


def is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


class Lookup:
    """Lookup in a table by name or pattern: an exact name wins, then the first pattern."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self._table = table
        self._patterns = [name for name in table if is_pattern(name)]

    def find(self, *names: str) -> str | None:
        """Return the table's entry for an object with these names; None if there is none."""
        key = self.key(*names)
        return None if key is None else self._table[key]

    def key(self, *names: str) -> str | None:
        """Return the table's key that matches one of these names; None if there is none."""
        for name in names:
            if name in self._table:
                return name
        for pattern in self._patterns:
            if any(fnmatchcase(name, pattern) for name in names):
                return pattern
        return None

    def unmatched(self, names: Collection[str]) -> list[str]:
        """Return the table's keys that match none of these names."""
        return [
            key
            for key in self._table
            if key not in names
            and not (key in self._patterns and any(fnmatchcase(n, key) for n in names))
        ]


def check_names(plan: Plan, program: Program) -> None:
    """Raise PlanError unless the program has every parameter, input and layer of the plan."""
    slots = program.arguments
    names = {n: 0 for s in slots if s.kind == "param" for n in (s.name, *s.aliases)}
    inputs = {s.name: 0 for s in slots if s.kind == "input"}
    ops = named_ops(program) if any(OP_MARK in key for key in plan.activations) else {}
    layers = {**program.layers(), **ops}
    for what, table, known in (
        ("parameter", plan.parameters, names),
        ("parameter", plan.used, names),
        ("parameter", dict.fromkeys(plan.projections, ""), names),
        ("input", plan.inputs, inputs),
        ("layer", plan.activations, layers),
    ):
        check_known(f"the plan names {what}", table, known)


def check_known(what: str, table: Iterable[str], known: Collection[str]) -> None:
    """Raise PlanError, which begins with `what`, for a name in `table` that matches none of
    `known`."""
    missing = Lookup(dict.fromkeys(table, "")).unmatched(known)
    if missing:
        names = [*filter(None, known)]
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        raise PlanError(
            f"{what} '{missing[0]}', which this program does not have (it has {shown or 'none'}); "
            "correct the name, or use a plan for this model."
        )


def read_sharding(text: str, where: str) -> ShardingAttr:
    """Parse a plan's sharding text. where: its location, for errors. Raises PlanError."""
    try:
        attribute = ShardingAttr.parse_text(text)
    except ParseError as error:
        raise PlanError(
            f"{where}: {text!r} is not a sharding: {' '.join(error.msg.split()).rstrip('.')}. "
            'Write one {..} per dim, as in [{"data"}, {}].'
        ) from error
    if attribute.unreduced.data:
        raise PlanError(
            f"{where}: sharding {text} is unreduced, but only an op can produce unreduced sums; "
            "remove 'unreduced'."
        )
    return attribute


def parse_sharding(text: str, shape: tuple[int, ...], mesh: Mesh, where: str) -> ShardingAttr:
    """Parse a sharding text and check it for a shape on a mesh. Raises PlanError at `where`."""
    attribute = read_sharding(text, where)
    try:
        attribute.on(shape, mesh)
    except ValueError as error:
        raise PlanError(f"{where} of shape {list(shape)}: {error}") from error
    return attribute


def sharding_text(dims: Sequence[DimSharding], shape: tuple[int, ...]) -> str:
    """Write a value's sharding as text for a plan, the inverse of `read_sharding`."""
    return attribute_text(ShardingAttr.of(Sharding(tuple(dims)), shape))


def attribute_text(attribute: ShardingAttr) -> str:
    """Write a sharding attribute as text for a plan, without the sizes of its value."""
    return str(attribute.of_any_size).removeprefix("#dist.sharding<").removesuffix(">")


def argument_shardings(
    program: Program, kind: str, table: Mapping[str, str], mesh: Mesh
) -> dict[int, ShardingAttr]:
    """Return the shardings that `table` gives to arguments of `kind` (`param`, `input`), by index.

    A pattern applies only to tensors with as many dims as its sharding. Raises PlanError for a
    sharding that does not fit, and for a pattern whose matches all have other numbers of dims.
    """
    ranks = {key: len(read_sharding(text, f"{kind} '{key}'").dims) for key, text in table.items()}
    slots = {index: slot for index, slot in enumerate(program.arguments) if slot.kind == kind}
    _check_patterns(table, ranks, slots.values())

    @cache
    def of_rank(rank: int) -> Lookup:
        return Lookup({k: v for k, v in table.items() if ranks[k] == rank or not is_pattern(k)})

    shardings: dict[int, ShardingAttr] = {}
    for index, slot in slots.items():
        shape = program.global_shape_of(slot)
        text = of_rank(len(shape)).find(slot.name, *slot.aliases)
        if text is not None:
            shardings[index] = parse_sharding(text, shape, mesh, f"{kind} '{slot.name}'")
    return shardings


def _check_patterns(
    table: Mapping[str, str], ranks: Mapping[str, int], slots: Iterable[Slot]
) -> None:
    for key in filter(is_pattern, table):
        lookup = Lookup({key: ""})
        matched = [slot for slot in slots if lookup.key(slot.name, *slot.aliases) is not None]
        if matched and all(len(shape_of(slot.value)) != ranks[key] for slot in matched):
            raise PlanError(
                f"the plan's pattern '{key}' has sharding {table[key]} with {ranks[key]} dims, "
                f"but {matched[0].kind} '{matched[0].name}' has shape "
                f"{list(shape_of(matched[0].value))}; write one {{...}} for each dim."
            )
