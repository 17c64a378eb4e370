"""Choosing how an op is cut: weights stay, axes stay in use, and then the fewest bytes move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, contiguous, fits, ordered
from shardweave.ir.sharding.assignment import (
    Operand,
    assign,
    cheapest_version,
    price_of,
)
from shardweave.ir.sharding.reshard import UnreachableSharding
from shardweave.ir.sharding.rules.base import Factor, Rule
from shardweave.tests.ir.strategies import meshes, random_sharding, randoms

MESH = Mesh(a=2, b=3)


def matmul(i: int, k: int, j: int) -> Rule:
    """`i k, k j -> i j`"""
    factors = Factor(i), Factor(k), Factor(j)
    return Rule(factors, (((0,), (1,)), ((1,), (2,))), (((0,), (2,)),))


def addition(*shape: int) -> Rule:
    """`i j, i j -> i j`, linear in both."""
    dims = tuple((index,) for index in range(len(shape)))
    return Rule(tuple(map(Factor, shape)), (dims, dims), (dims,), frozenset([0, 1]))


def on(shape: tuple[int, ...], *dims: str, pending: str = "", mesh: Mesh = MESH) -> Sharding:
    """Plain shards: for each dim the names of its axes, one letter each."""
    placed = (contiguous(list(axes), size, mesh) for axes, size in zip(dims, shape, strict=True))
    return Sharding(tuple(placed), tuple(pending))


def operand(shape: tuple[int, ...], *versions: Sharding, pinned: bool = False) -> Operand:
    return Operand(shape, 4, versions or (Sharding.replicated(len(shape)),), pinned)


X, W, Y = (12, 24), (24, 36), (12, 36)
MATMUL = matmul(12, 24, 36)


def choose(
    left: Operand, right: Operand, goal: Sharding | None = None, mesh: Mesh = MESH
) -> tuple[tuple[Sharding, ...], Sharding]:
    """How a matrix product is cut: its operands, and its result."""
    choice = assign(mesh, MATMUL, (left, right), (Y,), (goal,))
    return choice.operands, choice.results[0]


def test_shards_of_rows_and_columns_pass_to_the_result() -> None:
    given_ = on(X, "a", ""), on(W, "", "b")
    operands, result = choose(operand(X, given_[0]), operand(W, given_[1]))
    assert operands == given_
    assert result == on(Y, "a", "b")


def test_shards_of_the_contracted_dim_leave_a_sum_pending() -> None:
    operands, result = choose(operand(X, on(X, "", "a")), operand(W, on(W, "a", "")))
    assert operands == (on(X, "", "a"), on(W, "a", ""))
    assert result == on(Y, "", "", pending="a")


def test_whole_operand_is_sliced_to_match() -> None:
    operands, result = choose(operand(X), operand(W, on(W, "a", "")))
    assert operands == (on(X, "", "a"), on(W, "a", ""))
    assert result == on(Y, "", "", pending="a")


def test_larger_tensor_stays_where_it_is() -> None:
    # One axis, wanted for the rows of x (288 elements) and the columns of w (864).
    operands, result = choose(operand(X, on(X, "a", "")), operand(W, on(W, "", "a")))
    assert operands == (on(X, "", ""), on(W, "", "a"))
    assert result == on(Y, "", "a")


def test_planned_weight_is_never_moved() -> None:
    planned = operand(X, on(X, "a", ""), pinned=True)
    operands, result = choose(planned, operand(W, on(W, "", "a")))
    assert operands[0] == on(X, "a", "")
    assert operands[1] != on(W, "", "a")
    assert not result.unreduced


def test_goal_of_the_result_decides_where_operands_leave_it_open() -> None:
    operands, result = choose(operand(X), operand(W), on(Y, "b", "a"))
    assert operands == (on(X, "b", ""), on(W, "", "a"))
    assert result == on(Y, "b", "a")


def test_version_made_for_an_earlier_use_is_free() -> None:
    versions = on(X, "", "a"), on(X, "", "")
    operands, _ = choose(operand(X, *versions), operand(W, on(W, "", "a"), pinned=True))
    assert operands == (on(X, "", ""), on(W, "", "a"))


def test_sum_that_a_product_cannot_carry_is_reduced_before_it() -> None:
    pending = on(X, "", "", pending="a")
    operands, result = choose(operand(X, pending), operand(W))
    assert not operands[0].unreduced
    assert not result.unreduced


def test_hint_gives_an_axis_a_place_that_no_operand_proposes() -> None:
    operands = operand(X, on(X, "", "", pending="a")), operand(W)
    hinted = assign(MESH, MATMUL, operands, (Y,), (None,), (("a", 0, 6),))
    assert hinted.operands[0] == on(X, "a", "")
    assert hinted.results[0] == on(Y, "a", "")


def test_sums_pending_in_all_linear_operands_are_carried() -> None:
    rule, pending = addition(*X), operand(X, on(X, "b", "", pending="a"))
    choice = assign(MESH, rule, (pending, pending), (X,), (None,))
    assert choice.operands == (on(X, "b", "", pending="a"),) * 2
    assert choice.results == (on(X, "b", "", pending="a"),)


def test_sum_pending_in_one_of_two_linear_operands_is_reduced() -> None:
    rule, pending = addition(*X), operand(X, on(X, "", "", pending="a"))
    choice = assign(MESH, rule, (pending, operand(X)), (X,), (None,))
    assert not any(sharding.unreduced for sharding in (*choice.operands, *choice.results))


def test_pending_maximum_is_not_carried() -> None:
    pending = operand(X, replace(on(X, "", "", pending="a"), reduction="max"))
    choice = assign(MESH, addition(*X), (pending, pending), (X,), (None,))
    assert not any(sharding.unreduced for sharding in (*choice.operands, *choice.results))


def test_equal_questions_are_answered_once() -> None:
    rule = addition(*X)
    operands = operand(X, on(X, "a", "")), operand(X, on(X, "a", ""))
    first = assign(MESH, rule, operands, (X,), (None,))
    assert assign(MESH, rule, (*operands,), (X,), (None,)) is first
    other = assign(MESH, rule, operands, (X,), (on(X, "", "a"),))
    assert other is not first


@pytest.mark.parametrize(
    "factor", [Factor(12, whole=True), Factor(12, reduction=None), Factor(5), Factor(12)]
)
def test_factor_is_cut_only_where_its_rule_allows(factor: Factor) -> None:
    # `i -> .` over a contiguous, whole, indivisible or unsummable factor.
    rule = Rule((factor,), (((0,),),), ((),))
    given_ = Sharding(((Placement("a", 2, 6),) if factor.size == 12 else (),))
    choice = assign(MESH, rule, (operand((factor.size,), given_),), ((),), (None,))
    is_cut = factor == Factor(12)
    assert choice.operands == (given_ if is_cut else Sharding(((),)),)
    assert choice.results == (Sharding((), ("a",) if is_cut else ()),)


def test_contiguous_factor_refuses_strided_shards() -> None:
    rule = Rule((Factor(12, contiguous=True),), (((0,),),), (((0,),),))
    strided = Sharding(((Placement("a", 2, 1),),))
    choice = assign(MESH, rule, (operand((12,), strided),), ((12,),), (None,))
    assert choice.operands == (Sharding(((),)),)
    plain = Sharding((contiguous("a", 12, MESH),))
    choice = assign(MESH, rule, (operand((12,), plain),), ((12,),), (None,))
    assert choice.operands == (plain,)


def test_result_that_cannot_be_unreduced_is_refused() -> None:
    with pytest.raises(UnreachableSharding, match=r"unreduced over \['a'\]"):
        choose(operand(X), operand(W), on(Y, "", "", pending="a"))


# Seats: placements of dims as placements of factors


VIEW = Rule((Factor(4), Factor(6)), (((0, 1),),), (((0,), (1,)),))
"""`(i j) -> i j`"""


@pytest.mark.parametrize(
    ("placement", "seat"),
    [
        (Placement("a", 2, 12), (0, 2)),
        (Placement("a", 2, 6), (0, 1)),
        (Placement("a", 2, 3), (1, 3)),
        (Placement("b", 3, 1), (1, 1)),
        (Placement("b", 3, 8), None),
        (Placement("c", 4, 3), None),
    ],
)
def test_placement_of_a_merged_dim_cuts_one_of_its_factors(
    placement: Placement, seat: tuple[int, int] | None
) -> None:
    assert VIEW.seat((0, 1), placement) == seat


def test_factor_that_is_whole_has_no_seat() -> None:
    rule = Rule((Factor(4, whole=True), Factor(6)), VIEW.operands, VIEW.results)
    assert rule.seat((0, 1), Placement("a", 2, 12)) is None
    assert rule.seat((0, 1), Placement("a", 2, 3)) == (1, 3)


def test_dims_of_is_the_inverse_of_seat_of() -> None:
    for size, stride in product((2, 3), (1, 2, 3, 6, 12)):
        placement = Placement("a", size, stride)
        seat = VIEW.seat((0, 1), placement)
        if seat is not None:
            cuts: list[DimSharding] = [(), ()]
            cuts[seat[0]] = (Placement("a", size, seat[1]),)
            assert VIEW.dims_of(VIEW.operands[0], cuts) == ((placement,),)


# Prices


def test_price_counts_messages_then_bytes_then_slices() -> None:
    def price(source: Sharding, goal: Sharding) -> object:
        return price_of(MESH, operand(X, source), goal)

    assert price(on(X, "a", ""), on(X, "a", "")) == (0, 0.0, 0)
    assert price(on(X, "", ""), on(X, "a", "b")) == (0, 0.0, 2)
    assert price(on(X, "a", ""), on(X, "", "")) == (1, 4 * 144.0, 0)
    assert price(on(X, "", "", pending="a"), on(X, "", "")) == (1, 4 * 288.0, 0)
    assert price(on(X, "", ""), on(X, "", "", pending="a")) is None


def test_cheapest_version_is_the_one_that_needs_no_message() -> None:
    versions = on(X, "a", ""), on(X, "", "")
    assert cheapest_version(MESH, operand(X, *versions), on(X, "", "a")) == versions[1]
    assert cheapest_version(MESH, operand(X, *versions), on(X, "a", "")) == versions[0]
    with pytest.raises(UnreachableSharding):
        cheapest_version(MESH, operand(X, *versions), on(X, "", "", pending="a"))


# Against brute force


Cuts = tuple[tuple[Placement, ...], ...]


def every_cut(rule: Rule, shardings: Sequence[Sharding]) -> list[Cuts]:
    """All ways to leave each axis where one of the shardings has it, for dims of one factor."""
    seats: dict[str, list[tuple[int, Placement]]] = {}
    for dims, sharding in zip(rule.operands, shardings, strict=True):
        for (factor,), placements in zip(dims, sharding.dims, strict=True):
            for placement in placements:
                seats.setdefault(placement.axis, []).append((factor, placement))
    found: list[Cuts] = []
    for chosen in product(*seats.values()):
        cuts = [ordered(p for f, p in chosen if f == index) for index in range(len(rule.factors))]
        if all(fits(cut, factor.size) for cut, factor in zip(cuts, rule.factors, strict=True)):
            found.append(tuple(cuts))
    return found


@given(meshes, randoms)
@settings(max_examples=150)
def test_no_other_way_to_use_all_axes_of_a_product_costs_less(mesh: Mesh, random: Random) -> None:
    left = operand(X, random_sharding(X, mesh, random))
    right = operand(W, random_sharding(W, mesh, random))
    choice = assign(mesh, MATMUL, (left, right), (Y,), (None,))
    assert choice.results[0].problem(Y, mesh) is None
    for cuts in every_cut(MATMUL, [left.versions[0], right.versions[0]]):
        wanted = [Sharding(MATMUL.dims_of(dims, cuts)) for dims in MATMUL.operands]
        pending = tuple(axis for axis in mesh.names if axis in {p.axis for p in cuts[1]})
        produced = Sharding(MATMUL.dims_of(MATMUL.results[0], cuts), pending)
        prices = (
            price_of(mesh, left, wanted[0]),
            price_of(mesh, right, wanted[1]),
            price_of(mesh, operand(Y, produced), produced.whole()),
        )
        found = [price for price in prices if price is not None]
        messages, sent, slices = (sum(parts) for parts in zip(*found, strict=True))
        assert choice.cost[:3] <= (0.0, 0, (int(messages), sent, int(slices)))
