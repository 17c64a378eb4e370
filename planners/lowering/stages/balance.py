"""Division of a program into stages of about equal work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.ops.registry import flops_of
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.traffic import bytes_moved

FLOPS_PER_BYTE = 100
"""FLOPs that moving one byte in memory counts as; 50 to 300 on current devices."""


def balanced_stages(program: Program, count: int) -> tuple[tuple[str, ...], ...]:
    """Choose the layers of `count` stages so that the slowest is as fast as possible.

    Exact for costs of FLOPs plus bytes moved. Repeated blocks are kept together unless there are
    fewer blocks and layers between them than stages, for example in a model that calls one block
    twice. Raises ValueError for more stages than layers.
    """
    parts = _parts(program, blocks_of(program).of_layer)
    if count > len(parts):
        parts = _parts(program, lambda layer: layer)
    if count > len(parts):
        named = [names[0] for names, _ in parts[:4] if names[0]]
        some = f" ({', '.join(named)}{', ..' if len(parts) > 4 else ''})" if named else ""
        raise ValueError(
            f"{count} stages are more than the {len(parts)} layers of the model that can be "
            f"stages{some}; use fewer stages, or make each layer a module of its own."
        )
    cuts = _cuts([cost for _, cost in parts], count)
    return tuple(
        tuple(name for names, _ in parts[first:last] for name in names)
        for first, last in pairwise(cuts)
    )


def _parts(
    program: Program, block_of_layer: Callable[[str], str | None]
) -> list[tuple[list[str], float]]:
    """Return the units that may not be divided between stages, as (layers, cost), in order."""
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
    """Cut `costs` into `count` non-empty runs with the least maximal sum; returns boundaries."""
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
