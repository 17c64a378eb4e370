"""OPPA's formulas as the paper has them, but for what is wrong in them: beside those of
`planners/oppa/prior.py`, which also know recomputation, ZeRO and buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardweave.planners.oppa.prior import (
    Columns,
    MemoryPrior,
    ThroughputPrior,
    Values,
    all_reduce,
    devices_of,
)


@dataclass(frozen=True)
class CorrectedThroughput(ThroughputPrior):
    """(11) to (18), mended."""

    numbers: ClassVar[tuple[str, ...]] = ThroughputPrior.numbers[:-1]

    def compute_s(self, x: Columns, of: Values) -> Tensor:
        """(11)."""
        micro_batches = x["micro_batches"]
        bubble = (x["pipeline"] - 1) / x["chunks"]
        return of["work"] / micro_batches / devices_of(x) * (micro_batches + bubble)

    def data_s(self, x: Columns, of: Values) -> Tensor:
        """(14)."""
        transfer = of["data_transfer"] / (x["tensor"] * x["pipeline"])
        return all_reduce(x["data"], of["data_latency"], transfer)


@dataclass(frozen=True)
class CorrectedMemory(MemoryPrior):
    """(19) and (20), mended."""

    numbers: ClassVar[tuple[str, ...]] = MemoryPrior.numbers[:-1]

    def __call__(self, x: Columns, of: Values) -> Tensor:
        """A share; the shape of the columns."""
        weights = of["weights"] / (x["pipeline"] * x["tensor"])
        share = weights + of["activations"] / (devices_of(x) * x["micro_batches"]) + of["constant"]
        return self.cap - torch.nn.functional.softplus(self.cap - share, beta=20.0)
