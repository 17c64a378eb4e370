"""The table of a pipeline schedule: the passes of each rank, first to last.

A *rank* here is a coordinate on the stage axis, and stands for all devices there. A *stage* is a
contiguous group of layers; a rank may hold several stages, called chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; backward to inputs only; backward to weights only, which follows `I`."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage, as text `0F3` (stage, kind, micro-batch)."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Table = tuple[tuple[Action, ...], ...]
"""Passes of each rank, first to last."""


class RankPasses:
    """The passes of one rank; each pass takes the stage's next micro-batch for its kind."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._ran: Counter[tuple[int, str]] = Counter()

    def ran(self, stage: int, kind: str) -> int:
        """Number of passes of a stage of kind F, I or W so far; a B counts as both I and W."""
        return self._ran[stage, kind]

    def add(self, stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            action = Action(stage, kind, self.ran(stage, "I" if kind == "B" else kind))
            self.actions.append(action)
            self._ran.update((stage, part) for _, part, _ in gives_of(action))


def actions_in_order(table: Table, num_stages: int) -> list[tuple[int, Action]]:
    """List all actions as (rank, action), in an order in which one process could run them.

    Actions are in the order in which they start if all take equally long and messages are free.
    Raises ValueError for a deadlock, with the work that each rank waits for.
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
            raise ValueError(f"the schedule deadlocks: {_stuck(table, next_of, done, num_stages)}.")
        for rank, action in ready:
            next_of[rank] += 1
            done.update(gives_of(action))
            ordered.append((rank, action))
    return ordered


def gives_of(action: Action) -> list[tuple[int, str, int]]:
    """List the work that an action completes: (stage, kind, micro-batch). B does both I and W."""
    kinds = "IW" if action.kind == "B" else action.kind
    return [(action.stage, kind, action.micro_batch) for kind in kinds]


def needs_of(action: Action, num_stages: int) -> set[tuple[int, str, int]]:
    """Return the work that must precede an action, as (stage, kind, micro-batch)."""
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
