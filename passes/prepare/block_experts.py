"""Ragged rows of grouped products, so that each device computes only its own experts' rows.

If experts are sharded, a grouped product is an unreduced sum: each device has zeros in the rows of
other devices' experts. Its activation function would need the total. But each row is nonzero on one
device only, and the next grouped product on that device reads only these rows. So the rows become
ragged (`ir.library.grouped`): each device takes the rows of its experts, any number, and axes that
shard tokens split these evenly. Ops between two grouped products are computed row by row without
communication. Where rows are looked up, or summed by token or by expert, each device handles its
own. A value that is read in any other way is padded with zeros in all other rows, and becomes an
unreduced sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects.annotations import set_wanted_attrs, wanted_attrs_of
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.builder import Builder, remade
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.library.grouped import ALL_ROWS, OWN_ROWS, ROW_BOUNDS, padded_rows
from shardweave.ir.mesh.placement import (
    DimSharding,
    Placement,
    Sharding,
    contiguous,
    is_contiguous,
    is_even,
)
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.flow import Flow, aten_ops, check_not_propagated
from shardweave.ir.sharding.ragged import adds_rows, is_by_row, with_rows
from shardweave.ir.sharding.rules.lookup import rule_of
from shardweave.passes.notes import note
from shardweave.passes.partition.propagate_shardings import propagated_forward
from shardweave.passes.program_pass import Analyses, PassWithAnalyses

Routing = tuple[SSAValue, SSAValue]
"""The values that hold the first and the end row of each expert's group."""


@dataclass(frozen=True)
class BlockExpertsPass(PassWithAnalyses):
    """Give each device the rows of its own experts, if a mesh axis shards the experts.

    Without this pass each product with sharded experts is reduced before its activation. load: the
    number of rows per device in types, as a multiple of balanced routing's; at least 1. Execution
    takes any routing.

    Requires: a global program with a mesh, before `propagate-shardings`. Ensures: numerics
    unchanged. Takes time linear in the ops.
    """

    name = "block-experts"
    load: int | float = 1.0

    def __post_init__(self) -> None:
        if self.load < 1:
            raise ValueError(f"block-experts: load={self.load:g}; give 1 or more.")

    def rewrite(self, program: Program, analyses: Analyses) -> None:
        program.needed_mesh()
        check_not_propagated(program, self.name)
        ops = aten_ops(program)
        if not any(spec_of(op).grouped for op in ops) and self.load == 1:
            return
        flow = analyses.of(propagated_forward).flow
        spreads = _spreads(ops, flow)
        spread = [_spread(op, flow) for op in ops if _routing_of(op) not in spreads]
        for routing, over in spreads.items():
            _Ragged(routing, over, self.load).rewrite(aten_ops(program))
        if not spreads and self.load > 1:
            note(f"load={self.load:g} has no effect: no axis shards experts of grouped products.")
        if spreads or any(spread):
            analyses.forget()


@dataclass(frozen=True)
class _Spread:
    """Axes over which a routing's rows are sharded. experts: by expert. axes: within one's rows."""

    experts: DimSharding
    axes: tuple[tuple[str, int], ...]

    @property
    def blocks(self) -> int:
        return prod(placement.size for placement in self.experts)

    @property
    def parts(self) -> int:
        return prod(size for _, size in self.axes)

    def of_rows(self, num_rows: int) -> DimSharding:
        """The sharding of `num_rows` rows, with equally many on each device."""
        stride = num_rows // (self.blocks * self.parts)
        placements: list[Placement] = []
        for axis, size in reversed((*((p.axis, p.size) for p in self.experts), *self.axes)):
            placements.append(Placement(axis, size, stride))
            stride *= size
        return tuple(reversed(placements))


def _spreads(ops: Sequence[AtenOp], flow: Flow) -> dict[Routing, _Spread]:
    """The axes that shard the rows of each routing whose experts are sharded."""
    cuts: dict[Routing, set[DimSharding]] = {}
    tokens: dict[Routing, tuple[tuple[str, int], ...]] = {}
    for op in ops:
        routing = _routing_of(op)
        if routing is None or spec_of(op).grouped != "rows" or op.tensor("bounds") is not None:
            continue
        groups = shape_of(op.operands[1])[0]
        cut = flow.sharding(op.operands[1]).dims[0]
        is_plain = is_contiguous(cut, groups) and is_even(cut, groups)
        cuts.setdefault(routing, set()).add(cut if is_plain else ())
        tokens[routing] = tokens.get(routing) or _token_axes(op, flow)
    return {
        routing: _Spread(next(iter(given)), tokens[routing])
        for routing, given in cuts.items()
        if len(given) == 1 and given != {()}
    }


