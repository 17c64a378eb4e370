# pyright: basic
# torch's graphs are only partly typed.
"""Replace rows selected by a boolean mask, as in `x[mask] += v`, by `where` over all rows.

The number of selected rows depends on the data. If code computes on them row by row only, and
writes them back under the same mask, the program computes all rows, and the mask selects writes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from shardweave.ir.capture.observed.constant_numbers import changes_operand
from shardweave.ir.capture.site import CaptureError, site_of_node
from shardweave.ir.capture.substitutes.row_by_row import tried_by_row

_COMPARED: frozenset[Any] = frozenset(
    getattr(operator, name) for name in "gt ge lt le eq ne and_ or_ invert getitem".split()
)
"""Functions whose results are equal for equal operands, as `_is_same` assumes."""

_FILLER = 0.5
"""Value of rows that are not selected, for which most ops have a finite gradient."""


def replace_boolean_rows(exported: fx.GraphModule) -> None:
    """Replace reads `x[mask]` and writes `x[mask] = rows` in a graph by `torch.where`, if the
    results stay the same."""
    _write_masks(exported.graph)
    groups = _groups(exported.graph)
    changed = any([group.replace() for group in groups])
    for node in list(exported.graph.nodes):
        if _mask_of(node, operator.setitem) is not None and isinstance(node.args[2], fx.Node):
            changed |= _replace_write(node)
        elif node.target in _PUTS:
            changed |= _replace_put(node)
    if changed:
        exported.recompile()


def rows_or_filler(table: Tensor, mask: Tensor, rest: tuple[Any, ...], is_flat: bool) -> Tensor:
    """Return all rows of table[mask, *rest]; rows that `mask` does not select hold a filler value.
    rest: further indices. is_flat: flatten the mask's dims into one dim of rows."""
    table = _part(table, mask, rest)
    filler = _FILLER if table.is_floating_point() or table.is_complex() else 1
    rows = torch.where(_wide(mask, table), table, filler)
    return rows.flatten(0, mask.dim() - 1) if is_flat else rows


def write_rows(
    table: Tensor, mask: Tensor, rest: tuple[Any, ...], rows: Tensor, is_flat: bool = False
) -> None:
    """Write rows[i] to table[mask, *rest] where the mask selects row i. rows: a single row, or a
    row for each row of the table."""
    table = _part(table, mask, rest)
    rows = rows.unflatten(0, mask.shape) if is_flat else rows
    table.copy_(torch.where(_wide(mask, table), rows.to(table.dtype), table))


def put_rows(
    table: Tensor, indices: Sequence[Tensor], rows: Tensor, accumulate: bool = False
) -> Tensor:
    """Compute `torch.index_put` for one mask and a single row, which all selected rows get."""
    mask = _wide(indices[0], table)
    return torch.where(mask, table + rows if accumulate else rows, table)


def put_rows_in_place(
    table: Tensor, indices: Sequence[Tensor], rows: Tensor, accumulate: bool = False
) -> Tensor:
    """Compute `index_put_` for one mask and a single row, which all selected rows get."""
    return table.copy_(put_rows(table, indices, rows, accumulate))


_PUTS: dict[Any, Any] = {
    torch.index_put: put_rows,
    "index_put": put_rows,
    "index_put_": put_rows_in_place,
}


def _wide(mask: Tensor, table: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (table.dim() - mask.dim()))


def _part(table: Tensor, mask: Tensor, rest: tuple[Any, ...]) -> Tensor:
    return table[(slice(None),) * mask.dim() + rest] if rest else table


