"""Oases' planning problem as data: a chain of blocks, each to get a degree of tensor parallelism.

A block is a sequence of compute that ends in one communication (Li et al., arXiv 2305.16121). Two
sub-batches, 0 and 1, alternate: while one computes, the other communicates. Equation numbers are
the paper's. All times are in seconds, all sizes in bytes of one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    the workspace while the block runs, of which (6) counts only the last block's. sync_s: seconds
    to reduce the block's gradients among devices with the same shards, which overlaps nothing.
    """

    degree: int
    forward: PassTimes
    backward: PassTimes
    state_bytes: int = 0
    kept_bytes: int = 0
    runtime_bytes: int = 0
    sync_s: float = 0.0


@dataclass(frozen=True)
class ChainBlock:
    """A block's name and its options, by growing degree."""

    name: str
    choices: tuple[DegreeOption, ...]


@dataclass(frozen=True)
class Chain:
    """Blocks in the order of the forward pass, and the costs of changing degree between them.

    gather_s[i][a][b]: seconds of the all-gather between block i at its choice a and block i + 1 at
    its choice b, in the forward pass if the degree grows, in the backward pass if it shrinks (the
    other direction takes a slice, which is free); not read if the degrees are equal.
    """

    blocks: tuple[ChainBlock, ...]
    gather_s: tuple[Matrix, ...]

    def degrees(self, path: Sequence[int]) -> tuple[int, ...]:
        """Degrees of a path (for each block, the index of its option)."""
        return tuple(b.choices[a].degree for b, a in zip(self.blocks, path, strict=True))

    def path(self, degrees: Sequence[int]) -> tuple[int, ...]:
        """The path with these degrees, one per block. ValueError if a block lacks its degree."""
        pairs = zip(self.blocks, degrees, strict=True)
        return tuple([c.degree for c in block.choices].index(degree) for block, degree in pairs)

    def memory_parts(self, path: Sequence[int]) -> tuple[int, int, int]:
        """The left side of (6), in bytes, for each of `MEMORY_PARTS`."""
        chosen = [b.choices[a] for b, a in zip(self.blocks, path, strict=True)]
        return (
            sum(choice.state_bytes for choice in chosen),
            sum(choice.kept_bytes for choice in chosen),
            chosen[-1].runtime_bytes,
        )


@dataclass(frozen=True)
class ChainCosts:
    """A chain with additive costs, the input of every solver.

    The time of a path a_0 .. a_k is sum_i unary_s[i][a_i] + sum_i edge_s[i][a_i][a_i+1], and its
    memory is sum_i memory_bytes[i][a_i].
    """

    unary_s: tuple[tuple[float, ...], ...]
    edge_s: tuple[Matrix, ...]
    memory_bytes: tuple[tuple[int, ...], ...]

    def time_s(self, path: Sequence[int]) -> float:
        nodes = sum(row[a] for row, a in zip(self.unary_s, path, strict=True))
        steps = zip(self.edge_s, pairwise(path), strict=True)
        return nodes + sum(matrix[a][b] for matrix, (a, b) in steps)

    def memory(self, path: Sequence[int]) -> int:
        return sum(row[a] for row, a in zip(self.memory_bytes, path, strict=True))


def linearise(chain: Chain) -> ChainCosts:
    """The objective (3) + (4) and the memory (6) of a chain as additive costs, exactly.

    One pass over blocks 1 .. k, visited in its own order, takes by (3)

        d_1^0 + sum_i max(d_i^1, c_i^0) + sum_{i>1} max(d_i^0, c_{i-1}^1) + c_k^1.

    max(d_i^1, c_i^0) has the degree of one block, and is a unary cost; max(d_i^0, c_{i-1}^1) has
    those of two, and is an edge cost. The backward pass visits the blocks in reverse. Where the
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
    """Build `ChainCosts`. edge_s: seconds that depend on two neighbours' options."""
    edges: list[Matrix] = []
    for (before, after), gather in zip(pairwise(chain.blocks), chain.gather_s, strict=True):
        edges.append(
            tuple(
                tuple(edge_s(left, right, gather[a][b]) for b, right in enumerate(after.choices))
                for a, left in enumerate(before.choices)
            )
        )
    return ChainCosts(tuple(map(tuple, unary)), tuple(edges), _memory(chain))


def _unary(chain: Chain) -> list[list[float]]:
    """Terms of (3) that depend on one block's degree, plus the reduction of its gradients."""
    unary = [
        [choice.sync_s + _alone_s(choice) for choice in block.choices] for block in chain.blocks
    ]
    first, last = chain.blocks[0].choices, chain.blocks[-1].choices
    for a, choice in enumerate(first):
        unary[0][a] += choice.forward.compute_s[0] + choice.backward.communication_s[1]
    for a, choice in enumerate(last):
        unary[-1][a] += choice.forward.communication_s[1] + choice.backward.compute_s[0]
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
    for a, choice in enumerate(chain.blocks[-1].choices):
        rows[-1][a] += choice.runtime_bytes
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
