"""Shardings as DTensor placements."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardweave.backends.distributed.layout import placements_of
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Placement as Digit
from shardweave.ir.mesh.placement import Sharding, ordered
from shardweave.ir.mesh.shards import take_shard

MESH = Mesh(a=2, b=3, c=2)


def placed(text: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    return placements_of(ShardingAttr.parse_text(text).on(shape, MESH), shape, MESH)


@st.composite
def digits(draw: st.DrawFn) -> tuple[Sharding, tuple[int, ...]]:
    """A sharding of two dims over some axes, in any order and at any stride, and the shape."""
    axes = draw(st.permutations(MESH.names))
    cut = draw(st.integers(0, 3))
    dims: list[list[Digit]] = []
    shape: list[int] = []
    for names in (axes[:cut], axes[cut : draw(st.integers(cut, 3))]):
        size = draw(st.integers(1, 3))
        dim: list[Digit] = []
        for name in names:
            dim.append(Digit(name, MESH.size(name), size))
            size *= MESH.size(name) * draw(st.integers(1, 3))
        dims.append(dim)
        shape.append(size)
    return Sharding(tuple(ordered(dim) for dim in dims)), tuple(shape)


def cut_as_torch_does(tensor: Tensor, placements: tuple[Placement, ...], rank: int) -> Tensor:
    coordinates = MESH.coordinates(rank)
    for axis, placement in zip(MESH.axes, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            parts, _ = placement._split_tensor(tensor, axis.size, with_padding=False)
            tensor = parts[coordinates[axis.name]]
    return tensor


@given(digits())
def test_any_sharding_is_cut_by_torch_as_by_us(case: tuple[Sharding, tuple[int, ...]]) -> None:
    sharding, shape = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    placements = placements_of(sharding, shape, MESH)
    for rank in range(MESH.num_devices):
        wanted = take_shard(tensor, sharding, MESH.coordinates(rank))
        assert torch.equal(cut_as_torch_does(tensor, placements, rank), wanted)


def test_plain_shards_are_plain_placements() -> None:
    assert placed('[{}, {"b"}]', (4, 6)) == (Replicate(), Shard(1), Replicate())
    assert placed('[{"a", "c"}, {}]', (4, 6)) == (Shard(0), Replicate(), Shard(0))


def test_an_axis_major_to_an_earlier_one_is_a_strided_placement() -> None:
    wanted = (_StridedShard(0, split_factor=2), Replicate(), Shard(0))
    assert placed('[{"c", "a"}, {}]', (4, 6)) == wanted


def test_three_fused_projections_are_a_strided_placement() -> None:
    wanted = (_StridedShard(0, split_factor=3), Replicate(), Replicate())
    assert placed('[{"a":4}, {}]', (24, 6)) == wanted