def _write_masks(graph: fx.Graph) -> None:
    """Replace an index by all positions of a mask, `x[torch.where(mask)]`, by the mask."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (operator.getitem, operator.setitem):
            continue
        index = node.args[1] if isinstance(node.args[1], tuple) else ()
        if not index or not all(isinstance(part, fx.Node) for part in index):
            continue
        mask = _mask_at(cast("fx.Node", index[0]).all_input_nodes[:1])
        if mask is not None and list(index) == _parts_of(cast("fx.Node", index[0]).args[0]):
            node.update_arg(1, mask)
    for node in reversed(graph.nodes):
        positions = node.args[0] if node.target is operator.getitem else node
        if not node.users and _mask_at([positions]) is not None:
            graph.erase_node(node)


def _mask_at(positions: Sequence[Any]) -> fx.Node | None:
    """Return the mask if `positions` is one node, torch.where(mask) or its nonzero; else None."""
    (node,) = positions or (None,)
    if not isinstance(node, fx.Node) or not node.args or not _is_mask(node.args[0]):
        return None
    is_where = node.target is torch.where and len(node.args) == 1
    is_nonzero = node.target in (torch.nonzero, "nonzero") and node.kwargs.get("as_tuple")
    return cast("fx.Node", node.args[0]) if is_where or is_nonzero else None


def _parts_of(positions: Any) -> list[fx.Node]:
    """Return the index tensors of all dims, in order; empty unless all dims are read."""
    parts = {n.args[1]: n for n in positions.users if n.target is operator.getitem}
    dims = range(_example(positions.args[0]).dim())
    return [parts[dim] for dim in dims] if set(dims) == parts.keys() else []


def _mask_of(node: fx.Node, target: Any) -> fx.Node | None:
    """Return the mask by which a call of `target` indexes rows, or parts of rows; else None."""
    if node.op != "call_function" or node.target is not target:
        return None
    first, *rest = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if not _is_mask(first) or any(isinstance(index, fx.Node | type(None)) for index in rest):
        return None
    return cast("fx.Node", first)


def _is_mask(node: Any) -> bool:
    value = _example(node)
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0


def _rest(node: fx.Node) -> tuple[Any, ...]:
    return node.args[1][1:] if isinstance(node.args[1], tuple) else ()


@dataclass
class _Group:
    """The reads under one mask, the calls on the selected rows, and the writes of these."""

    mask: fx.Node
    reads: list[fx.Node] = field(default_factory=list)
    computed: set[fx.Node] = field(default_factory=set)
    writes: list[fx.Node] = field(default_factory=list)
    is_by_row: bool = True
    is_flat: bool = False

    def add(self, node: fx.Node) -> None:
        """Add a call on selected rows; note whether its result for a row depends on other rows."""
        mask = _mask_of(node, operator.setitem)
        inputs = self.computed.intersection(node.all_input_nodes)
        if mask is not None and _is_same(mask, self.mask) and list(inputs) == [node.args[2]]:
            self.writes.append(node)
            return
        tried = tried_by_row(node, self.computed, _example(self.mask).dim())
        self.is_by_row &= tried is not None
        self.is_flat |= tried is True
        self.computed.add(node)

    def replace(self) -> bool:
        """Make the group's calls compute all rows, not only those that a mask selects. False,
        with nothing changed, if that is impossible."""
        masks = {_mask_of(read, operator.getitem) for read in self.reads}
        masks |= {_mask_of(write, operator.setitem) for write in self.writes}
        if not self.is_by_row or not self.writes or any(map(is_written, filter(None, masks))):
            return False
        for read in self.reads:
            mask = _mask_of(read, operator.getitem)
            read.args = (read.args[0], mask, _rest(read), self.is_flat)
            read.target = rows_or_filler
        for node in self.computed:
            node.meta.pop("unbacked_bindings", None)
        for write in self.writes:
            mask = _mask_of(write, operator.setitem)
            write.args = (write.args[0], mask, _rest(write), write.args[2], self.is_flat)
            write.target = write_rows
        return True


def _groups(graph: fx.Graph) -> list[_Group]:
    groups: list[_Group] = []
    for node in graph.nodes:
        mask = _mask_of(node, operator.getitem)
        own = [g for g in groups if not g.computed.isdisjoint(node.all_input_nodes)]
        if mask is not None and not own and _has_free_sizes(_example(node)):
            group = next((g for g in groups if _is_same(g.mask, mask)), None) or _Group(mask)
            group.reads.append(node)
            group.computed.add(node)
            groups += [] if group in groups else [group]
        for group in own:
            group.add(node)
            group.is_by_row &= len(own) == 1
    return groups


def is_written(tensor: fx.Node) -> bool:
    """True if some call may change `tensor` in place."""
    return any(user.args[:1] == (tensor,) and changes_operand(user) for user in tensor.users)


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return type(first) is type(second) and first == second
    if first is second:
        return True
    is_call = first.op == second.op == "call_function" and first.target is second.target
    # What draws random numbers gives others each time.
    is_call &= first.target in _COMPARED
    is_pure = is_call and not first.kwargs and not second.kwargs and not is_written(first)
    return is_pure and _is_same(first.args, second.args)


def _replace_write(write: fx.Node) -> bool:
    """Replace a write of one row; return whether done. Raises CaptureError for several rows."""
    operands = cast("tuple[fx.Node, ...]", write.args)
    mask = cast("fx.Node", _mask_of(write, operator.setitem))
    rest, (table, rows) = _rest(write), map(_example, (operands[0], operands[2]))
    if operands[2].meta.get("unbacked_bindings") or _has_free_sizes(rows):
        return False
    _check_one_row(write, _part(table, _example(mask), rest), _example(mask), rows)
    write.args = (operands[0], mask, rest, operands[2])
    write.target = write_rows
    return True


def _replace_put(put: fx.Node) -> bool:
    """Replace `index_put` of one row by mask; return whether done. Raises CaptureError."""
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
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _check_one_row(write: fx.Node, table: Tensor, mask: Tensor, rows: Tensor) -> None:
    num_rest = table.dim() - mask.dim()
    is_one = rows.dim() <= num_rest or (rows.dim() == num_rest + 1 and rows.shape[0] == 1)
    if not is_one:
        raise CaptureError(
            f"{site_of_node(write)}: this writes one row for each True in a mask, and their "
            "number depends on the data; compute a value for every row, and write "
            "torch.where(mask, values, x)."
        )


def _has_free_sizes(value: Tensor) -> bool:
    return any(not isinstance(size, int) for size in value.shape)
