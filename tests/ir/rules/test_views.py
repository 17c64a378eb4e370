"""Rules of data movement: how dims split and merge, and which parts of a dim can be cut."""

from collections.abc import Callable
from itertools import chain
from math import prod
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardweave.ir.sharding.rules import Rule
from shardweave.ir.sharding.rules.base import Dims

Einsum = Callable[..., str]
MakeRule = Callable[..., Rule]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((4, 6), (4, 6), "a b -> a b"),
        ((4, 6, 8), (24, 8), "a b c -> (a b) c"),
        ((24, 8), (4, 6, 8), "(a b) c -> a b c"),
        ((4, 1, 6), (1, 4, 6), "a . b -> . a b"),
        ((24,), (4, 1, 6), "(a b) -> a . b"),
        ((4, 6), (2, 12), "(a b) c -> a (b c)"),
        ((4, 6), (6, 4), ". . -> . ."),
        ((5, 4, 6), (5, 6, 4), "a . . -> a . ."),
        ((2, 3, 4), (4, 6), ". . . -> . ."),
        ((1,), (), ". -> "),
        ((), (1, 1), " -> . ."),
        ((0, 4), (0,), ". . -> ."),
    ],
)
def test_view_has_the_factors_that_both_shapes_refine_to(
    einsum: Einsum, before: tuple[int, ...], after: tuple[int, ...], text: str
) -> None:
    assert einsum("aten.view", [before], [after]) == text


sizes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4)


@given(sizes, st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_view_keeps_the_order_of_its_factors(
    make_rule: MakeRule, before: list[int], data: st.DataObject
) -> None:
    rest, after = prod(before), list[int]()
    while rest > 1:
        after.append(data.draw(st.sampled_from([n for n in range(2, rest + 1) if rest % n == 0])))
        rest //= after[-1]
    rule = make_rule("aten.view", [tuple(before)], [tuple(after)])

    def order(dims: Dims) -> list[int]:
        return list(chain.from_iterable(dims))

    assert order(rule.operands[0]) == order(rule.results[0])
    assert rule.linear == {0}


def test_permute_moves_factors(einsum: Einsum) -> None:
    assert einsum("aten.permute", [(2, 4, 6)], [(6, 2, 4)], dims=[2, 0, -2]) == "a b c -> c a b"


def test_expand_repeats_over_free_factors(einsum: Einsum) -> None:
    assert einsum("aten.expand", [(1, 6)], [(4, 5, 6)]) == ". c -> a b c"
    assert einsum("aten.expand", [()], [(4,)]) == " -> a"


@pytest.mark.parametrize(
    ("size", "length", "values", "text"),
    [
        (24, 24, {}, "a b -> a b"),
        (24, 8, {"start": 8, "end": 16}, "(b a) c -> a c"),
        (24, 16, {"end": 16}, "(b a) d -> (c a) d"),
        (24, 8, {"start": 4, "end": 12}, "(b a) d -> (c a) d"),
        (24, 8, {"start": 16}, "(b a) c -> a c"),
        (24, 8, {"start": 3, "end": 11}, ". a -> . a"),
        (24, 7, {"end": 7}, ". a -> . a"),
        (24, 0, {"end": 0}, ". a -> . a"),
        (24, 12, {"start": 1, "step": 2}, "(a b) c -> a c"),
        (24, 11, {"start": 2, "step": 2}, ". a -> . a"),
    ],
)
def test_slice_of_whole_blocks_can_be_cut_within_the_blocks(
    einsum: Einsum, size: int, length: int, values: dict[str, Any], text: str
) -> None:
    assert einsum("aten.slice.Tensor", [(size, 4)], [(length, 4)], **values) == text


def test_blocks_that_a_slice_picks_from_cannot_be_cut_apart(make_rule: MakeRule) -> None:
    rule = make_rule("aten.slice.Tensor", [(2, 24)], [(2, 16)], dim=1, start=8, end=24)
    sizes = [(f.size, f.whole) for f in rule.factors]
    assert sizes == [(8, False), (3, True), (2, True), (2, False)]
    assert rule.linear == {0}
    assert rule.localize is not None


def test_slice_backward_mirrors_slice(einsum: Einsum) -> None:
    values = {"dim": 1, "start": 8, "end": 16, "step": 1}
    assert einsum("aten.slice_backward", [(4, 8)], [(4, 24)], **values) == "c a -> c (b a)"


def test_select_takes_its_dim_whole(einsum: Einsum) -> None:
    assert einsum("aten.select.int", [(2, 4, 6)], [(2, 6)], dim=-2, index=1) == "a . b -> a b"
    assert einsum("aten.select_backward", [(2, 6)], [(2, 4, 6)], dim=1, index=1) == "a b -> a . b"


def test_parts_written_into_a_dim_need_it_whole(einsum: Einsum) -> None:
    text = einsum("aten.slice_scatter", [(4, 6), (4, 2)], [(4, 6)], dim=1, end=2)
    assert text == "a ., a . -> a ."
    text = einsum("aten.select_scatter", [(4, 6), (4,)], [(4, 6)], dim=1, index=0)
    assert text == "a ., a -> a ."


def test_cat_can_be_cut_within_the_blocks_that_all_parts_share(
    einsum: Einsum, make_rule: MakeRule
) -> None:
    args = "aten.cat", [[(4, 6), (4, 6)]], [(4, 12)]
    assert einsum(*args, dim=-1) == "c a, c a -> c (b a)"
    rule = make_rule(*args, dim=-1)
    assert rule.linear == {0, 1}
    assert [f.whole for f in rule.factors] == [False, True, False]
    assert einsum("aten.cat", [[(4, 6), (2, 6)]], [(6, 6)]) == "(c a) d, a d -> (b a) d"


def test_cat_of_parts_without_a_common_block_is_whole_along_its_dim(einsum: Einsum) -> None:
    assert einsum("aten.cat", [[(3, 6), (2, 6)]], [(5, 6)]) == ". a, . a -> . a"
    assert einsum("aten.cat", [[(0,), (2, 6)]], [(2, 6)]) == "., . . -> . ."


def test_stack_takes_its_new_dim_whole(einsum: Einsum) -> None:
    assert einsum("aten.stack", [[(4, 6), (4, 6)]], [(4, 2, 6)], dim=1) == "a b, a b -> a . b"


def test_padded_dims_are_whole(einsum: Einsum, make_rule: MakeRule) -> None:
    args = "aten.constant_pad_nd", [(2, 4, 6)], [(2, 5, 6)]
    assert einsum(*args, pad=[0, 0, 1, 0]) == "a . b -> a . b"
    assert make_rule(*args, pad=[0, 0, 1, 0]).linear == {0}
    assert make_rule(*args, pad=[0, 0, 1, 0], value=1.0).linear == set()


def test_dims_within_which_indices_move_are_whole(einsum: Einsum) -> None:
    x = [(2, 4, 6)]
    assert einsum("aten.flip", x, x, dims=[-1]) == "a b . -> a b ."
    assert einsum("aten.flip", x, x, dims=[]) == "a b c -> a b c"
    assert einsum("aten.roll", x, x, shifts=[1], dims=[0]) == ". a b -> . a b"
    assert einsum("aten.roll", x, x, shifts=[1]) == ". . . -> . . ."
    assert einsum("aten.tril", x, x) == "a . . -> a . ."


def test_repeat_keeps_its_copies_whole(einsum: Einsum) -> None:
    text = einsum("aten.repeat", [(4, 1, 6)], [(2, 4, 3, 18)], repeats=[2, 1, 3, 3])
    assert text == "a . b -> . a . (c b)"
