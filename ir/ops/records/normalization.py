"""Layer, group and RMS normalisation."""

from __future__ import annotations

import math
from functools import cache
from typing import cast

from xdsl.ir import Attribute

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.literals import to_python
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.spec import Derivation, OpSpec, Reduction, family

LAYER_NORM_BACKWARD = "aten.native_layer_norm_backward"


def _normalized_shape(op: AtenOp, source: int, mean: tuple[int, ...]) -> list[int]:
    """The trailing dims that a layer norm reduces: its parameters' dims, or mean's 1s."""
    for name in ("weight", "bias"):
        parameter = op.tensor(name)
        if parameter is not None and not isinstance(parameter, list):
            return list(shape_of(parameter))
    kept = len(mean)
    while kept and mean[kept - 1] == 1:
        kept -= 1
    return list(shape_of(op.operands[source])[kept:])


def _group_norm_sizes(source: int) -> dict[str, Derivation]:
    """The sizes of a group norm's input, operand `source`."""
    return {
        "N": lambda op: shape_of(op.operands[source])[0],
        "C": lambda op: shape_of(op.operands[source])[1],
        "HxW": lambda op: math.prod(shape_of(op.operands[source])[2:]),
    }


def _layer_norm_reductions(op: AtenOp) -> tuple[Reduction, ...]:
    numel = math.prod(shape_of(op.operands[0]))
    return (Reduction("row", numel, numel // math.prod(shape_of(op.results[1]))),)


def _layer_norm_backward_reductions(op: AtenOp) -> tuple[Reduction, ...]:
    numel = math.prod(shape_of(op.operands[0]))
    size = numel // math.prod(shape_of(op.operands[2]))
    return _of_gradients(numel, size, op.properties["output_mask"])


@cache
def _of_gradients(numel: int, size: int, output_mask: Attribute) -> tuple[Reduction, ...]:
    mask = cast("list[bool]", to_python(output_mask))
    rows = (Reduction("row", numel, size),) if mask[0] else ()
    return (*rows, *((Reduction("column", numel, size),) if mask[1] or mask[2] else ()))


SPECS = (
    OpSpec(
        "aten.native_layer_norm",
        rule="layer_norm",
        derived={"normalized_shape": lambda op: _normalized_shape(op, 0, shape_of(op.results[1]))},
        is_direct=True,
        # torch's CUDA kernels give mean and rstd in the dtype that they accumulate in.
        float32_on_gpu=(1, 2),
        role="reduce",
        reductions=_layer_norm_reductions,
    ),
    OpSpec(
        LAYER_NORM_BACKWARD,
        rule="layer_norm_backward",
        derived={"normalized_shape": lambda op: _normalized_shape(op, 1, shape_of(op.operands[2]))},
        needs_contiguous=True,
        role="reduce",
        reductions=_layer_norm_backward_reductions,
    ),
    *family("_weight_norm_interface _weight_norm_interface_backward", needs_contiguous=True),
    *family("_fused_rms_norm", rule="layer_norm"),
    *family("_fused_rms_norm_backward", rule="layer_norm_backward"),
    OpSpec(
        "aten.native_group_norm",
        rule="group_norm",
        derived=_group_norm_sizes(0),
        is_direct=True,
        needs_contiguous=True,
    ),
    OpSpec(
        "aten.native_group_norm_backward",
        rule="group_norm_backward",
        derived=_group_norm_sizes(1),
        needs_contiguous=True,
    ),
)
