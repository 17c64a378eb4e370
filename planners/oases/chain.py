"""Oases' planning problem as data: a chain of blocks, each to get a degree of tensor parallelism.

A block is a sequence of compute that ends in one communication (Li et al., arXiv 2305.16121). Two
sub-batches, 0 and 1, alternate: while one computes, the other communicates. Equation numbers are
the paper's. All times are in seconds, all sizes in bytes of one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardweave.planners.cost.quantity import gib
from shardweave.planners.plan.plan_parts import PlanError

Matrix = tuple[tuple[float, ...], ...]

MEMORY_PARTS = ("parameters, gradients and optimizer", "activations", "workspace")


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a block in one pass: compute d and communication c of sub-batches 0 and 1."""

    compute_s: tuple[float, float]
    communication_s: tuple[float, float]


@dataclass(frozen=True)
class DegreeOption:
    """Cost of a block at one degree p, with the paper's symbols.

    backward: its compute includes recomputation. state_bytes (m_s): parameters, gradients and
    optimizer state; kept_bytes (m_t): activations kept for the backward pass; runtime_bytes (m_r):
    the workspace while the block runs, which (6) counts for a stage's last block only. sync_s:
    seconds to reduce the block's gradients among devices with the same shards, which overlaps
    nothing.
    """

    degree: int
    forward: PassTimes
    backward: PassTimes
    state_bytes: int = 0
    kept_bytes: int = 0
    runtime_bytes: int = 0
    sync_s: float = 0.0

    def in_step(self, kept: int, micro_batches: int) -> DegreeOption:
        """The option's costs for one micro-batch; the device keeps `kept` micro-batches at once."""
        return replace(self, kept_bytes=kept * self.kept_bytes, sync_s=self.sync_s / micro_batches)


@dataclass(frozen=True)
class ChainBlock:
    """A block's name and its options, by growing degree."""

    name: str
    choices: tuple[DegreeOption, ...]


@dataclass(frozen=True)
class Chain:
    """Blocks in the order of the forward pass, and the costs of changing degree between them.

    gather_s[i][a][b]: seconds of the all-gather between block i with option a and block i + 1 with
    option b; not read if their degrees are equal. If the degree grows, the forward pass gathers; if
    it shrinks, the backward pass. The other pass takes a slice, which is free. starts: index of the
    first block of each pipeline stage. With stages, costs are for one micro-batch, kept_bytes for
    all micro-batches in flight, and a change of degree between stages costs nothing.
    """

    blocks: tuple[ChainBlock, ...]
    gather_s: tuple[Matrix, ...]
    starts: tuple[int, ...] = (0,)
    micro_batches: int = 1

    @property
    def stages(self) -> list[Chain]:
        """A chain for each pipeline stage."""
        spans = pairwise((*self.starts, len(self.blocks)))
        return [Chain(self.blocks[a:b], self.gather_s[a : b - 1]) for a, b in spans]

    def degrees(self, path: Sequence[int]) -> tuple[int, ...]:
        """Degrees of a path (for each block, the index of its option)."""
        return tuple(b.choices[a].degree for b, a in zip(self.blocks, path, strict=True))

    def path(self, degrees: Sequence[int]) -> tuple[int, ...]:
        """The path with these degrees, one per block. ValueError if a block lacks its degree."""
        pairs = zip(self.blocks, degrees, strict=True)
        return tuple([c.degree for c in block.choices].index(degree) for block, degree in pairs)

    def memory_parts(self, path: Sequence[int]) -> tuple[int, int, int]:
        """The left side of (6), in bytes, for each of `MEMORY_PARTS`, in the fullest stage."""
        chosen = [b.choices[a] for b, a in zip(self.blocks, path, strict=True)]
        stages = (chosen[a:b] for a, b in pairwise((*self.starts, len(chosen))))
        parts = (
            (
                sum(choice.state_bytes for choice in stage),
                sum(choice.kept_bytes for choice in stage),
                stage[-1].runtime_bytes,
            )
            for stage in stages
        )
        return max(parts, key=sum)


@dataclass(frozen=True)
class ChainCosts:
    """A chain with additive costs, the input of every solver.

    The time of a path a_0 .. a_k is sum_i unary_s[i][a_i] + sum_i edge_s[i][a_i][a_i+1], and its
    memory is sum_i memory_bytes[i][a_i]. With stages, each has such sums. The path's time is then
    1F1B's, all stages plus the slowest once for each further micro-batch, and its memory is the
    fullest stage's.
    """

    unary_s: tuple[tuple[float, ...], ...]
    edge_s: tuple[Matrix, ...]
    memory_bytes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...] = (0,)
    micro_batches: int = 1

    def time_s(self, path: Sequence[int]) -> float:
        nodes = [row[a] for row, a in zip(self.unary_s, path, strict=True)]
        pairs = zip(self.edge_s, pairwise(path), strict=True)
        steps = [0.0, *(matrix[a][b] for matrix, (a, b) in pairs)]
        spans = pairwise((*self.starts, len(nodes)))
        stages = [sum(nodes[a:b]) + sum(steps[a:b]) for a, b in spans]
        return sum(stages) + (self.micro_batches - 1) * max(stages)

    def memory(self, path: Sequence[int]) -> int:
        sizes = [row[a] for row, a in zip(self.memory_bytes, path, strict=True)]
        return max(sum(sizes[a:b]) for a, b in pairwise((*self.starts, len(sizes))))


