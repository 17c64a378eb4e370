"""In which dtypes a step computes, keeps its parameters, and adds up over ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.ir.program.program import Program
from shardweave.passes.messages.reduce_in import REDUCE_DTYPES, ReduceInPass
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.lowering.partition import Passes

AUTOCAST = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16-true": None}
"""By `precision`, the dtype of torch.autocast around forward."""

PARAMETERS = {"bf16-true": torch.bfloat16}
"""By `precision`, the dtype of parameters, buffers and floating-point inputs, if they are cast."""


def check_precision(precision: str, program: Program | None) -> None:
    """Raises ValueError for a precision that there is not, or that a given program cannot have."""
    if precision not in AUTOCAST:
        known = ", ".join(f'"{name}"' for name in AUTOCAST if name)
        raise ValueError(
            f"precision {precision!r} is unknown; use one of {known}, or leave it out (None) to "
            "compute in the dtypes of the model."
        )
    if precision and program is not None:
        raise ValueError(
            f"precision '{precision}' is given with a program, which has its dtypes; leave one out."
        )


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """The model, or a copy of it in the dtype of parameters that a precision says.

    Complex numbers, such as angles of rotary embeddings, stay: `model.to(dtype)` would leave their
    real parts alone.
    """
    dtype = PARAMETERS.get(precision)
    if dtype is None:
        return model
    # Of what hooks make anew in each forward pass, as weight norm and pruning do, no copy is made.
    made = [x for m in model.modules() for x in vars(m).values() if isinstance(x, Tensor)]
    memo: dict[int, Any] = {id(x): x.detach() for x in made if not x.is_leaf}
    copied = copy.deepcopy(model, memo)
    return copied._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def inputs_in_precision(inputs: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """The inputs of a call, floating-point ones in the dtype of the parameters if that is cast.

    Raises ValueError for one that requires a gradient, which the cast one would get.
    """
    dtype = PARAMETERS.get(precision)
    if dtype is None:
        return dict(inputs)
    cast: dict[str, Tensor] = {}
    for name, tensor in inputs.items():
        is_other = tensor.is_floating_point() and tensor.dtype != dtype
        if is_other and tensor.requires_grad:
            raise ValueError(
                f"input '{name}' requires a gradient in {tensor.dtype}, but precision "
                f"'{precision}' computes in {dtype}; give it in that dtype."
            )
        cast[name] = tensor.to(dtype) if is_other else tensor
    return cast


def reducing_in(dtype: torch.dtype, passes: Passes) -> Passes:
    """The passes of a request with one before them that sets the dtype of reductions."""
    names = {known: name for name, known in REDUCE_DTYPES.items()}
    if dtype not in names:
        known = ", ".join(map(str, names))
        raise ValueError(f"reduce_dtype={dtype} is not supported; use one of {known}.")
    given = PassPipeline([passes] if isinstance(passes, str) else passes).passes
    if any(one.name == "insert-collectives" for one in given):
        raise ValueError(
            "reduce_dtype is for the default passes; where `passes` has insert-collectives, put "
            f"'reduce-in{{dtype=\"{names[dtype]}\"}}' behind it, and leave reduce_dtype out."
        )
    return [ReduceInPass(names[dtype]), *given]
