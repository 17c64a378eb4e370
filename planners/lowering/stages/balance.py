"""Stages as equal as whole blocks allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.ops.registry import flops_of
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.traffic import bytes_moved

FLOPS_PER_BYTE = 100
"""FLOPs that a byte moved in memory counts as: of devices of today between 50 and 300."""


def balanced_stages(program: Program, count: int) -> tuple[tuple[str, ...], ...]:
    """The layers of `count` stages whose longest takes the least time; exact for its costs.

    A block that repeats is cut only where there are too few blocks and layers between them, as in a
    model that calls one block twice; what stands between blocks goes with its neighbours. The time
    of an op is its FLOPs and the bytes that it moves. Raises ValueError for more stages than
    layers.
    """
    parts = _parts(program, blocks_of(program).of_layer)
    if count > len(parts):
        parts = _parts(program, lambda layer: layer)
    if count > len(parts):
        named = [names[0] for names, _ in parts[:4] if names[0]]
        some = f" ({', '.join(named)}{', ..' if len(parts) > 4 else ''})" if named else ""
        raise ValueError(
            f"{count} stages, but the model has only {len(parts)} layers that can be stages{some}; "
            "use fewer stages, or write layers as modules of their own."
        )
    cuts = _cuts([cost for _, cost in parts], count)
    return tuple(
        tuple(name for names, _ in parts[first:last] for name in names)
        for first, last in pairwise(cuts)
    )


def _parts(
    program: Program, block_of_layer: Callable[[str], str | None]
) -> list[tuple[list[str], float]]:
    """The parts between which stages may be cut: their layers, and what they cost, in order."""
    costs: dict[str, float] = {}
    layers: dict[str, list[str]] = {}
    part_of: dict[str, str] = {}
    for op in program.ops:
        layer = layer_of(op)
        if layer and layer not in part_of:
            name = block_of_layer(layer) or layer
            part_of[layer] = name
            layers.setdefault(name, [name])
        if layer:
            work = flops_of(op) + FLOPS_PER_BYTE * bytes_moved(op)
            costs[part_of[layer]] = costs.get(part_of[layer], 0.0) + work
    around = {part[:end] for part in layers for end, letter in enumerate(part) if letter == "."}
    return [(names, costs[part]) for part, names in layers.items() if part not in around]


def _cuts(costs: Sequence[float], count: int) -> list[int]:
    """Cut a row of costs so that the largest sum of a part is least; no part is empty."""
    sums = [0.0, *accumulate(costs)]
    total = len(costs)
    best = [[sums[end] for end in range(total + 1)]]
    first: list[list[int]] = []
    for parts in range(2, count + 1):
        row, cuts = [float("inf")] * (total + 1), [0] * (total + 1)
        for end in range(parts, total + 1):
            options = (
                (max(best[-1][at], sums[end] - sums[at]), at) for at in range(parts - 1, end)
            )
            row[end], cuts[end] = min(options)
        best.append(row)
        first.append(cuts)
    ends = [total]
    for cuts in reversed(first):
        ends.append(cuts[ends[-1]])
    return [0, *reversed(ends)] if count > 1 else [0, total]
