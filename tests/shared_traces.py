"""One trace of each model per test process: equal models on inputs of equal shapes share it.

Tracing is most of what a small test costs. What it gives follows from the module (its class, its
attributes, the shapes and dtypes of its tensors) and from the shapes and dtypes of the inputs, so
these are the key: the module pickled with its parameters and buffers described in place of stored.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as module_hooks

from shardweave.ir.capture.trace import Traced, trace

_traces: dict[tuple[bytes, bool], Traced] = {}


def trace_once(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, train: bool
) -> Traced:
    """As `trace`; a model that cannot be pickled, or has hooks, is traced each time."""
    if _has_hooks(model):
        return trace(model, args, kwargs, train=train)
    try:
        key = (_described(model, args, kwargs), train)
    except (pickle.PicklingError, AttributeError, TypeError):  # as pickle refuses local classes
        return trace(model, args, kwargs, train=train)
    if key not in _traces:
        _traces[key] = trace(model, args, kwargs, train=train)
    return _traces[key]


def _has_hooks(model: torch.nn.Module) -> bool:
    """Whether there are hooks of which the pickled model says nothing."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    parameters = any(getattr(p, kind, None) for p in model.parameters() for kind in kinds)
    return parameters or bool(module_hooks._global_forward_hooks)


def _described(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    described = [*model.parameters(), *model.buffers(), *args, *kwargs.values()]
    described = [value for value in described if isinstance(value, torch.Tensor)]
    _Describing(buffer, described).dump((model, list(args), dict(kwargs)))
    return buffer.getvalue()


class _Describing(pickle.Pickler):
    """Writes a description in place of each of some tensors, and others as they are."""

    def __init__(self, buffer: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(buffer)
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) not in self.numbers:
            return None
        layout = (tuple(obj.shape), obj.stride(), str(obj.dtype), str(obj.device))
        return (type(obj).__name__, self.numbers[id(obj)], layout, obj.requires_grad)
