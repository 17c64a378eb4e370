"""Reading and writing memory by strides: as lookups, since values of a program have no strides."""

from __future__ import annotations

from typing import Any

import torch
from xdsl.ir import SSAValue

from shardweave.ir.capture.canonical.base import FORMS, Call, Result, form
from shardweave.ir.capture.site import CaptureError, site_of_node
from shardweave.ir.dialects.types import num_elements, shape_of


def memory_order(node: torch.fx.Node) -> dict[str, list[int]]:
    """Return {"order": dims}, the operand's dims in memory order, for an as_strided op; else {}.

    Raises CaptureError unless the operand is contiguous from offset 0 with its dims in this order.
    """
    if FORMS.get(str(node.target).removesuffix(".default")) not in (
        _as_strided,
        _as_strided_scatter,
    ):
        return {}
    source: Any = node.args[0]
    value = source.meta["val"]
    order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), -value.shape[dim]))
    if not value.permute(order).is_contiguous() or value.storage_offset():
        raise CaptureError(
            f"{site_of_node(node)}: as_strided reads memory that is laid out otherwise than in "
            f"contiguous order (operand of shape {tuple(value.shape)}); call contiguous() on the "
            "operand before, or use indexing (unfold, diagonal) instead."
        )
    return {"order": order}


@form("aten.as_strided", "aten.as_strided_copy")
def _as_strided(call: Call) -> Result:
    """Look up the elements that the strides address."""
    flat, _ = _memory(call)
    return call.add("aten.index.Tensor", [flat, [_places(call)]])


@form("aten.as_strided_scatter")
def _as_strided_scatter(call: Call) -> Result:
    """Write the elements of `src` to the places that the strides address."""
    b, order = call.builder, call["order"]
    flat, shape = _memory(call)
    written = b.call("aten.index_put", flat, [_places(call)], call["src"], accumulate=False)
    return b.permute(b.view(written, shape), sorted(order, key=order.index))


def _memory(call: Call) -> tuple[SSAValue, tuple[int, ...]]:
    """Return the operand flattened in memory order, and its shape in that order of dims."""
    held = call.builder.permute(call["self"], call["order"])
    return call.builder.view(held, [num_elements(held)]), shape_of(held)


def _places(call: Call) -> SSAValue:
    b, size, stride = call.builder, list(call["size"]), list(call["stride"])
    places = b.full([1] * len(size), call["storage_offset"] or 0, torch.int64)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        if step:
            shape = [length if d == dim else 1 for d in range(len(size))]
            places = b.call("aten.add.Tensor", places, b.view(b.count(length, step), shape))
    return b.expand(places, size)
