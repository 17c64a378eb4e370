"""Chains with small random or round numbers, and their best path by trying all."""

from __future__ import annotations

import random
from itertools import product

from shardweave.benchmarks.oases_literal import published_costs
from shardweave.planners.cost.quantity import GIB
from shardweave.planners.oases.chain import (
    Chain,
    ChainBlock,
    DegreeOption,
    PassTimes,
    linearise,
)


def random_chain(seed: int, *, longest: int = 5) -> Chain:
    """Blocks whose every number is drawn at random; all have the same degrees."""
    draw = random.Random(seed)
    num_blocks, num_degrees = draw.randint(1, longest), draw.randint(1, 3)

    def work() -> PassTimes:
        return PassTimes(
            (draw.uniform(0, 5), draw.uniform(0, 5)), (draw.uniform(0, 5), draw.uniform(0, 5))
        )

    def choice(index: int) -> DegreeOption:
        sizes = [draw.randint(0, most) * GIB for most in (20, 9, 5)]
        return DegreeOption(2**index, work(), work(), *sizes)

    def gather() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw.uniform(0, 5) for _ in numbers) for _ in numbers)

    numbers = range(num_degrees)
    blocks = tuple(ChainBlock(f"b{i}", tuple(map(choice, numbers))) for i in range(num_blocks))
    return Chain(blocks, tuple(gather() for _ in blocks[1:]))


def random_budget(seed: int, chain: Chain) -> float:
    """Bytes that mostly hold some paths and not others, and sometimes none."""
    sizes = linearise(chain).memory_bytes
    least, most = sum(map(min, sizes)), sum(map(max, sizes))
    return max(GIB, random.Random(seed).uniform(1.1 * least - 0.1 * most, (least + most) / 2))


def least_time(chain: Chain, budget_bytes: float, *, literal: bool = False) -> float | None:
    """Seconds of the best path that fits, by trying all; None if none does."""
    costs = published_costs(chain) if literal else linearise(chain)
    times = [
        costs.time_s(path)
        for path in product(*(range(len(block.choices)) for block in chain.blocks))
        if costs.memory(path) <= budget_bytes
    ]
    return min(times, default=None)


def three_blocks() -> Chain:
    """Three equal blocks with degrees 1 and 2; gathers take 10 s where it grows, 20 s back."""
    low = DegreeOption(
        1, PassTimes((4, 4), (1, 1)), PassTimes((6, 6), (1, 1)), 8 * GIB, 2 * GIB, GIB
    )
    high = DegreeOption(
        2, PassTimes((2, 2), (3, 3)), PassTimes((3, 3), (4, 4)), 4 * GIB, 3 * GIB, GIB
    )
    blocks = tuple(ChainBlock(name, (low, high)) for name in "abc")
    return Chain(blocks, (((0.0, 10.0), (20.0, 0.0)),) * 2)
