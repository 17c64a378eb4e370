"""A step on a virtual mesh: all ranks in this process, with the face of a distributed step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardweave.backends.bound import BoundProgram, owned
from shardweave.backends.programs import Key
from shardweave.backends.reference import run_reference
from shardweave.ir.program import Program


class VirtualStep(BoundProgram):
    """A program bound to whole parameters on the CPU; calling it runs every rank of its mesh."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__(program)
        self._mirror(model, lambda kind, name, tensor: tensor.detach().to("cpu", copy=True))

    def run(self, batch: Mapping[str, Any]) -> Mapping[Key, Tensor]:
        """The global results."""
        values = self._stored | {("input", name): tensor for name, tensor in batch.items()}
        return owned(run_reference(self.program, values), values.values())

    def full_state_dict(self) -> dict[str, Any]:
        """A copy of `state_dict`, whose tensors are whole already."""
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}
