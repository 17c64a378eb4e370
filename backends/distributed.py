"""A training step as each rank of a mesh runs it on torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.bound import BoundProgram, device_of, like, local_of, owned
from shardweave.backends.checkpoint import checkpointable
from shardweave.backends.cuda_graph import GraphedStep
from shardweave.backends.emit import StepFunction, emit, load_step
from shardweave.backends.layout import as_dtensor, placements_of, whole
from shardweave.backends.programs import Key, sharding_held
from shardweave.backends.runtime import Runtime
from shardweave.backends.triton.launch import FusedCall
from shardweave.ir.kernel import FusedOp
from shardweave.ir.placement import Sharding
from shardweave.ir.program import Program
from shardweave.ir.sharding.shards import take_shard
from shardweave.ir.types import dtype_of_value, shape_of


class Step(BoundProgram):
    """A program bound to parameters: calling it runs forward and backward, as `BoundProgram` says.

    A batch holds, by the names of the captured arguments, global tensors (the same on every rank),
    this rank's shards, or DTensors; outputs are global.

    Parameters and buffers are copied from `model`, which must hold the same values on every
    rank. On a mesh of several devices they are DTensors that hold this rank's shard, so that
    torch's optimizers, `clip_grad_norm_` and `torch.distributed.checkpoint` work on them; on one
    device they are plain tensors. What the program does not use is kept whole and gets no gradient.

    program: a local program, or a global one to run on one device. kernels: whether fused regions
    run as generated Triton kernels; on the CPU, and where no template fits, they run on ATen, as
    `explain()` says. cuda_graph: whether the whole step is captured on the GPU at its first call,
    and replayed then. source: the Python module that runs. Making a step is collective. Raises
    ValueError if model, program and mesh do not fit together.
    """

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        runtime: Runtime | None = None,
        *,
        kernels: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__(program)
        self.runtime = runtime or _runtime_for(program, model)
        _check_mesh(program, self.runtime)
        self._slots = {(slot.kind, slot.name): slot for slot in program.arguments}
        self._shardings = {key: sharding_held(program, slot) for key, slot in self._slots.items()}
        self._mirror(model, self._copy)
        self._keys = {id(tensor): key for key, tensor in self._stored.items()}
        self._results = [(slot, sharding_held(program, slot)) for slot in program.results]
        self._check_results()
        fused = [op for op in program.ops if isinstance(op, FusedOp)] if kernels else []
        self.kernels = [FusedCall(op) for op in fused]
        self.source = emit(program, kernels=kernels)
        run = load_step(self.source, self.kernels)
        self._run: StepFunction = GraphedStep(run) if cuda_graph else run
        self.runtime.prepare(program)

    def run(self, batch: Mapping[str, Any]) -> Mapping[Key, Tensor]:
        """This rank's part of gradients and buffers, and whole outputs. Collective."""
        given = {key: local_of(self._stored[key]) for key in self._slots if key in self._stored}
        given |= self._batch(batch) | self._tangents()
        results = owned(self._run(self.runtime, given), given.values())
        for slot, sharding in self._results:
            if slot.kind == "output":
                key = slot.kind, slot.name
                results[key] = whole(results[key], sharding, self.runtime)
        return results

    def explain(self) -> str:
        """What runs each fused region: its kernel, or ATen and why. A line for each."""
        if not self.kernels:
            return "no fused regions: every op runs on ATen"
        lines = [call.explain(self.runtime.device) for call in self.kernels]
        return "\n".join(f"kernels[{number}]: {line}" for number, line in enumerate(lines))

    # State

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Parameters and persistent buffers under the model's names, tied ones under each.

        They share memory with the step's own, and are DTensors on a mesh of several devices.
        """
        return checkpointable(super().state_dict(*args, **kwargs))

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` with whole plain tensors on every rank, as the model's own. Collective."""
        full: dict[str, Any] = {}
        for name, tensor in super().state_dict(keep_vars=True).items():
            sharding = self._shardings[self._keys[id(tensor)]]
            full[name] = whole(local_of(tensor).detach().clone(), sharding, self.runtime)
        return full

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy a state, of whole tensors or of DTensors, into the step's own. Collective.

        Raises ValueError for a tensor of another shape and, if `strict`, RuntimeError for
        missing and unknown names, as `nn.Module` does.
        """
        if assign:
            raise ValueError("load_state_dict: a step keeps its own tensors; leave assign out.")
        own = super().state_dict(keep_vars=True)
        fitting = {
            name: self._as_stored(name, value, own[name]) if name in own else value
            for name, value in state_dict.items()
        }
        return super().load_state_dict(fitting, strict=strict)

    def _copy(self, kind: str, name: str, tensor: Tensor) -> Tensor:
        """The parameter or buffer that stands for one of the model's."""
        key = (kind, name)
        sharding = self._shardings.setdefault(key, Sharding.replicated(tensor.ndim))
        if key in self._slots:
            self._check_tensor(key, tensor)
        shard = take_shard(tensor.detach(), sharding, self.runtime.coordinates)
        # Never the model's own memory: training a step must not change the model.
        local = torch.empty_like(shard, device=self.runtime.device).copy_(shard)
        return as_dtensor(local, sharding, self.runtime)

    def _as_stored(self, name: str, value: Any, stored: Tensor) -> Any:
        """A given tensor in the form of the stored one."""
        if isinstance(value, DTensor):
            if value.placements == getattr(stored, "placements", None):
                return like(value.to_local(), stored)
            value = value.full_tensor()
        if tuple(value.shape) != tuple(stored.shape):
            raise ValueError(
                f"load_state_dict: '{name}' has shape {tuple(value.shape)}, expected the global "
                f"shape {tuple(stored.shape)}."
            )
        sharding = self._shardings[self._keys[id(stored)]]
        shard = take_shard(value.detach(), sharding, self.runtime.coordinates)
        return like(shard.to(self.runtime.device, stored.dtype), stored)

    # Arguments and results

    def _tangents(self) -> dict[Key, Tensor]:
        return {
            key: torch.ones((), dtype=dtype_of_value(slot.value), device=self.runtime.device)
            for key, slot in self._slots.items()
            if slot.kind == "tangent"
        }

    def _batch(self, batch: Mapping[str, Any]) -> dict[Key, Tensor]:
        wanted = [name for kind, name in self._slots if kind == "input"]
        if set(batch) != set(wanted):
            raise ValueError(
                f"the step was called with {sorted(batch)}, but it was captured with "
                f"{sorted(wanted)}; give exactly these (positional ones are arg0, arg1, ..)."
            )
        return {("input", name): self._input(name, batch[name]) for name in wanted}

    def _input(self, name: str, tensor: Tensor) -> Tensor:
        sharding = self._shardings["input", name]
        slot = self._slots["input", name]
        if isinstance(tensor, DTensor):
            assert self.runtime.device_mesh is not None
            goal = placements_of(sharding, tensor.shape, self.runtime.mesh)
            local = tensor.redistribute(self.runtime.device_mesh, goal).to_local()
        elif tuple(tensor.shape) == sharding.global_shape(shape_of(slot.value)):
            local = take_shard(tensor, sharding, self.runtime.coordinates)
        else:
            local = tensor
        if tuple(local.shape) != shape_of(slot.value) or local.dtype != dtype_of_value(slot.value):
            raise ValueError(
                f"input '{name}' has shape {tuple(tensor.shape)} and {tensor.dtype}, expected "
                f"{dtype_of_value(slot.value)} and the global shape "
                f"{sharding.global_shape(shape_of(slot.value))} or the local "
                f"{shape_of(slot.value)}."
            )
        return local.detach().to(self.runtime.device)

    # Checks

    def _check_tensor(self, key: Key, tensor: Tensor) -> None:
        value = self._slots[key].value
        shape = self._shardings[key].global_shape(shape_of(value))
        if tuple(tensor.shape) != shape or tensor.dtype != dtype_of_value(value):
            raise ValueError(
                f"{key[0]} '{key[1]}' of the model has shape {tuple(tensor.shape)} and "
                f"{tensor.dtype}, but the program has {shape} and {dtype_of_value(value)}; "
                "capture this model."
            )

    def _check_results(self) -> None:
        """The model has what the program reads, and what it updates is sharded alike."""
        missing = [
            f"{kind} '{name}'"
            for kind, name in self._slots
            if kind in ("param", "buffer") and (kind, name) not in self._stored
        ]
        if missing:
            raise ValueError(f"the model lacks {', '.join(missing)}; capture this model.")
        for slot, found in self._results:
            if slot.kind not in ("grad", "buffer"):
                continue
            target = ("param" if slot.kind == "grad" else "buffer", slot.name)
            stored = self._shardings.get(target)
            if found != stored:
                raise ValueError(
                    f"{slot.kind} '{slot.name}' is sharded as {found}, but what it updates is "
                    f"stored as {stored}; give both the same dist.sharding."
                )


def _runtime_for(program: Program, model: nn.Module) -> Runtime:
    mesh = program.mesh if program.is_local else None
    is_wide = mesh is not None and mesh.num_devices > 1
    return Runtime(mesh, None if is_wide else device_of(model))


def _check_mesh(program: Program, runtime: Runtime) -> None:
    if program.is_local and program.mesh is not None and program.mesh != runtime.mesh:
        raise ValueError(
            f"the program is for mesh {program.mesh}, but the runtime has mesh {runtime.mesh}."
        )
    if not program.is_local and runtime.mesh.num_devices > 1:
        raise ValueError(
            f"the program is not partitioned for mesh {runtime.mesh}; run the passes "
            "propagate-shardings and insert-collectives on it first."
        )