def linearise(chain: Chain) -> ChainCosts:
    """The objective (3) + (4) and the memory (6) of a chain as additive costs, exactly.

    One pass over blocks 1 .. k, visited in its own order, takes by (3)

        d_1^0 + sum_i max(d_i^1, c_i^0) + sum_{i>1} max(d_i^0, c_{i-1}^1) + c_k^1.

    max(d_i^1, c_i^0) depends on one block's degree: a unary cost. max(d_i^0, c_{i-1}^1) depends on
    two blocks' degrees: an edge cost. The backward pass visits the blocks in reverse. Where the
    degree changes, (4) adds the all-gather and min(c_{i-1}^1, d_i^0), the overlap that it
    destroys, in the pass that gathers.
    """
    return chain_costs_of(
        chain,
        _unary(chain),
        lambda left, right, gather_s: _pair_s(left, right) + _change_s(left, right, gather_s),
    )


def chain_costs_of(
    chain: Chain,
    unary: Sequence[Sequence[float]],
    edge_s: Callable[[DegreeOption, DegreeOption, float], float],
) -> ChainCosts:
    """Build `ChainCosts`. edge_s: seconds that depend on two neighbours' options; neighbours in
    different stages have none."""
    edges: list[Matrix] = []
    pairs = zip(pairwise(chain.blocks), chain.gather_s, strict=True)
    for number, ((before, after), gather) in enumerate(pairs, start=1):
        is_border = number in chain.starts
        edges.append(
            tuple(
                tuple(
                    0.0 if is_border else edge_s(left, right, gather[a][b])
                    for b, right in enumerate(after.choices)
                )
                for a, left in enumerate(before.choices)
            )
        )
    return ChainCosts(
        tuple(map(tuple, unary)), tuple(edges), _memory(chain), chain.starts, chain.micro_batches
    )


def _unary(chain: Chain) -> list[list[float]]:
    """Terms of (3) that depend on one block's degree, plus the reduction of its gradients."""
    unary = [
        [choice.sync_s + _alone_s(choice) for choice in block.choices] for block in chain.blocks
    ]
    for first, end in pairwise((*chain.starts, len(chain.blocks))):
        for a, choice in enumerate(chain.blocks[first].choices):
            unary[first][a] += choice.forward.compute_s[0] + choice.backward.communication_s[1]
        for a, choice in enumerate(chain.blocks[end - 1].choices):
            unary[end - 1][a] += choice.forward.communication_s[1] + choice.backward.compute_s[0]
    return unary


def _alone_s(choice: DegreeOption) -> float:
    """Seconds of max(d^1, c^0), summed over both passes of a block."""
    forward, backward = choice.forward, choice.backward
    return max(forward.compute_s[1], forward.communication_s[0]) + max(
        backward.compute_s[1], backward.communication_s[0]
    )


def _pair_s(left: DegreeOption, right: DegreeOption) -> float:
    """Seconds of max(d^0, c^1) of neighbours in both passes; backward goes right to left."""
    return max(right.forward.compute_s[0], left.forward.communication_s[1]) + max(
        left.backward.compute_s[0], right.backward.communication_s[1]
    )


def _change_s(left: DegreeOption, right: DegreeOption, gather_s: float) -> float:
    """Seconds of a change of degree between two blocks, by (4)."""
    if left.degree == right.degree:
        return 0.0
    if left.degree < right.degree:
        return gather_s + min(left.forward.communication_s[1], right.forward.compute_s[0])
    return gather_s + min(right.backward.communication_s[1], left.backward.compute_s[0])


def _memory(chain: Chain) -> tuple[tuple[int, ...], ...]:
    rows = [[c.state_bytes + c.kept_bytes for c in block.choices] for block in chain.blocks]
    for end in (*chain.starts[1:], len(rows)):
        for a, choice in enumerate(chain.blocks[end - 1].choices):
            rows[end - 1][a] += choice.runtime_bytes
    return tuple(map(tuple, rows))


def runs(degrees: Sequence[int]) -> str:
    """Write degrees in order, with the length of each run of equal ones: `[2]*8 [4]*16`."""
    counts: list[list[int]] = []
    for degree in degrees:
        if counts and counts[-1][0] == degree:
            counts[-1][1] += 1
        else:
            counts.append([degree, 1])
    return " ".join(f"[{degree}]*{count}" for degree, count in counts)


def no_fit(chain: Chain, path: Sequence[int], budget_bytes: float) -> PlanError:
    """Create the error that no path fits, with shortfall and parts. path: the smallest one."""
    parts = chain.memory_parts(path)
    shown = ", ".join(f"{name} {gib(size)}" for name, size in zip(MEMORY_PARTS, parts, strict=True))
    short = sum(parts) - budget_bytes
    return PlanError(
        f"no degrees fit into {gib(budget_bytes)} GiB: the least memory, with blocks by "
        f"degree {dict(sorted(Counter(chain.degrees(path)).items()))}, is "
        f"{gib(sum(parts))} GiB ({shown}), {gib(short)} GiB too much; use more devices, "
        "larger degrees or a smaller batch."
    )
