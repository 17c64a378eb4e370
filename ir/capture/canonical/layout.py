"""Views, copies and slices in one form each."""

from __future__ import annotations

import math

import torch
from xdsl.ir import SSAValue

from shardweave.ir.capture.canonical.base import Call, Result, form, normalized
from shardweave.ir.capture.canonical.grouped import gradient_of_lookup, is_zeros
from shardweave.ir.dialects.aten import maker
from shardweave.ir.dialects.types import dtype_of_value, shape_of, shape_of_type, tensor_type


@form(
    "aten.detach", "aten.alias", "aten.clone", "aten.contiguous", "aten.lift_fresh_copy",
    "aten.lift_fresh", "aten.lift",
)  # fmt: skip
def _identity(call: Call) -> Result:
    return call["self"]


@form("aten._to_copy", "aten.to.dtype")
def _to_copy(call: Call) -> Result:
    """Cast to the dtype of the result, if it differs; a Python number becomes a scalar tensor."""
    source: SSAValue | float = call["self"]
    if isinstance(source, SSAValue):
        return call.builder.cast(source, call.dtype)
    return call.builder.full(call.shape, source, call.dtype)


@form("aten.copy")
def _copy(call: Call) -> Result:
    source = call.builder.cast(call["src"], call.dtype)
    return call.builder.expand(source, call.shape)


@form(
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unsqueeze",
    "aten.squeeze", "aten.squeeze.dim", "aten.squeeze.dims", "aten.flatten.using_ints",
)  # fmt: skip
def _view(call: Call) -> Result:
    """Express any change of shape that keeps the order of elements as one view."""
    return call.builder.view(call["self"], call.shape)


@form("aten.t", "aten.transpose.int", "aten.permute", "aten.numpy_T")
def _permute(call: Call) -> Result:
    """Express any permutation of dims as `aten.permute`."""
    source = call["self"]
    rank = len(shape_of(source))
    order = list(range(rank))
    if call.name == "aten.permute":
        order = [normalized(d, rank) for d in call["dims"]]
    elif call.name == "aten.transpose.int":
        a, b = normalized(call["dim0"], rank), normalized(call["dim1"], rank)
        if rank:
            order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return call.builder.permute(source, order)


@form("aten.expand", "aten.expand_as", "aten.broadcast_to")
def _expand(call: Call) -> Result:
    return call.builder.expand(call["self"], call.shape)


@form("aten.repeat")
def _repeat(call: Call) -> Result:
    """Expand a new dim before each dim, then merge: the repeats become a separate factor."""
    repeats = list(call["repeats"])
    shape = shape_of(call["self"])
    shape = (1,) * (len(repeats) - len(shape)) + shape
    b = call.builder
    cut = b.view(call["self"], [n for size in shape for n in (1, size)])
    wide = b.expand(cut, [n for r, size in zip(repeats, shape, strict=True) for n in (r, size)])
    return b.view(wide, call.shape)


@form("aten.diagonal", "aten.unfold")
def _copied_view(call: Call) -> Result:
    """Replace a strided view by the op that copies it, since values have no strides."""
    values = {name: value for name, value in call.arguments.items() if name != "self"}
    return call.add(f"{call.name}_copy", [call["self"]], values)


@form("aten.slice.Tensor")
def _slice_(call: Call) -> Result:
    """Slice with an explicit start; a slice of the whole dim returns its operand."""
    start = call["start"] or 0
    return sliced(call, call["self"], call["dim"], start, call["step"], call.shape)


def sliced(
    call: Call, source: SSAValue, dim: int, start: int, step: int, shape: tuple[int, ...]
) -> SSAValue:
    """Slice `source` along `dim` to `shape`."""
    size = shape_of(source)
    dim = normalized(dim, len(size))
    if size == shape:
        return source
    start = max(start + size[dim], 0) if start < 0 else min(start, size[dim])
    values = {"dim": dim, "start": start, "step": step}
    result = tensor_type(shape, dtype_of_value(source))
    return call.builder.add("aten.slice.Tensor", [source], [result], values).results[0]


@form(
    "aten.split.Tensor", "aten.split_with_sizes", "aten.split.sizes", "aten.chunk",
    "aten.unsafe_split.Tensor", "aten.unsafe_chunk",
)  # fmt: skip
def _split(call: Call) -> Result:
    source = call["self"]
    dim = normalized(call["dim"], len(shape_of(source)))
    start = 0
    parts: list[SSAValue | None] = []
    for type_ in call.types:
        assert type_ is not None
        shape = shape_of_type(type_)
        parts.append(sliced(call, source, dim, start, 1, shape))
        start += shape[dim]
    return parts


