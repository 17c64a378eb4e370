"""Small models of OpInfo's samples, for `opinfo.py`: calls of ops with tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IN_PLACE = {"exponential", "normal.in_place", "uniform", "cauchy", "geometric", "log_normal"}
"""Ops that write their first argument: a model gives them a copy."""
MODULES = {
    "torch": torch,
    "functional": torch.nn.functional,
    "linalg": torch.linalg,
    "special": torch.special,
    "fft": torch.fft,
}


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a sample's arguments: an attribute of the model, or an input."""

    name: str
    index: int | None = None


_LAST = Slot("", -1)
"""The place of the last result before."""


@dataclass(frozen=True)
class Op:
    """A function of torch, looked up as a model does it, or another one; some change a copy."""

    function: Callable[..., Any]
    module: str = ""
    name: str = ""
    is_in_place: bool = False

    @classmethod
    def of(cls, key: str, info: Any) -> Op:
        """The op of an entry of the database, by its name and variant there."""
        name = info.name.rpartition(".")[2]
        module = next((k for k, m in MODULES.items() if getattr(m, name, None) is info.op), "")
        return cls(info.op, module, name, key in IN_PLACE)

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        if self.module:
            return getattr(MODULES[self.module], self.name)(first, *args, **kwargs)
        return self.function(first.clone() if self.is_in_place else first, *args, **kwargs)


@dataclass(frozen=True)
class Call:
    """A call of an op, with slots for tensors; `made` is applied to its output."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Callable[[Any], Any]


class Calls(nn.Module):
    """The calls of several samples; returns what they give, behind a loss if that has gradients."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.calls = list(calls)

    def forward(self, *inputs: Tensor) -> list[Any]:
        """What the calls give, one after another."""
        results: list[Any] = []
        for call in self.calls:
            given = (*inputs, results[-1] if results else None)
            args = _filled(self, given, call.args)
            kwargs = _filled(self, given, call.kwargs)
            results.extend(_leaves(call.made(call.op(*args, **kwargs))))
        losses = [_loss(o) for o in results if isinstance(o, Tensor) and o.requires_grad]
        return [torch.stack(losses).sum(), *results] if losses else results


def _filled(model: nn.Module, inputs: Sequence[Any], tree: Any) -> Any:
    """A tree of arguments with tensors in its slots."""
    if isinstance(tree, Slot):
        return getattr(model, tree.name) if tree.index is None else inputs[tree.index]
    if isinstance(tree, dict):
        return {key: _filled(model, inputs, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_filled(model, inputs, value) for value in tree])
    if isinstance(tree, slice):
        return slice(*(_filled(model, inputs, v) for v in (tree.start, tree.stop, tree.step)))
    return tree


def _leaves(value: Any) -> list[Any]:
    """The leaves of what an op returns."""
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [leaf for part in value for leaf in _leaves(part)]
    return [] if value is None else [value]


class Builder:
    """Makes a model of samples: `add` each, then take `model` and `inputs`."""

    def __init__(self, *, grad: bool) -> None:
        self.calls: list[Call] = []
        self.tensors: dict[str, Tensor] = {}
        self.inputs: list[Tensor] = []
        self.grad = grad

    def add(self, op: Op, sample: Any, *, follows: bool = False) -> None:
        """Add a sample. follows: its first argument is the last result of the one before."""
        slots: dict[int, Slot] = {id(sample.input): _LAST} if follows else {}
        args = tuple(self._slotted(a, slots) for a in (sample.input, *sample.args))
        kwargs = {key: self._slotted(value, slots) for key, value in sample.kwargs.items()}
        self.calls.append(Call(op, args, kwargs, sample.output_process_fn_grad))

    def _slotted(self, tree: Any, slots: dict[int, Slot]) -> Any:
        if isinstance(tree, Tensor):
            if id(tree) not in slots:
                slots[id(tree)] = self._slot(tree, is_first=not slots)
            return slots[id(tree)]
        if isinstance(tree, dict):
            return {key: self._slotted(value, slots) for key, value in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)([self._slotted(value, slots) for value in tree])
        if isinstance(tree, slice):
            return slice(*(self._slotted(v, slots) for v in (tree.start, tree.stop, tree.step)))
        return tree

    def _slot(self, tensor: Tensor, *, is_first: bool) -> Slot:
        value = tensor.detach().requires_grad_(self.grad and tensor.requires_grad)
        if (is_first and value.numel()) or value.layout != torch.strided:
            self.inputs.append(value)
            return Slot("", len(self.inputs) - 1)
        name = f"t{len(self.tensors)}"
        self.tensors[name] = value
        return Slot(name)

    def made(self) -> tuple[Calls, list[Tensor]]:
        """The model of all samples and its inputs."""
        model = Calls(self.calls)
        for name, value in self.tensors.items():
            if value.requires_grad:
                setattr(model, name, nn.Parameter(value))
            else:
                model.register_buffer(name, value)
        if not self.tensors:
            model.none = nn.Parameter(torch.zeros((), dtype=torch.float64))
        return model, self.inputs


def _loss(output: Tensor) -> Tensor:
    real = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
    weights = torch.arange(1, real.numel() + 1, dtype=torch.float64).cos().reshape(real.shape)
    return (real * weights).sum().double()
