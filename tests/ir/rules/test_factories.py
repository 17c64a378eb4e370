"""Rules of factories: free factors."""

from collections.abc import Callable

import torch

from shardweave.ir.sharding.rules import Rule


def test_full_is_free_in_all_dims(einsum: Callable[..., str]) -> None:
    assert einsum("aten.full", [], [(4, 6)], fill_value=0) == " -> a b"
    assert einsum("aten.full", [], [()], fill_value=0) == " -> "


def test_range_can_be_cut_into_plain_shards(make_rule: Callable[..., Rule]) -> None:
    rule = make_rule("aten.arange.start_step", [], [((8,), torch.int64)], start=0)
    (factor,) = rule.factors
    assert factor.size == 8
    assert factor.contiguous
    assert rule.localize is not None


def test_range_of_fractions_is_whole(einsum: Callable[..., str]) -> None:
    assert einsum("aten.arange.start_step", [], [(8,)], start=0.0, step=0.1) == " -> ."
