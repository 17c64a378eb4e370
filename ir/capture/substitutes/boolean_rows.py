# pyright: basic
# torch's graphs are only partly typed.
"""Rows that a boolean mask names: `x[mask] = row` and `x[mask] += v` as `where` over all rows.

How many rows a mask names depends on the data. Where they are only computed on, row by row, and
written back under the same mask, all rows are computed on, and the mask chooses what is written.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from shardweave.ir.capture.site import CaptureError, site_of_node
from shardweave.ir.ops.registry import spec_named

_COMPARED: frozenset[Any] = frozenset(
    getattr(operator, name) for name in "gt ge lt le eq ne and_ or_ invert getitem".split()
)
"""Functions that give equal results for equal operands."""

_FILLER = 0.5
"""Value of rows that are not selected, which gives ops on them a finite gradient."""


def replace_boolean_rows(exported: torch.fx.GraphModule) -> None:
    """Put `where` in place of reads and writes of rows by a mask, as far as that is the same."""
    changed = False
    for node in list(exported.graph.nodes):
        if _is_masked(node, operator.getitem) and node.meta.get("unbacked_bindings"):
            changed |= _replace_read(node)
        elif _is_masked(node, operator.setitem) and isinstance(node.args[2], torch.fx.Node):
            changed |= _replace_write(node)
        elif node.target in _PUTS:
            changed |= _replace_put(node)
    if changed:
        exported.recompile()


def rows_or_filler(table: Tensor, mask: Tensor) -> Tensor:
    """All rows, of those that the mask does not name a filler."""
    filler = _FILLER if table.is_floating_point() or table.is_complex() else 1
    return torch.where(_wide(mask, table), table, filler)


def write_rows(table: Tensor, mask: Tensor, rows: Tensor) -> None:
    """table[mask] = rows, where rows are one for all, or as many as the table has."""
    table.copy_(torch.where(_wide(mask, table), rows.to(table.dtype), table))


def put_rows(
    table: Tensor, indices: Sequence[Tensor], rows: Tensor, accumulate: bool = False
) -> Tensor:
    """`torch.index_put` by one mask, of one row for all."""
    mask = _wide(indices[0], table)
    return torch.where(mask, table + rows if accumulate else rows, table)


def put_rows_in_place(
    table: Tensor, indices: Sequence[Tensor], rows: Tensor, accumulate: bool = False
) -> Tensor:
    """`index_put_` by one mask, of one row for all."""
    return table.copy_(put_rows(table, indices, rows, accumulate))


_PUTS: dict[Any, Any] = {
    torch.index_put: put_rows,
    "index_put": put_rows,
    "index_put_": put_rows_in_place,
}


def _wide(mask: Tensor, table: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (table.dim() - mask.dim()))


def _is_masked(node: torch.fx.Node, target: Any) -> bool:
    if node.op != "call_function" or node.target is not target:
        return False
    mask = node.args[1]
    value = mask.meta.get("example_value") if isinstance(mask, torch.fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0


def _replace_read(read: torch.fx.Node) -> bool:
    """Whether the rows that are read could be replaced, with all that is computed of them."""
    mask = read.args[1]
    num_rest = read.meta["example_value"].dim() - 1
    computed, writes = {read}, []
    for node in _users_after(read):
        if not computed.intersection(node.all_input_nodes):
            continue
        if _is_masked(node, operator.setitem) and _is_same(node.args[1], mask):
            if computed.isdisjoint((node.args[0], node.args[1])):
                writes.append(node)
                continue
        if not _is_by_row(node, computed, num_rest):
            return False
        computed.add(node)
    if not writes or any(
        is_written(cast("torch.fx.Node", write.args[1])) for write in (read, *writes)
    ):
        return False
    read.target = rows_or_filler
    for node in computed:
        node.meta.pop("unbacked_bindings", None)
    for write in writes:
        write.target = write_rows
    return True


def _users_after(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    node = node.next
    while node.op != "root":
        yield node
        node = node.next


def _is_by_row(node: torch.fx.Node, computed: set[torch.fx.Node], num_rest: int) -> bool:
    others = [other for other in node.all_input_nodes if other not in computed]
    values = [other.meta.get("example_value") for other in others]
    is_one = all(isinstance(value, Tensor) and value.dim() <= num_rest for value in values)
    return is_one and _is_pointwise(node)


def _is_pointwise(node: torch.fx.Node) -> bool:
    """Whether a call computes each element by itself, as a kernel may hold it."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op == "call_function" and node.target is getattr(operator, name, None):
        is_in_place = name[:1] == "i" and hasattr(operator, name[1:])
        name = name[is_in_place:].replace("truediv", "div")
    elif node.op == "call_function" and node.target is not getattr(torch, name, None):
        return False
    name = name.removesuffix("_")
    overloads = (f"aten.{name}{suffix}" for suffix in ("", ".Tensor", ".Tensor_Scalar", ".self"))
    return any(spec_named(overload).role == "pointwise" for overload in overloads)


def is_written(tensor: torch.fx.Node) -> bool:
    """Whether some call may change a tensor in place."""
    return any(
        user.args[:1] == (tensor,)
        and (
            user.target is operator.setitem
            or str(user.target).endswith("_")
            or getattr(user.target, "__name__", "")[:1] == "i"
        )
        for user in tensor.users
    )


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if not isinstance(first, torch.fx.Node) or not isinstance(second, torch.fx.Node):
        return type(first) is type(second) and first == second
    if first is second:
        return True
    is_call = first.op == second.op == "call_function" and first.target is second.target
    # What draws random numbers gives others each time.
    is_call &= first.target in _COMPARED
    is_pure = is_call and not first.kwargs and not second.kwargs and not is_written(first)
    return is_pure and _is_same(first.args, second.args)


def _replace_write(write: torch.fx.Node) -> bool:
    """Whether one row is written to all that the mask names. Raises CaptureError for several."""
    operands = cast("tuple[torch.fx.Node, ...]", write.args)
    table, mask, rows = (node.meta["example_value"] for node in operands)
    if operands[2].meta.get("unbacked_bindings") or _has_free_sizes(rows):
        return False
    _check_one_row(write, table, mask, rows)
    write.target = write_rows
    return True


def _replace_put(put: torch.fx.Node) -> bool:
    """Whether a call of `index_put` writes one row to all that a mask names."""
    table, indices, rows = (*put.args, *[put.kwargs.get(name) for name in ("indices", "values")])[
        :3
    ]
    masks = cast("Sequence[Any]", indices) if isinstance(indices, tuple | list) else ()
    values = [_example(node) for node in (table, *masks, rows)]
    if len(values) != 3 or not all(isinstance(value, Tensor) for value in values):
        return False
    if values[1].dtype != torch.bool or not values[1].dim():
        return False
    _check_one_row(put, *values)
    put.op, put.target = "call_function", _PUTS[put.target]
    return True


def _example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None


def _check_one_row(write: torch.fx.Node, table: Tensor, mask: Tensor, rows: Tensor) -> None:
    num_rest = table.dim() - mask.dim()
    is_one = rows.dim() <= num_rest or (rows.dim() == num_rest + 1 and rows.shape[0] == 1)
    if not is_one:
        raise CaptureError(
            f"{site_of_node(write)}: this writes as many rows as the mask has ones, which depends "
            "on the data; give a value for every row, and write torch.where(mask, values, x)."
        )


def _has_free_sizes(value: Tensor) -> bool:
    return any(not isinstance(size, int) for size in value.shape)
