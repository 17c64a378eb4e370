"""How an ATen op is called: as torch's overload, but for kernels with holes in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.backends.emit.attention import flash_attention, flash_attention_backward
from shardweave.backends.emit.positional_attention import (
    positional_attention,
    positional_attention_backward,
)
from shardweave.backends.emit.random_numbers import random_numbers
from shardweave.ir.dialects.aten import AtenOp, overload_named
from shardweave.ir.library.philox import RANDOM
from shardweave.ir.library.positional_attention import ATTENTION, ATTENTION_BACKWARD
from shardweave.ir.ops.aten_args import CALLEE, arguments

_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"

FUNCTIONS: dict[str, Callable[..., Any]] = {
    _FLASH: flash_attention,
    f"{_FLASH}_backward": flash_attention_backward,
    RANDOM: random_numbers,
    ATTENTION: positional_attention,
    ATTENTION_BACKWARD: positional_attention_backward,
}
"""Ops that run as a function of ours."""

DIRECT: dict[str, str] = {
    f"aten.{name}": f"torch.{name.partition('.')[0]}"
    for name in """
    mm bmm addmm baddbmm add.Tensor sub.Tensor mul.Tensor div.Tensor neg exp log sqrt rsqrt tanh
    sigmoid relu sin cos erf reciprocal abs permute sum.dim_IntList amax where.self gather
    scatter_add cat stack select.int native_layer_norm native_group_norm embedding _softmax
    _log_softmax pow.Tensor_Scalar logsumexp
    """.split()
} | {"aten.view": "torch.reshape"}
"""Ops that emitted modules call by torch's own function, which takes the same arguments and calls
the same overload: `torch.ops` takes 1 to 3 us longer, since it reads arguments by the schema."""

TRANSPOSE = "torch.t"
"""What stands for `aten.permute` of a matrix, and reads no list: it takes half the time."""

NEED_CONTIGUOUS = frozenset(
    {
        "aten.native_group_norm",
        "aten.native_group_norm_backward",
        "aten.native_layer_norm_backward",
        "aten.view.dtype",
        "aten.view_as_complex",
        "aten._linalg_det",
        "aten._linalg_slogdet",
    }
)
"""Ops that need dense operands: a CPU kernel reads a strided one as if it were contiguous, without
an error, a view of pairs does not exist, or factors are those of the matrix as memory has it.

Eager's autograd, or the model, makes the operands contiguous before it calls these; a program does
not say so, and which operands are strided changes with the sharding.
"""


def callee_of(op: AtenOp) -> Callable[..., Any]:
    """The Python function that an op calls with its arguments."""
    return FUNCTIONS.get(op.name) or overload_named(CALLEE.get(op.name, op.name))


def takes_device(op: AtenOp) -> bool:
    """Whether an op must be told where to compute, since it has no operand that is there."""
    return not op.operands and op.signature.parameter("device") is not None


def prepared(
    op: AtenOp, tensor_of: Callable[[SSAValue], Tensor], device: torch.device | None = None
) -> Callable[[], list[Tensor]]:
    """The call of an op on the tensors of its operands, which returns those of its results."""
    dense = op.name in NEED_CONTIGUOUS
    args, kwargs = arguments(op, lambda v: tensor_of(v).contiguous() if dense else tensor_of(v))
    if device is not None and takes_device(op):
        kwargs["device"] = device
    function = callee_of(op)

    def call() -> list[Tensor]:
        returned = function(*args, **kwargs)
        parts = returned if isinstance(returned, tuple | list) else (returned,)
        # A gradient that the op's mask leaves out is None, and not a result of the op.
        return [part for part in parts if part is not None]

    return call
