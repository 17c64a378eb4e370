"""Training configurations (PCs in OPPA's paper), and a table of them as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to train. The product of its degrees is the number of devices.

    zero: ZeRO stage. data_bucket_mib, zero_bucket_mib: largest message, in MiB, of gradients
    without and with ZeRO. micro_batches: number in a replica's share of the batch. chunks: number
    of stages on each pipeline rank (interleaved stages). recompute, schedule: policies of the
    passes `rematerialize` and `overlap-communication`; "none" is without them. replica: number of
    data-parallel devices that hold the same shards, if ZeRO shards over fewer than all (over `data`
    of them). context: the degree that shards sequences. sub_batches: number in a micro-batch,
    interleaved. order: order of micro-batches on stages. recomputed_share: share of the blocks of
    each stage that `recompute` recomputes.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    data_bucket_mib: int = 1
    zero_bucket_mib: int = 1
    micro_batches: int = 1
    chunks: int = 1
    recompute: str = "none"
    schedule: str = "none"
    sequence_parallel: bool = False
    replica: int = 1
    context: int = 1
    sub_batches: int = 1
    order: str = "1f1b"
    recomputed_share: float = 1.0

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        return self.data, self.tensor, self.pipeline, self.context

    def __str__(self) -> str:
        """List the settings that differ from the default: `data 4, tensor 2, micro_batches 8`."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        least = Configuration()
        parts = [f"{name} {value}" for name, value in own.items() if value != getattr(least, name)]
        return ", ".join(parts) or "one device"


FEATURES = (
    "data", "tensor", "pipeline", "bucket", "micro_batches", "chunks", "replica", "context",
    "sub_batches",
)  # fmt: skip
"""Sizes that a model gets as logarithms; `bucket` is whichever of the two buckets is used."""

NUMBERS = ("data_bucket_mib", "zero_bucket_mib", *(n for n in FEATURES if n != "bucket"))
"""Fields of a Configuration that are sizes."""


@dataclass(frozen=True)
class SpaceTable:
    """Configurations as arrays, one row each.

    columns: sizes as they are, for formulas. features: numbers in [0, 1], for models: logarithms of
    sizes over their largest (log2 x / log2 max, as in the released code); for choices that are not
    sizes (ZeRO stages too), a one-hot column for each value but the first; for a recomputation
    policy the share of blocks that use it. A quantity that never varies has no column. names: of
    the features.
    """

    configurations: Sequence[Configuration]
    columns: dict[str, Floats] = field(repr=False)
    features: Floats = field(repr=False)
    names: tuple[str, ...]

    @staticmethod
    def of(configurations: Sequence[Configuration]) -> SpaceTable:
        columns = {
            name: np.array([getattr(c, name) for c in configurations], dtype=np.float64)
            for name in (*NUMBERS, "zero")
        }
        shares = np.array([c.recomputed_share for c in configurations])
        columns["recomputed"] = np.where(
            [c.recompute != "none" for c in configurations], shares, 0.0
        )
        features: dict[str, Floats] = {}
        for name in FEATURES:
            values = columns[name] if name in columns else _buckets(columns)
            if np.ptp(values) > 0:
                features[name] = np.log2(values) / np.log2(values.max())
        for name in ("zero", "recompute", "schedule", "sequence_parallel", "order"):
            values = [getattr(c, name) for c in configurations]
            for value in list(dict.fromkeys(values))[1:]:
                is_it = np.array([float(c == value) for c in values])
                features[f"{name}={value}"] = is_it * (shares if name == "recompute" else 1.0)
        constant = np.zeros(len(configurations))
        stacked = np.stack(list(features.values()) or [constant], axis=1)
        return SpaceTable(configurations, columns, stacked, tuple(features))

    def rows(self, index: Sequence[int]) -> SpaceTable:
        """Return a table of the rows at `index`, with this table's scales."""
        chosen = [self.configurations[i] for i in index]
        columns = {name: values[list(index)] for name, values in self.columns.items()}
        return SpaceTable(chosen, columns, self.features[list(index)], self.names)


def _buckets(columns: dict[str, Floats]) -> Floats:
    """The bucket size in use; without reductions, the middle of the sizes used by other rows."""
    size = np.maximum(columns["data_bucket_mib"], columns["zero_bucket_mib"])
    used = columns["data"] > 1
    middle = np.exp2(np.median(np.log2(size[used]))) if used.any() else 1.0
    return np.where(used, size, middle)
