"""Rules along dims: what reduces and what must be whole."""

from collections.abc import Callable

import pytest
import torch

from shardweave.ir.sharding.rules import Rule

Einsum = Callable[..., str]
MakeRule = Callable[..., Rule]
X = (2, 4, 6)


def test_sum_reduces_its_dims(einsum: Einsum, make_rule: MakeRule) -> None:
    name = "aten.sum.dim_IntList"
    assert einsum(name, [X], [(4,)], dim=[0, -1]) == "a b c -> b"
    assert einsum(name, [X], [(2, 1, 6)], dim=[1], keepdim=True) == "a b c -> a . c"
    assert einsum(name, [X], [()], dim=[]) == "a b c -> "
    assert einsum(name, [X], [()], dim=None) == "a b c -> "
    assert einsum(name, [()], [()], dim=[]) == " -> "
    assert einsum("aten.sum", [X], [()]) == "a b c -> "
    rule = make_rule(name, [X], [(4,)], dim=[0, -1])
    assert [f.reduction for f in rule.factors] == ["sum", "sum", "sum"]
    assert rule.linear == {0}


def test_sum_into_a_narrower_type_is_not_linear(make_rule: MakeRule) -> None:
    rule = make_rule("aten.sum", [X], [((), torch.bfloat16)], dtype=torch.bfloat16)
    assert rule.linear == set()


def test_maximum_reduces_by_maximum(einsum: Einsum, make_rule: MakeRule) -> None:
    args = "aten.amax", [X], [(2, 4, 1)]
    assert einsum(*args, dim=[-1], keepdim=True) == "a b c -> a b ."
    assert make_rule(*args, dim=[-1], keepdim=True).factors[2].reduction == "max"
    assert make_rule(*args, dim=[-1], keepdim=True).linear == set()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("_softmax", {"half_to_float": False}),
        ("_log_softmax", {"half_to_float": False}),
        ("_safe_softmax", {}),
        ("cumsum", {}),
    ],
)
def test_ops_along_a_dim_need_it_whole(einsum: Einsum, name: str, values: dict[str, bool]) -> None:
    assert einsum(f"aten.{name}", [X], [X], dim=1, **values) == "a . b -> a . b"


def test_softmax_backward_needs_its_dim_whole(einsum: Einsum) -> None:
    values = {"dim": -1, "input_dtype": torch.float32}
    for name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        assert einsum(f"aten.{name}", [X, X], [X], **values) == "a b ., a b . -> a b ."


def test_results_drop_or_keep_whole_dims(einsum: Einsum) -> None:
    i64, boolean = torch.int64, torch.bool
    assert einsum("aten.argmax", [X], [((2, 6), i64)], dim=1) == "a . b -> a b"
    assert einsum("aten.argmax", [X], [((), i64)]) == ". . . -> "
    assert einsum("aten.amin", [X], [(2, 1, 6)], dim=[1], keepdim=True) == "a . b -> a . b"
    assert einsum("aten.any.dim", [X], [((2, 4), boolean)], dim=-1) == "a b . -> a b"
    assert einsum("aten.any", [X], [((), boolean)]) == ". . . -> "
    topk = einsum("aten.topk", [X], [(2, 4, 3), ((2, 4, 3), i64)], k=3)
    assert topk == "a b . -> a b ., a b ."
    assert einsum("aten.max.dim", [X], [(4, 6), ((4, 6), i64)], dim=0) == ". a b -> a b, a b"
