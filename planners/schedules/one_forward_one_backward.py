"""Schedules without split backward passes: GPipe, 1F1B, and interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from shardweave.planners.schedules.table import Action, Kind, Table


def gpipe(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Make the GPipe table: all forward passes, then all backward (Huang et al. 2019, Sec. 2.3).
    With several chunks, rank r runs stages r, r + ranks, .., one after another."""
    sizes = ranks, micro_batches, chunks, micro_batches
    return tuple((*passes("F", rank, *sizes), *passes("B", rank, *sizes)) for rank in range(ranks))


def alternating(
    forward: Sequence[Action], backward: Sequence[Action], ahead: int
) -> tuple[Action, ...]:
    """Order a rank's passes: `ahead` forward passes, then both kinds in turn, then the rest."""
    ahead = min(ahead, len(forward))
    turns = chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return (*forward[:ahead], *turns, *backward[len(forward) - ahead :])


def one_forward_one_backward(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Make the 1F1B table: as many forward passes as there are later stages, then both kinds in
    turn, then the rest. Source: Narayanan et al. 2021, Sec. 2.2."""
    assert chunks == 1
    return _in_turn(ranks, micro_batches, chunks, micro_batches, 1)


def _in_turn(ranks: int, micro_batches: int, chunks: int, size: int, more: int) -> Table:
    """Make the table in which each rank runs `more` passes more ahead than the next rank, and then
    both kinds in turn. size: as for `passes`."""
    table: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        arguments = rank, ranks, micro_batches, chunks, size
        ahead = (chunks - 1) * size + more * (ranks - 1 - rank)
        table.append(alternating(passes("F", *arguments), passes("B", *arguments), ahead))
    return tuple(table)


def round_size(ranks: int, micro_batches: int) -> int:
    """Number of micro-batches that a rank runs through one chunk before it turns to the next.
    Raises ValueError if micro-batches do not divide into rounds of at least `ranks`."""
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise ValueError(
            f"{micro_batches} micro-batches on {ranks} ranks run in {rounds} rounds, which they "
            f"do not fill evenly; use a number of micro-batches that is a multiple of {ranks}."
        )
    return micro_batches // rounds


def passes(
    kind: Kind, rank: int, ranks: int, micro_batches: int, chunks: int, size: int
) -> list[Action]:
    """List a rank's passes of one kind in order: `size` micro-batches through each chunk in turn,
    then the next `size`; chunks in order if forward, else reversed."""
    return [
        Action(chunk * ranks + rank, kind, number)
        for first in range(0, micro_batches, size)
        for chunk in (range(chunks) if kind == "F" else reversed(range(chunks)))
        for number in range(first, first + size)
    ]


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Table:
    """Make the interleaved 1F1B table. Each rank runs two more passes ahead than the next rank."""
    return _in_turn(ranks, micro_batches, chunks, round_size(ranks, micro_batches), 2)
