"""The backend on torch.distributed: each rank of a mesh is a process that holds its shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardweave.backends.distributed.cuda_graph import check_graph
from shardweave.backends.distributed.emitted_runner import EmittedRunner
from shardweave.backends.distributed.layout import as_dtensor, placements_of, whole
from shardweave.backends.distributed.pipeline import StagedRunner, holders_of
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.optimizers.hook import keep_states_on_host
from shardweave.backends.programs import Key
from shardweave.backends.state.initial import Source
from shardweave.backends.state.mesh_tensor import MeshTensor, of_mesh
from shardweave.backends.step.backend import Backend, Compiler, Pending
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.mesh.shards import take_shard
from shardweave.ir.program.blocks import shared_modules
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import is_staged
from shardweave.ir.torch_private import dtensor_spec, local_part


class DistributedBackend(Backend):
    """Stores tensors as DTensors that hold this rank's shard; on one device as plain tensors.

    compiler: "triton" runs fused regions as our generated kernels; on the CPU, and where no
    template fits, they run on ATen, as `explain()` says. "inductor" compiles them with PyTorch's
    compiler. None: their ops run one by one. cuda_graph: whether a whole program is captured on the
    GPU at its first call, and replayed afterwards. holders: by kind and name of parameters and
    buffers, the coordinates on the stage axis that store them; without it all coordinates do.
    reduce_dtype: dtype in which unreduced gradients are reduced; None: their own.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        compiler: Compiler | None = None,
        cuda_graph: bool = False,
        holders: Mapping[Key, tuple[int, ...]] | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.runtime = runtime
        self.device = runtime.device
        self.is_joint = runtime.mesh.num_devices > 1
        self.compiler: Compiler | None = compiler
        self.cuda_graph = cuda_graph
        self.holders = holders or {}
        self.reduce_dtype = reduce_dtype
        if self.is_joint:
            for places in sorted(set(self.holders.values())):
                runtime.mesh_at(places)
        self.adds_pending = not cuda_graph  # a graph writes gradients to its own memory

    def check(self, program: Program) -> None:
        mesh = self.runtime.mesh
        own = program.mesh
        if program.is_local and own is not None and own.device_axes != mesh.device_axes:
            raise ValueError(
                f"the program is for mesh {program.mesh}, but the runtime has mesh {mesh}; use "
                "one mesh for both."
            )
        if not program.is_local and mesh.num_devices > 1:
            raise ValueError(
                f"the program is not partitioned for mesh {mesh}; first run the passes "
                "propagate-shardings and insert-collectives on it."
            )

    def load(self, program: Program, pending: Collection[str] = ()) -> EmittedRunner | StagedRunner:
        if self.cuda_graph:
            check_graph(program, self.runtime.mesh, is_joint=self.is_joint)
        if is_staged(program):
            self._check_holders(program)
            return StagedRunner(program, self.runtime, self.compiler)
        return EmittedRunner(
            program,
            self.runtime,
            compiler=self.compiler,
            cuda_graph=self.cuda_graph,
            pending=pending,
        )

    def keep_states_on_host(self, parameters: Iterable[Tensor]) -> None:
        keep_states_on_host(parameters, self.runtime)

    def _check_holders(self, program: Program) -> None:
        """Raises ValueError if a parameter's gradient is computed on other stages than those that
        hold it: the example call did not read the parameter."""
        trained = {slot.name for slot in program.results if slot.kind == "grad"}
        for key, places in holders_of(program).items():
            is_guessed = self.holders and key not in self.holders
            if key[1] in trained and is_guessed and self._places(key) != places:
                raise ValueError(
                    f"this call trains '{key[1]}' on stage {places[0]}, but it is stored on "
                    "other stages, since the example given to sw.compile does not use it. Give "
                    "an example that uses every parameter, or a mesh without stages."
                )

    def _places(self, key: Key) -> tuple[int, ...] | None:
        """Return the stages that have a tensor; None for all. A tensor that the first program does
        not read is on the stages of the tensor that is nearest in the module tree."""
        if not self.holders or key in self.holders:
            return self.holders.get(key)
        module = key[1].rpartition(".")[0]
        shared = {
            other: shared_modules(module, other[1].rpartition(".")[0]) for other in self.holders
        }
        nearest = max(shared, key=lambda other: (shared[other], self.holders[other]))
        return self.holders[nearest] if shared[nearest] else None

    def stored(self, tensor: Tensor | Source, sharding: Sharding, key: Key) -> Tensor:
        places = self._places(key)
        if places is not None and self.runtime.device_mesh is not None:
            return of_mesh(self._stored_at(tensor, sharding, places))
        return of_mesh(as_dtensor(self._copied(tensor, sharding), sharding, self.runtime))

    def _copied(self, tensor: Tensor | Source, sharding: Sharding) -> Tensor:
        """Copy this rank's shard, since training a step must not change the original model."""
        if isinstance(tensor, Source):
            return tensor.part(sharding, self.runtime.coordinates, self.device)
        shard = take_shard(tensor.detach(), sharding, self.runtime.coordinates)
        return torch.empty_like(shard, device=self.device).copy_(shard)

    def _stored_at(
        self, tensor: Tensor | Source, sharding: Sharding, places: tuple[int, ...]
    ) -> Tensor:
        """Store a tensor that only the stages `places` have; elsewhere its shard is empty."""
        local = torch.empty(0, dtype=tensor.dtype, device=self.device)
        if self.runtime.place in places:
            local = self._copied(tensor, sharding)
        device_mesh = self.runtime.mesh_at(places)
        return as_dtensor(local, sharding, self.runtime, device_mesh, tensor.shape)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def argument(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        device_mesh = self.runtime.device_mesh
        if isinstance(tensor, DTensor) and tensor.device_mesh == device_mesh:
            goal = placements_of(sharding, tensor.shape, self.runtime.mesh)
            local = tensor.redistribute(device_mesh, goal).to_local()
        else:
            whole_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            local = take_shard(whole_tensor, sharding, self.runtime.coordinates)
        return local.detach().to(self.device)

    def returned(
        self, result: Tensor, sharding: Sharding, home: int | None, shape: Sequence[int]
    ) -> Tensor:
        if result.ndim == 0:
            return whole(result, sharding, self.runtime)
        is_here = home in (None, self.runtime.place)
        if not sharding.is_chunked(shape):
            result = whole(result, sharding, self.runtime) if is_here else result
            sharding = Sharding.replicated(len(shape))
        device_mesh = None if home is None else self.runtime.mesh_at((home,))
        return of_mesh(as_dtensor(result, sharding, self.runtime, device_mesh, shape))

    def like(self, local: Tensor, stored: Tensor) -> Tensor:
        # Much faster than `as_dtensor`.
        if isinstance(stored, DTensor):
            return MeshTensor(local, dtensor_spec(stored), requires_grad=False)
        return local

    def gradient(self, local: Tensor, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor) or isinstance(local, MeshTensor):
            return local
        if isinstance(local, DTensor):
            return MeshTensor(local_part(local), dtensor_spec(local), requires_grad=False)
        return MeshTensor(local, dtensor_spec(parameter), requires_grad=False)

    def fitted(self, value: Tensor, stored: Tensor, sharding: Sharding) -> Tensor:
        if isinstance(stored, DTensor) and stored.device_mesh.get_coordinate() is None:
            return self.like(stored.to_local().detach(), stored)
        if isinstance(value, DTensor):
            if value.placements == getattr(stored, "placements", None):
                return self.like(value.to_local(), stored)
            value = value.full_tensor()
        shard = take_shard(value.detach(), sharding, self.runtime.coordinates)
        return self.like(shard.to(self.device, stored.dtype), stored)

    def batch(self, local: Tensor, sharding: Sharding) -> Tensor:
        return as_dtensor(local.to(self.device), sharding, self.runtime)

    def rows(self, num_rows: int, sharding: Sharding) -> Sequence[int]:
        held = take_shard(torch.arange(num_rows), sharding, self.runtime.coordinates).tolist()
        if not held:
            return range(0)
        first, last = held[0], held[-1]
        return range(first, last + 1) if last - first + 1 == len(held) else held

    # Unreduced gradients

    def pending(self, local: Tensor, sharding: Sharding) -> Tensor:
        return as_dtensor(local, sharding, self.runtime)

    def reduced(self, gradients: Mapping[str, Pending]) -> dict[str, Tensor]:
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        for pending in gradients.values():
            local = self.local(pending.gradient)
            by_axes.setdefault(pending.sharding.unreduced, []).append(local)
        for axes, tensors in by_axes.items():
            sent = [local.to(self.reduce_dtype or local.dtype) for local in tensors]
            self.runtime.all_reduce_in_place(sent, axes)
            for local, total in zip(tensors, sent, strict=True):
                if total is not local:
                    local.copy_(total)
        return {
            name: as_dtensor(self.local(reduced.gradient), reduced.sharding.whole(), self.runtime)
            for name, reduced in gradients.items()
        }

    def is_first(self, axes: Sequence[str]) -> bool:
        return not any(self.runtime.coordinates[axis] for axis in axes)


def distributed_backend(
    program: Program, device: torch.device, *, compiler: Compiler | None, **options: Any
) -> DistributedBackend:
    """Make the backend of a program on the processes of its mesh. Collective."""
    mesh = program.mesh if program.is_local else None
    return DistributedBackend(
        Runtime(mesh, device, program.devices),
        compiler=compiler,
        holders=holders_of(program) if is_staged(program) else None,
        **options,
    )
