"""Products beside a gather or a reduce-scatter, computed in blocks while the next block is sent."""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    layer_of,
    phase_of,
    set_sharding_attrs,
    sharding_attrs_of_value,
)
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.builder import Builder, remade
from shardweave.ir.dialects.dist_base import StartedOp
from shardweave.ir.dialects.types import (
    AnyTensor,
    num_bytes,
    shape_of,
    tensor_type_of,
    with_shape,
)
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, ordered
from shardweave.ir.ops.registry import adding, spec_of
from shardweave.ir.program.blocks import weight_ops
from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of
from shardweave.ir.sharding.rules import rule_of
from shardweave.passes.messages.gradient_buckets import gradient_reductions
from shardweave.passes.notes import note

_RING = "ring"
"""A mesh axis for the turns of a ring, so that sharding rules can place blocks on it."""

Cut = tuple[DimSharding, ...]
"""A value's sharding over the turns, as placements by dim."""


@dataclass(frozen=True)
class _Blocks:
    """Shardings over the turns of an op's operands (`read`) and of its result (`made`; None if the
    turns' results are terms of a sum)."""

    read: tuple[Cut, ...]
    made: Cut | None


def _blocks_of(op: Operation, cuts: Mapping[SSAValue, Cut]) -> _Blocks | None:
    """Shard an op over the turns as `cuts` shards its values; None if no block can be computed."""
    if not isinstance(op, AtenOp) or len(op.results) != 1:
        return None
    rule = rule_of(op)
    factors: list[DimSharding] = [()] * len(rule.factors)
    for dims, value in zip(
        (*rule.operands, *rule.results), (*op.operands, *op.results), strict=True
    ):
        own = rule.factors_of(dims, cuts[value]) if value in cuts else None
        if own is None and value in cuts:
            return None
        factors = [ordered({*x, *y}) for x, y in zip(factors, own or factors, strict=True)]
    made = rule.result(0, factors, (), [_RING])
    if rule.localize or sum(map(len, factors)) != 1 or made is None or made.reduction != "sum":
        return None
    if not all(map(rule.can_cut, range(len(factors)), factors)):
        return None
    read = tuple([rule.dims_of(dims, factors) for dims in rule.operands])
    return _Blocks(read, None if made.unreduced else made.dims)


def _only_moves(op: Operation) -> bool:
    return spec_of(op).view in ("reshape", "permute", "cast")