def _token_axes(op: AtenOp, flow: Flow) -> tuple[tuple[str, int], ...]:
    """The axes, with sizes, that shard the tokens that a product reads, but not its weight."""
    lookup = _lookup(op)
    if lookup is None or wanted_attrs_of(lookup):
        return ()
    taken = flow.sharding(op.operands[1]).axes
    space = {axis.name for axis in flow.mesh.space_axes}
    tokens = flow.sharding(lookup.operands[0]).dims[0]
    return tuple((p.axis, p.size) for p in tokens if p.axis in space and p.axis not in taken)


def _spread(op: AtenOp, flow: Flow) -> bool:
    """Ask for a lookup of a product's rows to be sharded like the tokens; returns whether it is."""
    lookup = _lookup(op) if spec_of(op).grouped == "rows" else None
    axes = [axis for axis, _ in _token_axes(op, flow)] if lookup is not None else []
    if lookup is None or not axes:
        return False
    shape = shape_of(lookup.results[0])
    cut = contiguous(axes, shape[0], flow.mesh)
    if not is_even(cut, shape[0]):
        return False
    _want(lookup, cut)
    return True


def _want(op: AtenOp, rows: DimSharding) -> None:
    shape = shape_of(op.results[0])
    rest: tuple[DimSharding, ...] = tuple(() for _ in shape[1:])
    set_wanted_attrs(op, [ShardingAttr.of(Sharding((rows, *rest)), shape)])


def _lookup(op: AtenOp) -> AtenOp | None:
    owner = op.operands[0].owner
    while isinstance(owner, AtenOp) and spec_of(owner).view == "cast":
        owner = owner.operands[0].owner
    return owner if isinstance(owner, AtenOp) and spec_of(owner).is_lookup else None


def _routing_of(op: AtenOp) -> Routing | None:
    if not spec_of(op).grouped:
        return None
    starts, ends = op.operands[2:4]
    return starts, ends