@form("aten.unbind.int")
def _unbind(call: Call) -> Result:
    source = call["self"]
    dim = normalized(call["dim"], len(shape_of(source)))
    b = call.builder
    return [
        b.add("aten.select.int", [source], [type_], {"dim": dim, "index": _index}).results[0]
        for _index, type_ in enumerate(call.types)
        if type_ is not None
    ]


@form("aten.slice_backward")
def _slice_backward(call: Call) -> Result:
    grad = call["grad_output"]
    if shape_of(grad) == call.shape:
        return grad
    dim = normalized(call["dim"], len(call.shape))
    start = call["start"]
    start = max(start + call.shape[dim], 0) if start < 0 else start
    values = {"dim": dim, "start": start, "step": call["step"]}
    return call.add("aten.slice_backward", [grad], values)


@form("aten.select.int")
def _select(call: Call) -> Result:
    shape = shape_of(call["self"])
    dim = normalized(call["dim"], len(shape))
    values = {"dim": dim, "index": normalized(call["index"], shape[dim])}
    return call.add("aten.select.int", [call["self"]], values)


@form("aten.select_backward")
def _select_backward(call: Call) -> Result:
    dim = normalized(call["dim"], len(call.shape))
    values = {"dim": dim, "index": normalized(call["index"], call.shape[dim])}
    grad = call["grad_output"]
    return call.add("aten.select_backward", [grad], values)


@form("aten.cat")
def _cat(call: Call) -> Result:
    """Concatenate the operands that are not empty."""
    parts = [p for p in call["tensors"] if 0 not in shape_of(p)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return call.builder.full(call.shape, 0, call.dtype)
    dim = normalized(call["dim"], len(call.shape))
    return call.add("aten.cat", [parts], {"dim": dim})


@form("aten.stack")
def _stack(call: Call) -> Result:
    dim = normalized(call["dim"], len(call.shape))
    shape = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    parts = [call.builder.view(part, shape) for part in call["tensors"]]
    return call.add("aten.cat", [parts], {"dim": dim})


@form("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(call: Call) -> Result:
    """Look up elements; if the indices enumerate each dim in order, this is only a view."""
    source = call["self"]
    indices = list(call["indices"])
    if _counts_every_dim(source, indices, call.shape):
        return call.builder.view(source, call.shape)
    return call.add("aten.index.Tensor", [source, indices])


@form("aten.index_put", "aten._unsafe_index_put")
def _index_put(call: Call) -> Result:
    """Write values at indices; rows added to zeros become the gradient of a lookup."""
    rows = _numbers_of_rows(call)
    if rows is not None and call["accumulate"] and is_zeros(call["self"]):
        # An index may count from the end.
        rows = call.builder.call("aten.remainder.Scalar", rows, other=call.shape[0])
        return gradient_of_lookup(call, rows, call["values"])
    operands = [call["self"], list(call["indices"]), call["values"]]
    values = {"accumulate": call["accumulate"]}
    return call.add("aten.index_put", operands, values)


def _numbers_of_rows(call: Call) -> SSAValue | None:
    """Return the index if it selects whole rows and `values` has every element; else None."""
    rows, *others = call["indices"]
    if rows is None or any(other is not None for other in others):
        return None
    is_number = dtype_of_value(rows) in (torch.int32, torch.int64)
    shape = (*shape_of(rows), *call.shape[1:])
    return rows if is_number and shape_of(call["values"]) == shape else None


def _counts_every_dim(
    source: SSAValue, indices: list[SSAValue | None], shape: tuple[int, ...]
) -> bool:
    """True if index k runs over 0, 1, .. of dim k, along result dims in the same order."""
    sizes = shape_of(source)
    if len(indices) != len(sizes):
        return False
    previous = -1
    for value, size in zip(indices, sizes, strict=True):
        if value is None:
            return False
        dim = _counted_dim(value, size)
        if dim is None:
            return False
        dim += len(shape) - len(shape_of(value))
        if dim <= previous or shape[dim] != size:
            return False
        previous = dim
    return math.prod(shape) == math.prod(sizes)


def _counted_dim(value: SSAValue, size: int) -> int | None:
    """The dim along which `value` is 0, 1, .., size - 1 (and constant along the others)."""
    shape = shape_of(value)
    wide = [d for d, n in enumerate(shape) if n != 1]
    if len(wide) > 1 or (wide and shape[wide[0]] != size) or (not wide and size != 1):
        return None
    source = value
    while (shown := maker(source, "aten.view", "aten.expand")) is not None:
        source = shown.operands[0]
    made = maker(source, "aten.arange.start_step")
    counts = made is not None and made.value("start") == 0 and made.value("step") == 1
    # Without a wide dim any dim will do: the last one keeps the order of dims.
    return (wide[0] if wide else len(shape) - 1) if counts else None
