"""Orders of a pipeline whose stages are at several ranks each, with micro-batches in proportion.

A stage that has more devices, or slower ones, is at several coordinates of the stage axis; each
micro-batch goes through one of them, as in PipeDream (Narayanan et al. 2019, Sec. 3.2). With one
stage that is data parallelism in which every replica takes as many micro-batches as suit it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shardweave.planners.pipelines.table import Action, Table
from shardweave.planners.plan_parts import PlanError

Shares = Sequence[Sequence[int]]
"""By stage, how many micro-batches each of its ranks runs."""

SCHEDULES = ("1f1b", "gpipe")
"""Those that know such stages."""


def uneven_table(schedule: str, shares: Shares) -> Table:
    """What each rank runs; the ranks of stage 0 come first.

    A rank runs what its stage would run alone, less what goes elsewhere. In 1F1B a stage begins as
    many forward passes before its first backward pass as there are ranks from it to the end. Raises
    PlanError for a schedule that does not know such stages.
    """
    if schedule not in SCHEDULES:
        raise PlanError(
            f"schedule '{schedule}' has each stage on one rank, but the plan's 'shares' are "
            f"{shares_text(shares)}; use one of {', '.join(SCHEDULES)}."
        )
    count = sum(shares[0])
    behind = list(accumulate(len(one) for one in reversed(shares)))[::-1]
    table: list[tuple[Action, ...]] = []
    for stage, own in enumerate(shares):
        ahead = count if schedule == "gpipe" else min(behind[stage], count)
        actions = [Action(stage, "F", number) for number in range(ahead)]
        for number in range(count):
            actions.append(Action(stage, "B", number))
            if ahead + number < count:
                actions.append(Action(stage, "F", ahead + number))
        takers = dealt(own)
        table += [
            tuple(one for one in actions if takers[one.micro_batch] == rank)
            for rank in range(len(own))
        ]
    return tuple(table)


def dealt(shares: Sequence[int]) -> list[int]:
    """By micro-batch, who takes it: he who is furthest behind his share."""
    total = sum(shares)
    taken = [0] * len(shares)
    found: list[int] = []
    for number in range(1, total + 1):
        owed = [share * number - total * had for share, had in zip(shares, taken, strict=True)]
        taker = owed.index(max(owed))
        taken[taker] += 1
        found.append(taker)
    return found


def fitted_shares(shares: Shares, count: int) -> tuple[tuple[int, ...], ...]:
    """The same proportions of another number of micro-batches.

    Raises PlanError for fewer micro-batches than a stage has ranks.
    """
    most = max(map(len, shares), default=0)
    if count < most:
        raise PlanError(
            f"a stage is at {most} ranks, but a step has {count} micro-batches; give a larger "
            "batch, or fewer ranks in 'shares'."
        )
    return tuple(_fitted(one, count) for one in shares)


def _fitted(shares: Sequence[int], count: int) -> tuple[int, ...]:
    """Everyone takes one, and the rest goes in proportion, each to who is furthest behind."""
    total = sum(shares)
    found = [1] * len(shares)
    for _ in range(count - len(shares)):
        owed = [share * count - total * had for share, had in zip(shares, found, strict=True)]
        found[owed.index(max(owed))] += 1
    return tuple(found)


def shares_text(shares: Shares) -> str:
    """Shares as an option of `cut-stages`: `8/5,3` for two stages, the second at two ranks."""
    return "/".join(",".join(map(str, one)) for one in shares)


def read_shares(text: str) -> tuple[tuple[int, ...], ...]:
    """Shares from their text. Raises ValueError for another."""
    parts = [one.split(",") for one in text.split("/")]
    if not all(word.strip().isdecimal() for one in parts for word in one):
        raise ValueError(
            f"shares '{text}': expected numbers of micro-batches by stage, as 8/5,3 for two stages "
            "of which the second is at two ranks."
        )
    return tuple(tuple(map(int, one)) for one in parts)


def check_shares(shares: Shares, stages: int, micro_batches: int) -> None:
    """Raises PlanError unless shares are of so many stages and micro-batches."""
    if len(shares) != stages:
        raise PlanError(
            f"'shares' has {len(shares)} entries, expected one for each of {stages} stages."
        )
    for stage, own in enumerate(shares):
        if not own or min(own) < 1 or sum(own) != micro_batches:
            raise PlanError(
                f"the shares of stage {stage} are {list(own)}; expected 1 or more for each of its "
                f"ranks, {micro_batches} in all, which are the micro-batches."
            )