class _Ragged:
    """Rewrites all ops on the rows of one routing to ragged rows."""

    def __init__(self, routing: Routing, spread: _Spread, load: float) -> None:
        self.routing = routing
        self.spread = spread
        self.load = load
        self.spread_of = {"blocks": spread.blocks, "parts": spread.parts}
        self.counted = self.spread_of | ({} if load == 1 else {"load": load})
        self.ragged: dict[SSAValue, SSAValue] = {}
        """Values with ragged rows, by the values with all rows that they replace."""
        self.computed: set[SSAValue] = set()
        """Values with all rows that are now only computed with ragged rows."""
        self.bounds: SSAValue | None = None

    def rewrite(self, ops: Sequence[AtenOp]) -> None:
        replaced = [op for op in ops if self._replace(op)]
        gone = set(replaced)
        for value in self.computed:
            left = [use for use in value.uses if use.operation not in gone]
            if left:
                whole = self._whole(value)
                for use in left:
                    use.operation.operands[use.index] = whole
        for op in reversed(replaced):
            Rewriter.erase_op(op)

    def _replace(self, op: AtenOp) -> bool:
        """Add a copy of an op that works on ragged rows, if it can; returns whether it did."""
        if _routing_of(op) == self.routing:
            self._product(op)
            return True
        taken = {index for index, value in enumerate(op.operands) if value in self.computed}
        if not taken:
            return False
        rule = rule_of(op)
        for by_row, fits in ((True, is_by_row), (False, adds_rows)):
            rows = with_rows(rule, min(taken))
            if taken <= rows and fits(op, rule, min(taken)):
                self._on_ragged(op, rows, by_row)
                return True
        return False

    def _product(self, op: AtenOp) -> None:
        gives_rows = spec_of(op).grouped == "rows"
        operands = list(op.operands)
        for index in (0,) if gives_rows else (0, 1):
            operands[index] = self._rows(operands[index], op)
        num_rows = shape_of(op.operands[0])[0]
        types = [self._ragged_type(op.results[0]) if gives_rows else op.results[0].type]
        operands.append(self._bounds(op, num_rows))
        self._insert(op, remade(op, operands, types, **self.spread_of), gives_rows)

    def _on_ragged(self, op: AtenOp, rows: set[int], by_row: bool) -> None:
        operands = [
            self._rows(value, op) if index in rows else value
            for index, value in enumerate(op.operands)
        ]
        types = [self._ragged_type(r) if by_row else r.type for r in op.results]
        self._insert(op, remade(op, operands, types), by_row)

    def _insert(self, op: AtenOp, new: AtenOp, gives_rows: bool) -> None:
        Builder.before(op).insert(new, None)
        for old, result in zip(op.results, new.results, strict=True):
            result.name_hint = old.name_hint
            if gives_rows:
                self.ragged[old] = result
                self.computed.add(old)
            else:
                old.replace_all_uses_with(result)

    def _ragged_type(self, value: SSAValue) -> Attribute:
        rows, *rest = shape_of(value)
        devices = self.spread.blocks * self.spread.parts
        return tensor_type((padded_rows(rows, devices, self.load), *rest), dtype_of_value(value))

    def _rows(self, value: SSAValue, place: Operation) -> SSAValue:
        """The ragged rows of a value, made before `place`; of a lookup, only these are looked
        up."""
        if value not in self.ragged:
            owner = value.owner
            looked = self._looked_up(value, owner, place) if isinstance(owner, AtenOp) else None
            self.ragged[value] = looked or self._own(value, place)
        return self.ragged[value]

    def _looked_up(self, value: SSAValue, owner: AtenOp, place: Operation) -> SSAValue | None:
        """The ragged rows of a lookup, or of a row-by-row op on lookups; None for other values."""
        spec = spec_of(owner)
        if spec.grouped or spec.ragged or wanted_attrs_of(owner):
            return None
        if not spec.is_lookup and not dtype_of_value(value).is_floating_point:
            return None  # numbers of rows stay those of all rows, by which messages are counted
        rule = rule_of(owner)
        rows = {i for i, dims in enumerate(rule.operands) if dims[:1] == rule.results[0][:1]}
        if not rows or len(owner.results) != 1 or not is_by_row(owner, rule, min(rows)):
            return None
        if not spec.is_lookup and not any(
            owner.operands[index] in self.ragged or self._is_looked_up(owner.operands[index])
            for index in rows
        ):
            return None
        operands = [
            self._rows(operand, place) if index in rows else operand
            for index, operand in enumerate(owner.operands)
        ]
        new = remade(owner, operands, [self._ragged_type(value)])
        return Builder.before(place, owner).insert(new, value).results[0]

    def _is_looked_up(self, value: SSAValue) -> bool:
        """True if a value is a lookup, or a view or a cast of it."""
        owner = value.owner
        while isinstance(owner, AtenOp) and spec_of(owner).view in ("cast", "reshape", "expand"):
            owner = owner.operands[0].owner
        return isinstance(owner, AtenOp) and spec_of(owner).is_lookup

    def _own(self, value: SSAValue, place: Operation) -> SSAValue:
        owner = value.owner
        new = Builder.before(place, owner if isinstance(owner, Operation) else place)
        bounds = self._bounds(place, shape_of(value)[0])
        made = create(OWN_ROWS, [value, bounds], [self._ragged_type(value)], self.counted)
        new.insert(made, value)
        _want(made, self.spread.of_rows(shape_of(made.results[0])[0]))
        return made.results[0]

    def _bounds(self, place: Operation, num_rows: int) -> SSAValue:
        if self.bounds is None:
            devices = self.spread.blocks * self.spread.parts
            self.bounds = Builder.before(place).aten(
                ROW_BOUNDS, list(self.routing), tensor_type((devices + 1,), torch.int64), "bounds",
                rows=num_rows, **self.spread_of,
            )  # fmt: skip
        return self.bounds

    def _whole(self, value: SSAValue) -> SSAValue:
        """Pad ragged rows with zeros to all rows, an unreduced sum over devices."""
        rows = self.ragged[value]
        owner = rows.owner
        assert isinstance(owner, Operation)
        assert self.bounds is not None
        new, shape, dtype = Builder.after(owner), shape_of(value), dtype_of_value(value)
        if dtype == torch.bool:
            counted = tensor_type(shape_of(rows), torch.int64)
            rows = new.aten("aten._to_copy", [rows], counted)
        whole = tensor_type(shape, dtype_of_value(rows))
        made = new.aten(
            ALL_ROWS, [rows, self.bounds], whole, "all_rows", num_rows=shape[0], **self.counted
        )
        if dtype == torch.bool:
            made = new.aten("aten._to_copy", [made], tensor_type(shape, dtype))
        return made
