"""Steps of a reshard: the short list of collectives from one sharding to another.

Planners count its bytes and the partitioner emits its ops, so that the planned cost is that of
the ops that run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from shardweave.ir.dialects import dist
from shardweave.ir.mesh.mesh import Mesh, whole_axis
from shardweave.ir.mesh.placement import Placement, Sharding, block_of, fits


@dataclass(frozen=True)
class ReshardStep:
    """One collective, or a local slice, of a resharding.

    op: class of the op. axes: mesh axes over which it communicates. arguments: its other arguments,
    by name. after: the sharding of its result. operand, result: their local shapes; a dim that
    becomes unevenly sharded is padded before the op, and a dim that is gathered loses its padding
    after it. sent_elements: number of elements that one rank sends over the network with ring
    algorithms.
    """

    op: type[dist.DistOp]
    axes: tuple[str, ...]
    arguments: Mapping[str, int | str]
    after: Sharding
    operand: tuple[int, ...]
    result: tuple[int, ...]
    sent_elements: float


class UnreachableSharding(ValueError):
    """Raised if a reduced value should become unreduced: no collective undoes a reduction."""


@dataclass
class _Search:
    """State of a search: the sharding reached so far, and the steps to it."""

    shape: tuple[int, ...]
    source: Sharding
    goal: Sharding
    mesh: Mesh
    now: Sharding
    steps: list[ReshardStep] = field(default_factory=list[ReshardStep])

    def push(
        self,
        kind: type[dist.DistOp],
        axes: tuple[str, ...],
        after: Sharding,
        ranks: int,
        **arguments: int | str,
    ) -> None:
        """Append the step that leads to sharding `after`. ranks: the number of ranks in a group."""
        operand, result = (
            list(self.now.local_shape(self.shape)),
            list(after.local_shape(self.shape)),
        )
        for dim in range(len(self.shape)):
            old, new = (math.prod(p.size for p in s.dims[dim]) for s in (self.now, after))
            if new > old:
                operand[dim] = result[dim] * (new // old)
            else:
                result[dim] = operand[dim] * (old // new)
        sent = kind.sent(math.prod(operand), ranks)
        shapes = tuple(operand), tuple(result)
        self.steps.append(ReshardStep(kind, axes, arguments, after, *shapes, sent))
        self.now = after
        if len(self.steps) > 1:
            self.join_parts(*self.steps[-2:])

    def join_parts(self, first: ReshardStep, second: ReshardStep) -> None:
        """Merge two messages over parts of one axis into one over both, if the effect is equal."""
        kind, axes = first.op, tuple(sorted(first.axes + second.axes, key=self.mesh.names.index))
        is_alike = kind is second.op and issubclass(kind, dist.CollectiveOp)
        if not is_alike or len({whole_axis(axis) for axis in axes}) > 1:
            return
        before = self.steps[-3].after if len(self.steps) > 2 else self.source
        for step in (first, second):  # the minor part, which comes first or last, has the blocks
            joined = dist.create_dist(kind, [], [], axes=list(axes), **step.arguments)
            try:
                after = joined.after(before, self.mesh)
            except ValueError:
                continue
            if after == second.after:
                del self.steps[-2:]
                self.now = before
                self.push(kind, axes, after, self.mesh.sizes(axes), **step.arguments)
                return

    def wanted(self) -> list[tuple[int, Placement]]:
        return [
            (dim, placement)
            for dim, placements in enumerate(self.goal.dims)
            for placement in placements
            if placement not in self.now.dims[dim]
        ]

    def can_place(self, dim: int, placement: Placement) -> bool:
        return fits((*self.now.dims[dim], placement), self.shape[dim])

    def place(self, dim: int, placement: Placement) -> tuple[Sharding, int]:
        """Return the sharding with `placement` added to `dim`, and the step's block length."""
        after = self.now.with_dim(dim, (*self.now.dims[dim], placement))
        return after, block_of(after.dims[dim], placement)

    def slice_free_axes(self) -> None:
        for dim, new in self.wanted():
            if new.axis not in self.now.axes and self.can_place(dim, new):
                after, block = self.place(dim, new)
                self.push(dist.SliceOp, (new.axis,), after, new.size, dim=dim, block=block)

    def scatter_sums(self) -> None:
        if self.now.reduction != "sum":
            return
        if any(placement.axis in self.now.unreduced for _, placement in self.wanted()):
            self.add_sub_batches()
        for dim, new in self.wanted():
            if new.axis in self.now.unreduced and self.can_place(dim, new):
                after, block = self.place(dim, new)
                after = after.reduced((new.axis,))
                where = {"dim": dim, "block": block}
                self.push(dist.ReduceScatterOp, (new.axis,), after, new.size, **where)

    def add_sub_batches(self) -> None:
        """Reduce over time axes first, a local sum, so that one message serves all sub-batches."""
        pending = [a for a in self.now.unreduced if a not in self.goal.unreduced]
        axes = tuple(a for a in pending if a in self.mesh.time_names)
        if axes:
            self.reduce(axes, ranks=1)

    def reduce_rest(self) -> None:
        axes = tuple(a for a in self.now.unreduced if a not in self.goal.unreduced)
        if axes:
            self.reduce(axes, self.mesh.sizes(axes))

    def reduce(self, axes: tuple[str, ...], ranks: int) -> None:
        by = {"op": "max"} if self.now.reduction == "max" else {}
        self.push(dist.AllReduceOp, axes, self.now.reduced(axes), ranks, **by)

    def move_and_gather(self) -> None:
        for dim, placements in enumerate(self.now.dims):
            # Gather minor axes first: major ones are then gathered in larger blocks.
            for old in reversed(placements):
                if old not in self.goal.dims[dim]:
                    self.move_or_gather(dim, old)

    def move_or_gather(self, dim: int, old: Placement) -> None:
        own = block_of(self.now.dims[dim], old)
        kept = [p for p in self.now.dims[dim] if p != old]
        targets = [(d, p) for d, p in self.wanted() if p.axis == old.axis and d != dim]
        if targets and self.can_place(*targets[0]):
            to_dim, new = targets[0]
            placed, block = self.place(to_dim, new)
            after = placed.with_dim(dim, kept)
            where = {"dim": to_dim, "block": block, "from_dim": dim, "from_block": own}
            self.push(dist.AllToAllOp, (old.axis,), after, old.size, **where)
        else:
            after = self.now.with_dim(dim, kept)
            self.push(dist.AllGatherOp, (old.axis,), after, old.size, dim=dim, block=own)


