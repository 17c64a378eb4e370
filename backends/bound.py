"""A program bound to a model's parameters: what a step is on every backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.input_gradients import check_required, give
from shardweave.backends.programs import Key
from shardweave.ir.program import INPUT_GRADIENT, Program

_K = TypeVar("_K")


class BoundProgram(nn.Module, ABC):
    """Copies of a model's parameters and buffers, under the model's names, and the program on them.

    Calling it returns the loss, or the outputs of a program without gradients. Gradients are added
    to the parameters' `.grad`, as `loss.backward()` does, and buffers are updated.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self._stored: dict[Key, Tensor] = {}

    @abstractmethod
    def run(self, batch: Mapping[str, Any]) -> Mapping[Key, Tensor]:
        """The results by kind and name, each in memory of its own; outputs are global."""

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch, or the outputs of a program without gradients. Collective."""
        outputs: list[Tensor] = []
        batch = {f"arg{index}": arg for index, arg in enumerate(args)} | kwargs
        check_required(self.program.results, batch)
        for (kind, name), tensor in self.run(batch).items():
            if kind == "grad":
                self._accumulate(name, tensor)
            elif kind == "buffer":
                local_of(self._stored["buffer", name]).copy_(tensor)
            elif name.startswith(INPUT_GRADIENT):
                give(name, tensor, batch)
            else:
                outputs.append(tensor)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _accumulate(self, name: str, gradient: Tensor) -> None:
        parameter = self._stored["param", name]
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            parameter.grad = like(gradient, parameter)
        else:
            local_of(parameter.grad).add_(gradient)

    def _mirror(self, model: nn.Module, copy: Callable[[str, str, Tensor], Tensor]) -> None:
        """Take over the names of a model: its tree of modules, without their code.

        copy: makes the tensor to keep of a kind, a qualified name and the model's tensor. Of a
        tensor with several names it gets the first.
        """
        kept: dict[int, Tensor] = {}

        def stored(kind: str, name: str, tensor: Tensor) -> Tensor:
            if id(tensor) not in kept:
                made = copy(kind, name, tensor)
                made = nn.Parameter(made, tensor.requires_grad) if kind == "param" else made
                self._stored[kind, name] = kept[id(tensor)] = made
            return kept[id(tensor)]

        targets: dict[str, nn.Module] = {"": self}
        for path, module in model.named_modules(remove_duplicate=False):
            # Written to the dicts that nn.Module keeps: its setters refuse a name that a step
            # uses for something else, such as a layer called "program".
            if path:
                parent, _, name = path.rpartition(".")
                targets[path] = targets[parent]._modules[name] = nn.Module()
            dot = f"{path}." if path else ""
            into: Any = targets[path]
            into._non_persistent_buffers_set |= module._non_persistent_buffers_set
            for kind, old, new in (
                ("param", module._parameters, into._parameters),
                ("buffer", module._buffers, into._buffers),
            ):
                for name, tensor in old.items():
                    new[name] = None if tensor is None else stored(kind, dot + name, tensor)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU if it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory, of a DTensor or of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(local: Tensor, stored: Tensor) -> Tensor:
    """`local` as a part of a tensor placed as `stored` is; much faster than `as_dtensor`."""
    if isinstance(stored, DTensor):
        return DTensor(local, stored._spec, requires_grad=False)
    return local


def owned(results: Mapping[_K, Tensor], held: Iterable[Tensor]) -> dict[_K, Tensor]:
    """The results, each contiguous and in memory that no other one nor any of `held` shares.

    A program may return a value twice, or a view of an argument; but gradients and buffers
    are changed in place. What shares memory is copied; disjoint parts of one buffer are not.
    """
    found = {key: tensor.contiguous() for key, tensor in results.items()}
    held_storages = {tensor.untyped_storage().data_ptr() for tensor in held if tensor.numel()}
    end = 0
    filled = [key for key in found if found[key].numel()]
    for key in sorted(filled, key=lambda key: found[key].data_ptr()):
        tensor = found[key]
        is_held = tensor.untyped_storage().data_ptr() in held_storages
        if is_held or tensor.data_ptr() < end:
            found[key] = tensor.clone()
        if not is_held:
            end = max(end, tensor.data_ptr() + tensor.nbytes)
    return found
