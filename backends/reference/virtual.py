"""A virtual mesh: all ranks in this process, on the CPU, on whole parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from shardweave.backends.programs import Key
from shardweave.backends.reference.reference import run_reference
from shardweave.backends.state.initial import Source
from shardweave.backends.step.backend import Backend, Runner
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program


class VirtualRunner(Runner):
    """Runs every rank of a program's mesh, op by op, and gives global results."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        return run_reference(self.program, given)


class VirtualBackend(Backend):
    """Plain whole tensors; what is sharded is sharded while a program runs."""

    device = torch.device("cpu")

    def check(self, program: Program) -> None:
        del program

    def load(self, program: Program, pending: Collection[str] = ()) -> Runner:
        assert not pending
        return VirtualRunner(program)

    def stored(self, tensor: Tensor | Source, sharding: Sharding, key: Key) -> Tensor:
        del sharding, key
        if isinstance(tensor, Source):
            return tensor.part(Sharding.replicated(tensor.ndim), {}, self.device)
        return tensor.detach().to("cpu", copy=True)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def argument(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        del sharding
        return tensor.detach().to("cpu")

    def returned(
        self, result: Tensor, sharding: Sharding, name: str, shape: Sequence[int]
    ) -> Tensor:
        del sharding, name, shape
        return result

    def whole(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        del sharding
        return tensor.detach().clone()

    def like(self, local: Tensor, stored: Tensor) -> Tensor:
        del stored
        return local

    def fitted(self, value: Tensor, stored: Tensor, sharding: Sharding) -> Tensor:
        del stored, sharding
        return value

    def batch(self, local: Tensor, sharding: Sharding) -> Tensor:
        del sharding
        return local

    def rows(self, num_rows: int, sharding: Sharding) -> Sequence[int]:
        del sharding
        return range(num_rows)
