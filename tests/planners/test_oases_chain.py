"""Oases' costs, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.benchmarks.oases_literal import published_costs
from shardweave.planners.cost.quantity import GIB
from shardweave.planners.oases.chain import (
    Chain,
    ChainBlock,
    DegreeOption,
    PassTimes,
    linearise,
)
from shardweave.planners.oases.chain import runs as runs_of
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.tests.planners.small_chains import three_blocks


def test_single_block_overlaps_one_sub_batch_with_the_other() -> None:
    choice = DegreeOption(1, PassTimes((1, 2), (4, 8)), PassTimes((16, 32), (64, 128)))
    # d0 + max(d1, c0) + c1, forward and backward.
    chain = Chain((ChainBlock("a", (choice,)),), ())
    assert linearise(chain).time_s((0,)) == (1 + 4 + 8) + (16 + 64 + 128)


def test_equal_degrees_pay_no_gather() -> None:
    chain = three_blocks()
    forward = 4 + (4 + 4 + 4) + (4 + 4) + 1
    backward = 6 + (6 + 6 + 6) + (6 + 6) + 1
    assert linearise(chain).time_s(chain.path([1, 1, 1])) == forward + backward


def test_growing_degree_gathers_in_the_forward_pass() -> None:
    chain = three_blocks()
    path = chain.path([1, 2, 2])
    forward = 4 + (4 + 3 + 3) + (max(2, 1) + max(2, 3)) + 3
    backward = 3 + (6 + 4 + 4) + (max(3, 4) + max(6, 4)) + 1
    gather = 10 + min(1, 2)
    assert linearise(chain).time_s(path) == forward + backward + gather


def test_shrinking_degree_gathers_in_the_backward_pass() -> None:
    chain = three_blocks()
    path = chain.path([2, 1, 1])
    forward = 2 + (3 + 4 + 4) + (max(4, 3) + max(4, 1)) + 1
    backward = 6 + (4 + 6 + 6) + (max(6, 1) + max(3, 1)) + 4
    gather = 20 + min(1, 3)
    assert linearise(chain).time_s(path) == forward + backward + gather


def test_literal_takes_one_degree_for_both_blocks_of_a_pair() -> None:
    chain = three_blocks()
    costs = published_costs(chain)
    forward = 4 + (max(2, 3) + max(2, 3)) + (max(2, 3) + 3)
    backward = (6 - 4) + (max(3, 3) + max(3, 3)) + (max(3, 3) + 3)
    assert costs.time_s(chain.path([1, 2, 2])) == forward + backward + 10 + min(1, 2)
    forward = 4 + (max(2, 3) + max(2, 3)) + (max(4, 1) + 1)
    backward = (6 - 4) + (max(3, 3) + max(3, 3)) + (max(6, 1) + 1)
    gathers = 10 + min(1, 2) + 20 + min(3, 6 - 4)
    assert costs.time_s(chain.path([1, 2, 1])) == forward + backward + gathers


def test_memory_counts_the_workspace_of_the_last_block_alone() -> None:
    chain = three_blocks()
    path = chain.path([1, 2, 2])
    assert chain.memory_parts(path) == (16 * GIB, 8 * GIB, GIB)
    assert linearise(chain).memory(path) == 25 * GIB


def test_runs_of_degrees_read_as_in_the_paper() -> None:
    assert runs_of([2, 2, 4, 4, 4, 2]) == "[2]*2 [4]*3 [2]*1"


def test_literal_costs_refuse_blocks_with_different_degrees() -> None:
    chain = three_blocks()
    narrow = replace(chain.blocks[2], choices=chain.blocks[2].choices[:1])
    chain = Chain((*chain.blocks[:2], narrow), (chain.gather_s[0], ((0.0,), (20.0,))))
    with pytest.raises(PlanError, match=r"'c' has \[1\], 'a' has \[1, 2\]"):
        published_costs(chain)
