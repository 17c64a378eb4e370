"""Expert dispatch: token rows are sent only to the ranks whose experts need them, not gathered.

After `block-experts`, each device looks up the rows of its own experts among the tokens of all
devices, and adds its results to these tokens. With few experts per token and many devices it needs
few of the rows. All ranks know the routing, and so which rank needs which row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import set_sharding_attrs, sharding_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.dist_rows import AddRowsOp, FetchRowsOp
from shardweave.ir.dialects.types import shape_of, tensor_type
from shardweave.ir.library.grouped import ROW_ROUTES
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program
from shardweave.passes.program_pass import PassOnProgram

Mode = Literal["cheaper", "all-to-all", "gather"]


@dataclass(frozen=True)
class DispatchExpertsPass(PassOnProgram):
    """Send tokens to the ranks whose experts take them, instead of gathering all of them.

    mode: `all-to-all` sends tokens wherever it can, `gather` nowhere. `cheaper` decides for each
    message by its bytes, with balanced routing: a gather brings all tokens to each rank.

    Requires: a local program with blocking collectives, without time axes. Ensures: results
    unchanged except for the order of sums. Nothing is dropped, whatever the routing. Linear.
    """

    mode: Mode = "cheaper"

    name = "dispatch-experts"

    def run(self, program: Program) -> None:
        mesh = program.needed_mesh()
        if self.mode == "gather" or not program.is_local:
            return
        routes: dict[SSAValue, SSAValue] = {}
        for site in list(_sites(program, mesh)):
            if self.mode == "all-to-all" or site.is_cheaper():
                site.rewrite(routes)


@dataclass(frozen=True)
class _Site:
    """A lookup of gathered rows, or a sum of rows that is reduce-scattered.

    whole: the gathers or reduce-scatters, in order. ops: the lookups, or the op that adds. axes:
    the axes that shard the table, slowest first. places: for each rank along `axes`, the index of
    its rows among `bounds`. tokens: number of rows of the table.
    """

    ops: Sequence[AtenOp]
    whole: Sequence[dist.DistOp]
    axes: tuple[str, ...]
    places: list[int]
    tokens: int

    def is_cheaper(self) -> bool:
        """True if sending needed rows, under balanced routing, moves fewer rows than a gather."""
        needed = max(shape_of(_numbers(op))[0] for op in self.ops)
        return needed * len(self.ops) < 2 * self.tokens

    def rewrite(self, known: dict[SSAValue, SSAValue]) -> None:
        """Replace the site by ops that send single rows. known: routes by row numbers, reused."""
        for op in self.ops:
            is_lookup = spec_of(op).is_lookup
            last = op if is_lookup else self.whole[-1]
            first = self.whole[0].operands[0] if is_lookup else op.operands[0]
            kind = FetchRowsOp if is_lookup else AddRowsOp
            operands = [first, _numbers(op), self._routes(_numbers(op), known)]
            made = dist.create_dist(kind, operands, [last.results[0].type], axes=list(self.axes))
            Builder.before(op).insert(made, last.results[0])
            set_sharding_attrs(made, sharding_attrs_of(last))
            last.results[0].replace_all_uses_with(made.results[0])
        is_lookup = spec_of(self.ops[0]).is_lookup
        gone = [*self.whole, *self.ops] if is_lookup else [*self.ops, *self.whole]
        for op in reversed(gone):
            Rewriter.erase_op(op)

    def _routes(self, numbers: SSAValue, known: dict[SSAValue, SSAValue]) -> SSAValue:
        if numbers not in known:
            own = numbers.owner
            assert isinstance(own, AtenOp)
            type_ = tensor_type((len(self.places), self.tokens), torch.bool)
            known[numbers] = Builder.after(own).aten(
                ROW_ROUTES, list(own.operands[:2]), type_, "routes",
                tokens=self.tokens, places=self.places,
            )  # fmt: skip
        return known[numbers]


def _numbers(op: AtenOp) -> SSAValue:
    return op.operands[1]


def _sites(program: Program, mesh: Mesh) -> Iterator[_Site]:
    for op in program.ops:
        if isinstance(op, dist.AllGatherOp) and not _is_gather(op.operands[0].owner):
            chain, value = [op], op.results[0]
            while value.has_one_use() and _is_gather(user := _user(value)):
                assert isinstance(user, dist.AllGatherOp)
                chain.append(user)
                value = user.results[0]
            axes = tuple(axis for gather in reversed(chain) for axis in gather.axes)
            users = [use.operation for use in value.uses]
            yield from _site(users, chain, axes, value, mesh)
        elif isinstance(op, AtenOp) and op.name == "aten.embedding_dense_backward":
            scatters: list[dist.DistOp] = []
            value = op.results[0]
            while value.has_one_use() and _is_scatter(user := _user(value)):
                assert isinstance(user, dist.ReduceScatterOp)
                scatters.append(user)
                value = user.results[0]
            axes = tuple(axis for scatter in scatters for axis in scatter.axes)
            if scatters and op.value("padding_idx") == -1:
                yield from _site([op], scatters, axes, op.results[0], mesh)


def _user(value: SSAValue) -> Operation:
    return next(iter(value.uses)).operation


def _is_gather(op: object) -> bool:
    if not isinstance(op, dist.AllGatherOp) or len(op.operands) != 1:
        return False
    return op.dim == 0 and op.block == shape_of(op.operands[0])[0]


def _is_scatter(op: object) -> bool:
    if not isinstance(op, dist.ReduceScatterOp) or len(op.operands) != 1:
        return False
    return op.dim == 0 and op.block == shape_of(op.results[0])[0]


def _site(
    users: Sequence[Operation],
    whole: Sequence[dist.DistOp],
    axes: tuple[str, ...],
    table: SSAValue,
    mesh: Mesh,
) -> Iterator[_Site]:
    """Yield a site for `users` if all of them read or add only rows of the device's own groups."""
    if not users or not _is_of_plain_rows(whole) or len(shape_of(table)) < 2:
        return
    own = [_own_rows(user, table) for user in users]
    ops = [user for user in users if isinstance(user, AtenOp)]
    rows = {row.operands[2].owner for row in own if row is not None}
    if None in own or len(rows) != 1 or len(set(users)) < len(users):
        return
    (index,) = rows
    if not isinstance(index, dist.ShardIndexOp) or set(index.axes) != set(axes):
        return
    yield _Site(ops, whole, axes, _places(axes, index.axes, mesh), shape_of(table)[0])


def _is_of_plain_rows(whole: Sequence[dist.DistOp]) -> bool:
    return all(_is_gather(op) or _is_scatter(op) for op in whole)


def _own_rows(op: Operation, table: SSAValue) -> AtenOp | None:
    """The op that gives `op`, a lookup or sum, the device's own row numbers; None otherwise."""
    if not isinstance(op, AtenOp) or len(op.operands) != 2:
        return None
    is_lookup = op.name == "aten.index.Tensor" and op.operands[0] is table
    if not is_lookup and op.name != "aten.embedding_dense_backward":
        return None
    owner = _numbers(op).owner
    if not isinstance(owner, AtenOp) or spec_of(owner).ragged != "begin":
        return None
    given = op.tensor("indices") if is_lookup else None
    is_first = not is_lookup or (isinstance(given, list) and given[0] is not None)
    return owner if len(owner.operands) == 3 and is_first else None


def _places(axes: Sequence[str], rows: Sequence[str], mesh: Mesh) -> list[int]:
    """Map each rank's position on `axes` to its position on `rows`, the same axes reordered."""
    sizes = (range(mesh.size(axis)) for axis in axes)
    return [mesh.position(rows, dict(zip(axes, at, strict=True))) for at in product(*sizes)]