class _Ring:
    """A collective's values in blocks: in each of as many turns as ranks, a rank handles one."""

    def __init__(self, op: dist.AlongDimOp, ranks: int, whole: SSAValue) -> None:
        self.op, self.ranks, self.whole = op, ranks, whole
        placement = Placement(_RING, ranks, op.block)
        self.cuts: dict[SSAValue, Cut] = {
            whole: Sharding.replicated(len(shape_of(whole))).with_dim(op.dim, [placement]).dims
        }
        self.products: dict[AtenOp, _Blocks] = {}
        self.held: dict[tuple[SSAValue, int], SSAValue] = {}
        """Blocks by value and turn."""

    def block(self, value: SSAValue, cut: Cut, turn: int, new: Builder) -> SSAValue:
        """Return a value's block of one turn: a known block, a view of one, or a new slice."""
        held = self.held.get((value, turn))
        if held is not None or not any(cut):
            return held or value
        if value in self.cuts:
            assert isinstance(value.owner, AtenOp)
            read = (self.cuts[value.owner.operands[0]],)
            held = self.computed(value.owner, _Blocks(read, cut), turn, new)
        else:
            ((dim, (placement,)),) = [pair for pair in enumerate(cut) if pair[1]]
            held = self._ring_op(
                dist.RingSliceOp, [value], _part(value, cut), new, dim, placement.stride, turn=turn
            )
        self.held[value, turn] = held
        return held

    def computed(
        self,
        op: AtenOp,
        blocks: _Blocks,
        turn: int,
        new: Builder,
        total: SSAValue | None = None,
    ) -> SSAValue:
        """Compute an op on its operands' blocks of one turn, and add the result to `total`."""
        pairs = zip(op.operands, blocks.read, strict=True)
        operands = [self.block(value, cut, turn, new) for value, cut in pairs]
        (result,) = op.results
        type_ = tensor_type_of(result) if blocks.made is None else _part(result, blocks.made)
        own = Builder(new.add, op)
        name = None if total is None else adding(op.name)
        if name is not None:
            return own.aten(name, [total, *operands], type_, result)
        made = own.insert(remade(op, operands, [type_]), result).results[0]
        return made if total is None else _sum(own, total, made)

    def joined(self, value: SSAValue, cut: Cut, parts: list[SSAValue], new: Builder) -> SSAValue:
        """Concatenate a value's blocks of all turns."""
        ((dim, (placement,)),) = [pair for pair in enumerate(cut) if pair[1]]
        type_ = tensor_type_of(value)
        made = self._ring_op(dist.RingJoinOp, parts, type_, new, dim, placement.stride)
        return _named(made, value)

    def shifted(self, value: SSAValue, new: Builder) -> SSAValue:
        op = dist.create_dist(dist.ShiftOp, [value], [value.type], axes=list(self.op.axes))
        return new.insert(op).results[0]

    def _ring_op(
        self, kind: type[dist.DistOp], operands: list[SSAValue], type_: AnyTensor, new: Builder,
        dim: int, block: int, **more: int,
    ) -> SSAValue:  # fmt: skip
        axes = list(self.op.axes)
        op = dist.create_dist(kind, operands, [type_], axes=axes, dim=dim, block=block, **more)
        return new.insert(op).results[0]


def _part(value: SSAValue, cut: Cut) -> AnyTensor:
    type_ = tensor_type_of(value)
    return with_shape(type_, Sharding(cut).local_shape(shape_of(value)))


def _named(made: SSAValue, old: SSAValue) -> SSAValue:
    """Give `made` the name and the sharding of `old`, which it replaces; returns it."""
    assert isinstance(made.owner, Operation)
    made.name_hint = old.name_hint
    set_sharding_attrs(made.owner, sharding_attrs_of_value(old))
    return made


def _sum(new: Builder, first: SSAValue, second: SSAValue) -> SSAValue:
    op = create("aten.add.Tensor", [first, second], [first.type])
    return new.insert(op, "total").results[0]


