"""The objective that OASES' released planner minimises, to compare with its numbers."""

from __future__ import annotations

from itertools import pairwise

from shardweave.planners.oases.chain import (
    Chain,
    ChainCosts,
    DegreeOption,
    chain_costs_of,
)
from shardweave.planners.plan.plan_parts import PlanError


def published_costs(chain: Chain) -> ChainCosts:
    """(3) + (4) as the released planner has them. Raises PlanError for unequal degrees."""
    _check_equal_degrees(chain)
    return chain_costs_of(chain, _published_unary(chain), _published_change_s)


def _published_unary(chain: Chain) -> list[list[float]]:
    """(3) as the released planner has it, all of it by the degree of one block.

    With g = d - d_forward, the backward without its recomputation, and all at the degree of i:
    d_1 + g_1 of the first block; max(d_i, c_i) + max(d_{i+1}, c_i) of those between, in each pass;
    max(d_{k-1}, c_{k-1}) + c_k of the last, in each pass. So it takes one degree for both blocks
    of a pair, visits the blocks of the backward pass in the order of the forward, and leaves
    out the first pair. It has equal sub-batches; of unequal ones, sub-batch 0 is taken.
    """
    first, last = chain.blocks[0].choices, chain.blocks[-1].choices
    unary = [[_gradient_s(choice) + choice.forward.compute_s[0] for choice in first]]
    for one, two in pairwise(chain.blocks[1:]):
        unary.append(
            [
                _beside_s(left, left) + _beside_s(right, left)
                for left, right in zip(one.choices, two.choices, strict=True)
            ]
        )
    if len(chain.blocks) > 1:
        unary.append([_beside_s(choice, choice) for choice in chain.blocks[-2].choices])
    for a, choice in enumerate(last):
        unary[-1][a] += 2 * choice.forward.communication_s[0]
    return unary


def _beside_s(computing: DegreeOption, communicating: DegreeOption) -> float:
    """max(d, c) of both passes."""
    communication_s = communicating.forward.communication_s[0]
    return max(computing.forward.compute_s[0], communication_s) + max(
        computing.backward.compute_s[0], communication_s
    )


def _gradient_s(choice: DegreeOption) -> float:
    """The backward without recomputation, which lasts as long as the forward."""
    return choice.backward.compute_s[0] - choice.forward.compute_s[0]


def _published_change_s(left: DegreeOption, right: DegreeOption, gather_s: float) -> float:
    """(4) as the released planner has it: the forward's blocks in either direction."""
    if left.degree == right.degree:
        return 0.0
    grows = left.degree < right.degree
    compute_s = right.forward.compute_s[0] if grows else _gradient_s(right)
    return gather_s + min(left.forward.communication_s[0], compute_s)


def _check_equal_degrees(chain: Chain) -> None:
    wanted = [choice.degree for choice in chain.blocks[0].choices]
    for block in chain.blocks:
        found = [choice.degree for choice in block.choices]
        if found != wanted:
            raise PlanError(
                f"published costs need equal degrees for all blocks: '{block.name}' has {found}, "
                f"'{chain.blocks[0].name}' has {wanted}."
            )
