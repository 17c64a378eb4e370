"""Execution of a program on all ranks of a virtual mesh; each value has one tensor per rank.

Ranks with equal tensors share one object, and an op on shared operands is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from xdsl.ir import Operation, SSAValue

from shardweave.backends.emit.calls import prepared
from shardweave.backends.programs import Key, last_uses, sharding_held
from shardweave.ir.dialects import dist
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import DistOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.mesh import Axis, Mesh, check_virtual
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.mesh.shards import assemble, held, resized, take_shard
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.sharding.ragged import ragged_values


def run_collective(
    op: dist.DistOp, operands: Sequence[Sequence[Tensor]], mesh: Mesh
) -> list[list[Tensor]]:
    """Run a `dist` op on every rank. operands, returned results: per value, a tensor per rank."""
    if isinstance(op, (dist.WaitOp, dist.ReshardOp)):  # a global program has whole values
        return [list(tensors) for tensors in operands]
    if isinstance(op, dist.OverAxesOp) and op.JOINS_OPERANDS:
        return [_joined(op, operands, mesh)]
    if not isinstance(op, (dist.OverAxesOp, dist.HostCopyOp)):
        raise ValueError(f"the reference backend cannot run op '{op.name}' as a collective.")
    if isinstance(op, dist.ShardIndexOp):
        operands = [[torch.empty(0)] * mesh.num_devices]
    return [_on_groups(op, tensors, mesh) for tensors in operands]


def _joined(op: dist.OverAxesOp, operands: Sequence[Sequence[Tensor]], mesh: Mesh) -> list[Tensor]:
    results = list(operands[0])
    for ranks in mesh.groups(op.axes):
        made = op.over_members([[tensors[rank] for tensors in operands] for rank in ranks])
        for rank, result in zip(ranks, made, strict=True):
            results[rank] = result
    return results


def _on_groups(op: dist.DistOp, tensors: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    known: dict[tuple[int, ...], list[Tensor]] = {}
    results = list(tensors)
    for ranks in mesh.groups(op.axes):
        members = [tensors[rank] for rank in ranks]
        key = tuple(id(member) for member in members)
        if key not in known:
            known[key] = op.on_shards(members)
        for rank, result in zip(ranks, known[key], strict=True):
            results[rank] = result
    return results


PerRank = list[Tensor]
"""One value on every rank, by rank number."""

Messages = Callable[[dist.DistOp, list[PerRank]], list[PerRank]]
"""A function that runs a send or a receive on its operands, and returns its results."""

_T = TypeVar("_T")

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Allowed difference between replicas by dtype, relative to the largest element."""


class ReplicaMismatchError(ValueError):
    """Raised if ranks that should hold the same shard of a result hold different values."""


def run_op_by_op(
    program: Program,
    environment: dict[SSAValue, PerRank],
    mesh: Mesh,
    messages: Messages | None = None,
) -> Iterator[Operation]:
    """Run a program without fused regions on all ranks, and yield each op after it. environment:
    the tensors of each value; results are added, and values removed after their last use."""
    dying, ragged = last_uses(program), ragged_values(program.ops)
    for op in program.ops:
        if messages is not None and isinstance(op, (dist.SendOp, dist.RecvOp)):
            outputs = messages(op, [environment[value] for value in op.operands])
        else:
            outputs = _run(op, environment, mesh, ragged)
        for value, tensors in zip(op.results, outputs, strict=True):
            environment[value] = tensors
        for value in dying.get(op, ()):
            del environment[value]
        yield op


def virtual_mesh(program: Program) -> Mesh:
    """Return the mesh of a local program, where sub-batch axes count as ranks; else one device."""
    if program.mesh is None or not program.is_local:
        return Mesh()
    check_virtual(program.mesh)
    return Mesh(Axis(axis.name, axis.size) for axis in program.mesh.axes)


def global_argument(program: Program, slot: Slot, values: Mapping[Key, Tensor]) -> Tensor:
    """Return an argument's global tensor; tangents default to 1. ValueError if missing or unfit."""
    shape = sharding_held(program, slot).global_shape(shape_of(slot.value))
    dtype = dtype_of_value(slot.value)
    tensor = values.get((slot.kind, slot.name))
    if tensor is None:
        if slot.kind == "tangent":
            return torch.ones(shape, dtype=dtype)
        raise ValueError(
            f"no tensor was given for {slot.kind} '{slot.name}'; give a tensor of shape {shape} "
            f"and {dtype} under the key ('{slot.kind}', '{slot.name}')."
        )
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{slot.kind} '{slot.name}' has shape {tuple(tensor.shape)} and {tensor.dtype}, "
            f"expected the global shape {shape} and {dtype}."
        )
    return tensor.detach()


