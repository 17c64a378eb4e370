"""The order in which a pipeline's stages run the passes of their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Task(NamedTuple):
    """The forward or backward pass of one micro-batch through one stage."""

    is_forward: bool
    micro_batch: int


def order_of(schedule: str, stage: int, num_stages: int, micro_batches: int) -> list[Task]:
    """What a stage runs, first to last.

    gpipe: all forward passes, then all backward (Huang et al. 2019). 1f1b: as many forward passes
    as there are stages after it, then one of each in turn, then what is left (Narayanan et al.
    2021, Sec. 2.2).
    """
    forward = [Task(True, number) for number in range(micro_batches)]
    backward = [Task(False, number) for number in range(micro_batches)]
    if schedule == "gpipe":
        return forward + backward
    ahead = min(num_stages - 1 - stage, micro_batches)
    found = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        found += (one, other)
    return found + backward[micro_batches - ahead :]


def most_in_flight(tasks: Sequence[Task]) -> int:
    """The most micro-batches whose activations a stage holds at once.

    From the start of the forward to the end of the backward pass: min(S - s, m) of m micro-batches
    on stage s of S in 1f1b, all m in gpipe.
    """
    most = now = 0
    for task in tasks:
        now += 1 if task.is_forward else -1
        most = max(most, now)
    return most
