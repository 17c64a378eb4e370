"""Compute beside messages: the two factors that the presets have are those that the profile gives."""

from __future__ import annotations

import pytest

from shardweave.benchmarks.interference import error, fit, read_pairs
from shardweave.planners.cost.presets import find_cluster


@pytest.mark.parametrize(
    ("gpu", "preset", "most"),
    [("a100-sxm4-40gb", "dgx-a100", 0.02), ("v100-sxm2-16gb", "dgx-v100", 0.06)],
)
def test_presets_predict_pairs_that_were_left_out(gpu: str, preset: str, most: float) -> None:
    cluster = find_cluster(preset)
    for is_inside in (True, False):
        pairs = [p for p in read_pairs() if p.gpu == gpu and (p.nodes == 1) == is_inside]
        rest = [one for one in pairs if one.is_held_out]
        slowdown = cluster.slowdown_beside(is_inside=is_inside)
        found = error(rest, (slowdown, cluster.link_slowdown))
        assert found < most
        assert found < error(rest, (1.0, 1.0))


@pytest.mark.slow
def test_factors_of_the_preset_are_the_fitted_ones() -> None:
    pairs = [p for p in read_pairs() if p.gpu.startswith("a100") and not p.is_held_out]
    cluster = find_cluster("dgx-a100")
    for is_inside in (True, False):
        slowdown, _ = fit([p for p in pairs if (p.nodes == 1) == is_inside])
        assert slowdown == pytest.approx(cluster.slowdown_beside(is_inside=is_inside), abs=0.02)