class _Gather(_Ring):
    """A gather whose result products read: shards travel around the ring, and each product computes
    with one while the next arrives. Products that contract the gathered dim sum over turns."""

    def __init__(self, op: dist.AlongDimOp, ranks: int, places: Mapping[Operation, int]) -> None:
        super().__init__(op, ranks, op.results[0])
        self.places = places
        self.read_whole: dict[SSAValue, Operation | None] = {}
        """Values that an op reads whole, with the first such op; None for an op of another ring."""
        self.users: dict[int, Operation] = {}
        self.waiting: list[int] = []
        self._add_users(self.whole)
        while self.waiting:
            self._read(self.users[heapq.heappop(self.waiting)])

    def _add_users(self, value: SSAValue) -> None:
        for use in value.uses:
            place = self.places.get(use.operation)
            if place is None:
                self.read_whole[value] = None
            elif place not in self.users:
                self.users[place] = use.operation
                heapq.heappush(self.waiting, place)

    def _read(self, user: Operation) -> None:
        blocks = _blocks_of(user, self.cuts)
        if blocks is not None and blocks.made is not None and _only_moves(user):
            self.cuts[user.results[0]] = blocks.made
            self._add_users(user.results[0])
        elif blocks is not None and self._gains(user, blocks):
            assert isinstance(user, AtenOp)
            self.products[user] = blocks
        else:
            for value in filter(self.cuts.__contains__, user.operands):
                self.read_whole.setdefault(value, user)

    def _gains(self, op: Operation, blocks: _Blocks) -> bool:
        """True for a product, unless sums over turns move more bytes than joining the blocks."""
        added = num_bytes(tensor_type_of(op.results[0])) if blocks.made is None else 0
        is_light = (self.ranks - 1) * added <= num_bytes(tensor_type_of(self.whole))
        return spec_of(op).product is not None and is_light

    def write(self) -> None:
        new = Builder.before(self.op)
        self.held[self.whole, 0] = self.op.operands[0]
        now = [op for op in self.products if phase_of(op) == phase_of(self.op)]
        self._compute(dict.fromkeys(now, new), new)
        for op in self.products:
            if op not in now:
                self._compute({op: Builder.before(op)}, None)
        joined: dict[SSAValue, SSAValue] = {}
        for value, reader in self.read_whole.items():
            assert isinstance(value.owner, Operation)
            cut = self.cuts[value]
            own = Builder.after(value.owner) if reader is None else Builder.before(reader)
            parts = [self.block(value, cut, turn, own) for turn in range(self.ranks)]
            joined[value] = self.joined(value, cut, parts, own)
        for value, whole in joined.items():
            value.replace_all_uses_with(whole)

    def _compute(self, products: Mapping[AtenOp, Builder], new: Builder | None) -> None:
        """Compute products turn by turn. new: starts the next transfer; None: all have arrived."""
        made: dict[AtenOp, list[SSAValue]] = {op: [] for op in products}
        for turn in range(self.ranks):
            if new is not None and turn + 1 < self.ranks:
                self.held[self.whole, turn + 1] = self.shifted(self.held[self.whole, turn], new)
            for op, own in products.items():
                total = made[op][-1] if made[op] and self.products[op].made is None else None
                made[op].append(self.computed(op, self.products[op], turn, own, total))
        for op, own in products.items():
            cut, (result,), (*parts, done) = self.products[op].made, op.results, made[op]
            if cut is not None:
                done = self.joined(result, cut, [*parts, done], Builder(own.add, op))
            Rewriter.replace_op(op, [], [_named(done, result)])


class _Scatter(_Ring):
    """A reduce-scatter of products: each sum travels around the ring to the rank that keeps it.
    Each rank on its way computes its product meanwhile, and adds it."""

    def __init__(self, op: dist.AlongDimOp, ranks: int) -> None:
        super().__init__(op, ranks, op.operands[0])
        self.made: dict[SSAValue, _Blocks] = {}
        waiting = [self.whole]
        while waiting:
            value = waiting.pop()
            maker, blocks = value.owner, None
            if isinstance(maker, AtenOp) and _is_own(value):
                blocks = _blocks_of(maker, {value: self.cuts[value]})
            if blocks is None or not isinstance(maker, AtenOp):
                self.products.clear()
                return
            self.made[value] = blocks
            if spec_of(maker).product is not None:
                self.products[maker] = blocks
                continue
            for operand, cut in zip(maker.operands, blocks.read, strict=True):
                self.cuts[operand] = cut
                waiting.append(operand)

    def block(self, value: SSAValue, cut: Cut, turn: int, new: Builder) -> SSAValue:
        blocks = self.made.get(value)
        if blocks is None:
            return super().block(value, cut, turn, new)
        assert isinstance(value.owner, AtenOp)
        return self.computed(value.owner, blocks, turn, new)

    def write(self) -> None:
        new, total = Builder.before(self.op), None
        for turn in (*range(1, self.ranks), 0):
            moved = None if total is None else self.shifted(total, new)
            term = self.block(self.whole, self.cuts[self.whole], turn, new)
            total = term if moved is None else _sum(new, moved, term)
        assert total is not None
        Rewriter.replace_op(self.op, [], [_named(total, self.op.results[0])])


def _is_own(value: SSAValue) -> bool:
    """True if one op reads a value, and it is a view, a sum, or a product of reduced values."""
    maker = value.owner
    if not isinstance(maker, AtenOp) or not value.has_one_use():
        return False
    if spec_of(maker).product is not None:
        return not any(map(_is_unreduced, maker.operands))
    return _only_moves(maker) or spec_of(maker).sign is not None


