"""OPPA's formulas as the paper has them, and with what is wrong in them mended: beside those of
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


@dataclass(frozen=True)
class LiteralThroughput(ThroughputPrior):
    """(11) to (18) as printed. Of the unknowns D and a of (15) only their product can be told, so
    that one latency is shared by (14) and (16) alone."""

    numbers: ClassVar[tuple[str, ...]] = (
        "work", "data_latency", "data_transfer", "tensor_latency", "tensor_transfer",
        "pipeline_transfer",
    )  # fmt: skip

    def compute_s(self, x: Columns, of: Values) -> Tensor:
        """(11), where both counts are 1 without stages."""
        bubble = (x["pipeline"] - 1) / _with_stages(x, "chunks")
        return of["work"] / devices_of(x) * (_with_stages(x, "micro_batches") + bubble)

    def data_s(self, x: Columns, of: Values) -> Tensor:
        """(14)."""
        return all_reduce(x["data"], of["data_latency"], of["data_transfer"])

    def tensor_s(self, x: Columns, of: Values) -> Tensor:
        """(15)."""
        count = _with_stages(x, "micro_batches")
        return count * all_reduce(x["tensor"], of["tensor_latency"], of["tensor_transfer"] / count)

    def pipeline_s(self, x: Columns, of: Values) -> Tensor:
        """(16)."""
        count = _with_stages(x, "micro_batches")
        message = of["data_latency"] + of["pipeline_transfer"] / count
        return _with_stages(x, "chunks") * count * message


def _with_stages(x: Columns, name: str) -> Tensor:
    return torch.where(x["pipeline"] > 1, x[name], 1.0)


@dataclass(frozen=True)
class LiteralMemory(CorrectedMemory):
    """(19), clipped to the memory by (20)."""

    def __call__(self, x: Columns, of: Values) -> Tensor:
        """A share; the shape of the columns."""
        weights = of["weights"] / (x["pipeline"] * x["tensor"])
        activations = of["activations"] / (devices_of(x) * _with_stages(x, "micro_batches"))
        return (weights + activations + of["constant"]).clamp(max=1.0)
