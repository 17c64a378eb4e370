"""Which share of the keys the queries of a causal attention see, by their positions.

A kernel computes the products of queries by keys that a causal mask lets be seen, half of all where
queries are those of the whole sequence. Of a device's piece of the sequence it is half as well, if
that has early and late positions alike; of the last of plain pieces it is nearly all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.ir.aten import AtenOp
from shardweave.ir.dist import ShardIndexOp, SliceOp
from shardweave.ir.mesh import Mesh
from shardweave.ir.positional_attention import ATTENTION, ATTENTION_BACKWARD
from shardweave.ir.types import shape_of

Expression = tuple[object, ...]
"""How positions are computed, as data: (`range`, start, step, length), (`add`, a, b), (`times`, a,
number), (`index`, axes), (`slice`, a, axes, block)."""


def seen_share(op: AtenOp, mesh: Mesh) -> float:
    """Of all products of queries by keys in a fused attention, the share that is computed.

    On the device that computes most: all wait for it. Positions that are not counted from the mesh
    are taken for those of a balanced piece.
    """
    if op.name not in (ATTENTION, ATTENTION_BACKWARD):
        return 0.5 if op.value("is_causal") else 1.0
    queries, keys = op.tensor("query_positions"), op.tensor("key_positions")
    if not (isinstance(queries, SSAValue) and isinstance(keys, SSAValue)):
        return 1.0
    pair = _expression(queries), _expression(keys)
    if pair[0] is None or pair[1] is None:
        return 0.5
    return _share(pair[0], pair[1], mesh)


def is_causal(op: AtenOp) -> bool:
    """Whether a query of a fused attention sees the keys before it alone."""
    if op.name in (ATTENTION, ATTENTION_BACKWARD):
        return op.tensor("query_positions") is not None
    return bool(op.value("is_causal"))


def _expression(value: SSAValue) -> Expression | None:
    """How positions are computed; None if by other ops."""
    op = value.owner
    if isinstance(op, ShardIndexOp):
        return "index", op.axes
    if isinstance(op, SliceOp):
        inner = _expression(op.operands[0])
        return None if inner is None else ("slice", inner, op.axes, op.block)
    if not isinstance(op, AtenOp):
        return None
    if op.name == "aten.arange.start_step":
        return "range", op.value("start"), op.value("step"), shape_of(value)[0]
    inner = [_expression(operand) for operand in op.operands]
    if None in inner:
        return None
    if op.name == "aten.add.Tensor":
        return "add", *inner
    return ("times", *inner, op.value("other")) if op.name == "aten.mul.Scalar" else None


@cache
def _share(queries: Expression, keys: Expression, mesh: Mesh) -> float:
    axes = sorted({*_axes(queries), *_axes(keys)})
    most = 0.0
    for place in product(*(range(mesh.size(axis)) for axis in axes)):
        coordinates = dict(zip(axes, place, strict=True))
        own, all_keys = (_values(one, coordinates, mesh) for one in (queries, keys))
        seen = torch.searchsorted(all_keys.sort().values, own.contiguous(), right=True)
        most = max(most, seen.double().mean().item() / len(all_keys))
    return most


def _axes(expression: Expression) -> Iterator[str]:
    match expression:
        case ("index", tuple(axes)) | ("slice", _, tuple(axes), _):
            yield from map(str, axes)
        case _:
            pass
    for inner in expression[1:]:
        if isinstance(inner, tuple) and inner and inner[0] in _KINDS:
            yield from _axes(inner)


_KINDS = ("range", "add", "times", "index", "slice")


def _values(expression: Expression, coordinates: Mapping[str, int], mesh: Mesh) -> Tensor:
    """The positions of the device at some coordinates."""
    match expression:
        case ("range", int(start), int(step), int(length)):
            return start + step * torch.arange(length)
        case ("add", tuple(a), tuple(b)):
            return _values(a, coordinates, mesh) + _values(b, coordinates, mesh)
        case ("times", tuple(a), int(number)):
            return _values(a, coordinates, mesh) * number
        case ("index", tuple(axes)):
            return torch.tensor(_index(axes, coordinates, mesh)[0])
        case ("slice", tuple(a), tuple(axes), int(block)):
            index, count = _index(axes, coordinates, mesh)
            return _values(a, coordinates, mesh).view(-1, count, block)[:, index].flatten()
        case _:
            raise AssertionError(f"no expression of positions: {expression}")


def _index(axes: tuple[object, ...], coordinates: Mapping[str, int], mesh: Mesh) -> tuple[int, int]:
    """The place among the devices of some axes, the first slowest, and how many there are."""
    index, count = 0, 1
    for axis in map(str, axes):
        size = mesh.size(axis)
        index, count = index * size + coordinates[axis], count * size
    return index, count
