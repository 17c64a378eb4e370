"""Tokens a second, and the share of the devices' peak that a model's FLOPs take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Predicted
from shardweave.planners.predict.throughput import Throughput
from shardweave.tests.planners.small_clusters import with_dtype
from shardweave.tests.zoo import captured


def test_share_of_the_peak_counts_each_product_three_times() -> None:
    program = captured("gpt:layers=2,hidden=32,heads=4,vocab=32,seq=8,batch=8").program
    on = with_dtype(find_cluster("testbed:nodes=4"))
    plan = Plan({"data": 4})
    found = Throughput.of(program, on, plan, Predicted(0.5))
    assert found is not None
    assert (found.batch, found.seq) == (8, 8)
    # Twelve squares of the hidden size a block and the vocabulary, two FLOPs each, and attention.
    products = 3 * 2 * 64 * (2 * 12 * 32**2 + 32 * 32)
    assert products < found.flops < 1.1 * products
    assert found.mfu == pytest.approx(found.flops / (0.5 * 4 * found.peak_flops_s))
    assert "128 tokens/s, 32 a device, with a batch of 8 x 8 tokens; MFU " in str(found)
    assert " FLOPs of the model / (500.00 ms x 4 x 0.12 TFLOP/s)" in str(found)
    assert "HFU" not in str(found)
    assert "MFU" not in str(replace(found, peak_flops_s=0.0))
    slower = Throughput.of(program, on, plan, Predicted(0.75, update_s=0.25))
    assert slower is not None
    assert slower.mfu == found.mfu
    assert "85 tokens/s" in str(slower)
    again = Throughput.of(program, on, replace(plan, recompute="layer"), Predicted(0.5))
    assert again is not None
    # All products of the blocks once more, and not those of the head.
    assert again.again == pytest.approx((found.flops - 3 * 2 * 64 * 32 * 32) / 3, rel=0.1)
    assert f"HFU {again.hfu:.1%}, with " in str(again)
