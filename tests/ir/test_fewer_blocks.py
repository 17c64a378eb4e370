"""A deep step with few of its blocks: the same costs, block by block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.passes.prepare.fewer_blocks import with_fewer_blocks
from shardweave.planners.auto.reader import Depths
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.workload import workload_of
from shardweave.tests.zoo import captured

CLUSTER = find_cluster("perlmutter:nodes=1")


def deep(layers: int = 6) -> Program:
    return captured(f"gpt:layers={layers},hidden=16,heads=2,vocab=16,seq=4,batch=4").program


def test_kept_blocks_are_the_first_and_the_last_and_the_step_is_verified() -> None:
    few = with_fewer_blocks(deep(), 3)
    assert few is not None
    check(few)
    assert blocks_of(few).names == ("h.0", "h.1", "h.5")
    names = {slot.name for slot in few.arguments}
    assert "h.1.mlp.fc_in.weight" in names
    assert "h.3.mlp.fc_in.weight" not in names
    grads = [slot.name for slot in few.results if slot.kind == "grad"]
    assert len(grads) == len([slot for slot in few.arguments if slot.kind == "param"])


def test_costs_of_all_blocks_follow_from_those_of_a_few() -> None:
    program = deep(7)
    depths = Depths.of(program, deep=4)
    assert depths.is_deep
    found = depths.deepened(workload_of(depths.read, CLUSTER))
    whole = workload_of(program, CLUSTER)
    assert [block.name for block in found.blocks] == [block.name for block in whole.blocks]
    for one, other in zip(found.blocks, whole.blocks, strict=True):
        assert one.forward_s == pytest.approx(other.forward_s)
        assert one.backward_s == pytest.approx(other.backward_s)
        assert (one.parameter_bytes, one.kept_bytes) == (other.parameter_bytes, other.kept_bytes)
        assert one.crossing_bytes == other.crossing_bytes
    assert found.shared == whole.shared


@pytest.mark.parametrize("other", [1, 2, 3])
def test_blocks_of_which_an_inner_one_differs_are_all_read(other: int) -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.ReLU() if i == other else nn.GELU()) for i in range(5)),
    )
    program = sw.capture(Scored(model), (torch.zeros(4, 8),))
    assert len(blocks_of(program).names) == 5
    assert with_fewer_blocks(program, 3) is None


class Scored(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_no_fewer_blocks_than_there_are_and_too_few_are_told() -> None:
    assert with_fewer_blocks(deep(), 6) is None
    with pytest.raises(ValueError, match="keep at least 3"):
        with_fewer_blocks(deep(), 2)
