"""The share of the keys that the queries of a causal attention see, by their positions.

A kernel computes only the query-key products that a causal mask allows: half of all if the queries
are those of the whole sequence, or of a shard that mixes early and late positions; nearly all if
they are the last contiguous shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, reduce
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import ShardIndexOp, SliceOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.library.positional_attention import pieces_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import is_positional

_Positions: TypeAlias = tuple[Any, ...]
"""Computation of positions on each rank, as data: ("range", start, step, length), ("sum", terms),
("multiple", of, times), ("index", axes) of a shard, or ("slice", of, axes, block)."""


def seen_share(op: AtenOp, mesh: Mesh) -> float:
    """The fraction of query-key products that an attention computes on its most loaded device."""
    if not is_positional(op):
        return 0.5 if op.value("is_causal") else 1.0
    if not is_causal(op):
        return 1.0
    own, whole = _read_positions(op)
    return 0.5 if own is None or whole is None else _share(own, whole, mesh)


def num_pieces(op: AtenOp, mesh: Mesh) -> int:
    """Number of pieces in which the first device computes an attention by positions; 1 if it uses a
    mask."""
    if not is_causal(op) or op.tensor("attn_mask") is not None:
        return 1
    own, whole = _read_positions(op)
    return 1 if own is None or whole is None else _num_pieces(own, whole, mesh)


@cache
def _num_pieces(queries: _Positions, keys: _Positions, mesh: Mesh) -> int:
    first = dict.fromkeys(_axes(queries) | _axes(keys), 0)
    own, whole = ([int(n) for n in _values(each, first, mesh)] for each in (queries, keys))
    pieces = pieces_of(own, whole)
    return 1 if pieces is None else len(pieces)


def is_causal(op: AtenOp) -> bool:
    """True if a fused attention is causal: a query sees only keys at its position and before."""
    if is_positional(op):
        return op.tensor("query_positions") is not None
    return bool(op.value("is_causal"))


def are_counted(positions: SSAValue) -> bool:
    """True if positions depend only on mesh coordinates, so that they are known before the run."""
    return _read(positions) is not None


def _read_positions(op: AtenOp) -> list[_Positions | None]:
    """The computations (`_Positions`) of the positions of an attention's queries and keys."""
    given = op.tensor("query_positions"), op.tensor("key_positions")
    return [_read(value) if isinstance(value, SSAValue) else None for value in given]


def _read(value: SSAValue) -> _Positions | None:
    """The computation of positions as data; None if it has ops that `_Positions` lacks."""
    op = value.owner
    if isinstance(op, ShardIndexOp):
        return "index", op.axes
    if isinstance(op, SliceOp):
        whole = _read(op.operands[0])
        return None if whole is None else ("slice", whole, op.axes, op.block)
    if not isinstance(op, AtenOp):
        return None
    if op.name == "aten.arange.start_step":
        return "range", int(op.value("start")), int(op.value("step")), shape_of(value)[0]
    inner = [read for operand in op.operands if (read := _read(operand)) is not None]
    if len(inner) < len(op.operands):
        return None
    if op.name == "aten.add.Tensor":
        return "sum", tuple(inner)
    is_multiple = op.name == "aten.mul.Scalar"
    return ("multiple", inner[0], int(op.value("other"))) if is_multiple else None


@cache
def _share(queries: _Positions, keys: _Positions, mesh: Mesh) -> float:
    axes = sorted(_axes(queries) | _axes(keys))
    most = 0.0
    for place in product(*(range(mesh.size(axis)) for axis in axes)):
        coordinates = dict(zip(axes, place, strict=True))
        own, whole = (_values(each, coordinates, mesh) for each in (queries, keys))
        seen = torch.searchsorted(whole.sort().values, own.contiguous(), right=True)
        most = max(most, seen.double().mean().item() / len(whole))
    return most


def _axes(positions: _Positions) -> set[str]:
    match positions:
        case "index", axes:
            return set(axes)
        case "slice", of, axes, _:
            return _axes(of) | set(axes)
        case "multiple", of, _:
            return _axes(of)
        case "sum", terms:
            return set[str]().union(*map(_axes, terms))
        case _:
            return set()


def _values(positions: _Positions, coordinates: Mapping[str, int], mesh: Mesh) -> Tensor:
    """The positions of the device at some coordinates."""
    match positions:
        case "range", start, step, length:
            return start + step * torch.arange(length)
        case "sum", terms:
            return reduce(torch.add, [_values(term, coordinates, mesh) for term in terms])
        case "multiple", of, times:
            return _values(of, coordinates, mesh) * times
        case "index", axes:
            return torch.tensor(mesh.position(axes, coordinates))
        case _:
            _, of, axes, block = positions
            blocks = _values(of, coordinates, mesh).view(-1, mesh.sizes(axes), block)
            return blocks[:, mesh.position(axes, coordinates)].flatten()
