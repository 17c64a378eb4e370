"""Replicas of different speeds: micro-batches in proportion, where AMP deals them out evenly.

A departure from the paper, whose replicas all run as many and so wait for the slowest. The replicas
of a stage become coordinates of the stage axis at which the stage is (`planners.schedules.uneven`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.amp.costs import slowest_times
from shardweave.planners.amp.model import LayeredModel
from shardweave.planners.amp.network import ClusterArrays
from shardweave.planners.amp.search import Placed
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline


def with_shares(
    plan: Plan, program: Program, placed: Placed, model: LayeredModel, links: ClusterArrays
) -> Plan | None:
    """The plan of a placement with as many micro-batches for each replica as suit its devices.

    None where all suit as many, and with ZeRO, which divides a state among replicas that are alike.
    """
    strategy, pipeline = placed.estimate.strategy, plan.pipeline
    if strategy.data == 1 or plan.zero:
        return None
    count = strategy.data * strategy.num_micro_batches(model.batch)
    shares = tuple(
        shares_by_seconds(own, count) for own in _seconds_of_replicas(placed, model, links)
    )
    if all(len(set(own)) == 1 for own in shares):
        return None
    mesh = Mesh(stage=strategy.pipeline * strategy.data, tensor=strategy.tensor)
    if pipeline is None:
        ranks = tuple(map(int, placed.grid.flat))
        is_moved = ranks != tuple(range(len(ranks)))
        pipeline = Pipeline((("*",),), ranks=(ranks,) if is_moved else ())
    return replace(
        plan_megatron(program, mesh),
        planner=plan.planner,
        pipeline=replace(pipeline, micro_batches=count, shares=shares),
    )


def _seconds_of_replicas(
    placed: Placed, model: LayeredModel, links: ClusterArrays
) -> list[list[float]]:
    """By stage, the seconds of a micro-batch on each replica, which is as fast as its slowest
    device."""
    strategy, found = placed.estimate.strategy, list[list[float]]()
    for stage, (left, right) in zip(placed.grid, pairwise(placed.estimate.cuts), strict=True):
        seconds: list[float] = []
        for replica in stage:
            kinds: list[int] = links.kind[replica].tolist()
            names = [links.names[kind] for kind in dict.fromkeys(kinds)]
            seconds.append(float(slowest_times(model, names, strategy)[left:right].sum()))
        found.append(seconds)
    return found


def shares_by_seconds(seconds: Sequence[float], count: int) -> tuple[int, ...]:
    """How many of `count` micro-batches each replica runs, so that the last is done the soonest.

    seconds: of a micro-batch on each. Each runs one, and every other one goes to whoever would be
    done with it first, which is exact: to run fewer than a replica has by then, another would have
    to run one that it ends later.
    """
    found = [1] * len(seconds)
    for _ in range(count - len(seconds)):
        ends = [(number + 1) * one for number, one in zip(found, seconds, strict=True)]
        found[ends.index(min(ends))] += 1
    return tuple(found)