@lru_cache(maxsize=65536)
def reshard(
    shape: tuple[int, ...], source: Sharding, goal: Sharding, mesh: Mesh
) -> tuple[ReshardStep, ...]:
    """Find the steps that reshard a value of global `shape` from `source` to `goal`.

    Free slices come first; then sums are reduce-scattered where the goal is sharded, and
    all-reduced elsewhere; then axes move between dims (all-to-all) or are gathered. Each axis takes
    one step, except an axis that changes its stride within a dim (gather, then slice). Parts of an
    axis (`Mesh.factored`) that move alike share one message.

    Raises UnreachableSharding if the goal is unreduced over an axis that the source is not, or
    is a maximum where the source is a sum.
    """
    missing = [axis for axis in goal.unreduced if axis not in source.unreduced]
    if missing:
        raise UnreachableSharding(
            f"the value is fully reduced over {missing} and cannot become an unreduced sum over "
            "these axes again; ask for a sharding without 'unreduced'."
        )
    if goal.unreduced and goal.reduction != source.reduction:
        raise UnreachableSharding(
            f"the value is an unreduced {source.reduction} over {list(source.unreduced)}, and "
            f"cannot become an unreduced {goal.reduction}; reduce it first."
        )
    if source.dims == goal.dims and source.unreduced == goal.unreduced:
        return ()
    search = _Search(shape, source, goal, mesh, source)
    search.slice_free_axes()
    search.scatter_sums()
    search.reduce_rest()
    search.move_and_gather()
    search.slice_free_axes()
    if search.now.dims != goal.dims or search.now.unreduced != goal.unreduced:
        raise AssertionError(
            f"resharding {source} -> {goal} of {shape} ended at {search.now}. This is a defect of "
            "shardweave: report this line, and give the value another sharding until it is mended."
        )
    return tuple(search.steps)
