"""Messages between the stages of a program: who sends what to whom, and in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import Run, StageMessage, StagePlaces, functions_of, runs_of


@dataclass(frozen=True)
class ComingMessage:
    """A message from another coordinate on the stage axis. run, stage: the sender's.

    seen: how many messages of the receiver the sender has received before it sends this one. When
    this message arrives, the receiver knows that those have arrived.
    """

    run: Run
    message: StageMessage
    stage: int
    seen: int


def coming_messages(program: Program) -> dict[int, dict[int, list[ComingMessage]]]:
    """Map each coordinate on the stage axis to the messages that it receives in a step, in order,
    by the sender's coordinate. Takes time linear in the messages."""
    places = StagePlaces.of(program)
    functions = functions_of(program)
    messages = {name: function.messages for name, function in functions.items()}
    seen: Counter[tuple[int, int]] = Counter()
    coming: dict[int, dict[int, list[ComingMessage]]] = {}
    for run in runs_of(program):
        stage = functions[run.function].stage
        for message in messages[run.function]:
            if not message.is_sent:
                seen[run.at, places.source(message.other, run.micro_batch)] += 1
                continue
            for place in places.goals(run, stage, message.other):
                if place != run.at:
                    arriving = ComingMessage(run, message, stage, seen[run.at, place])
                    coming.setdefault(place, {}).setdefault(run.at, []).append(arriving)
    return coming


def places_that_talk(program: Program) -> list[tuple[int, int]]:
    """Pairs (sender, receiver) that exchange messages, as coordinates on the stage axis."""
    places = StagePlaces.of(program)
    functions = functions_of(program)
    goals = {name: {op.to for op in function.sends} for name, function in functions.items()}
    pairs = {
        (run.at, goal)
        for run in runs_of(program)
        for to in goals[run.function]
        for goal in places.goals(run, functions[run.function].stage, to)
        if goal != run.at
    }
    return sorted(pairs)
