"""Cutting tensors and putting them together again."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Placement, Sharding
from shardweave.ir.mesh.shards import assemble, cut_out, merge_blocks, take_blocks, take_shard
from shardweave.tests.ir.strategies import (
    all_coordinates,
    indices_of,
    meshes,
    random_sharding,
    randoms,
    shapes,
)


def numbered(*shape: int) -> torch.Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def test_blocks_are_dealt_round_robin() -> None:
    tensor = torch.arange(8)
    assert take_blocks(tensor, 0, 2, 4, 1).tolist() == [4, 5, 6, 7]
    assert take_blocks(tensor, 0, 2, 2, 0).tolist() == [0, 1, 4, 5]
    assert take_blocks(tensor, 0, 2, 1, 1).tolist() == [1, 3, 5, 7]


def test_what_is_cut_out_has_memory_of_its_own_so_that_the_rest_can_be_freed() -> None:
    tensor = numbered(4, 8)
    for dim, block in ((0, 2), (0, 1), (1, 4), (1, 1)):
        part = cut_out(tensor, dim, 2, block, 1)
        assert torch.equal(part, take_blocks(tensor, dim, 2, block, 1))
        assert part.untyped_storage().nbytes() == tensor.untyped_storage().nbytes() // 2
        assert part.is_contiguous()


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)
)
def test_undeal_is_the_inverse_of_deal(
    size: int, block: int, rounds: int, dim: int, rest: int
) -> None:
    shape = [rest] * 3
    shape[dim] = size * block * rounds
    tensor = numbered(*shape)
    parts = [take_blocks(tensor, dim, size, block, index) for index in range(size)]
    assert torch.equal(merge_blocks(parts, dim, block), tensor)


@given(shapes, meshes, randoms)
def test_shard_holds_the_indices_of_its_placements(
    shape: tuple[int, ...], mesh: Mesh, random: Random
) -> None:
    sharding, tensor = random_sharding(shape, mesh, random), numbered(*shape)
    for at in all_coordinates(mesh):
        expected = tensor
        for dim, (placements, size) in enumerate(zip(sharding.dims, shape, strict=True)):
            indices = torch.tensor(indices_of(placements, size, at))
            expected = expected.index_select(dim, indices)
        shard = take_shard(tensor, sharding, at)
        assert torch.equal(shard, expected)
        assert shard.is_contiguous()


@given(shapes, meshes, randoms)
def test_assemble_is_the_inverse_of_take_shard(
    shape: tuple[int, ...], mesh: Mesh, random: Random
) -> None:
    sharding = random_sharding(shape, mesh, random, may_be_sum=True)
    tensor = numbered(*shape)
    whole = assemble(lambda at: take_shard(tensor, sharding, at), sharding, mesh)
    assert torch.equal(whole, tensor)


def test_shard_of_an_empty_dim_is_empty() -> None:
    sharding = Sharding(((Placement("a", 2, 1),), ()))
    assert take_shard(torch.empty(0, 3), sharding, {"a": 1}).shape == (0, 3)


def test_term_of_a_sum_is_whole_at_coordinate_zero_and_zero_elsewhere() -> None:
    pending = Sharding(((),), ("a",))
    assert take_shard(torch.ones(2), pending, {"a": 0}).tolist() == [1, 1]
    assert take_shard(torch.ones(2), pending, {"a": 1}).tolist() == [0, 0]


def test_term_of_a_maximum_is_the_value_everywhere() -> None:
    pending = Sharding(((),), ("a",), "max")
    assert take_shard(-torch.ones(2), pending, {"a": 1}).tolist() == [-1, -1]


def test_unreduced_terms_are_added_or_their_maximum_taken() -> None:
    terms = [torch.tensor([1.0, 5.0]), torch.tensor([4.0, 2.0])]
    for reduction, expected in (("sum", [5.0, 7.0]), ("max", [4.0, 5.0])):
        pending = Sharding(((),), ("a",), "max" if reduction == "max" else "sum")
        whole = assemble(lambda at: terms[at["a"]], pending, Mesh(a=2))
        assert whole.tolist() == expected


def test_axes_that_a_sharding_does_not_name_are_read_at_zero() -> None:
    seen: list[dict[str, int]] = []

    def shard_at(at: dict[str, int]) -> torch.Tensor:
        seen.append(at)
        return torch.zeros(1)

    assemble(shard_at, Sharding(((Placement("a", 2, 1),),)), Mesh(a=2, b=3))
    assert [at["b"] for at in seen] == [0, 0]
