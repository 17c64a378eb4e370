"""A step on a virtual mesh: all ranks in this process, with the face of a distributed step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardweave.backends.input_gradients import check_required, give
from shardweave.backends.mirror import mirror
from shardweave.backends.ownership import owned
from shardweave.backends.reference import run_reference
from shardweave.ir.program import INPUT_GRADIENT, Program


class VirtualStep(nn.Module):
    """A program bound to whole parameters; calling it runs every rank of its mesh in turn.

    As with `backends.distributed.Step`, parameters and buffers are copies of the model's,
    gradients are added to `.grad`, and buffers are updated; all are whole tensors on the CPU.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__()
        self.program = program
        self._stored: dict[tuple[str, str], Tensor] = {}
        mirror(model, self, self._store)

    def _store(self, kind: str, name: str, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to("cpu", copy=True)
        if kind == "param":
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        self._stored[kind, name] = copy
        return copy

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a global batch, or the outputs of a program without gradients."""
        batch = {f"arg{index}": arg for index, arg in enumerate(args)} | kwargs
        check_required(self.program.results, batch)
        values = self._stored | {("input", name): t.detach() for name, t in batch.items()}
        outputs: list[Tensor] = []
        results = owned(run_reference(self.program, values), values.values())
        for (kind, name), tensor in results.items():
            if kind == "grad":
                self._accumulate(name, tensor)
            elif kind == "buffer":
                self._stored["buffer", name].copy_(tensor)
            elif name.startswith(INPUT_GRADIENT):
                give(name, tensor, batch)
            else:
                outputs.append(tensor)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def full_state_dict(self) -> dict[str, Any]:
        """A copy of `state_dict`, whose tensors are whole already."""
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}

    def _accumulate(self, name: str, gradient: Tensor) -> None:
        parameter = self._stored["param", name]
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
