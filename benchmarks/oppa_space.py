"""The paper's space of parallelism configurations, enumerated once.

What a choice makes meaningless takes its least value (a bucket of a reduction that there is none
of), so that no two configurations of a space are the same run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from shardweave.planners.cost.degrees import divisors
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.trials.space import Configuration

BUCKETS_MIB = tuple(4**k for k in range(7))


@dataclass(frozen=True)
class SearchSpace:
    """What may be chosen.

    devices: all are used. heads: tensor degrees are powers of two that divide it. layers: the
    pipeline divides it, and chunks times pipeline are at most it (and at most the
    micro-batches). batch: samples; the data degree divides it and micro-batches divide a
    replica's share of it; there are at least as many as stages. With one stage there is one chunk.
    A data degree of 1 has no ZeRO and no bucket; ZeRO uses its own bucket, else the data bucket
    is used.
    """

    devices: int
    heads: int
    layers: int
    batch: int
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    data_buckets_mib: tuple[int, ...] = BUCKETS_MIB
    zero_buckets_mib: tuple[int, ...] = BUCKETS_MIB
    recompute: tuple[str, ...] = ("none", "layer")

    def degrees(self) -> Iterator[tuple[int, int, int]]:
        for tensor in divisors(math.gcd(self.devices, self.heads)):
            if tensor & (tensor - 1):
                continue
            for pipeline in divisors(math.gcd(self.devices // tensor, self.layers)):
                data = self.devices // (tensor * pipeline)
                if self.batch % data == 0:
                    yield data, tensor, pipeline

    def pipelining(self, data: int, pipeline: int) -> list[tuple[int, int]]:
        counts = [n for n in divisors(self.batch // data) if n >= pipeline]
        if pipeline == 1:
            return [(n, 1) for n in counts]
        return [
            (n, chunks) for n in counts for chunks in range(1, min(n, self.layers) // pipeline + 1)
        ]

    def reductions(self, data: int) -> list[tuple[int, int, int]]:
        """ZeRO stage, data bucket and ZeRO bucket."""
        if data == 1:
            return [(0, 1, 1)]
        plain = [(0, size, 1) for size in self.data_buckets_mib if 0 in self.zero_stages]
        stages = [stage for stage in self.zero_stages if stage]
        return plain + [(stage, 1, size) for stage in stages for size in self.zero_buckets_mib]

    def enumerate(self) -> list[Configuration]:
        """All configurations, always in the same order. Raises PlanError if there are none.

        Time: linear in their number.
        """
        found = [
            Configuration(data, tensor, pipeline, *reduction, count, chunks, recompute)
            for data, tensor, pipeline in self.degrees()
            for reduction, (count, chunks), recompute in product(
                self.reductions(data), self.pipelining(data, pipeline), self.recompute
            )
        ]
        if not found:
            raise PlanError(
                f"no configuration uses all {self.devices} devices with {self.heads} heads, "
                f"{self.layers} layers and a batch of {self.batch}; change the batch or the number "
                "of devices."
            )
        return found
