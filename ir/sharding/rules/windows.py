"""Spatial dims along which ops slide windows, and the rules of pools.

A dim of n blocks is `(y s)` on one side of the op and `(y t)` on the other, with s and t indices a
block: a pool of stride 2 has s = 2 and t = 1. Shards of y are blocks of both sides. Where a shard's
windows reach beyond it, the local form fetches the neighbours' indices (`dist.halo`) in place of
the op's own padding; gradients of what was fetched are added to the neighbours' (`dist.halo_add`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist_ring import Halo
from shardweave.ir.dialects.types import (
    AnyTensor,
    dtype_of_value,
    shape_of,
    tensor_type_of,
    with_shape,
)
from shardweave.ir.mesh.placement import DimSharding
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.base import Localize, Localizer, Notation, Rule, rule


class Along(NamedTuple):
    """A spatial dim that can be sharded.

    first: the first spatial dim. stride, times: a block's length on the wide side, `(y s)`, and on
    the narrow one, `(y t)`. before, after: wide indices that windows read past either end of a
    shard, if positive. factor: index of y among the rule's factors.
    """

    dim: int
    first: int
    stride: int
    times: int = 1
    before: int = 0
    after: int = 0
    factor: int = -1

    @property
    def halo(self) -> Halo:
        return self.dim, self.before, max(self.after, 0)

    @property
    def reach(self) -> int:
        """Number of neighbouring blocks that a shard's windows read, at most, at either end."""
        return -(-max(self.halo[1:]) // self.stride)


Sharded = Sequence[tuple[Along, DimSharding]]
"""The spatial dims that are sharded, with their placements."""


def texts(alongs: Iterable[Along], first: int, rank: int) -> tuple[str, str]:
    """Return the notation of the spatial dims, from `first` on: of the wide and the narrow side."""
    wide, narrow = ["."] * rank, ["."] * rank
    for along in alongs:
        name = f"y{along.dim}"
        wide[along.dim] = f"({name} s{along.dim})" if along.stride > 1 else name
        narrow[along.dim] = f"({name} t{along.dim})" if along.times > 1 else name
    return " ".join(wide[first:]), " ".join(narrow[first:])


def windowed(
    op: AtenOp,
    text: str,
    alongs: Sequence[Along],
    localize: Callable[[tuple[Along, ...]], Localize] | None,
    *,
    even: bool = False,
    sizes: dict[str, int] | None = None,
    **limits: Any,
) -> Rule:
    """Build the rule of an op with sliding windows. even: whether spatial shards must be of equal
    size. localize: makes the rule's `localize` from `alongs` with their `factor` set."""
    inner = {f"s{a.dim}": a.stride for a in alongs} | {f"t{a.dim}": a.times for a in alongs}
    notation = Notation(op, text, {**(sizes or {}), **inner})
    names = {f"y{a.dim}": a for a in alongs}
    numbered = tuple([a._replace(factor=notation.number(name)) for name, a in names.items()])
    return notation.rule(
        whole=list(inner),
        contiguous=[name for name, a in names.items() if a.reach or even],
        even=list(names) if even else (),
        reach={name: a.reach for name, a in names.items()},
        localize=localize and localize(numbered),
        **limits,
    )


def windows_along(
    wide: Sequence[int], narrow: Sequence[int], window: Sequence[Sequence[int]]
) -> list[Along]:
    """List the dims along which windows can be sharded: the stride divides them into as many blocks
    as there are windows. wide, narrow: shapes. window: (length, stride, padding, dilation) of each
    spatial dim."""
    alongs: list[Along] = []
    first = len(wide) - len(window)
    for dim, (length, stride, padding, dilation) in enumerate(window, first):
        if 1 < narrow[dim] == wide[dim] / stride:
            after = dilation * (length - 1) - padding - stride + 1
            alongs.append(Along(dim, first, stride, 1, padding, after))
    return alongs


# Local forms


def sharded_of(local: Localizer, alongs: Iterable[Along]) -> Sharded:
    """The dims that a local form shards, with their placements."""
    pairs = [(along, local.placements[along.factor]) for along in alongs]
    return [(along, placements) for along, placements in pairs if placements]


def wider(local: Localizer, value: SSAValue, sharded: Sharded, edge: str = "") -> SSAValue:
    """Extend a value by its neighbours' indices (`dist.halo`)."""
    for along, placements in sharded:
        if along.reach:
            value = local.halo(value, placements, along.halo, edge)
    return value


def narrower(local: Localizer, value: SSAValue, sharded: Sharded, edge: str = "") -> SSAValue:
    """Cut the halos off a gradient; the neighbours add them to theirs (`dist.halo_add`)."""
    for along, placements in reversed(sharded):
        if along.reach:
            value = local.halo(value, placements, along.halo, edge, adds=True)
    return value


def stretched(local: Localizer, value: SSAValue, halos: Iterable[Halo]) -> SSAValue:
    """Extend a value by zeros in place of its neighbours' indices."""
    halos = [halo for halo in halos if any(halo[1:])]
    rank = len(shape_of(value))
    pad = [0] * 2 * rank
    for dim, before, after in halos:
        at = 2 * (rank - 1 - dim)  # the last dim comes first
        pad[at : at + 2] = before, after
    if not halos:
        return value
    type_ = wide_type(value, halos)
    return local.emit(
        "aten.constant_pad_nd", [value], (type_.get_shape(), dtype_of_value(value)), pad=pad
    )[0]


def wide_type(value: SSAValue | AnyTensor, halos: Iterable[Halo]) -> AnyTensor:
    """The type of a value that is extended by halos."""
    type_ = tensor_type_of(value) if isinstance(value, SSAValue) else value
    sizes = list(type_.get_shape())
    for dim, before, after in halos:
        sizes[dim] += before + after
    return with_shape(type_, sizes)


def unpadded(local: Localizer, sharded: Sharded, name: str = "padding") -> list[int]:
    """An op's padding (its argument `name`), with 0 for sharded dims, which halos pad instead."""
    first, rank = sharded[0][0].first, len(shape_of(local.operands[0]))
    padding = listed(local.op, name, rank - first)
    for along, _ in sharded:
        padding[along.dim - first] = 0
    return padding


def listed(op: AtenOp, name: str, num: int) -> list[int]:
    """An argument as a list of `num` numbers; torch also takes one number for all dims."""
    value = op.value(name)
    value = [value] if isinstance(value, int) else list(value)
    return value * num if len(value) == 1 else value


def gives_gradients(op: AtenOp) -> bool:
    """True for a backward op."""
    return op.signature.tensors[0].name == "grad_output"


# Pools


@rule
def window(op: AtenOp) -> Rule:
    """`... . . -> ... . .`: each plane, line or volume is computed by itself."""
    dims = spec_of(op).notation
    operands, results = (", ".join([dims] * len(v)) for v in (op.operands, op.results))
    return Notation(op, f"{operands} -> {results}").rule()


@rule
def pool(op: AtenOp) -> Rule:
    """`... (y s) -> ... y`, and backward `... y, ... (y s) -> ... (y s)`."""
    is_backward = gives_gradients(op)
    narrow, wide = op.operands[:2] if is_backward else (op.results[0], op.operands[0])
    num, rank = spec_of(op).notation.count(" ."), len(shape_of(wide))
    alongs = windows_along(shape_of(wide), shape_of(narrow), _windows_of(op, wide, narrow, num))
    if op.signature.parameter("count_include_pad") is not None:
        # Each window is divided by its length, unless it reaches beyond the padding.
        counts = op.value("count_include_pad")
        alongs = [a for a in alongs if a.after <= a.before and (counts or not a.before)]
    of_wide, of_narrow = ("... " + text for text in texts(alongs, rank - num, rank))
    values = [of_narrow, of_wide, of_narrow]
    given, made = (values, [of_wide]) if is_backward else ([of_wide], [of_narrow] * 2)
    text = [", ".join(given[: len(op.operands)]), ", ".join(made[: len(op.results)])]
    has_indices = (len(op.operands) - 1 if is_backward else len(op.results)) > 1
    is_local = has_indices or any(along.reach for along in alongs)
    localize = _pooled if is_local else None
    return windowed(op, " -> ".join(text), alongs, localize, even=has_indices)


def _windows_of(op: AtenOp, wide: SSAValue, narrow: SSAValue, num: int) -> list[tuple[int, ...]]:
    """List (length, stride, padding, dilation) of a pool's windows by spatial dim."""
    if op.signature.parameter("kernel_size") is None:  # adaptive
        sizes = zip(shape_of(wide)[-num:], shape_of(narrow)[-num:], strict=True)
        lengths = [max(whole // part, 1) for whole, part in sizes]
        return [(length, length, 0, 1) for length in lengths]
    lengths = listed(op, "kernel_size", num)
    strides = listed(op, "stride", num) or lengths
    has_dilation = op.signature.parameter("dilation") is not None
    dilations = listed(op, "dilation", num) if has_dilation else [1] * num
    return list(zip(lengths, strides, listed(op, "padding", num), dilations, strict=True))


@cache
def _pooled(alongs: tuple[Along, ...]) -> Localize:
    def localize(local: Localizer) -> Sequence[SSAValue]:
        op, sharded = local.op, sharded_of(local, alongs)
        if not sharded:
            return local.clone()
        padding = unpadded(local, sharded)
        x, *rest = local.operands
        if not gives_gradients(op):
            x = wider(local, x, sharded, "lowest" if len(op.results) > 1 else "")
            made = local.clone([x], padding=padding)
            return [made[0], *(_renumbered(local, places, x, sharded) for places in made[1:])]
        grad, (x, *rest) = x, rest
        x = stretched(local, x, [along.halo for along, _ in sharded])
        rest = [_renumbered(local, places, x, sharded) for places in rest]
        (made,) = local.clone([grad, x, *rest], [x.type], padding=padding)
        return [narrower(local, made, sharded)]

    return localize


def _renumbered(local: Localizer, places: SSAValue, x: SSAValue, sharded: Sharded) -> SSAValue:
    """Convert a max pool's indices from the local plane `x` to the global plane; in the backward
    pass from the global plane to the local one."""
    op, sign, own = local.op, 1, shape_of(x)
    before, after = own, shape_of(op.operands[0])
    if gives_gradients(op):
        sign, before, after = -1, shape_of(op.operands[1]), own
    first = len(own) - spec_of(op).notation.count(" .")
    type_, scalar = (shape_of(places), torch.int64), ((), torch.int64)
    for along, placements in reversed(sharded):
        dim, minor = along.dim, prod(after[along.dim + 1 :])
        if dim > first:
            # An index of the dims before it now counts for another number of elements.
            rows, more = before[dim] * minor, (after[dim] - before[dim]) * minor
            (major,) = local.emit(
                "aten.div.Scalar_mode", [places], type_, other=rows, rounding_mode="floor"
            )
            (shift,) = local.emit("aten.mul.Scalar", [major], type_, other=more)
            (places,) = local.emit("aten.add.Tensor", [places, shift], type_)
        _, left, right = along.halo
        step = sign * minor * (own[dim] - left - right)
        shard = local.shard_index(placements)
        (start,) = local.emit("aten.mul.Scalar", [shard], scalar, other=step)
        (places,) = local.emit("aten.add.Tensor", [places, start], type_)
        if left:
            (places,) = local.emit("aten.add.Scalar", [places], type_, other=-sign * left * minor)
    return places
