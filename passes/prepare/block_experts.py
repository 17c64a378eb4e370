"""Rows of grouped products by blocks of groups, so that each device computes its own experts' rows.

Where the weights of experts are sharded, a grouped product is zero in the rows of other devices'
experts, and an unreduced sum. An activation of it would need the sum. But each row has only one
term, and the next grouped product on its device reads those rows alone. So the rows get one more
dim, of blocks of experts, before the rows: `(r i)`. It is sharded as the experts are. Between two
grouped products everything is computed row by row, block by block, without a message. Where a value
leaves these rows, rows that are not of the block are made zero, and blocks are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects.annotations import set_wanted_attrs, wanted_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.builder import Builder, remade
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.mesh.placement import (
    DimSharding,
    Sharding,
    contiguous,
    is_contiguous,
    is_even,
)
from shardweave.ir.ops.registry import gives_zero, is_random, spec_of
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.flow import Flow, aten_ops, check_not_propagated
from shardweave.ir.sharding.rules.lookup import rule_of
from shardweave.passes.analyses import Analyses
from shardweave.passes.partition.propagate_shardings import propagated_forward
from shardweave.passes.program_pass import PassWithAnalyses

Routing = tuple[SSAValue, SSAValue]
"""Where the rows of each group start and end."""


@dataclass(frozen=True)
class BlockExpertsPass(PassWithAnalyses):
    """Give rows of grouped products a dim of blocks of experts, sharded as the experts are.

    Without this pass each product of experts that are sharded is reduced before its activation.

    Requires: a global program with a mesh, before `propagate-shardings`. Ensures: numerics
    unchanged; a row of no group is zero. Linear in the ops.
    """

    name = "block-experts"

    def rewrite(self, program: Program, analyses: Analyses) -> None:
        program.needed_mesh()
        check_not_propagated(program, self.name)
        ops = aten_ops(program)
        if not any(spec_of(op).grouped for op in ops):
            return
        flow = analyses.of(propagated_forward).flow
        sizes, spread = _blocks(ops, flow), [_spread(op, flow) for op in ops]
        for routing, blocks in sizes.items():
            _Blocks(routing, blocks).rewrite(aten_ops(program))
        if sizes or any(spread):
            analyses.forget()


def _spread(op: AtenOp, flow: Flow) -> bool:
    """Wish that rows are looked up in shards over the axes that shard the tokens; whether it was.

    Rows sorted by group are runs of rows of any tokens, so that each device takes as many.
    """
    lookup = _lookup(op) if spec_of(op).grouped == "rows" else None
    if lookup is None or wanted_attrs_of(lookup):
        return False
    taken = flow.sharding(op.operands[1]).axes
    shape, space = shape_of(lookup.results[0]), {axis.name for axis in flow.mesh.space_axes}
    tokens = flow.sharding(lookup.operands[0]).dims[0]
    axes = [p.axis for p in tokens if p.axis in space and p.axis not in taken]
    cut = contiguous(axes, shape[0], flow.mesh)
    if not axes or not is_even(cut, shape[0]):
        return False
    rest: tuple[DimSharding, ...] = tuple(() for _ in shape[1:])
    set_wanted_attrs(lookup, [ShardingAttr.of(Sharding((cut, *rest)), shape)])
    return True


def _lookup(op: AtenOp) -> AtenOp | None:
    """The lookup of the rows of a grouped product, and casts between; None if there is none."""
    owner = op.operands[0].owner
    while isinstance(owner, AtenOp) and spec_of(owner).view == "cast":
        owner = owner.operands[0].owner
    return owner if isinstance(owner, AtenOp) and spec_of(owner).is_lookup else None


def _blocks(ops: Sequence[AtenOp], flow: Flow) -> dict[Routing, int]:
    """For each routing whose experts are sharded, over how many devices they are."""
    sizes: dict[Routing, set[int]] = {}
    for op in ops:
        if spec_of(op).grouped == "rows":
            groups = shape_of(op.operands[1])[0]
            cut = flow.sharding(op.operands[1]).dims[0]
            is_plain = is_contiguous(cut, groups) and is_even(cut, groups)
            size = prod(placement.size for placement in cut) if is_plain else 1
            sizes.setdefault(_routing(op), set()).add(size if op.value("blocks") == 1 else 1)
    return {
        routing: min(given) for routing, given in sizes.items() if given - {1} and len(given) == 1
    }


def _routing(op: AtenOp) -> Routing:
    starts, ends = op.operands[2:4]
    return starts, ends


class _Blocks:
    """The rewriting of all that is computed of the rows of one routing."""

    def __init__(self, routing: Routing, blocks: int) -> None:
        self.routing = routing
        self.blocks = blocks
        self.stacked: dict[SSAValue, SSAValue] = {}
        """The values of rows by block, by the values that they stand for."""
        self.tiled: dict[SSAValue, SSAValue] = {}
        self.zero: set[SSAValue] = set()
        """Values by block that are known to be zero in rows of other blocks."""
        self.outside: SSAValue | None = None

    def rewrite(self, ops: Sequence[AtenOp]) -> None:
        replaced = [op for op in ops if self._replace(op)]
        for value, stacked in self.stacked.items():
            left = [use for use in value.uses if use.operation not in set(replaced)]
            if left:
                total = self._total(stacked)
                for use in left:
                    use.operation.operands[use.index] = total
        for op in reversed(replaced):
            Rewriter.erase_op(op)

    def _replace(self, op: AtenOp) -> bool:
        """Put an op on rows by block beside an op on rows, if that can be."""
        if spec_of(op).grouped and _routing(op) == self.routing:
            self._product(op)
            return True
        if not self._is_by_row(op):
            return False
        rule = rule_of(op)
        row = rule.results[0][0]
        operands = [
            self._rows(value, op) if dims[:1] == (row,) else value
            for value, dims in zip(op.operands, rule.operands, strict=True)
        ]
        new = Builder.before(op).insert(
            remade(op, operands, [self._longer(result) for result in op.results]), None
        )
        bearing = {
            index: operands[index] in self.zero
            for index, dims in enumerate(rule.operands)
            if dims[:1] == (row,)
        }
        self._note(op, new, is_zero=gives_zero(op, bearing))
        return True

    def _product(self, op: AtenOp) -> None:
        gives_rows = spec_of(op).grouped == "rows"
        operands = list(op.operands)
        for index in (0,) if gives_rows else (0, 1):
            operands[index] = self._rows(operands[index], op)
        types = [self._longer(op.results[0]) if gives_rows else op.results[0].type]
        new = remade(op, operands, types, blocks=self.blocks)
        Builder.before(op).insert(new, op.results[0])
        if gives_rows:
            self._note(op, new, is_zero=True)
        else:
            op.results[0].replace_all_uses_with(new.results[0])

    def _note(self, op: AtenOp, new: AtenOp, is_zero: bool) -> None:
        for old, result in zip(op.results, new.results, strict=True):
            result.name_hint = old.name_hint
            self.stacked[old] = result
            if is_zero:
                self.zero.add(result)

    def _is_by_row(self, op: AtenOp) -> bool:
        """Whether an op works on each row of some rows by block alone, and gives such rows."""
        if not any(value in self.stacked for value in op.operands):
            return False
        rule = rule_of(op)
        first = rule.results[0][:1]
        if is_random(op) or rule.localize or wanted_attrs_of(op) or len(first) != 1:
            return False
        if len(first[0]) != 1 or not all(dims[:1] == first for dims in rule.results):
            return False
        (row,) = first[0]
        limits = rule.factors[row]
        if limits.contiguous or limits.whole or limits.even:
            return False
        elsewhere = (names for dims in (*rule.operands, *rule.results) for names in dims[1:])
        leads = all(
            dims[0] == first[0]
            if value in self.stacked
            else row not in dims[0] or dims[0] == first[0]
            for value, dims in zip(op.operands, rule.operands, strict=True)
            if value in self.stacked or dims
        )
        return leads and not any(row in names for names in elsewhere)

    def _longer(self, value: SSAValue) -> Attribute:
        rows, *rest = shape_of(value)
        return tensor_type((self.blocks * rows, *rest), dtype_of_value(value))

    def _rows(self, value: SSAValue, place: Operation) -> SSAValue:
        """The rows of a value by block: the value once for each block, if it has none."""
        if value in self.stacked:
            return self.stacked[value]
        if value not in self.tiled:
            owner = value.owner
            new = Builder.before(place, owner if isinstance(owner, Operation) else place)
            shape, dtype = shape_of(value), dtype_of_value(value)
            one = new.aten("aten.view", [value], tensor_type((1, *shape), dtype))
            each = new.aten("aten.expand", [one], tensor_type((self.blocks, *shape), dtype))
            self.tiled[value] = new.aten("aten.view", [each], self._longer(value), value)
        return self.tiled[value]

    def _total(self, stacked: SSAValue) -> SSAValue:
        """The sum of the blocks, where rows of other blocks are zero."""
        owner = stacked.owner
        assert isinstance(owner, Operation)
        outside = None if stacked in self.zero else self._outside()
        new = Builder.after(owner)
        rows, *rest = shape_of(stacked)
        dtype = dtype_of_value(stacked)
        if outside is not None:
            column = outside
            if rest:
                shape = tensor_type((rows, *(1 for _ in rest)), torch.bool)
                column = new.aten("aten.view", [outside], shape)
            stacked = new.aten("aten.masked_fill.Scalar", [stacked, column], value=0)
        each = tensor_type((self.blocks, rows // self.blocks, *rest), dtype)
        apart = new.aten("aten.view", [stacked], each)
        wide = dtype if dtype.is_floating_point else torch.int64
        total = tensor_type((rows // self.blocks, *rest), wide)
        added = new.aten("aten.sum.dim_IntList", [apart], total, dim=[0])
        if wide == dtype:
            return added
        return new.aten("aten._to_copy", [added], tensor_type((rows // self.blocks, *rest), dtype))

    def _outside(self) -> SSAValue:
        """For each row by block, whether it belongs to another block."""
        if self.outside is None:
            self.outside = self._made_outside()
        return self.outside

    def _made_outside(self) -> SSAValue:
        first = next(iter(self.stacked.values())).owner
        assert isinstance(first, Operation)
        new = Builder.before(first)
        num_rows = shape_of(first.results[0])[0] // self.blocks
        starts, ends = self.routing
        groups, dtype = shape_of(starts)[0] // self.blocks, dtype_of_value(starts)
        apart = tensor_type((self.blocks, groups), dtype)
        column = tensor_type((self.blocks, 1), dtype)
        counted = tensor_type((num_rows,), torch.int64)
        count = new.aten("aten.arange.start_step", [], counted, start=0)
        row = new.aten("aten.view", [count], tensor_type((1, num_rows), torch.int64))
        is_outside: list[SSAValue] = []
        for name, bound, at in (("lt", starts, 0), ("ge", ends, groups - 1)):
            by_block = new.aten("aten.view", [bound], apart)
            edge = new.aten("aten.slice.Tensor", [by_block], column, dim=1, start=at)
            flags = tensor_type((self.blocks, num_rows), torch.bool)
            is_outside.append(new.aten(f"aten.{name}.Tensor", [row, edge], flags))
        either = new.aten("aten.logical_or", is_outside)
        flat = tensor_type((self.blocks * num_rows,), torch.bool)
        return new.aten("aten.view", [either], flat)
