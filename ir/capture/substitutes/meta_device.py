# pyright: basic
"""Trace models on the meta device as fake tensors on the CPU: meta tensors have no gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.ir.torch_private import FakeTensorMode


def off_meta(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """Return the model and its inputs; copies with fake CPU tensors if the model is on `meta`.
    Shared tensors stay shared. Nothing is allocated, and the model itself does not change."""
    tensors = (*model.parameters(), *model.buffers())
    if not any(tensor.is_meta for tensor in tensors):
        return model, args, kwargs
    model = copy.deepcopy(model)
    made: dict[int, Tensor] = {}
    with FakeTensorMode():
        for module in model.modules():
            for owned in (module._parameters, module._buffers):
                owned.update({name: _fake(value, made) for name, value in owned.items()})
        inputs = [_fake(value, made) for value in args]
        named = {name: _fake(value, made) for name, value in kwargs.items()}
    return model, inputs, named


def _fake(value: Any, made: dict[int, Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if id(value) not in made:
        fake = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        if isinstance(value, nn.Parameter):
            fake = nn.Parameter(fake, value.requires_grad)
        made[id(value)] = fake
    return made[id(value)]
