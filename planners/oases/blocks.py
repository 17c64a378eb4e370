"""Partition of a program into Oases' blocks: compute, and the communication that ends it.

A block holds a column- and row-parallel pair found by structure (`structure.find_pairs`). It ends
at the first value after the pair on which everything later depends, such as a residual stream: only
there can the batch be resharded for the next block. Pairs without such a value between them (the
layers of a decoder, which all read the encoder's output) share a block, and so a degree. Ops before
the first pair are part of the first block, ops after the last pair of the last block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.program.blocks import split_at_backward
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import storage_of
from shardweave.planners.structure.structure import Pair


@dataclass(frozen=True)
class ProgramBlock:
    """A block of a program.

    enters: the value that the block gets from the previous one; for the first block, the input of
    its first pair, or the pair's products. gradient: gradient of the block's output, which the
    next block's backward pass computes; None for the last block, or if it cannot be identified.
    """

    name: str
    forward: tuple[AtenOp, ...]
    backward: tuple[AtenOp, ...]
    pairs: tuple[Pair, ...]
    enters: tuple[SSAValue, ...]
    gradient: SSAValue | None


def read_blocks(program: Program, pairs: Sequence[Pair]) -> list[ProgramBlock]:
    """Find the blocks, in the order of the forward pass. Takes time linear in the ops. pairs: the
    parallel pairs at the smallest degree that shards anything. ValueError if there are none."""
    if not pairs:
        raise ValueError(
            "planner 'oases' has no tensor degree to choose: no column- and row-parallel pair of "
            "linear maps in the program divides over the tensor axis; use planner 'replicated'."
        )
    forward, backward = (
        [op for op in ops if isinstance(op, AtenOp)] for ops in split_at_backward(program)
    )
    activations = _activations(program, forward)
    places = {op: place for place, op in enumerate(forward)}
    spans = _spans(pairs, places)
    cuts, first = _boundaries(forward, activations, [(a, b) for a, b, _ in spans])
    starts = [0, *(place + 1 for place, _ in cuts)]
    numbers: dict[Operation, int] = {}
    members: list[list[AtenOp]] = []
    for number, (start, stop) in enumerate(pairwise([*starts, len(forward)])):
        members.append(forward[start:stop])
        numbers.update(dict.fromkeys(forward[start:stop], number))
    _number_backward(program, backward, activations, numbers)
    gradients = _gradients(backward, numbers, [value for _, value in cuts])
    blocks: list[ProgramBlock] = []
    for number, ops in enumerate(members):
        own = tuple(pair for _, _, pair in spans if numbers[pair.columns[0]] == number)
        if number:
            entering = (cuts[number - 1][1],)
        else:
            entering = first or tuple(op.results[0] for op in own[0].columns)
        blocks.append(
            ProgramBlock(
                _name(own, number),
                tuple(ops),
                tuple(op for op in backward if numbers[op] == number),
                own,
                entering,
                gradients[number],
            )
        )
    return blocks


def _activations(program: Program, forward: Iterable[AtenOp]) -> set[SSAValue]:
    from_inputs = {slot.value for slot in program.arguments if slot.kind == "input"}
    from_parameters = {slot.value for slot in program.arguments if slot.kind == "param"}
    for op in forward:
        for reached in (from_inputs, from_parameters):
            if not reached.isdisjoint(op.operands):
                reached.update(op.results)
    return from_inputs & from_parameters


def _spans(pairs: Sequence[Pair], places: dict[AtenOp, int]) -> list[tuple[int, int, Pair]]:
    spans = [
        (min(places[op] for op in pair.columns), max(places[op] for op in pair.ends), pair)
        for pair in pairs
    ]
    return sorted(spans, key=lambda span: span[0])


def _boundaries(
    forward: Sequence[AtenOp], activations: set[SSAValue], spans: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, SSAValue]], tuple[SSAValue, ...]]:
    """Boundaries between pairs, as (index of the last op before, the one value that later ops
    read); also the value that enters the first pair, if there is one."""
    single = dict(_single_crossings(forward, activations))
    boundaries: list[tuple[int, SSAValue]] = []
    end = spans[0][1]
    for (_, stop), (start, _) in pairwise(spans):
        end = max(end, stop)
        place = next((t for t in range(end, start) if t in single), None)
        if place is not None:
            boundaries.append((place, single[place]))
    before = [single[t] for t in range(spans[0][0]) if t in single]
    return boundaries, tuple(before[-1:])


def _single_crossings(
    ops: Sequence[AtenOp], tracked: set[SSAValue]
) -> Iterator[tuple[int, SSAValue]]:
    for place, alive in _crossings(ops, tracked):
        if len(alive) == 1:
            yield place, next(iter(alive))


def _crossings(
    ops: Sequence[AtenOp], tracked: set[SSAValue]
) -> Iterator[tuple[int, dict[SSAValue, None]]]:
    """Yield each op's index and the set of tracked storages read later: a dict, reused."""
    last = {
        storage_of(value): place
        for place, op in enumerate(ops)
        for value in op.operands
        if value in tracked
    }
    alive: dict[SSAValue, None] = {}
    for place, op in enumerate(ops):
        for value in op.results:
            if value in tracked and last.get(storage_of(value), -1) > place:
                alive[storage_of(value)] = None
        for value in op.operands:
            if last.get(storage_of(value)) == place:
                alive.pop(storage_of(value), None)
        yield place, alive


