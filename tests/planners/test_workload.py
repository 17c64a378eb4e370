"""The work of blocks, against the program's own numbers and against hand-worked ones."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.dist import CollectiveOp
from shardweave.ir.inspect.stats import stats
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.model import CostModel, kind_of
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.workload import Workload, workload_of
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.tests.ir_text import step
from shardweave.tests.planners.small_clusters import cluster
from shardweave.tests.zoo import SPECS, captured

CLUSTER = find_cluster("perlmutter")
A100 = next(iter(CLUSTER.devices))


def local(name: str, mesh: Mesh) -> Program:
    program = captured(SPECS[name]).program
    return local_program(program, plan_megatron(program, mesh))


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "unet"])
def test_blocks_add_up_to_the_whole_program(name: str) -> None:
    program = local(name, Mesh(data=2, tensor=2))
    work, whole = workload_of(program, CLUSTER), stats(program)
    assert sum(one.parameter_bytes for one in work.blocks) == whole.parameter_bytes
    assert sum(one.kept_bytes for one in work.blocks) == whole.kept_bytes
    cost = CostModel(CLUSTER, Mesh(data=2, tensor=2))
    waited = sum(sum(one.communication_s.values()) for one in work.blocks)
    collectives = [op for op in program.ops if isinstance(op, CollectiveOp)]
    assert waited == pytest.approx(sum(cost.collective_time_s(op) for op in collectives))
    seconds = sum(cost.op_time_s(op) for op in program.ops if kind_of(op) == "compute")
    assert work.compute_s(A100) == pytest.approx(seconds)


def test_blocks_stand_in_the_order_of_the_forward_pass_with_their_layers() -> None:
    work = workload_of(captured(SPECS["gpt"]).program, CLUSTER)
    assert [one.name for one in work.blocks] == ["wte", "h.0", "h.1", "ln_f"]
    assert work.blocks[0].layers == ("wte", "wpe")
    assert "h.1.mlp.fc_in" in work.blocks[2].layers


def test_equal_layers_ask_for_the_same() -> None:
    # Inner layers: what adds the embeddings, and their gradients, counts for the block beside it.
    program = captured("gpt:layers=4,hidden=16,heads=8,vocab=32,seq=16,batch=8").program
    local_one = local_program(program, plan_megatron(program, Mesh(tensor=2)))
    first, second = workload_of(local_one, CLUSTER).blocks[2:4]
    assert first.forward_s == second.forward_s
    assert first.backward_s == second.backward_s
    assert (first.kept_bytes, first.parameter_bytes) == (second.kept_bytes, second.parameter_bytes)


CHAIN = """
param %a : tensor<4x8xf32>
param %b : tensor<8x2xf32>
input %x : tensor<3x4xf32>
%h = aten.mm(%x, %a) {layer = "one.0"} : tensor<3x8xf32>
%s = aten.relu(%x) {layer = "one.0"} : tensor<3x4xf32>
%y = aten.mm(%h, %b) {layer = "one.1"} : tensor<3x2xf32>
%z = aten.neg(%y) {layer = "head"} : tensor<3x2xf32>
%t = aten.neg(%s) {layer = "head"} : tensor<3x4xf32>
output %z
output %t
"""


def chain() -> Workload:
    return workload_of(step(CHAIN), cluster(1))


def test_what_crosses_is_what_later_blocks_read() -> None:
    blocks = chain().blocks
    # %h (3x8) and the skip %s (3x4); then %y (3x2) and the skip; then nothing.
    assert [one.crossing_bytes for one in blocks] == [4 * (24 + 12), 4 * (6 + 12), 0]


def test_parameters_and_workspace_count_where_they_are_used() -> None:
    blocks = chain().blocks
    assert [one.parameter_bytes for one in blocks] == [4 * 32, 4 * 16, 0]
    # %h and %y; parameters and inputs are there anyway.
    assert [one.workspace_bytes for one in blocks] == [4 * 24, 4 * (24 + 6), 4 * (12 + 12)]


def test_tied_parameter_counts_once_in_the_first_block_that_uses_it() -> None:
    work = workload_of(captured(SPECS["gpt"]).program, CLUSTER)
    table = next(s for s in captured(SPECS["gpt"]).program.arguments if s.name == "wte.weight")
    assert table.aliases
    assert work.blocks[0].parameter_bytes > work.blocks[-1].parameter_bytes
    counted = sum(one.parameter_bytes for one in work.blocks)
    assert counted == stats(captured(SPECS["gpt"]).program).parameter_bytes
    assert [(one.first, one.second) for one in work.shared] == [(0, 3)]


def test_communication_is_told_by_axes_and_phase() -> None:
    work = workload_of(local("gpt", Mesh(data=2, tensor=2)), CLUSTER)
    block = work.blocks[1]
    assert set(block.communication_s) == {(("tensor",), "forward"), (("tensor",), "backward")}
    assert {axes for one in work.blocks for axes, _ in one.communication_s} == {
        ("data",),
        ("tensor",),
        ("data", "tensor"),  # the loss
    }
