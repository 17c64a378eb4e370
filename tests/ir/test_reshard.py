"""Resharding: the steps bring every device its part, and send no more than they must."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Placement, Sharding, contiguous
from shardweave.ir.mesh.shards import assemble, merge_blocks, take_blocks, take_shard
from shardweave.ir.sharding.reshard import ReshardStep, UnreachableSharding, reshard
from shardweave.tests.ir.strategies import (
    all_coordinates,
    meshes,
    random_sharding,
    randoms,
    shapes,
)

MESH = Mesh(a=2, b=3)


def on(shape: tuple[int, ...], *dims: str, pending: str = "", mesh: Mesh = MESH) -> Sharding:
    """Plain shards: for each dim the names of its axes, one letter each."""
    placed = (contiguous(list(axes), size, mesh) for axes, size in zip(dims, shape, strict=True))
    return Sharding(tuple(placed), tuple(pending))


def run(step: ReshardStep, parts: list[Tensor], before: Sharding, mesh: Mesh) -> list[Tensor]:
    """One step on the tensors of all ranks."""
    found = list(parts)
    for ranks in mesh.groups(step.axes):
        members = [parts[rank] for rank in ranks]
        for index, rank in enumerate(ranks):
            found[rank] = _result(step, members, index, before)
    return found


def _result(step: ReshardStep, members: list[Tensor], index: int, before: Sharding) -> Tensor:
    size, kind, given = len(members), step.op.kind(), cast("dict[str, int]", step.arguments)
    if kind == "slice":
        return take_blocks(members[index], given["dim"], size, given["block"], index)
    if kind == "all_gather":
        return merge_blocks(members, given["dim"], given["block"])
    if kind == "all_to_all":
        whole = merge_blocks(members, given["from_dim"], given["from_block"])
        return take_blocks(whole, given["dim"], size, given["block"], index)
    stacked = torch.stack(members)
    total = stacked.amax(0) if before.reduction == "max" else stacked.sum(0)
    if kind == "reduce_scatter":
        return take_blocks(total, given["dim"], size, given["block"], index)
    assert kind == "all_reduce"
    return total


def random_terms(tensor: Tensor, sharding: Sharding, mesh: Mesh) -> list[Tensor]:
    """What each rank holds: shards, and where sums are pending random terms of them."""
    whole = sharding.whole()
    shards = [take_shard(tensor, whole, at) for at in all_coordinates(mesh)]
    if not sharding.unreduced:
        return shards
    found = list(shards)
    # Ranks that agree on all other axes and on these are replicas and must hold the same term.
    terms: dict[tuple[object, ...], Tensor] = {}
    for rank, at in enumerate(all_coordinates(mesh)):
        place = tuple(at[axis] for axis in sorted(sharding.axes))
        if place not in terms:
            terms[place] = torch.randint_like(shards[rank], 100)
        found[rank] = terms[place]
    total = assemble(lambda at: found[mesh.rank(at)], sharding, mesh)
    rest = tensor - total
    for rank, at in enumerate(all_coordinates(mesh)):
        if not any(at[axis] for axis in sharding.unreduced):
            found[rank] = found[rank] + take_shard(rest, whole, at)
    return found


@given(shapes, meshes, randoms)
@settings(max_examples=300)
def test_steps_bring_every_rank_its_part(
    shape: tuple[int, ...], mesh: Mesh, random: Random
) -> None:
    source = random_sharding(shape, mesh, random, may_be_sum=True)
    goal = random_sharding(shape, mesh, random)
    tensor = torch.arange(math.prod(shape)).view(shape)
    parts, before = random_terms(tensor, source, mesh), source
    for step in reshard(shape, source, goal, mesh):
        parts = run(step, parts, before, mesh)
        before = step.after
        assert {tuple(part.shape) for part in parts} == {before.local_shape(shape)}
        assert torch.equal(assemble(lambda at, p=parts: p[mesh.rank(at)], before, mesh), tensor)
    assert before == goal
    for rank, at in enumerate(all_coordinates(mesh)):
        assert torch.equal(parts[rank], take_shard(tensor, goal, at))


@given(shapes, meshes, randoms)
@settings(max_examples=200)
def test_some_sums_may_stay_pending(shape: tuple[int, ...], mesh: Mesh, random: Random) -> None:
    source = random_sharding(shape, mesh, random, may_be_sum=True)
    goal = random_sharding(shape, mesh, random)
    kept = tuple(a for a in source.unreduced if a not in goal.axes and random.random() < 0.7)
    goal = replace(goal, unreduced=kept)
    tensor = torch.arange(math.prod(shape)).view(shape)
    parts, before = random_terms(tensor, source, mesh), source
    for step in reshard(shape, source, goal, mesh):
        parts, before = run(step, parts, before, mesh), step.after
    assert before == goal
    assert torch.equal(assemble(lambda at: parts[mesh.rank(at)], goal, mesh), tensor)


@given(shapes, meshes, randoms)
@settings(max_examples=200)
def test_an_axis_takes_one_step_unless_it_stays_in_its_dim(
    shape: tuple[int, ...], mesh: Mesh, random: Random
) -> None:
    source = random_sharding(shape, mesh, random, may_be_sum=True)
    goal = random_sharding(shape, mesh, random)
    steps = reshard(shape, source, goal, mesh)
    for axis in mesh.names:
        kinds = [step.op.kind() for step in steps if axis in step.axes]
        assert len(kinds) <= 1 or kinds in (["all_gather", "slice"], ["all_reduce", "slice"])
    assert sum(step.op.kind() == "all_reduce" for step in steps) <= 1


@given(shapes, meshes, randoms)
@settings(max_examples=200)
def test_no_more_is_sent_than_to_make_the_value_whole_and_slice_it(
    shape: tuple[int, ...], mesh: Mesh, random: Random
) -> None:
    source = random_sharding(shape, mesh, random, may_be_sum=True)
    goal = random_sharding(shape, mesh, random)
    local, pending = math.prod(source.local_shape(shape)), mesh.sizes(source.unreduced)
    whole = 2 * local * (pending - 1) / pending + local * (
        math.prod(p.size for dim in source.dims for p in dim) - 1
    )
    sent = sum(step.sent_elements for step in reshard(shape, source, goal, mesh))
    assert sent <= whole * (1 + 1e-9)


def steps_of(shape: tuple[int, ...], source: Sharding, goal: Sharding) -> list[tuple[str, float]]:
    """Kind and sent elements of each step."""
    return [
        (step.op.kind(), round(step.sent_elements, 6))
        for step in reshard(shape, source, goal, MESH)
    ]


S = (12, 24)
"""288 elements."""


@pytest.mark.parametrize(
    ("source", "goal", "steps"),
    [
        (on(S, "a", "b"), on(S, "a", "b"), []),
        (on(S, "", ""), on(S, "a", ""), [("slice", 0)]),
        (on(S, "", ""), on(S, "ab", ""), [("slice", 0), ("slice", 0)]),
        (on(S, "a", ""), on(S, "", ""), [("all_gather", 144)]),
        (on(S, "ab", ""), on(S, "", ""), [("all_gather", 96), ("all_gather", 144)]),
        (on(S, "a", "b"), on(S, "a", ""), [("all_gather", 96)]),
        (on(S, "a", ""), on(S, "", "a"), [("all_to_all", 72)]),
        (on(S, "b", ""), on(S, "", "b"), [("all_to_all", 64)]),
        (
            # Neither axis can move first: the other is in its way.
            on(S, "a", "b"),
            on(S, "b", "a"),
            [("all_gather", 48), ("all_to_all", 64), ("slice", 0)],
        ),
        (on(S, "", "", pending="a"), on(S, "", ""), [("all_reduce", 288)]),
        (on(S, "", "", pending="b"), on(S, "", ""), [("all_reduce", 384)]),
        (on(S, "", "", pending="ab"), on(S, "", ""), [("all_reduce", 480)]),
        (on(S, "", "", pending="b"), on(S, "b", ""), [("reduce_scatter", 192)]),
        (on(S, "a", "", pending="b"), on(S, "a", ""), [("all_reduce", 192)]),
        (on(S, "", "", pending="b"), on(S, "a", ""), [("slice", 0), ("all_reduce", 192)]),
        (on(S, "", "", pending="b"), on(S, "a", "b"), [("slice", 0), ("reduce_scatter", 96)]),
        (on(S, "", "", pending="a"), on(S, "", "", pending="a"), []),
        (on(S, "", "", pending="ab"), on(S, "b", "", pending="a"), [("reduce_scatter", 192)]),
    ],
)
def test_steps_are_the_cheapest_that_there_are(
    source: Sharding, goal: Sharding, steps: list[tuple[str, float]]
) -> None:
    assert steps_of(S, source, goal) == steps


def test_maximum_is_reduced_and_then_sliced() -> None:
    source = replace(on(S, "", "", pending="a"), reduction="max")
    assert steps_of(S, source, on(S, "a", "")) == [("all_reduce", 288), ("slice", 0)]
    assert reshard(S, source, on(S, "", ""), MESH)[0].after == on(S, "", "")


def test_axis_that_changes_its_stride_is_gathered_and_sliced() -> None:
    strided = Sharding(((Placement("a", 2, 1),), ()))
    assert steps_of(S, strided, on(S, "a", "")) == [("all_gather", 144), ("slice", 0)]


def test_minor_axis_is_gathered_first() -> None:
    steps = reshard(S, on(S, "ab", ""), on(S, "", ""), MESH)
    assert [step.axes for step in steps] == [("b",), ("a",)]
    assert [step.arguments["block"] for step in steps] == [2, 6]


def test_gathering_the_major_axis_of_two_interleaves_blocks() -> None:
    (step,) = reshard(S, on(S, "ab", ""), Sharding((contiguous("ab", 12, MESH)[1:], ())), MESH)
    assert (step.op.kind(), step.axes, step.arguments["block"]) == ("all_gather", ("a",), 2)


def test_whole_value_cannot_become_unreduced() -> None:
    with pytest.raises(
        UnreachableSharding, match=r"fully reduced over \['a'\] and cannot become an unreduced"
    ):
        reshard(S, on(S, "", ""), on(S, "", "", pending="a"), MESH)
    with pytest.raises(UnreachableSharding, match=r"\['b'\]"):
        reshard(S, on(S, "", "", pending="a"), on(S, "", "", pending="ab"), MESH)


def test_sum_cannot_become_a_maximum() -> None:
    goal = replace(on(S, "", "", pending="a"), reduction="max")
    with pytest.raises(
        UnreachableSharding, match=r"an unreduced sum over .* cannot become an unreduced max"
    ):
        reshard(S, on(S, "", "", pending="a"), goal, MESH)
