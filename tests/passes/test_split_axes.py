"""split-axes: an axis is split where ops can be sharded over its parts but not the whole axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, ordered
from shardweave.ir.program.program import Program
from shardweave.ir.proof.prove import prove
from shardweave.ir.sharding.reshard import ReshardStep, reshard
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir.strategies import random_sharding, uneven_sharding
from shardweave.tests.ir_text import assert_same_values, collectives, step

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


def view(mesh: str = "a=4", kind: str = "param", size: int = 8) -> Program:
    return step(
        f"""
        {kind} %x : tensor<{size}x3xf64> [{{"a"}}, {{}}]
        %y = aten.view(%x) : tensor<2x{size // 2}x3xf64>
        output %y
        """,
        mesh,
    )


@pytest.mark.parametrize(("size", "mesh"), [(8, "a=4"), (12, "a=6"), (8, "a=8")])
def test_axis_that_shards_two_dims_of_a_view_is_split_between_them(size: int, mesh: str) -> None:
    program = view(mesh, size=size)
    local = run_passes(program, "preset:partition")
    assert not collectives(local)
    assert str(local.mesh) == f"a.0=2,a.1={int(mesh[2:]) // 2}"
    assert_same_values(program, local)
    prove(local, against=program)


@pytest.mark.parametrize(
    "program",
    [
        *(view(kind="input"), view("a=2"), view("a=3", size=12), view("a=4", size=10)),
        *(view("a=4,a.0=2"), view("a.0=4,a.1=2")),  # a user's names
    ],
)
def test_axes_of_inputs_and_those_without_fitting_parts_stay_whole(program: Program) -> None:
    assert run_passes(program, "split-axes") == program


def test_keys_are_sharded_over_a_part_of_the_axis_of_their_queries() -> None:
    program = step(
        f"""
        param %q : tensor<2x4x8x6xf64> [{{}}, {{"a"}}, {{}}, {{}}]
        param %k : tensor<2x2x8x6xf64>
        param %v : tensor<2x2x8x6xf64>
        %o, %l = {FLASH}(%q, %k, %v) : tensor<2x4x8x6xf64>, tensor<2x4x8xf64>
        output %o
        """,
        "a=4",
    )
    local = run_passes(program, "split-axes{groups=true},preset:partition")
    assert [str(local.sharding_of_slot(slot).placed_axes) for slot in local.arguments[1:]] == [
        str(frozenset({"a.0"}))
    ] * 2
    assert not collectives(local)
    assert_same_values(program, local)
    prove(local, against=program)


def test_the_name_of_a_split_axis_stands_for_its_parts() -> None:
    split = "a.0=2,a.1=2"
    assert run_passes(view(split), "preset:partition") == run_passes(view(), "preset:partition")
    strided, mesh = step('param %x : tensor<8xf64> [{"a":1}]\noutput %x', split), Mesh(a=4)
    (slot,) = strided.arguments
    assert [p.stride for p in strided.sharding_of_slot(slot).dims[0]] == [2, 1]
    assert mesh.parts("a") == ("a",)
    assert mesh.factored("a", (2, 2)).parts("a") == ("a.0", "a.1")


def in_parts(sharding: Sharding) -> Sharding:
    """The sharding over a.0 and a.1 in place of a."""
    dims: list[DimSharding] = []
    for dim in sharding.dims:
        split = [(Placement("a.0", 2, 2 * p.stride), Placement("a.1", 2, p.stride)) for p in dim]
        pairs = zip(dim, split, strict=True)
        dims.append(ordered(q for p, own in pairs for q in (own if p.axis == "a" else (p,))))
    unreduced = [b for a in sharding.unreduced for b in (("a.0", "a.1") if a == "a" else (a,))]
    return Sharding(tuple(dims), tuple(unreduced), sharding.reduction)


def traffic(steps: Sequence[ReshardStep]) -> tuple[int, float]:
    """Messages, and elements that a rank sends."""
    sent = [step.sent_elements for step in steps if step.sent_elements]
    return len(sent), sum(sent)


@pytest.mark.parametrize("make", [uneven_sharding, random_sharding])
def test_parts_that_move_alike_share_a_message(make: Callable[..., Sharding]) -> None:
    random, whole = Random(3), Mesh(a=4, b=2)
    mesh, shape, joined = whole.factored("a", (2, 2)), (8, 16, 7), 0
    for _ in range(1500):
        pair = make(shape, whole, random), make(shape, whole, random)
        if any(s.problem(shape, mesh) for s in map(in_parts, pair)):
            continue  # some of the ranks have no index of an uneven dim
        expected = reshard(shape, *pair, whole)
        steps = reshard(shape, *map(in_parts, pair), mesh)
        (messages, sent), (of_whole, sent_whole) = map(traffic, (steps, expected))
        # Where a whole axis must be gathered, one part of it may have room to move.
        assert (messages <= of_whole and sent <= sent_whole) or sent < sent_whole
        joined += any(len(s.axes) == 2 for s in steps)
    assert joined > 50


def test_a_propagated_program_is_refused() -> None:
    program = run_passes(view(), "propagate-shardings")
    with pytest.raises(PassError, match="run split-axes before propagate-shardings"):
        run_passes(program, "split-axes")
