"""Dtypes in which a step computes, stores its parameters, and reduces over ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.driver.step.request import PRECISIONS
from shardweave.passes.messages.reduce_in import REDUCE_DTYPES, ReduceInPass
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.lowering.partition import Passes

AUTOCAST: Mapping[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By `precision`, the dtype of torch.autocast around forward, if there is one."""

PARAMETERS: Mapping[str | None, torch.dtype] = {"bf16-true": torch.bfloat16}
"""By `precision`, the dtype of parameters, buffers and floating-point inputs, if they are cast."""


def check_precision(precision: str | None) -> None:
    """Raises ValueError for a precision that does not exist."""
    if precision and precision not in PRECISIONS:
        known = ", ".join(f'"{name}"' for name in PRECISIONS)
        raise ValueError(
            f"precision {precision!r} is unknown; use one of {known}, or leave it out (None) to "
            "compute in the model's own dtypes."
        )


def in_precision(model: nn.Module, precision: str | None) -> nn.Module:
    """Return the model, or a copy cast to the dtype that `precision` gives parameters. Complex
    numbers, such as angles of rotary embeddings, stay: `model.to(dtype)` would leave their real
    parts alone."""
    dtype = PARAMETERS.get(precision)
    tensors = (*model.parameters(), *model.buffers())
    if dtype is None or all(x.dtype == dtype for x in tensors if x.is_floating_point()):
        return model
    copied = copy_of_model(model)
    cast_parameters(copied, precision)
    return copied


def copy_of_model(model: nn.Module) -> nn.Module:
    """Copy a model with the gradient hooks of its parameters, which torch's deep copy drops.
    Tensors that hooks recompute in each forward pass (weight norm, pruning) are shared, not
    copied."""
    made = [x for m in model.modules() for x in vars(m).values() if isinstance(x, Tensor)]
    memo: dict[int, Any] = {id(x): x.detach() for x in made if not x.is_leaf}
    copied = copy.deepcopy(model, memo)
    for ours, parameter in zip(copied.parameters(), model.parameters(), strict=True):
        for hook in (parameter._backward_hooks or {}).values():
            ours.register_hook(hook)
    return copied


def cast_parameters(model: nn.Module, precision: str | None) -> None:
    """Cast the model's parameters and buffers in place, to the dtype that `precision` gives."""
    dtype = PARAMETERS.get(precision)
    if dtype is not None:
        model._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def inputs_in_precision(inputs: Mapping[str, Tensor], precision: str | None) -> dict[str, Tensor]:
    """Cast floating-point inputs to the parameters' dtype, if `precision` casts parameters. Raises
    ValueError for an input that requires a gradient, which its cast copy would get."""
    dtype = PARAMETERS.get(precision)
    if dtype is None:
        return dict(inputs)
    cast: dict[str, Tensor] = {}
    for name, tensor in inputs.items():
        is_other = tensor.is_floating_point() and tensor.dtype != dtype
        if is_other and tensor.requires_grad:
            raise ValueError(
                f"input '{name}' has dtype {tensor.dtype} and requires a gradient, but precision "
                f"'{precision}' computes in {dtype}; cast the input to {dtype} before the call."
            )
        cast[name] = tensor.to(dtype) if is_other else tensor
    return cast


def dtype_named(dtype: torch.dtype | str) -> torch.dtype:
    """Convert a name such as "bfloat16" to a dtype; a dtype is returned unchanged."""
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def reducing_in(dtype: torch.dtype | str, passes: Passes) -> Passes:
    """Prepend a pass that sets the dtype of reductions. ValueError if unknown or without effect."""
    name = str(dtype).removeprefix("torch.")
    if name not in REDUCE_DTYPES:
        known = ", ".join(map(str, REDUCE_DTYPES.values()))
        raise ValueError(f"reduce_dtype={dtype} is not supported; use one of {known}.")
    given = PassPipeline([passes] if isinstance(passes, str) else passes).passes
    if any(p.name == "insert-collectives" for p in given):
        raise ValueError(
            "reduce_dtype changes the default passes, but `passes` has its own "
            "insert-collectives; leave reduce_dtype out, and put "
            f"'reduce-in{{dtype=\"{name}\"}}' after insert-collectives."
        )
    return [ReduceInPass(name), *given]
