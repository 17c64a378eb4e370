"""Pointwise rules: broadcasting, and which sums pass."""

from collections.abc import Callable

import torch

from shardweave.ir.sharding.rules import Rule

Einsum = Callable[..., str]
MakeRule = Callable[..., Rule]


def test_dims_of_a_pointwise_op_are_factors(einsum: Einsum) -> None:
    assert einsum("aten.gelu", [(4, 6)], [(4, 6)]) == "a b -> a b"


def test_operands_are_aligned_on_the_right(einsum: Einsum) -> None:
    text = einsum("aten.add.Tensor", [(4, 6, 8), (6, 8)], [(4, 6, 8)])
    assert text == "a b c, b c -> a b c"


def test_broadcast_dims_and_dims_of_size_one_have_no_factor(einsum: Einsum) -> None:
    text = einsum("aten.mul.Tensor", [(4, 1, 8), (6, 1)], [(4, 6, 8)])
    assert text == "a . c, b . -> a b c"
    assert einsum("aten.neg", [(4, 1)], [(4, 1)]) == "a . -> a ."


def test_scalar_tensors_have_no_dims(einsum: Einsum) -> None:
    text = einsum("aten.where.self", [((4, 6), torch.bool), (4, 6), ()], [(4, 6)])
    assert text == "a b, a b,  -> a b"
    assert einsum("aten.exp", [()], [()]) == " -> "


def test_clamp_takes_the_bounds_it_is_given(einsum: Einsum) -> None:
    assert einsum("aten.clamp.Tensor", [(4, 6), None, (6,)], [(4, 6)]) == "a b, b -> a b"


def test_sums_pass_through_sums_and_constant_multiples(make_rule: MakeRule) -> None:
    def linear(name: str, count: int, **values: float) -> set[int]:
        return set(make_rule(name, [(4,)] * count, [(4,)], **values).linear)

    assert linear("aten.add.Tensor", 2) == {0, 1}
    assert linear("aten.sub.Tensor", 2) == {0, 1}
    assert linear("aten.neg", 1) == {0}
    assert linear("aten.mul.Scalar", 1, other=2.0) == {0}
    assert linear("aten.add.Scalar", 1, other=2.0) == set()
    assert linear("aten.mul.Tensor", 2) == set()


def test_sums_pass_through_a_choice_but_not_its_condition(make_rule: MakeRule) -> None:
    rule = make_rule("aten.where.self", [((4,), torch.bool), (4,), (4,)], [(4,)])
    assert rule.linear == {1, 2}


def test_sums_pass_where_entries_are_set_to_zero(make_rule: MakeRule) -> None:
    def linear(value: float) -> set[int]:
        operands = [(4,), ((4,), torch.bool)]
        return set(make_rule("aten.masked_fill.Scalar", operands, [(4,)], value=value).linear)

    assert linear(0) == {0}
    assert linear(0.0) == {0}
    assert linear(-1.0) == set()


def test_sums_pass_through_a_cast_to_a_wider_type_only(make_rule: MakeRule) -> None:
    def linear(given: torch.dtype, wanted: torch.dtype) -> bool:
        return bool(make_rule("aten._to_copy", [((4,), given)], [((4,), wanted)]).linear)

    assert linear(torch.bfloat16, torch.float32)
    assert linear(torch.float32, torch.float32)
    assert not linear(torch.float32, torch.bfloat16)
    assert not linear(torch.float16, torch.bfloat16)
    assert not linear(torch.bool, torch.float32)
