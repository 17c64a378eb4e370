"""Schedules of pipelines whose stages are replicated unevenly over ranks of the stage axis.

A stage may be at several coordinates of the stage axis; each micro-batch passes through one of
them, as in PipeDream (Narayanan et al. 2019, Sec. 3.2), and a faster rank takes more of them. With
a single stage this is data parallelism with different numbers of micro-batches for the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.schedules.list_order import list_table
from shardweave.planners.schedules.one_forward_one_backward import alternating
from shardweave.planners.schedules.schedules import LIST, find_schedule, possible_tables
from shardweave.planners.schedules.table import Action, Table

Shares = Sequence[Sequence[int]]
"""By stage, the number of micro-batches on each of its ranks; with chunks, of the first chunk."""


def uneven_table(schedule: str, shares: Shares, chunks: int = 1) -> Table:
    """Make the table of each rank's actions; the ranks of stage 0 come first.

    A rank runs the order of its stage at a single rank, without the micro-batches of the stage's
    other ranks; this adds no dependences, so the order has no deadlock. chunks: stages on each
    rank, placed as the schedule places them. Raises PlanError for impossible numbers.
    """
    if schedule == LIST:
        return _list_table(shares, chunks)
    if schedule == "1f1b" and chunks == 1:
        rows = _one_forward_one_backward(shares)
    else:
        rows = _in_groups(schedule, shares, chunks)
    table: list[tuple[Action, ...]] = []
    for own, actions in zip(shares, rows, strict=True):
        takers = takers_of(own)
        table += [
            tuple(a for a in actions if takers[a.micro_batch] == rank) for rank in range(len(own))
        ]
    return tuple(table)


def _list_table(shares: Shares, chunks: int) -> Table:
    """Make the table of `list` for passes of equal time."""
    ends = [0, *accumulate(map(len, shares))]
    first = [
        [begin + taker for taker in takers_of(own)]
        for begin, own in zip(ends[:-1], shares, strict=True)
    ]
    others = uneven_tables(shares, chunks)
    return list_table(ends[-1], sum(shares[0]), chunks, others=others, placement=first * chunks)


def uneven_tables(shares: Shares, chunks: int) -> list[Table]:
    """Make the tables of all schedules except `list` that are possible for these shares."""
    return possible_tables(lambda name: uneven_table(name, shares, chunks))


def _one_forward_one_backward(shares: Shares) -> list[list[Action]]:
    """List each stage's actions: as many forward passes before the first backward pass as there are
    ranks in this and later stages, then both kinds in turn."""
    count = sum(shares[0])
    behind = list(accumulate(len(own) for own in reversed(shares)))[::-1]
    rows: list[list[Action]] = []
    for stage, ranks in enumerate(behind):
        forward = [Action(stage, "F", number) for number in range(count)]
        backward = [Action(stage, "B", number) for number in range(count)]
        rows.append([*alternating(forward, backward, ranks - 1)])
    return rows


def _in_groups(schedule: str, shares: Shares, chunks: int) -> list[list[Action]]:
    """List each stage's actions: the schedule orders groups of micro-batches, not single ones."""
    count, size = sum(shares[0]), max(map(len, shares))
    groups = -(-count // size)
    try:
        table = find_schedule(schedule).table(len(shares), groups, chunks)
    except ValueError as error:
        raise PlanError(
            f"schedule '{schedule}' cannot order the {count} micro-batches, which it runs in "
            f"{groups} groups of {size} (the largest number of ranks of a stage): {error}"
        ) from error
    return [
        [
            action._replace(micro_batch=number)
            for action in actions
            for number in range(count)[action.micro_batch * size : (action.micro_batch + 1) * size]
        ]
        for actions in table
    ]


def takers_of(shares: Sequence[int]) -> list[int]:
    """Assign each micro-batch in turn to the rank that lags most behind its number in `shares`;
    return the ranks."""
    total = sum(shares)
    taken = [0] * len(shares)
    takers: list[int] = []
    for number in range(1, total + 1):
        owed = [share * number - total * had for share, had in zip(shares, taken, strict=True)]
        taker = owed.index(max(owed))
        taken[taker] += 1
        takers.append(taker)
    return takers


def fitted_shares(shares: Shares, count: int) -> tuple[tuple[int, ...], ...]:
    """Scale shares to `count` micro-batches. PlanError if a stage has more than `count` ranks."""
    most = max(map(len, shares), default=0)
    if count < most:
        raise PlanError(
            f"a stage has {most} ranks in 'shares', more than the {count} micro-batches of a "
            "step; give a larger batch, or list fewer ranks in 'shares'."
        )
    return tuple(_fitted(own, count) for own in shares)


def _fitted(shares: Sequence[int], count: int) -> tuple[int, ...]:
    """Give each rank one micro-batch; others go to the rank furthest behind its share."""
    total = sum(shares)
    counts = [1] * len(shares)
    for _ in range(count - len(shares)):
        owed = [share * count - total * had for share, had in zip(shares, counts, strict=True)]
        counts[owed.index(max(owed))] += 1
    return tuple(counts)


def shares_text(shares: Shares) -> str:
    """Write shares as text for `cut-stages`: `8/5,3` for two stages, the second on two ranks."""
    return "/".join(",".join(map(str, own)) for own in shares)


def read_shares(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse the text that `shares_text` writes. Raises ValueError for malformed text."""
    parts = [part.split(",") for part in text.split("/")]
    if not all(word.strip().isdecimal() for part in parts for word in part):
        raise ValueError(
            f"shares '{text}' are malformed; write the micro-batches of each rank, ranks of a "
            "stage separated by ',' and stages by '/', such as 8/5,3."
        )
    return tuple(tuple(map(int, part)) for part in parts)
