"""The sharding algebra: which part of a value each device holds.

A dim of global size N is cut by *placements*. A placement (axis, size n, stride t) says that
the device with coordinate c on the axis holds the indices i with (i // t) % n == c. A plain
shard has t = N / n; a strided one (batch x sharded sequence, flattened; three fused
projections, each sharded by head) has a smaller stride. The placements of a dim are digits of
a mixed-radix number, so they commute, and two shardings are equal exactly if they are equal
as data: no gather is ever needed to tell.

N need not be a multiple of n. The digits then count to the next multiple N' of the largest
placement's span, and the indices from N to N' are *padding*: every device has a shard of the same
shape, whose last elements may be padding (t = ceil(N / n) for plain shards, as `torch.chunk` cuts).
Indices ascend in each shard, so that padding is always at its end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from shardweave.ir.mesh.mesh import Mesh

Reduction = Literal["sum", "max", "lse"]
"""lse: partial results of attention over parts of the keys, merged by their log-sum-exp; only
proofs use it, for parts that run one after another, so it never stands in a program's text."""


@dataclass(frozen=True, order=True)
class Placement:
    """One mesh axis that shards one dim: index i is on coordinate (i // stride) % size.

    length: the global size of an unevenly sharded dim, for readers of a local program, whose types
    have the sizes of padded shards; else 0. Comparisons ignore it, as the global shape implies it.
    """

    axis: str
    size: int
    stride: int
    length: int = field(default=0, compare=False, repr=False)

    @property
    def span(self) -> int:
        """Number of indices after which the sequence of coordinates repeats: stride * size."""
        return self.size * self.stride


DimSharding = tuple[Placement, ...]
"""The placements of one dim, major to minor (descending stride)."""


def ordered(placements: Iterable[Placement]) -> DimSharding:
    """Placements in canonical order: major to minor."""
    return tuple(sorted(placements, key=lambda p: (-p.stride, p.axis)))


def fits(placements: Sequence[Placement], dim_size: int) -> bool:
    """True if the placements can shard a dim of `dim_size`, with or without padding."""
    upper = 0
    for placement in ordered(placements):
        if upper % placement.span if upper else placement.stride >= dim_size:
            return False
        upper = placement.stride
    return True