def scatter_shards(tensor: Tensor, sharding: Sharding, mesh: Mesh) -> PerRank:
    """Shard a tensor over the ranks, with padding; ranks with equal shards share one tensor."""
    shape = sharding.local_shape(tensor.shape)
    return once_per_key(
        range(mesh.num_devices),
        lambda rank: _shard_key(sharding, mesh.coordinates(rank)),
        lambda rank: resized(take_shard(tensor, sharding, mesh.coordinates(rank)), shape),
    )


def _shard_key(sharding: Sharding, coordinates: Mapping[str, int]) -> tuple[int, ...]:
    """Return a key that is equal for ranks that hold the same shard of a value."""
    return tuple(coordinates[axis] for axis in sorted(sharding.axes))


def once_per_key(
    ranks: range, key_of: Callable[[int], Any], compute: Callable[[int], _T]
) -> list[_T]:
    """Return `compute(rank)` for each rank, computed once for all ranks with the same key."""
    computed: dict[Any, _T] = {}
    results: list[_T] = []
    for rank in ranks:
        key = key_of(rank)
        if key not in computed:
            computed[key] = compute(rank)
        results.append(computed[key])
    return results


def _run(
    op: Operation, environment: Mapping[SSAValue, PerRank], mesh: Mesh, ragged: frozenset[SSAValue]
) -> list[PerRank]:
    operands = [environment[value] for value in op.operands]
    if isinstance(op, DistOp):
        return run_collective(op, operands, mesh)
    assert isinstance(op, AtenOp)  # fused regions are inlined before
    per_rank = once_per_key(
        range(mesh.num_devices),
        lambda rank: tuple(id(tensors[rank]) for tensors in operands),
        lambda rank: _call(op, rank, environment, ragged),
    )
    return [list(tensors) for tensors in zip(*per_rank, strict=True)]


def _call(
    op: AtenOp, rank: int, environment: Mapping[SSAValue, PerRank], ragged: frozenset[SSAValue]
) -> list[Tensor]:
    call = prepared(op, lambda value: environment[value][rank], ragged=ragged)
    try:
        results = call()
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        shapes = [tuple(environment[value][rank].shape) for value in op.operands]
        raise ValueError(f"{op.name} failed on operands of shapes {shapes}: {error}") from error
    for value, tensor in zip(op.results, results, strict=True):
        first = 1 if value in ragged else 0
        if tuple(tensor.shape)[first:] != shape_of(value)[first:]:
            raise ValueError(
                f"op %{value.name_hint or '?'} = {op.name} computed a tensor of shape "
                f"{tuple(tensor.shape)}, but its type says {shape_of(value)}; correct the types "
                "in the program."
            )
    return results


def collect(slot: Slot, tensors: PerRank, program: Program, mesh: Mesh) -> Tensor:
    """Assemble the global value of a result. ReplicaMismatchError if replicas of it differ."""
    sharding = sharding_held(program, slot)
    shape = sharding.global_shape(shape_of(slot.value))
    parts = [held(x, sharding, shape, mesh.coordinates(r)) for r, x in enumerate(tensors)]
    first: dict[tuple[int, ...], int] = {}
    for rank, tensor in enumerate(parts):
        owner = first.setdefault(_shard_key(sharding, mesh.coordinates(rank)), rank)
        error = relative_difference(parts[owner], tensor)
        if error > TOLERANCES.get(tensor.dtype, 0.0):
            raise ReplicaMismatchError(
                f"{slot.kind} '{slot.name}': ranks {owner} and {rank} of mesh {mesh} should hold "
                f"the same shard, but their values differ by {error:.3g} relative to the "
                "largest; the program lacks a collective or has one too many."
            )
    return assemble(lambda at: tensors[mesh.rank(at)], sharding, mesh)


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest element; inf if tensors differ in
    shape, in non-finite elements, or are unequal and not floating-point."""
    if a is b or torch.equal(a, b):
        return 0.0
    if a.shape != b.shape or not a.is_floating_point():
        return float("inf")
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return float("inf")
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a[finite].double(), b[finite].double()
    scale = max(a.abs().max().item(), b.abs().max().item()) if a.numel() else 0.0
    return (a - b).abs().max().item() / scale if scale else 0.0
