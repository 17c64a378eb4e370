"""A model's tree of modules without its code: where a step keeps its parameters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

Store = Callable[[str, str, Tensor], Tensor]
"""(kind, qualified name, the model's tensor) -> the tensor to keep."""


def mirror(model: nn.Module, root: nn.Module, store: Store) -> None:
    """Give `root` the modules, parameters and buffers of `model` under the same names.

    `store` makes the tensors, once for each: a tensor under several names is passed with the
    first, as `named_parameters` has it. What is shared in the model is shared in the mirror.
    """
    _Mirror(store).copy(model, root, "")


class _Mirror:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, Tensor] = {}

    def copy(self, model: nn.Module, target: nn.Module, prefix: str) -> None:
        # Written to the dicts that nn.Module keeps: its setters refuse a name that `root`
        # uses for something else, such as a layer called "program".
        self.modules[id(model)] = target
        for name, parameter in model._parameters.items():
            kept = None if parameter is None else self.tensor("param", prefix + name, parameter)
            target._parameters[name] = kept  # pyright: ignore[reportArgumentType]
        for name, buffer in model._buffers.items():
            kept = None if buffer is None else self.tensor("buffer", prefix + name, buffer)
            target._buffers[name] = kept
        target._non_persistent_buffers_set |= model._non_persistent_buffers_set
        for name, child in model._modules.items():
            if child is None or id(child) in self.modules:
                target._modules[name] = None if child is None else self.modules[id(child)]
                continue
            target._modules[name] = nn.Module()
            self.copy(child, target._modules[name], f"{prefix}{name}.")  # pyright: ignore[reportArgumentType]

    def tensor(self, kind: str, name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = self.store(kind, name, tensor)
        return self.tensors[id(tensor)]
