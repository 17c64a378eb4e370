"""Rules of convolutions and pools."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardweave.ir.sharding.rules import Rule

Einsum = Callable[..., str]
MakeRule = Callable[..., Rule]
X, Y, W = (2, 4, 8, 8), (2, 6, 8, 8), (6, 4, 3, 3)


def settings(**values: Any) -> dict[str, Any]:
    """The arguments of a 3x3 convolution that keeps the size, with some replaced."""
    pairs = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "output_padding": [0, 0]}
    return {**pairs, "transposed": False, "groups": 1, **values}


def test_input_channels_reduce_where_no_bias_is_added(einsum: Einsum, make_rule: MakeRule) -> None:
    args = "aten.convolution", [X, W], [Y]
    assert einsum(*args, **settings()) == "a b c d, e b . . -> a e c d"
    assert make_rule(*args, **settings()).factors[1].reduction == "sum"


def test_input_channels_cannot_be_cut_under_a_bias(einsum: Einsum, make_rule: MakeRule) -> None:
    args = "aten.convolution", [X, W, (6,)], [Y]
    assert einsum(*args, **settings()) == "a b c d, e b . ., e -> a e c d"
    assert make_rule(*args, **settings()).factors[1].reduction is None


def test_transposed_convolution_has_its_weight_turned(einsum: Einsum) -> None:
    text = einsum("aten.convolution", [Y, W], [X], **settings(transposed=True))
    assert text == "a b c d, b e . . -> a e c d"


def test_groups_are_a_factor_of_both_channels(einsum: Einsum, make_rule: MakeRule) -> None:
    args = "aten.convolution", [X, (6, 2, 3, 3), (6,)], [Y]
    assert einsum(*args, **settings(groups=2)) == "a (b c) d e, (b f) c . ., (b f) -> a (b f) d e"
    assert make_rule(*args, **settings(groups=2)).localize is not None


@pytest.mark.parametrize(
    ("mask", "results", "reduction"),
    [
        ([True, True, True], "a e c d, b e . ., b", None),
        ([True, True, False], "a e c d, b e . .", "sum"),
        ([False, True, False], "b e . .", "sum"),
        ([False, False, True], "b", None),
    ],
)
def test_convolution_backward_has_the_results_that_are_asked_for(
    einsum: Einsum, make_rule: MakeRule, mask: list[bool], results: str, reduction: str | None
) -> None:
    shapes = [shape for shape, wanted in zip([X, W, (6,)], mask, strict=True) if wanted]
    args = "aten.convolution_backward", [Y, X, W], shapes
    values = settings(output_mask=mask, bias_sizes=None)
    assert einsum(*args, **values) == f"a b c d, a e c d, b e . . -> {results}"
    factors = make_rule(*args, **values).factors
    assert [f.reduction for f in factors] == [*["sum"] * 4, reduction]


def test_pools_work_on_each_plane_alone(einsum: Einsum) -> None:
    small = (2, 4, 4, 4)
    values = {"kernel_size": [2, 2]}
    text = einsum("aten.max_pool2d_with_indices", [X], [small, (small, torch.int64)], **values)
    assert text == "a b (c d) (e f) -> a b c e, a b c e"
    assert einsum("aten.avg_pool2d", [X[1:]], [small[1:]], **values) == "a (b c) (d e) -> a b d"
    assert einsum("aten._adaptive_avg_pool2d", [X], [(2, 4, 1, 1)]) == "a b . . -> a b . ."
    text = einsum("aten.upsample_nearest2d_backward", [X], [small])
    assert text == "a b (c d) (e f) -> a b c e"


@pytest.mark.parametrize(
    ("window", "small", "reach"),
    [
        ({"stride": [2, 2]}, 4, [1, 1]),
        ({"padding": [2, 2], "dilation": [2, 2]}, 8, [2, 2]),
        ({"padding": [0, 0]}, 6, []),  # no block of the input for each window
        ({"stride": [2, 2], "padding": [0, 0]}, 3, []),
    ],
)
def test_spatial_dims_reach_into_neighbours(
    make_rule: MakeRule, window: dict[str, Any], small: int, reach: list[int]
) -> None:
    rule = make_rule("aten.convolution", [X, W], [(2, 6, small, small)], **settings(**window))
    assert [factor.reach for factor in rule.factors if factor.reach] == reach
