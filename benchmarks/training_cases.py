"""The rows of benchmarks/training.py: each parallelism of ours, and PyTorch's own beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch_tensor_parallel
from timed_rows import TimedRow
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardweave as sw
from shardweave.driver.models.models import Example, build_example
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.lowering.partition import partition
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan

KEEP = "delete-redundant-collectives"
"""The pass that keeps gathered weights for the backward pass: reshard_after_forward=False."""

COMPILED = ", compiled"
"""Behind the name of a row: each block is compiled by Inductor, PyTorch's by `Module.compile`."""


@dataclass(frozen=True)
class Case:
    """One parallelism: its mesh, what is ours, and PyTorch's, of which the first is the peer."""

    name: str
    mesh: str
    plan: Callable[[Program, Mesh], Plan]
    peers: tuple[str, ...]
    passes: str = ""

    @property
    def num_ranks(self) -> int:
        return sw.Mesh(**_sizes(self.mesh)).num_devices


def stored_over_data(program: Program, mesh: Mesh) -> Plan:
    """Megatron's plan, with every parameter stored in shards of dim 0 over the axis `data`."""
    plan = plan_megatron(program, mesh)
    parameters: dict[str, str] = {}
    for slot in program.arguments:
        if slot.kind == "param":
            whole = f"[{', '.join(['{}'] * len(shape_of(slot.value)))}]"
            head, rest = plan.parameters.get(slot.name, whole).split("}", 1)
            comma = "" if head.endswith("{") else ", "
            parameters[slot.name] = f'{head}{comma}"data"}}{rest}'
    return Plan(mesh=plan.mesh, parameters=parameters, inputs=plan.inputs)


def in_turns(program: Program, mesh: Mesh) -> Plan:
    """Megatron's plan for two sub-batches, of which one computes while the other's messages
    travel."""
    return replace(plan_megatron(program, mesh), batch_split=2, schedule="cross-pass")


CASES = (
    Case("data", "data=2", plan_megatron, ("DDP",)),
    Case("shards", "data=2", stored_over_data, ("FSDP2",)),
    Case("shards kept", "data=2", stored_over_data, ("FSDP2 kept",), KEEP),
    Case("tensor", "tensor=2", plan_megatron, ("parallelize_module",)),
    Case("tensor in sub-batches", "tensor=2", in_turns, ("parallelize_module",)),
    Case("data x tensor", "data=2,tensor=2", stored_over_data, ("FSDP2 + parallelize_module",)),
    Case("one process", "", plan_megatron, ("eager", "torch.compile")),
)


# Ours


def our_row(case: Case, model: str, *, compiled: bool = False) -> TimedRow:
    """Our step of a case, compiled as a user's. compiled: its blocks by Inductor."""
    example, mesh, plan = _planned(case, model)
    step = sw.compile(
        example.module,
        kwargs=example.kwargs,
        mesh=mesh,
        plan=plan,
        passes=case.passes,
        backward="in_call",
        backend="inductor" if compiled else "distributed",
    )
    name = "shardweave" + COMPILED if compiled else "shardweave"
    return TimedRow(name, lambda: step(**example.kwargs), [step], step.program)


def our_program(case: Case, model: str) -> Program:
    """The program of our step, without its processes."""
    example, mesh, plan = _planned(case, model)
    program = sw.capture(example.module, kwargs=example.kwargs)
    return partition(program, mesh, plan, case.passes)


def _planned(case: Case, model: str) -> tuple[Example, Mesh, Plan | None]:
    example, mesh = build_example(model), sw.Mesh(**_sizes(case.mesh))
    if mesh.num_devices == 1:
        return example, mesh, None
    return example, mesh, case.plan(sw.capture(example.module, kwargs=example.kwargs), mesh)


def _sizes(mesh: str) -> dict[str, int]:
    pairs = (axis.split("=") for axis in mesh.split(",") if axis)
    return {name: int(size) for name, size in pairs}


# PyTorch's


def peer_row(name: str, case: Case, model: str) -> TimedRow:
    """PyTorch's step of a case, on the same weights and batch."""
    example = build_example(model)
    module, batch = example.module, example.kwargs
    mesh = _device_mesh(case)
    row, name = name, name.removesuffix(COMPILED)
    if row != name:
        for block in cast(nn.ModuleList, module.h):
            block.compile()
    if name == "DDP":
        module, batch = DistributedDataParallel(module), _own_rows(batch, mesh)
    elif name.startswith("FSDP2") and "parallelize_module" not in name:
        _fully_shard(module, mesh, reshard=not name.endswith("kept"))
        batch = _own_rows(batch, mesh)
    elif "parallelize_module" in name:
        assert mesh is not None
        run = _tensor_step(module, batch, mesh)
        return TimedRow(row, run, [module])
    elif name == "torch.compile":
        compiled = torch.compile(module)
        return TimedRow(row, _plain_step(compiled, batch), [module])
    return TimedRow(row, _plain_step(module, batch), [module])


def _device_mesh(case: Case) -> DeviceMesh | None:
    sizes = _sizes(case.mesh)
    if not sizes:
        return None
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _own_rows(batch: Mapping[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    assert mesh is not None
    rank, size = mesh.get_local_rank("data"), mesh.size(0)
    return {name: tensor.chunk(size)[rank] for name, tensor in batch.items()}


def _fully_shard(module: nn.Module, mesh: Any, *, reshard: bool) -> None:
    """FSDP2 as its documentation has it: each block, and the model."""
    for block in cast(nn.ModuleList, module.h):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def _plain_step(module: Any, batch: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = module(**batch)
        loss.backward()
        return loss.detach()

    return step


def _tensor_step(
    module: nn.Module, batch: dict[str, Tensor], mesh: DeviceMesh
) -> Callable[[], Tensor]:
    """parallelize_module with loss_parallel; with a data axis under FSDP2."""
    if mesh.ndim == 1:
        return torch_tensor_parallel.torch_step(module, batch, mesh, recompute=False)
    own = _own_rows(batch, mesh)
    shard = lambda: _fully_shard(module, mesh["data"], reshard=True)  # noqa: E731
    return torch_tensor_parallel.torch_step(
        module, own, mesh["tensor"], recompute=False, prepared=shard
    )
