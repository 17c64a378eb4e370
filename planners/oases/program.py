"""Oases' chain of a program: its blocks, and what each costs at each degree on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from xdsl.ir import Operation, SSAValue

from shardweave.ir.facts import facts_of, weight_of
from shardweave.ir.placement import Placement
from shardweave.ir.program import Program
from shardweave.ir.storage import storage_of
from shardweave.ir.types import shape_of
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.model import CostModel
from shardweave.planners.oases.blocks import ProgramBlock, read_blocks
from shardweave.planners.oases.chain import Chain, ChainBlock, DegreeOption, Matrix, PassTimes
from shardweave.planners.oases.degree import Axes, DegreeModel, DegreeTimes, batch_size
from shardweave.planners.structure import Cut, Pair, find_pairs, input_embeddings


@dataclass(frozen=True)
class ChainOptions:
    """How the step runs. recompute: a policy of `rematerialize`. optimizer_multiplier: bytes of
    optimizer state per byte of parameters. literal: as the paper counts."""

    recompute: str
    optimizer_multiplier: float
    literal: bool


@dataclass(frozen=True)
class ProgramChain:
    """A chain, and the blocks and times that it comes from.

    cuts: of the parameters, by block and degree, over one axis of the size of the degree. times:
    by degree.
    """

    chain: Chain
    blocks: tuple[ProgramBlock, ...]
    axes: Axes
    cuts: tuple[dict[int, dict[SSAValue, Cut]], ...]
    times: dict[int, DegreeTimes]


def chain_of_program(
    program: Program, axes: Axes, cluster: Cluster, options: ChainOptions
) -> ProgramChain:
    """The planning problem that a program is on a cluster.

    A block can have the degrees over which all its pairs divide, and that leave each device a
    sample of every sub-batch. Raises ValueError if that leaves a block none. Walks the program
    once a degree.
    """
    wide = [degree for degree in axes.degrees if degree > 1]
    pairs = {degree: find_pairs(program, "degree", degree) for degree in wide}
    blocks = read_blocks(program, pairs[wide[0]] if wide else [])
    cuts = [_cuts(program, block, pairs) for block in blocks]
    model = DegreeModel(program, axes, CostModel(cluster, axes.mesh))
    times: dict[int, DegreeTimes] = {}
    for degree in axes.degrees:
        everywhere = {v: c for block in cuts for v, c in block.get(degree, {}).items()}
        ends = frozenset(op for pair in pairs.get(degree, ()) for op in pair.ends)
        found = model.times(degree, everywhere, ends)
        if found is not None:
            times[degree] = found
    _check(program, blocks, cuts, times, axes)
    owners = _owners(program, blocks)
    chosen = tuple(
        ChainBlock(
            block.name,
            tuple(
                _choice(block, degree, times[degree], owners[number], axes, options)
                for degree in sorted(set(cuts[number]) & set(times))
            ),
        )
        for number, block in enumerate(blocks)
    )
    gathers = tuple(
        _gathers(model, block.enters[0], before, after, times)
        for block, (before, after) in zip(blocks[1:], pairwise(chosen), strict=True)
    )
    return ProgramChain(Chain(chosen, gathers), tuple(blocks), axes, tuple(cuts), times)


def _cuts(
    program: Program, block: ProgramBlock, pairs: dict[int, list[Pair]]
) -> dict[int, dict[SSAValue, Cut]]:
    """The cuts of a block's parameters by the degrees that all its pairs have."""
    found: dict[int, dict[SSAValue, Cut]] = {1: {}}
    for degree, known in pairs.items():
        by_columns = {pair.columns: pair.cuts for pair in known}
        own = [by_columns.get(pair.columns) for pair in block.pairs]
        if all(cuts is not None for cuts in own):
            found[degree] = {v: c for cuts in own if cuts is not None for v, c in cuts.items()}
            found[degree] |= _tables(program, block, degree, found[degree])
    return found


