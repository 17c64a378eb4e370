"""Which share of the keys the queries of a causal attention see, by their positions.

A kernel computes the products of queries by keys that a causal mask lets be seen, half of all where
queries are those of the whole sequence. Of a device's piece of the sequence it is half as well, if
that has early and late positions alike; of the last of plain pieces it is nearly all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import ShardIndexOp, SliceOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.library.positional_attention import pieces_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import is_positional


@dataclass(frozen=True)
class _Range:
    start: int
    step: int
    length: int


@dataclass(frozen=True)
class _Sum:
    terms: tuple[_Positions, ...]


@dataclass(frozen=True)
class _Multiple:
    of: _Positions
    times: int


@dataclass(frozen=True)
class _ShardIndex:
    axes: tuple[str, ...]


@dataclass(frozen=True)
class _Slice:
    of: _Positions
    axes: tuple[str, ...]
    block: int


_Positions: TypeAlias = "_Range | _Sum | _Multiple | _ShardIndex | _Slice"
"""How positions are computed on each rank, as data."""


def seen_share(op: AtenOp, mesh: Mesh) -> float:
    """The share of products of queries by keys that is computed, on the device where it is most."""
    if not is_positional(op):
        return 0.5 if op.value("is_causal") else 1.0
    queries, keys = op.tensor("query_positions"), op.tensor("key_positions")
    if not (isinstance(queries, SSAValue) and isinstance(keys, SSAValue)):
        return 1.0
    own, whole = _read(queries), _read(keys)
    return 0.5 if own is None or whole is None else _share(own, whole, mesh)


def num_pieces(op: AtenOp, mesh: Mesh) -> int:
    """How many pieces an attention by positions is computed in, on the first device; 1 where a mask
    says what queries see."""
    queries, keys = op.tensor("query_positions"), op.tensor("key_positions")
    if not (isinstance(queries, SSAValue) and isinstance(keys, SSAValue)):
        return 1
    own, whole = _read(queries), _read(keys)
    if own is None or whole is None or op.tensor("attn_mask") is not None:
        return 1
    return _num_pieces(own, whole, mesh)


@cache
def _num_pieces(queries: _Positions, keys: _Positions, mesh: Mesh) -> int:
    first = dict.fromkeys({*_axes(queries), *_axes(keys)}, 0)
    own, whole = ([int(n) for n in _values(one, first, mesh)] for one in (queries, keys))
    found = pieces_of(own, whole)
    return 1 if found is None else len(found)


def is_causal(op: AtenOp) -> bool:
    """Whether a query of a fused attention sees the keys before it alone."""
    if is_positional(op):
        return op.tensor("query_positions") is not None
    return bool(op.value("is_causal"))


def are_counted(positions: SSAValue) -> bool:
    """Whether positions are counted from the mesh, so that each rank knows them beforehand."""
    return _read(positions) is not None


def _read(value: SSAValue) -> _Positions | None:
    """How positions are computed; None if by other ops."""
    op = value.owner
    if isinstance(op, ShardIndexOp):
        return _ShardIndex(tuple(op.axes))
    if isinstance(op, SliceOp):
        whole = _read(op.operands[0])
        return None if whole is None else _Slice(whole, tuple(op.axes), op.block)
    if not isinstance(op, AtenOp):
        return None
    if op.name == "aten.arange.start_step":
        return _Range(int(op.value("start")), int(op.value("step")), shape_of(value)[0])
    inner = [found for operand in op.operands if (found := _read(operand)) is not None]
    if len(inner) < len(op.operands):
        return None
    if op.name == "aten.add.Tensor":
        return _Sum(tuple(inner))
    return _Multiple(inner[0], int(op.value("other"))) if op.name == "aten.mul.Scalar" else None


@cache
def _share(queries: _Positions, keys: _Positions, mesh: Mesh) -> float:
    axes = sorted({*_axes(queries), *_axes(keys)})
    most = 0.0
    for place in product(*(range(mesh.size(axis)) for axis in axes)):
        coordinates = dict(zip(axes, place, strict=True))
        own, whole = (_values(one, coordinates, mesh) for one in (queries, keys))
        seen = torch.searchsorted(whole.sort().values, own.contiguous(), right=True)
        most = max(most, seen.double().mean().item() / len(whole))
    return most


def _axes(positions: _Positions) -> Iterator[str]:
    if isinstance(positions, _ShardIndex | _Slice):
        yield from positions.axes
    if isinstance(positions, _Multiple | _Slice):
        yield from _axes(positions.of)
    if isinstance(positions, _Sum):
        for term in positions.terms:
            yield from _axes(term)


def _values(positions: _Positions, coordinates: Mapping[str, int], mesh: Mesh) -> Tensor:
    """The positions of the device at some coordinates."""
    match positions:
        case _Range(start, step, length):
            return start + step * torch.arange(length)
        case _Sum((first, *rest)):
            total = _values(first, coordinates, mesh)
            for term in rest:
                total = total + _values(term, coordinates, mesh)
            return total
        case _Multiple(of, times):
            return _values(of, coordinates, mesh) * times
        case _ShardIndex(axes):
            return torch.tensor(mesh.position(axes, coordinates))
        case _Slice(of, axes, block):
            blocks = _values(of, coordinates, mesh).view(-1, mesh.sizes(axes), block)
            return blocks[:, mesh.position(axes, coordinates)].flatten()
        case _:
            raise AssertionError("a sum has terms")
