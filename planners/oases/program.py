"""Oases' chain for a program: its blocks, and the cost of each at each degree on a cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.dialects.types import (
    AnyTensor,
    dtype_of_type,
    dtype_of_value,
    num_bytes,
    shape_of,
)
from shardweave.ir.mesh.placement import Placement, Sharding
from shardweave.ir.ops.registry import spec_of, weight_of
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.cost.model import CostModel
from shardweave.planners.cost.quantity import counted
from shardweave.planners.lowering.stages.cut_stages import stages_of_layers
from shardweave.planners.oases.blocks import ProgramBlock, read_blocks
from shardweave.planners.oases.chain import Chain, ChainBlock, DegreeOption, Matrix, PassTimes
from shardweave.planners.oases.degree import Axes, DegreeSpace, batch_size
from shardweave.planners.oases.prices import DegreePrices, handed_at, moving_s, price
from shardweave.planners.structure.linear_maps import Cut, input_embeddings
from shardweave.planners.structure.structure import Pair, find_pairs


@dataclass(frozen=True)
class ChainOptions:
    """Options for lowering and running the step. recompute: a policy of `rematerialize`."""

    recompute: str
    precision: str = ""


@dataclass(frozen=True)
class ProgramChain:
    """A chain, and the blocks, degrees and prices from which it was made."""

    chain: Chain
    space: DegreeSpace
    prices: Mapping[int, DegreePrices]


def chain_of_program(
    program: Program, axes: Axes, cluster: Cluster, options: ChainOptions
) -> ProgramChain:
    """Make the chain (Oases' planning problem) of a program on a cluster.

    A block can have a degree if all its pairs divide over it, and if each device then has a sample
    of every sub-batch. Raises ValueError if a block can have no degree. Lowers the program once for
    each degree.
    """
    wide = [degree for degree in axes.degrees if degree > 1]
    pairs = {degree: find_pairs(program, "degree", degree) for degree in wide}
    blocks = read_blocks(program, pairs[wide[0]] if wide else [])
    cuts = [_cuts(program, block, pairs) for block in blocks]
    handed: dict[int, dict[SSAValue, Sharding]] = {}
    for degree in axes.degrees:
        everywhere = {v: c for block in cuts for v, c in block.get(degree, {}).items()}
        held = handed_at(program, axes, degree, everywhere)
        if held is not None:
            handed[degree] = held
    _check(program, blocks, cuts, handed, axes)
    space = DegreeSpace(axes, tuple(blocks), tuple(cuts), handed)
    prices = {degree: price(program, space, degree, cluster) for degree in handed}
    owners = _owners(program, blocks)
    stages = _stages(program, blocks, axes)
    # Of 1F1B, the first stage keeps a micro-batch for each stage.
    kept = [min(axes.micro_batches, 1 + stages[-1] - stage) for stage in stages]
    chosen = tuple(
        ChainBlock(
            block.name,
            tuple(
                _option(space, number, degree, prices[degree], owners[number], options).in_step(
                    kept[number], axes.micro_batches
                )
                for degree in sorted(set(cuts[number]) & set(prices))
            ),
        )
        for number, block in enumerate(blocks)
    )
    costs = CostModel(cluster, axes.mesh)
    gathers = tuple(
        _gathers(space, block.enters[0], before, after, costs)
        for block, (before, after) in zip(blocks[1:], pairwise(chosen), strict=True)
    )
    starts = tuple(stages.index(stage) for stage in sorted(set(stages)))
    return ProgramChain(Chain(chosen, gathers, starts, axes.micro_batches), space, prices)


def _stages(program: Program, blocks: Sequence[ProgramBlock], axes: Axes) -> list[int]:
    """List the pipeline stage of each block: its first pair's, or the previous block's if no stage
    names that pair's layer (`passes.stages.places` puts ops of such layers behind their operands).
    """
    if axes.pipeline is None:
        return [0] * len(blocks)
    stage_of = stages_of_layers(program, axes.pipeline.stages)
    named = (stage_of.get(layer_of(block.pairs[0].columns[0]), 0) for block in blocks)
    return [*accumulate(named, max)]


def _cuts(
    program: Program, block: ProgramBlock, pairs: dict[int, list[Pair]]
) -> dict[int, dict[SSAValue, Cut]]:
    """Shardings of a block's parameters, for each degree over which all its pairs divide."""
    cuts_of: dict[int, dict[SSAValue, Cut]] = {1: {}}
    for degree, known in pairs.items():
        by_columns = {pair.columns: pair.cuts for pair in known}
        own = [by_columns.get(pair.columns) for pair in block.pairs]
        if all(cuts is not None for cuts in own):
            cuts_of[degree] = {v: c for cuts in own if cuts is not None for v, c in cuts.items()}
            cuts_of[degree] |= _tables(program, block, degree, cuts_of[degree])
    return cuts_of


def _tables(
    program: Program, block: ProgramBlock, degree: int, known: dict[SSAValue, Cut]
) -> dict[SSAValue, Cut]:
    """Shardings along the rows of a block's embeddings whose weights no projection shares."""
    members = set(block.forward)
    tables: dict[SSAValue, Cut] = {}
    for op, table in input_embeddings(program):
        rows, _ = shape_of(table)
        projects = any(weight_of(user) is not None for user in _users(table))
        if op in members and table not in known and not projects and rows % degree == 0:
            tables[table] = ((Placement("degree", degree, rows // degree),), ())
    return tables


def _users(value: SSAValue) -> Iterator[Operation]:
    for use in value.uses:
        yield use.operation
        if spec_of(use.operation).is_layout:
            yield from _users(use.operation.results[0])


def _check(
    program: Program,
    blocks: Sequence[ProgramBlock],
    cuts: Sequence[dict[int, dict[SSAValue, Cut]]],
    degrees: Collection[int],
    axes: Axes,
) -> None:
    for block, known in zip(blocks, cuts, strict=True):
        if not set(known) & set(degrees):
            raise ValueError(
                f"no tensor degree suits block '{block.name}': its features divide by "
                f"{sorted(known)}, but a batch of {batch_size(program)} in "
                f"{counted(axes.micro_batches, 'micro-batch')} of {axes.batch_split} sub-batches "
                f"on {axes.mesh.num_devices} devices allows {sorted(degrees)}; use a larger batch, "
                "fewer micro_batches, batch_split=1 or fewer devices."
            )


def _owners(program: Program, blocks: Sequence[ProgramBlock]) -> list[list[str]]:
    numbers: dict[Operation, int] = {
        op: number for number, block in enumerate(blocks) for op in block.forward
    }
    owners: list[list[str]] = [[] for _ in blocks]
    for slot in program.arguments:
        users = [numbers[u.operation] for u in slot.value.uses if u.operation in numbers]
        if slot.kind == "param" and users:
            owners[min(users)].append(slot.name)
    return owners


def _option(
    space: DegreeSpace,
    number: int,
    degree: int,
    prices: DegreePrices,
    parameters: Sequence[str],
    options: ChainOptions,
) -> DegreeOption:
    """Make the option of a block at a degree, including its recomputation."""
    block, split = prices.blocks[number], space.axes.batch_split
    backward, backward_message = list(block.backward_s), list(block.backward_message_s)
    kept_bytes = block.kept_bytes
    if options.recompute != "none":
        # What only feeds a message whose result is kept is not computed again.
        keeps_messages = options.recompute == "after-communication"
        for copy in range(2):
            backward[copy] += block.forward_s[copy] - (block.fed_s[copy] if keeps_messages else 0.0)
            if options.recompute == "layer":
                backward_message[copy] += block.forward_message_s[copy]
        kept_bytes = split * _entering_bytes(space, number, degree)
        kept_bytes += block.message_bytes if keeps_messages else 0
    running = block.kept_bytes // split
    return DegreeOption(
        degree,
        PassTimes(_pair(block.forward_s), _pair(block.forward_message_s)),
        PassTimes(_pair(backward), _pair(backward_message)),
        state_bytes=sum(_state_bytes(prices.parameters[name], options) for name in parameters),
        kept_bytes=kept_bytes,
        runtime_bytes=running if options.recompute == "none" else 2 * running,
        sync_s=block.sync_s,
    )


def _state_bytes(parameter: AnyTensor, options: ChainOptions) -> int:
    size, itemsize = num_bytes(parameter), dtype_of_type(parameter).itemsize
    parts = state_bytes(size, itemsize, options.precision)
    return int(sum(parts.values()))


def _pair(seconds: Sequence[float]) -> tuple[float, float]:
    return seconds[0], seconds[1]


def _entering_bytes(space: DegreeSpace, number: int, degree: int) -> int:
    handed = space.handed[degree]
    return sum(
        prod(handed[value].local_shape(shape_of(value))) * dtype_of_value(value).itemsize
        for value in space.blocks[number].enters
    )


def _gathers(
    space: DegreeSpace, value: SSAValue, before: ChainBlock, after: ChainBlock, costs: CostModel
) -> Matrix:
    """Seconds to gather one block's output for the next, in all sub-batches, by their degrees."""

    def gather_s(first: int, second: int) -> float:
        if first == second:
            return 0.0
        small, large = (space.handed[degree][value] for degree in sorted((first, second)))
        return space.axes.batch_split * moving_s(value, small, large, space.axes, costs)

    return tuple(tuple(gather_s(a.degree, b.degree) for b in after.choices) for a in before.choices)
