"""Random meshes, shapes and shardings for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

from hypothesis import strategies as st

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, ordered

MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2), Mesh(b=3, a=2), Mesh(a=2, b=3, c=2))
SIZES = (1, 2, 4, 6, 8, 12, 24)

meshes = st.sampled_from(MESHES)
shapes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=3).map(tuple)
# A seed, not `st.randoms`, whose draws are so often 0 that little would be sharded.
randoms = st.builds(Random, st.integers(0, 2**32 - 1))


def random_placements(size: int, axes: Sequence[str], mesh: Mesh, random: Random) -> DimSharding:
    """The axes, whose sizes divide `size`, as digits of an index in random places."""
    digits: list[tuple[str | None, int]] = [(axis, mesh.size(axis)) for axis in axes]
    rest = size // mesh.sizes(axes)
    for prime in (2, 3):
        while rest and rest % prime == 0:
            digits.append((None, prime))
            rest //= prime
    random.shuffle(digits)
    # What is left has no small divisor: it stays the most minor digit.
    stride, placements = max(rest, 1), list[Placement]()
    for axis, count in digits:
        if axis is not None:
            placements.append(Placement(axis, count, stride))
        stride *= count
    return ordered(placements)


def uneven_placements(
    size: int, axes: Sequence[str], mesh: Mesh, random: Random, *, contiguous: bool = False
) -> DimSharding:
    """Those of the axes that find room, as digits of an index that need not divide `size`.

    contiguous: as nested shards, of which the first may be longer than they have to be.
    """
    placements: list[Placement] = []
    stride, waiting = 1, list(axes) if size > 1 else []
    random.shuffle(waiting)
    least = -(-size // mesh.sizes(axes))
    for axis in waiting:
        if not placements:
            stride = random.randint(least if contiguous else 1, max(least, (size + 1) // 2))
        elif not contiguous:
            stride *= random.choice((1, 1, 2))
        if stride >= size:
            break
        placements.append(Placement(axis, mesh.size(axis), stride))
        stride *= mesh.size(axis)
    found = ordered(placements)
    return found if not contiguous or not found or found[0].span >= size else ()


def uneven_sharding(shape: Sequence[int], mesh: Mesh, random: Random) -> Sharding:
    """Each axis at a random place of a random dim that has room for it, or nowhere."""
    chosen: list[list[str]] = [[] for _ in shape]
    for axis in mesh.names:
        place = random.choice([*range(len(shape)), None])
        if place is not None:
            chosen[place].append(axis)
    dims = zip(shape, chosen, strict=True)
    return Sharding(tuple(uneven_placements(n, own, mesh, random) for n, own in dims))


def random_sharding(
    shape: Sequence[int], mesh: Mesh, random: Random, *, may_be_sum: bool = False
) -> Sharding:
    """Each axis at a random place of a random dim, or nowhere, or a pending sum."""
    chosen: list[list[str]] = [[] for _ in shape]
    unreduced: list[str] = []
    for axis in mesh.names:
        free = [
            dim
            for dim, size in enumerate(shape)
            if size and size % (mesh.sizes(chosen[dim]) * mesh.size(axis)) == 0
        ]
        place = random.choice([*free, None, "sum" if may_be_sum else None])
        if place == "sum":
            unreduced.append(axis)
        elif isinstance(place, int):
            chosen[place].append(axis)
    dims = zip(shape, chosen, strict=True)
    return Sharding(
        tuple(random_placements(n, own, mesh, random) for n, own in dims), tuple(unreduced)
    )


def indices_of(dim: DimSharding, size: int, coordinates: dict[str, int]) -> list[int]:
    """The indices of a dim that a device holds, by the definition of a placement."""
    return [
        index
        for index in range(size)
        if all((index // p.stride) % p.size == coordinates[p.axis] for p in dim)
    ]


def all_coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """The coordinates of every device, in rank order."""
    ranges = product(*(range(axis.size) for axis in mesh.axes))
    return [dict(zip(mesh.names, values, strict=True)) for values in ranges]