def padded_size(placements: Sequence[Placement], dim_size: int) -> int:
    """The size of a dim with its padding: the next multiple of the largest placement's span."""
    span = max((placement.span for placement in placements), default=1)
    return -(-dim_size // span) * span


def is_even(placements: Sequence[Placement], dim_size: int) -> bool:
    """True if the placements shard a dim of `dim_size` without padding."""
    return padded_size(placements, dim_size) == dim_size


def part_size(placements: Sequence[Placement], dim_size: int) -> int:
    """The size of a device's shard of a dim of global `dim_size`, with padding."""
    if not placements:
        return dim_size
    return padded_size(placements, dim_size) // math.prod(p.size for p in placements)


def held_size(dim: DimSharding, dim_size: int, coordinates: Mapping[str, int]) -> int:
    """Count the indices of a dim that the device at `coordinates` holds, without padding."""
    if not dim:
        return dim_size
    major, *minor = dim
    blocks, rest = divmod(dim_size, major.span)
    own = min(max(rest - coordinates[major.axis] * major.stride, 0), major.stride)
    in_block = major.stride // math.prod(p.size for p in minor)
    return blocks * in_block + held_size(tuple(minor), own, coordinates)


def contiguous(axes: Sequence[str], dim_size: int, mesh: Mesh) -> DimSharding:
    """Shard a dim over `axes`, major to minor, into contiguous shards of ceil(dim_size / devices).
    Raises ValueError for a dim that is too small to be sharded over each axis."""
    sizes = [mesh.size(axis) for axis in axes]
    stride = -(-dim_size // math.prod(sizes))
    placements: list[Placement] = []
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        placements.append(Placement(axis, size, stride))
        stride *= size
    dim = ordered(p for p in placements if p.size > 1)
    if not fits(dim, dim_size):
        raise ValueError(
            f"a dim of size {dim_size} is too small to shard over axes {list(axes)} of sizes "
            f"{sizes}: with {dim[0].stride} indices for each shard over '{dim[0].axis}', some "
            "ranks would get none; use smaller axes, or leave the dim unsharded."
        )
    return of_length(dim, dim_size)


def is_plain(dim: DimSharding, dim_size: int) -> bool:
    """True if `contiguous` returns the same placements."""
    if not is_contiguous(dim, dim_size):
        return False
    num_shards = math.prod(p.size for p in dim)
    return not dim or dim[-1].stride == -(-dim_size // num_shards)


def of_length(dim: DimSharding, dim_size: int) -> DimSharding:
    """Set the placements' `length` to `dim_size` if it is sharded unevenly, else to 0."""
    length = 0 if is_even(dim, dim_size) else dim_size
    if all(placement.length == length for placement in dim):
        return dim
    return tuple(replace(placement, length=length) for placement in dim)


@dataclass(frozen=True)
class Sharding:
    """The layout of a value on a mesh.

    dims: for each dim its placements. unreduced: the axes over which each device holds one
    term of a sum (or of a max, as `reduction` says) instead of the value.
    """

    dims: tuple[DimSharding, ...]
    unreduced: tuple[str, ...] = ()
    reduction: Reduction = "sum"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of the fields, cached: shardings are looked up far more often than made."""
        return hash((self.dims, self.unreduced, self.reduction))

    def __reduce__(self) -> tuple[type[Sharding], tuple[object, ...]]:
        """Pickle without the cached hash, which differs between processes."""
        return Sharding, (self.dims, self.unreduced, self.reduction)

    @staticmethod
    def replicated(rank: int) -> Sharding:
        """The sharding of a tensor of `rank` dims that is replicated on every device."""
        return Sharding(((),) * rank)

    @cached_property
    def placed_axes(self) -> frozenset[str]:
        """The axes that shard a dim."""
        return frozenset(p.axis for dim in self.dims for p in dim)

    @cached_property
    def axes(self) -> frozenset[str]:
        """All axes that the sharding names."""
        return self.placed_axes | frozenset(self.unreduced)

    @property
    def is_replicated(self) -> bool:
        """True if every device holds the whole value."""
        return not self.axes

    def whole(self) -> Sharding:
        """This sharding without its unreduced axes."""
        return Sharding(self.dims) if self.unreduced else self

    def reduced(self, axes: Collection[str]) -> Sharding:
        """This sharding after a reduction over `axes`, which are then no longer unreduced."""
        left = tuple(axis for axis in self.unreduced if axis not in axes)
        return Sharding(self.dims, left, self.reduction if left else "sum")

    def without(self, axes: Collection[str]) -> Sharding:
        """This sharding without `axes`, neither as placements nor as unreduced axes."""
        dims = tuple(tuple(p for p in dim if p.axis not in axes) for dim in self.dims)
        return replace(self.reduced(axes), dims=dims)

    def with_dim(self, dim: int, placements: Iterable[Placement]) -> Sharding:
        """This sharding with other `placements` of `dim`."""
        dims = (*self.dims[:dim], ordered(placements), *self.dims[dim + 1 :])
        return Sharding(dims, self.unreduced, self.reduction)

    def seat_of(self, axis: str) -> tuple[int, Placement] | None:
        """The dim that an axis shards, and the axis' placement there; None if it shards no dim."""
        placed = ((dim, p) for dim, placements in enumerate(self.dims) for p in placements)
        return next(((dim, p) for dim, p in placed if p.axis == axis), None)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one device's shard, with its padding, of a value of global `shape`."""
        return tuple([part_size(dim, size) for size, dim in zip(shape, self.dims, strict=True)])

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Global `shape` with the padding of all shards."""
        return tuple([padded_size(dim, size) for size, dim in zip(shape, self.dims, strict=True)])

    def without_padding(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Inverse of `padded_shape`: uses `length` of the unevenly sharded dims."""
        return tuple(
            max((p.length for p in dim), default=0) or size
            for size, dim in zip(shape, self.dims, strict=True)
        )

    def held_shape(self, shape: Sequence[int], coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the shard at `coordinates` of a value of global `shape`, without padding."""
        pairs = zip(shape, self.dims, strict=True)
        return tuple([held_size(dim, size, coordinates) for size, dim in pairs])

    def is_even(self, shape: Sequence[int]) -> bool:
        """True if no part of a value of global `shape` has padding."""
        return all(is_even(dim, size) for size, dim in zip(shape, self.dims, strict=True))

    def global_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Inverse of `local_shape`: uses `length` of the unevenly sharded dims."""
        pairs = zip(local, self.dims, strict=True)
        return self.without_padding([size * math.prod(p.size for p in dim) for size, dim in pairs])

    def is_chunked(self, shape: Sequence[int]) -> bool:
        """True if each uneven dim is sharded over one axis, as `torch.chunk` splits it. DTensor can
        represent no other uneven shards."""
        return all(
            is_even(dim, size) or (len(dim) == 1 and is_plain(dim, size))
            for dim, size in zip(self.dims, shape, strict=True)
        )

    def problem(self, shape: Sequence[int], mesh: Mesh) -> str | None:
        """Explain why a value of `shape` on `mesh` cannot have this sharding; None if it can."""
        if len(self.dims) != len(shape):
            return f"it has {len(self.dims)} dims, the value has {len(shape)}"
        named = [p.axis for dim in self.dims for p in dim] + list(self.unreduced)
        for axis in named:
            if axis not in mesh.names:
                return f"the mesh {mesh} has no axis '{axis}'; name another, or add it to the mesh"
            if named.count(axis) > 1:
                return f"axis '{axis}' is used twice"
        for index, (dim, size) in enumerate(zip(self.dims, shape, strict=True)):
            if any(p.size != mesh.size(p.axis) for p in dim):
                return f"dim {index} names a size that is not the mesh's ({mesh})"
            if not fits(dim, size):
                strides = [p.stride for p in dim]
                return f"strides {strides} do not cut dim {index} of size {size}"
        return None


def block_of(dim: DimSharding, placement: Placement) -> int:
    """Number of neighbouring local elements that have the same coordinate on `placement`'s axis.
    Gathering or slicing over the axis is block-cyclic with blocks of this length."""
    minor = math.prod(p.size for p in dim if p.stride < placement.stride)
    return placement.stride // minor


def is_contiguous(dim: DimSharding, dim_size: int) -> bool:
    """True if the placements are nested shards of the dim, major to minor: each device holds
    consecutive indices, from its position times the shard's size on."""
    upper = 0
    for placement in dim:
        if placement.span != upper if upper else placement.span < dim_size:
            return False
        upper = placement.stride
    return True