def _is_unreduced(value: SSAValue) -> bool:
    (attr,) = sharding_attrs_of_value(value) or (None,)
    return attr is not None and bool(attr.unreduced.data)


def decompose(program: Program, patterns: Collection[str]) -> int:
    """Decompose the collectives beside products of layers that match a pattern; return how many.
    Takes time linear in the ops."""
    mesh = program.needed_mesh()
    others = {*weight_ops(program), *gradient_reductions(program)}
    places = {op: place for place, op in enumerate(program.ops)}
    count = 0
    for op in list(program.ops):
        if op in others or type(op) not in (dist.AllGatherOp, dist.ReduceScatterOp):
            continue
        assert isinstance(op, dist.AlongDimOp)
        ranks, wide = mesh.sizes(op.axes), [axis for axis in op.axes if mesh.size(axis) > 1]
        if len(op.operands) > 1 or len(wide) != 1:
            continue
        is_gather = isinstance(op, dist.AllGatherOp)
        ring = _Gather(op, ranks, places) if is_gather else _Scatter(op, ranks)
        if any(fnmatch.fnmatch(layer_of(each), p) for each in ring.products for p in patterns):
            ring.write()
            count += 1
    remove_dead_ops(program)
    program.reorder(_operands_first(list(program.ops)))
    return count


def _operands_first(ops: Sequence[Operation]) -> Iterable[Operation]:
    """Move each op that comes after a reader of its results before this reader."""
    order: dict[Operation, None] = {}
    for op in ops:
        stack = [op]
        while stack:
            makers = (value.owner for value in stack[-1].operands)
            missing = [m for m in makers if isinstance(m, Operation) and m not in order]
            if missing:
                stack += missing
            else:
                order[stack.pop()] = None
    return order


@dataclass(frozen=True)
class DecomposeCollectivesPass(ModulePass):
    """Compute products beside a gather or a reduce-scatter in blocks, while the next block travels.

    A gather that products read, and a reduce-scatter of products, become as many turns as there are
    ranks. In each, a rank computes with one block, and sends one to its neighbour (`dist.shift`).
    Gradients of weights add up over the turns, or read the joined blocks if that moves fewer bytes;
    a forward gather's blocks stay for them. Nothing else is gathered whole, unless other ops read
    it. Views, casts and sums between collective and product are computed in blocks, too. Gathers of
    weights, reductions of gradients and messages over several mesh axes stay as they are.

    `layers`: names or patterns of the layers whose products are decomposed, separated by commas;
    default all.

    Requires: a local program without time axes, before `start-collectives`. Ensures: numerics
    unchanged except for the order of sums. Takes time linear in the ops.
    """

    name = "decompose-collectives"
    layers: str = ""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        parts = parts_of(Program(op))
        patterns = self._patterns({layer_of(each) for part in parts for each in part.ops})
        if not sum([self._decompose(part, patterns) for part in parts]):
            note(
                "no product of these layers reads a gather of activations over one mesh axis or "
                "gives a reduce-scatter; use a plan with sequence_parallel, or leave the pass out."
            )

    def _patterns(self, layers: Collection[str]) -> list[str]:
        patterns = [word for word in map(str.strip, self.layers.split(",")) if word] or ["*"]
        for pattern in patterns:
            if not fnmatch.filter(layers, pattern):
                raise ValueError(
                    f"layers: no op is in a layer '{pattern}'; give names or patterns such as "
                    f"'{next(filter(None, sorted(layers)), '*')}'."
                )
        return patterns

    @staticmethod
    def _decompose(program: Program, patterns: Collection[str]) -> int:
        if not program.is_local:
            raise ValueError(
                "the program is global; run insert-collectives before decompose-collectives."
            )
        if any(isinstance(op, StartedOp) for op in program.ops):
            raise ValueError(
                "the program has started collectives already; run decompose-collectives before "
                "start-collectives."
            )
        return decompose(program, patterns)
