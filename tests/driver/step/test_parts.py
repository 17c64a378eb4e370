"""A plan on parts of an axis: two key heads on four devices are sharded over one part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.backends.batch.rows import axes_of_rows
from shardweave.driver.step.request import CompileOptions, mesh_for
from shardweave.driver.training.checkpoints import load_checkpoint, save_checkpoint
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.workload import workload_of
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_followed
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests.ir_text import step
from shardweave.tests.spawn import run_ranks

SHARDED = Plan(mesh={"a": 4}, parameters={"x": '[{"a"}, {}]'})


class Attention(nn.Module):
    """Four query heads of size 4 that share two key heads, and a batch norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.q, self.k, self.v = (nn.Linear(16, size) for size in (16, 8, 8))
        self.o = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2)).square().mean()


def train(mesh: str, save: str = "", load: str = "", backend: str = "distributed") -> list[float]:
    """Losses of two steps, then of one in evaluation mode with more rows, and of another step."""
    torch.manual_seed(0)
    model, x = Attention().double(), torch.randn(2, 8, 16, dtype=torch.float64)
    if mesh:
        plan = sw.plan(sw.capture(model, (x,)), mesh, "megatron")
        if mesh == "tensor=4":
            plan = replace(plan, mesh={"tensor.0": 2, "tensor.1": 2})
        sw.compile(model, (x,), mesh=mesh, plan=plan, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    if load:
        assert load_checkpoint(load, state) is not None

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = [] if load else [step(), step()]
    if save:
        save_checkpoint(save, 2, state)
        own = [p.to_local().shape[0] for p in model.parameters() if isinstance(p, DTensor)]
        assert own == [8, 8, 4, 4, 4, 4, 4, 4, 16]  # norm, then q, k and v with biases, and o
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.cat([x, x, 2 * x])).item())
    model.train()
    return [*losses, step()]


@pytest.mark.slow
def test_keys_are_stored_over_a_part_and_checkpoints_fit_other_meshes(tmp_path: Path) -> None:
    folder, wanted = str(tmp_path), torch.tensor(train(""), dtype=torch.float64)
    for losses in run_ranks(train, 4, "tensor=4", folder):
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), wanted)
    for losses in run_ranks(train, 2, "tensor=2", "", folder):
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), wanted[2:])
    alone = train("tensor=4", load=folder, backend="reference")
    torch.testing.assert_close(torch.tensor(alone, dtype=torch.float64), wanted[2:])


def total() -> Program:
    """A program that is computed over parts of an axis of 4."""
    return step(
        """
        param %x : tensor<8x3xf64>
        %y = aten.view(%x) : tensor<2x4x3xf64>
        %z = aten.sum.dim_IntList(%y, dim = [0, 1]) : tensor<3xf64>
        output %z
        """
    )


def test_who_asks_for_the_whole_axis_may_have_a_program_on_its_parts() -> None:
    mesh = Mesh(a=4)
    local = partition(total(), mesh, SHARDED)
    assert local.mesh == mesh.factored("a", (2, 2))
    check_followed(SHARDED, local)
    assert mesh_for(CompileOptions(program=local, mesh="a=4")) == local.mesh
    with pytest.raises(ValueError, match=r"is for mesh a\.0=2,a\.1=2, but mesh a=2 is given"):
        mesh_for(CompileOptions(program=local, mesh="a=2"))
    assert simulate(local, "perlmutter", mesh).mesh == local.mesh
    given, own = (workload_of(local, find_cluster("perlmutter"), m) for m in (mesh, None))
    assert given == own
    assert any(block.communication_s for block in given.blocks)


@pytest.mark.parametrize(("kind", "size"), [("input", 8), ("param", 10)])
def test_arguments_without_a_sharding_keep_an_axis_whole_too(kind: str, size: int) -> None:
    program = step(
        f"""
        param %x : tensor<8x3xf64>
        {kind} %b : tensor<{size}xf64>
        %y = aten.view(%x) : tensor<2x4x3xf64>
        %z = aten.exp(%b) {{layer = "exp"}} : tensor<{size}xf64>
        output %y
        output %z
        """
    )
    plan = replace(SHARDED, activations={"exp": '[{"a"}]'})
    local = partition(program, Mesh(a=4), plan)
    assert local.mesh == Mesh(a=4)
    assert local.sharding_of_slot(local.arguments[1]).axes == {"a"}


def test_a_user_s_passes_do_not_split_the_mesh_of_a_step_that_has_programs() -> None:
    mesh, passes = Mesh(a=4), "preset:partition"
    assert partition(total(), mesh, SHARDED, passes).mesh == mesh.factored("a", (2, 2))
    assert partition(total(), mesh, SHARDED, passes, buffers={}).mesh == mesh


def test_ranks_have_different_rows_along_parts_of_data() -> None:
    assert axes_of_rows(Mesh(data=4, tensor=2).factored("data", (2, 2))) == ("data.0", "data.1")
    assert axes_of_rows(Mesh(tensor=4).factored("tensor", (2, 2))) == ()