def _number_backward(
    program: Program,
    backward: Sequence[AtenOp],
    activations: set[SSAValue],
    numbers: dict[Operation, int],
) -> None:
    """Assign each backward op to the last block whose activations it reads, as the next block's
    backward pass reads a block's output too. An op that reads only gradients belongs to the
    earliest block that computed one."""
    owners: dict[SSAValue, set[int]] = {}
    for slot in program.arguments:
        if slot.kind == "param":
            owners[slot.value] = {
                numbers[use.operation] for use in slot.value.uses if use.operation in numbers
            }
    last = max(numbers.values())
    forward = set(numbers)
    for op in backward:
        evidence: list[int] = []
        gradients: list[int] = []
        for value in map(storage_of, op.operands):
            if value in owners:
                evidence += owners[value] if len(owners[value]) == 1 else ()
            elif isinstance(value.owner, Operation) and value.owner in numbers:
                if value.owner not in forward:
                    gradients.append(numbers[value.owner])
                elif value in activations:
                    evidence.append(numbers[value.owner])
        numbers[op] = max(evidence) if evidence else min(gradients, default=last)


def _gradients(
    backward: Sequence[AtenOp], numbers: dict[Operation, int], handed_on: Sequence[SSAValue]
) -> list[SSAValue | None]:
    """For each block, the gradient of its output; None if it cannot be identified."""
    begins: dict[int, list[int]] = {}
    lowest = len(handed_on)
    for place, op in enumerate(backward):
        if numbers[op] < lowest:
            begins[place - 1] = list(range(numbers[op], lowest))
            lowest = numbers[op]
    gradients: list[SSAValue | None] = [None] * (len(handed_on) + 1)
    produced: set[SSAValue] = {value for op in backward for value in op.results}
    for place, alive in _crossings(backward, produced):
        for number in begins.get(place, ()):
            shape = shape_of(handed_on[number])
            same = [value for value in alive if shape_of(value) == shape]
            gradients[number] = same[0] if len(same) == 1 else None
    return gradients


def _name(pairs: Sequence[Pair], number: int) -> str:
    """Name a block by the common prefix of its linear maps' layers, else by its number."""
    columns = [op for pair in pairs for op in pair.columns]
    ends = [op for pair in pairs for op in pair.ends if layer_of(op)]
    layers = [layer_of(op).split(".") for op in (*columns, *ends)]
    shared: list[str] = []
    for parts in zip(*layers, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(filter(None, shared)) or f"block {number}"