def _tables(
    program: Program, block: ProgramBlock, degree: int, known: dict[SSAValue, Cut]
) -> dict[SSAValue, Cut]:
    """The cuts along their rows of embeddings in a block that no projection shares."""
    members = set(block.forward)
    found: dict[SSAValue, Cut] = {}
    for op, table in input_embeddings(program):
        rows, _ = shape_of(table)
        projects = any(weight_of(one) is not None for one in _users(table))
        if op in members and table not in known and not projects and rows % degree == 0:
            found[table] = ((Placement("degree", degree, rows // degree),), ())
    return found


def _users(value: SSAValue) -> Iterator[Operation]:
    """What reads a value or a view of it."""
    for use in value.uses:
        yield use.operation
        if facts_of(use.operation).is_layout:
            yield from _users(use.operation.results[0])


def _check(
    program: Program,
    blocks: Sequence[ProgramBlock],
    cuts: Sequence[dict[int, dict[SSAValue, Cut]]],
    times: dict[int, DegreeTimes],
    axes: Axes,
) -> None:
    for block, known in zip(blocks, cuts, strict=True):
        if not set(known) & set(times):
            raise ValueError(
                f"block '{block.name}' can have degrees {sorted(known)} by its features, and "
                f"{sorted(times)} by a batch of {batch_size(program)} in {axes.batch_split} "
                f"sub-batches on {axes.mesh.num_devices} devices; use a larger batch, "
                "batch_split=1 or fewer devices."
            )


def _owners(program: Program, blocks: Sequence[ProgramBlock]) -> list[list[tuple[str, SSAValue]]]:
    """The parameters of each block; one that several use belongs to the first."""
    numbers: dict[Operation, int] = {
        op: number for number, block in enumerate(blocks) for op in block.forward
    }
    found: list[list[tuple[str, SSAValue]]] = [[] for _ in blocks]
    for slot in program.arguments:
        users = [numbers[u.operation] for u in slot.value.uses if u.operation in numbers]
        if slot.kind == "param" and users:
            found[min(users)].append((slot.name, slot.value))
    return found


def _choice(
    block: ProgramBlock,
    degree: int,
    times: DegreeTimes,
    parameters: Iterable[tuple[str, SSAValue]],
    axes: Axes,
    options: ChainOptions,
) -> DegreeOption:
    def seconds(table: dict[Operation, float], ops: Iterable[Operation]) -> float:
        return sum(table.get(op, 0.0) for op in ops)

    ends = {op for pair in block.pairs for op in pair.ends}
    forward = seconds(times.compute_s, block.forward)
    forward_message = seconds(times.communication_s, block.forward)
    backward = seconds(times.compute_s, block.backward)
    backward_message = seconds(times.communication_s, block.backward)
    if options.recompute != "none":
        kept = options.recompute == "after-communication" and not options.literal
        # What only feeds a message whose result is kept is not computed again.
        backward += forward - (seconds(times.compute_s, ends) if kept else 0.0)
        backward_message += forward_message if options.recompute == "layer" else 0.0
    split = axes.batch_split
    saved = _bytes(times, _saved(block))
    state = 2 + options.optimizer_multiplier
    own = list(parameters)
    return DegreeOption(
        degree,
        _pass_times(forward, forward_message, split),
        _pass_times(backward, backward_message, split),
        state_bytes=int(state * _bytes(times, [value for _, value in own])),
        kept_bytes=split * (saved if options.recompute == "none" else _kept(block, times, options)),
        runtime_bytes=saved if options.recompute == "none" else 2 * saved,
        sync_s=0.0 if options.literal else sum(times.sync_s.get(name, 0.0) for name, _ in own),
    )


def _pass_times(compute_s: float, communication_s: float, split: int) -> PassTimes:
    """Of two sub-batches; of a whole batch, the other is empty."""
    if split == 1:
        return PassTimes((compute_s, 0.0), (communication_s, 0.0))
    return PassTimes((compute_s, compute_s), (communication_s, communication_s))


def _saved(block: ProgramBlock) -> list[SSAValue]:
    """What the forward pass of a block computes and its backward pass reads."""
    read = {storage_of(value) for op in block.backward for value in op.operands}
    return [value for op in block.forward for value in op.results if value in read]


def _kept(block: ProgramBlock, times: DegreeTimes, options: ChainOptions) -> int:
    """What a block that is recomputed keeps: what enters it, and what its messages bring."""
    values = list(block.enters)
    if options.recompute == "after-communication":
        values += [op.results[0] for pair in block.pairs for op in pair.ends]
    return _bytes(times, values)


def _bytes(times: DegreeTimes, values: Iterable[SSAValue]) -> int:
    return sum(times.local_bytes(value) for value in values)


def _gathers(
    model: DegreeModel,
    value: SSAValue,
    before: ChainBlock,
    after: ChainBlock,
    times: dict[int, DegreeTimes],
) -> Matrix:
    """Seconds of gathering, in all sub-batches, what one block hands to the next."""
    held = {degree: found.shardings[value].whole() for degree, found in times.items()}

    def gather_s(one: int, two: int) -> float:
        if one == two:
            return 0.0
        small, large = held[min(one, two)], held[max(one, two)]
        return model.axes.batch_split * model.moving_s(value, small, large)

    return tuple(tuple(gather_s(a.degree, b.degree) for b in after.choices) for a in before.choices)
