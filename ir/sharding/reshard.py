"""How a value moves from one sharding to another: a short list of collectives.

Both the planners (to count bytes) and the partitioner (to emit ops) ask here, so that what
is costed is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import DimSharding, Placement, Sharding, block_of, fits, ordered

StepKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice"]


@dataclass(frozen=True)
class ReshardStep:
    """One collective (or a local slice) of a resharding.

    axes: mesh axes joined. dim, block: the dim that is gathered, scattered or sliced, and the
    length of the local blocks, block-cyclic over the axis (see `placement.block_of`).
    from_dim, from_block: for all_to_all, the dim that is gathered while `dim` is split.
    after: the sharding of the result. sent_elements: what one rank sends over the network
    with ring algorithms.
    """

    kind: StepKind
    axes: tuple[str, ...]
    after: Sharding
    sent_elements: float
    dim: int = 0
    block: int = 0
    from_dim: int = 0
    from_block: int = 0


class UnreachableSharding(ValueError):
    """No collective turns a value that is whole into one that is unreduced."""


def _with_dim(sharding: Sharding, dim: int, placements: DimSharding) -> Sharding:
    dims = (*sharding.dims[:dim], placements, *sharding.dims[dim + 1 :])
    return replace(sharding, dims=dims)


@dataclass
class _Plan:
    """State of one search: the sharding reached so far and the steps that led there."""

    shape: tuple[int, ...]
    goal: Sharding
    now: Sharding
    steps: list[ReshardStep]

    def local_elements(self) -> int:
        return math.prod(self.now.local_shape(self.shape))

    def can_place(self, dim: int, placement: Placement) -> bool:
        return fits((*self.now.dims[dim], placement), self.shape[dim])

    def place(self, dim: int, placement: Placement) -> tuple[Sharding, int]:
        dims = ordered((*self.now.dims[dim], placement))
        return _with_dim(self.now, dim, dims), block_of(dims, placement)

    def push(self, step: ReshardStep) -> None:
        self.steps.append(step)
        self.now = step.after


def _wanted(plan: _Plan) -> list[tuple[int, Placement]]:
    return [
        (dim, placement)
        for dim, placements in enumerate(plan.goal.dims)
        for placement in placements
        if placement not in plan.now.dims[dim]
    ]


def _slice_free_axes(plan: _Plan) -> None:
    for dim, placement in _wanted(plan):
        if placement.axis not in plan.now.axes and plan.can_place(dim, placement):
            after, block = plan.place(dim, placement)
            plan.push(ReshardStep("slice", (placement.axis,), after, 0.0, dim, block))


def _scatter_sums(plan: _Plan, mesh: Mesh) -> None:
    if plan.now.reduction != "sum":
        return
    if any(placement.axis in plan.now.unreduced for _, placement in _wanted(plan)):
        _add_sub_batches(plan, mesh)
    for dim, placement in _wanted(plan):
        if placement.axis in plan.now.unreduced and plan.can_place(dim, placement):
            after, block = plan.place(dim, placement)
            left = tuple(a for a in after.unreduced if a != placement.axis)
            n = placement.size
            sent = plan.local_elements() * (n - 1) / n
            after = replace(after, unreduced=left)
            plan.push(ReshardStep("reduce_scatter", (placement.axis,), after, sent, dim, block))


def _add_sub_batches(plan: _Plan, mesh: Mesh) -> None:
    """Sum over time axes first, which is local, so that one message serves all sub-batches."""
    times = [axis.name for axis in mesh.axes if axis.kind == "time"]
    unreduced, kept = plan.now.unreduced, plan.goal.unreduced
    axes = tuple(a for a in unreduced if a in times and a not in kept)
    if axes:
        left = tuple(a for a in unreduced if a not in axes)
        plan.push(ReshardStep("all_reduce", axes, replace(plan.now, unreduced=left), 0.0))


def _reduce_rest(plan: _Plan, mesh: Mesh) -> None:
    axes = tuple(a for a in plan.now.unreduced if a not in plan.goal.unreduced)
    if axes:
        left = tuple(a for a in plan.now.unreduced if a in plan.goal.unreduced)
        n = mesh.sizes(axes)
        sent = 2 * plan.local_elements() * (n - 1) / n
        after = Sharding(plan.now.dims, left, plan.now.reduction if left else "sum")
        plan.push(ReshardStep("all_reduce", axes, after, sent))


def _move_and_gather(plan: _Plan) -> None:
    for dim, placements in enumerate(plan.now.dims):
        # Gather minor axes first: what is left is then gathered in larger blocks.
        for placement in reversed(placements):
            if placement in plan.goal.dims[dim]:
                continue
            old_block = block_of(plan.now.dims[dim], placement)
            kept = tuple(p for p in plan.now.dims[dim] if p != placement)
            elements, n = plan.local_elements(), placement.size
            target = next(
                ((d, p) for d, p in _wanted(plan) if p.axis == placement.axis and d != dim), None
            )
            if target is not None and plan.can_place(*target):
                to_dim, new = target
                placed, block = plan.place(to_dim, new)
                after = _with_dim(placed, dim, kept)
                sent = elements * (n - 1) / n
                plan.push(
                    ReshardStep(
                        "all_to_all", (new.axis,), after, sent, to_dim, block, dim, old_block
                    )
                )
            else:
                after = _with_dim(plan.now, dim, kept)
                sent = float(elements * (n - 1))
                plan.push(ReshardStep("all_gather", (placement.axis,), after, sent, dim, old_block))


@lru_cache(maxsize=65536)
def reshard(
    shape: tuple[int, ...], source: Sharding, goal: Sharding, mesh: Mesh
) -> tuple[ReshardStep, ...]:
    """The steps from `source` to `goal` for a value of global `shape`.

    Free slices come first, then sums are scattered where the goal wants shards and reduced
    where it wants the whole, then axes move between dims or are gathered. At most one step
    an axis, except an axis that changes its stride within a dim (gather, then slice).

    Raises UnreachableSharding if the goal is unreduced over an axis that the source is not, or
    is a maximum where the source is a sum.
    """
    missing = [axis for axis in goal.unreduced if axis not in source.unreduced]
    if missing:
        raise UnreachableSharding(
            f"a value that is whole over {missing} cannot become unreduced over them."
        )
    if goal.unreduced and goal.reduction != source.reduction:
        raise UnreachableSharding(
            f"a {source.reduction} over {list(source.unreduced)} cannot become a {goal.reduction}."
        )
    if source.dims == goal.dims and source.unreduced == goal.unreduced:
        return ()
    plan = _Plan(shape, goal, source, [])
    _slice_free_axes(plan)
    _scatter_sums(plan, mesh)
    _reduce_rest(plan, mesh)
    _move_and_gather(plan)
    _slice_free_axes(plan)
    if plan.now.dims != goal.dims or plan.now.unreduced != goal.unreduced:
        raise AssertionError(f"resharding {source} -> {goal} of {shape} ended at {plan.now}")
    return tuple(plan.steps)


def sent_elements(shape: Sequence[int], source: Sharding, goal: Sharding, mesh: Mesh) -> float:
    """Elements that one rank sends to reshard a value, with ring algorithms."""
    return sum(step.sent_elements for step in reshard(tuple(shape), source, goal, mesh))
