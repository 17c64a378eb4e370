"""Attributes as text: shardings, meshes and phases read back as they were written."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from xdsl.ir import Attribute
from xdsl.parser import Parser
from xdsl.utils.exceptions import ParseError, VerifyException

from shardweave.ir.dialects.attributes import MeshAttr, PhaseAttr, ShardingAttr
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.mesh.placement import Placement, Sharding, contiguous
from shardweave.ir.program.text import make_context
from shardweave.tests.ir.strategies import meshes, random_sharding, randoms, shapes

MESH = Mesh(a=2, b=3, one=1)


def parse(text: str) -> Attribute:
    """Any attribute of the dialects."""
    return Parser(make_context(), text).parse_attribute()


# Shardings


@given(shapes, meshes, randoms)
def test_sharding_reads_back_from_its_text(
    shape: tuple[int, ...], mesh: Mesh, random: Random
) -> None:
    sharding = random_sharding(shape, mesh, random, may_be_sum=True)
    if sharding.unreduced and random.random() < 0.5:
        sharding = replace(sharding, reduction="max")
    attribute = ShardingAttr.of(sharding, shape)
    assert parse(str(attribute)) == attribute
    assert attribute.on(shape, mesh) == sharding
    assert attribute.on_local(sharding.local_shape(shape), mesh) == sharding


@pytest.mark.parametrize(
    ("sharding", "shape", "text"),
    [
        (Sharding((), ()), (), "[]"),
        (Sharding(((), ())), (4, 6), "[{}, {}]"),
        (Sharding((contiguous("ab", 24, MESH), ())), (24, 6), '[{"a", "b"}, {}]'),
        (Sharding((contiguous("ba", 24, MESH),)), (24,), '[{"b", "a"}]'),
        (Sharding(((Placement("b", 3, 2),),)), (24,), '[{"b":2}]'),
        (Sharding(((Placement("b", 3, 4), Placement("a", 2, 1)),)), (12,), '[{"b":4, "a":1}]'),
        (Sharding(((), ()), ("a", "b")), (4, 6), '[{}, {}], unreduced = ["a", "b"]'),
        (Sharding(((),), ("b",), "max"), (4,), '[{}], max_unreduced = ["b"]'),
    ],
)
def test_text_of_a_sharding(sharding: Sharding, shape: tuple[int, ...], text: str) -> None:
    attribute = ShardingAttr.of(sharding, shape)
    assert str(attribute) == f"#dist.sharding<{text}>"
    assert ShardingAttr.parse_text(text) == attribute
    assert ShardingAttr.parse_text(text).on(shape, MESH) == sharding


def test_axes_of_one_device_are_left_out() -> None:
    for text in (
        '[{"one", "a"}, {}]',
        '[{"a":6, "one":3}, {}]',
        '[{"a"}, {}], unreduced = ["one"]',
    ):
        sharding = ShardingAttr.parse_text(text).on((12, 6), MESH)
        assert sharding == Sharding((contiguous("a", 12, MESH), ()))


def test_pending_axes_stand_in_the_order_of_the_mesh() -> None:
    sharding = ShardingAttr.parse_text('[{}], unreduced = ["b", "a"]').on((4,), MESH)
    assert sharding.unreduced == ("a", "b")


def test_plain_shards_of_another_size_stay_plain() -> None:
    attribute = ShardingAttr.parse_text('[{"a", "b"}]')
    assert attribute.on((12,), MESH).dims == (contiguous("ab", 12, MESH),)
    assert attribute.on_local((4,), MESH).dims == (contiguous("ab", 24, MESH),)


@pytest.mark.parametrize(
    ("text", "shape", "problem"),
    [
        (
            '[{"a"}]',
            (4, 6),
            r"has 1 dims, but the value has shape \(4, 6\); give one {...} per dim",
        ),
        ('[{"c"}]', (4,), "no axis 'c'"),
        ('[{}], unreduced = ["c"]', (4,), "no axis 'c'"),
        ('[{"a"}]', (1,), "with 1 indices for each shard over 'a', some ranks would get none"),
        ('[{"a"} of 5]', (6,), "says that a dim has size 5, but the value has shape"),
        ('[{"a"}, {"a"}]', (4, 6), "axis 'a' is used twice"),
        ('[{"a"}], unreduced = ["a"]', (4,), "axis 'a' is used twice"),
        ('[{}], unreduced = ["a", "a"]', (4,), "axis 'a' is used twice"),
        ('[{"a":2, "b":3}]', (12,), "strides .3, 2. do not cut dim 0 of size 12"),
        ('[{"a", "b":2}]', (12,), "a stride to some axes of a dim but not to others"),
        ('[{"a":99}]', (12,), "strides .99. do not cut dim 0 of size 12"),
    ],
)
def test_sharding_that_does_not_fit_says_why(
    text: str, shape: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        ShardingAttr.parse_text(text).on(shape, MESH)


def test_local_shape_of_another_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 dims"):
        ShardingAttr.parse_text('[{"a"}]').on_local((4, 6), MESH)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[a]",
        "[{a}]",
        '[{"a"}',
        '[{"a":}]',
        '[{"a":-1}]',
        '[{"a":true}]',
        '[{"a"}], reduced = ["b"]',
        '[{"a"}], unreduced',
        '[{"a"}], unreduced = "b"',
        '[{"a"}] unreduced = ["b"]',
    ],
)
def test_text_that_is_no_sharding_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        ShardingAttr.parse_text(text)


# Meshes


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh(), "[]"),
        (Mesh(data=2, tensor=4), '["data" = 2, "tensor" = 4]'),
        (Mesh([Axis("tensor.0", 2), Axis("tensor.1", 1)]), '["tensor.0" = 2, "tensor.1" = 1]'),
        (
            Mesh([Axis("data", 2), Axis("batch", 3, "time")]),
            '["data" = 2, time "batch" = 3]',
        ),
    ],
)
def test_mesh_reads_back_from_its_text(mesh: Mesh, text: str) -> None:
    attribute = MeshAttr.of(mesh)
    assert str(attribute) == f"#dist.mesh<{text}>"
    assert parse(str(attribute)) == attribute
    assert attribute.mesh == mesh


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('["a" = 2, "a" = 3]', "not distinct"),
        ('["a" = 0]', "size 0"),
        ('["a" = -2]', "Expected"),
        ('["a b" = 2]', "not a word"),
        ('["a"]', "Expected '='"),
        ("[a = 2]", "expected"),
        ('[space "a" = 2]', "expected"),
    ],
)
def test_text_that_is_no_mesh_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ParseError, match=problem):
        parse(f"#dist.mesh<{text}>")


# Phases


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward", "optimizer"])
def test_phase_reads_back_from_its_text(phase: str) -> None:
    assert str(PhaseAttr.of(phase)) == f"#dist.phase<{phase}>"
    assert parse(f"#dist.phase<{phase}>") == PhaseAttr.of(phase)


def test_unknown_phase_is_refused() -> None:
    with pytest.raises((VerifyException, ValueError), match="phase 'sideways' is unknown; use one"):
        PhaseAttr.of("sideways")
