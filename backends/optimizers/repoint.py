"""Optimizers made before `sw.compile`: they are switched to the DTensors that it made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

REPLACED = "_shardweave_replaced"
"""Attribute set on a parameter that a DTensor has replaced: its name in the model."""


def repoint(
    optimizers: Iterable[Optimizer],
    new: Mapping[int, Tensor],
    placed: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Let optimizers update new parameters, given by the id of the old ones; move their states too.
    placed: converts a state tensor of a parameter's shape to the new parameter's placements."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [new.get(id(old), old) for old in group["params"]]
        states = list(optimizer.state.items())
        optimizer.state.clear()
        for old, state in states:
            parameter = new.get(id(old), old)
            optimizer.state[parameter] = (
                state if parameter is old else _placed(state, old, parameter, placed)
            )


def _placed(
    state: Any, old: Tensor, new: Tensor, placed: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    if isinstance(state, dict):
        return {key: _placed(value, old, new, placed) for key, value in state.items()}
    if isinstance(state, Tensor) and state.ndim and state.shape == old.shape:
        return placed(state, new)
    return state


def check_not_replaced(parameters: Iterable[Tensor]) -> None:
    """Raises ValueError if sw.compile has replaced one of these parameters by a DTensor."""
    for parameter in parameters:
        name = getattr(parameter, REPLACED, None)
        if name is not None:
            raise ValueError(
                "the optimizer was made before sw.compile and holds the old tensor of parameter "
                f"'{name}', so that it would train nothing. Make the optimizer after sw.compile, "
                "or pass it: sw.compile(.., optimizers=optimizer)."
            )
