"""The table of a pipeline's schedule: for each rank what it runs, first to last.

A *rank* here is a coordinate on the stage axis, which stands for all devices there; a *stage* is a
part of the model, of which a rank may have several, called chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward as a whole; backward to the input; backward to the weights, after that."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: `0F3` as text."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Table = tuple[tuple[Action, ...], ...]
"""By rank, what it runs, first to last."""


def actions_in_order(table: Table, num_stages: int) -> list[tuple[int, Action]]:
    """All actions with their ranks, in an order in which one process could run them.

    That in which they start if each takes as long and messages take no time. Raises ValueError for
    a table in which ranks wait for each other for ever, with what they wait for.
    """
    done: set[tuple[int, str, int]] = set()
    next_of = [0] * len(table)
    ordered: list[tuple[int, Action]] = []
    total = sum(map(len, table))
    while len(ordered) < total:
        ready = [
            (rank, actions[at])
            for rank, (actions, at) in enumerate(zip(table, next_of, strict=True))
            if at < len(actions) and needs_of(actions[at], num_stages) <= done
        ]
        if not ready:
            raise ValueError(
                f"the schedule does not end: {_stuck(table, next_of, done, num_stages)}."
            )
        for rank, action in ready:
            next_of[rank] += 1
            done.update(gives_of(action))
            ordered.append((rank, action))
    return ordered


def gives_of(action: Action) -> list[tuple[int, str, int]]:
    """Work that an action completes: a whole backward pass is both of its halves."""
    kinds = "IW" if action.kind == "B" else action.kind
    return [(action.stage, kind, action.micro_batch) for kind in kinds]


def needs_of(action: Action, num_stages: int) -> set[tuple[int, str, int]]:
    """Work that must be done before an action, in the form of `gives_of`."""
    stage, kind, number = action
    if kind == "F":
        return {(stage - 1, "F", number)} if stage else set()
    if kind == "W":
        return {(stage, "I", number)}
    before = {(stage, "F", number)}
    return before | ({(stage + 1, "I", number)} if stage + 1 < num_stages else set())


def _stuck(
    table: Table, next_of: Sequence[int], done: set[tuple[int, str, int]], num_stages: int
) -> str:
    waits: list[str] = []
    for rank, (actions, at) in enumerate(zip(table, next_of, strict=True)):
        if at < len(actions):
            missing = sorted(needs_of(actions[at], num_stages) - done)
            names = ", ".join(f"{stage}{kind}{number}" for stage, kind, number in missing)
            waits.append(f"rank {rank} is at {actions[at]} and waits for {names}")
    return "; ".join(waits)
