"""Rules of normalisation: statistics need whole dims, parameter gradients are sums."""

from collections.abc import Callable

import pytest

from shardweave.ir.sharding.rules import Rule

Einsum = Callable[..., str]
X, STATISTICS, WEIGHT = (2, 4, 6), (2, 4, 1), (6,)


def test_layer_norm_keeps_normalized_dims_whole(einsum: Einsum) -> None:
    text = einsum(
        "aten.native_layer_norm", [X, WEIGHT, WEIGHT], [X, STATISTICS, STATISTICS], eps=1e-5
    )
    assert text == "a b ., ., . -> a b ., a b ., a b ."


def test_layer_norm_without_weight_reads_its_dims_off_the_statistics(einsum: Einsum) -> None:
    statistics = (2, 1, 1)
    text = einsum("aten.native_layer_norm", [X], [X, statistics, statistics], eps=1e-5)
    assert text == "a . . -> a . ., a . ., a . ."


@pytest.mark.parametrize(
    ("mask", "results"),
    [
        ([True, True, True], "a b ., ., ."),
        ([True, True, False], "a b ., ."),
        ([False, True, True], "., ."),
    ],
)
def test_layer_norm_backward_has_the_results_that_are_asked_for(
    einsum: Einsum, mask: list[bool], results: str
) -> None:
    shapes = [shape for shape, wanted in zip([X, WEIGHT, WEIGHT], mask, strict=True) if wanted]
    operands = [X, X, STATISTICS, STATISTICS, WEIGHT, WEIGHT]
    text = einsum("aten.native_layer_norm_backward", operands, shapes, output_mask=mask)
    assert text == f"a b ., a b ., a b ., a b ., ., . -> {results}"


def test_rms_norm_is_a_layer_norm_without_bias(einsum: Einsum) -> None:
    text = einsum(
        "aten._fused_rms_norm", [X, WEIGHT], [X, STATISTICS], normalized_shape=[6], eps=1e-5
    )
    assert text == "a b ., . -> a b ., a b ."
    text = einsum(
        "aten._fused_rms_norm_backward",
        [X, X, STATISTICS, WEIGHT],
        [X, WEIGHT],
        normalized_shape=[6],
        output_mask=[True, True],
    )
    assert text == "a b ., a b ., a b ., . -> a b ., ."


def test_groups_of_a_group_norm_can_be_cut_but_not_their_channels(
    einsum: Einsum, make_rule: Callable[..., Rule]
) -> None:
    x, statistics, weight = (2, 6, 4, 4), (2, 3), (6,)
    args = "aten.native_group_norm", [x, weight, weight], [x, statistics, statistics]
    text = einsum(*args, group=3, eps=1e-5)
    assert text == "a (b c) d e, (b c), (b c) -> a (b c) d e, a b, a b"
    factors = make_rule(*args, group=3, eps=1e-5).factors
    assert [f.whole for f in factors] == [False, False, True, False, False]
    assert [f.joined for f in factors] == [False, False, False, True, True]


def test_group_norm_backward_sums_parameter_gradients_over_samples(einsum: Einsum) -> None:
    x, statistics, weight = (2, 6, 4, 4), (2, 3), (6,)
    text = einsum(
        "aten.native_group_norm_backward",
        [x, x, statistics, statistics, weight],
        [x, weight],
        group=3,
        output_mask=[True, True, False],
    )
    assert text == "a (b c) d e, a (b c) d e, a b, a b, (b c) -> a (b c) d e, (b c)"
