"""The space of parallelism configurations (OPPA's PCs), enumerated once, and as numbers.

A configuration is a choice of degrees, ZeRO, bucket sizes, micro-batches and what else a backend
can vary. What a choice makes meaningless takes its least value (a bucket of a reduction that there
is none of), so that no two configurations of a space are the same run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shardweave.planners.degrees import divisors

Floats = NDArray[np.float64]

BUCKETS_MIB = tuple(4**k for k in range(7))
SCHEDULES_OF_SUB_BATCHES = ("sub-batch", "cross-pass")
"""Orders that need at least two micro-batches to alternate between."""


class SpaceError(ValueError):
    """A space without configurations, or a configuration that is not of it."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to train. Degrees multiply to the number of devices.

    zero: ZeRO stage. data_bucket_mib, zero_bucket_mib: largest message, in MiB, of gradients
    without and with ZeRO. micro_batches: of a replica's share of the batch. chunks: pieces of the
    model on each pipeline stage (interleaved stages). recompute, schedule: policies of the
    passes `rematerialize` and `overlap-communication`; "none" is without them.
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

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Data, tensor and pipeline."""
        return self.data, self.tensor, self.pipeline

    def __str__(self) -> str:
        """What differs from the least choice: `data 4, tensor 2, micro_batches 8`."""
        least = Configuration()
        parts = [
            f"{name} {value}"
            for name, value in self.to_dict().items()
            if value != getattr(least, name)
        ]
        return ", ".join(parts) or "one device"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: object, where: str) -> Configuration:
        """Raises SpaceError naming `where` unless the data has exactly a configuration's keys."""
        known: dict[str, type] = {one.name: type(one.default) for one in fields(Configuration)}
        found = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        wrong = [name for name, kind in known.items() if type(found.get(name)) is not kind]
        wrong += [name for name in found if name not in known]
        if wrong:
            raise SpaceError(
                f"{where}: '{wrong[0]}' of the configuration is {found.get(wrong[0])!r}, expected "
                f"the keys {', '.join(known)} with the types of a configuration."
            )
        return Configuration(**found)


NUMBERS = (
    "data",
    "tensor",
    "pipeline",
    "data_bucket_mib",
    "zero_bucket_mib",
    "micro_batches",
    "chunks",
)
"""Sizes."""

FEATURES = ("data", "tensor", "pipeline", "bucket", "micro_batches", "chunks")
"""Sizes that a model sees, as logarithms. Of the two buckets only one is ever in use."""


@dataclass(frozen=True)
class SearchSpace:
    """What may be chosen.

    devices: all are used. heads: tensor degrees are powers of two that divide it. layers: the
    pipeline divides it, and chunks times pipeline are at most it (and at most the
    micro-batches). batch: samples; the data degree divides it and micro-batches divide a
    replica's share of it; there are at least as many as stages. With one stage there is one chunk.
    A data degree of 1 has no ZeRO and no bucket; ZeRO uses its own bucket, else the data bucket
    is used. max_micro_batches: a tighter limit.
    """

    devices: int
    heads: int
    layers: int
    batch: int
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    data_buckets_mib: tuple[int, ...] = BUCKETS_MIB
    zero_buckets_mib: tuple[int, ...] = BUCKETS_MIB
    recompute: tuple[str, ...] = ("none", "layer")
    schedules: tuple[str, ...] = ("none",)
    sequence_parallel: tuple[bool, ...] = (False,)
    max_micro_batches: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            name: list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def degrees(self) -> Iterator[tuple[int, int, int]]:
        for tensor in divisors(math.gcd(self.devices, self.heads)):
            if tensor & (tensor - 1):
                continue
            for pipeline in divisors(math.gcd(self.devices // tensor, self.layers)):
                data = self.devices // (tensor * pipeline)
                if self.batch % data == 0:
                    yield data, tensor, pipeline

    def pipelining(self, data: int, pipeline: int) -> list[tuple[int, int]]:
        most = self.max_micro_batches or self.batch
        counts = [n for n in divisors(self.batch // data) if pipeline <= n <= most]
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
        """All configurations, always in the same order. Raises SpaceError if there are none.

        Time: linear in their number.
        """
        found: list[Configuration] = []
        for data, tensor, pipeline in self.degrees():
            sequences = self.sequence_parallel if tensor > 1 else (False,)
            for (zero, data_mib, zero_mib), (count, chunks), recompute, sequence in product(
                self.reductions(data), self.pipelining(data, pipeline), self.recompute, sequences
            ):
                found += [
                    Configuration(
                        data, tensor, pipeline, zero, data_mib, zero_mib, count, chunks,
                        recompute, schedule, sequence,
                    )
                    for schedule in self._schedules(count)
                ]  # fmt: skip
        if not found:
            raise SpaceError(
                f"no configuration uses all {self.devices} devices with {self.heads} heads, "
                f"{self.layers} layers and a batch of {self.batch}; change the batch or the number "
                "of devices."
            )
        return found

    def _schedules(self, micro_batches: int) -> Sequence[str]:
        if micro_batches > 1:
            return self.schedules
        return [name for name in self.schedules if name not in SCHEDULES_OF_SUB_BATCHES]


@dataclass(frozen=True)
class SpaceTable:
    """Configurations as arrays, one row each.

    columns: sizes as they are, for formulas. features: each in [0, 1], for models: logarithms of
    sizes over their largest one (log2 x / log2 max, as in the released code), and of what is no
    size, ZeRO stages too, a column for each value but the first. What never varies has none.
    """

    configurations: Sequence[Configuration]
    columns: dict[str, Floats] = field(repr=False)
    features: Floats = field(repr=False)

    @staticmethod
    def of(configurations: Sequence[Configuration]) -> SpaceTable:
        columns = {
            name: np.array([getattr(one, name) for one in configurations], dtype=np.float64)
            for name in (*NUMBERS, "zero")
        }
        policies = [one.recompute != "none" for one in configurations]
        columns["is_recomputing"] = np.array(policies, dtype=np.float64)
        features: dict[str, Floats] = {}
        for name in FEATURES:
            values = columns[name] if name in columns else _buckets(columns)
            if np.ptp(values) > 0:
                features[name] = np.log2(values) / np.log2(values.max())
        for name in ("zero", "recompute", "schedule", "sequence_parallel"):
            values = [getattr(one, name) for one in configurations]
            for value in list(dict.fromkeys(values))[1:]:
                features[f"{name}={value}"] = np.array([float(one == value) for one in values])
        constant = np.zeros(len(configurations))
        stacked = np.stack(list(features.values()) or [constant], axis=1)
        return SpaceTable(configurations, columns, stacked)

    def rows(self, index: Sequence[int]) -> SpaceTable:
        """Some of the rows, on the same scales."""
        chosen = [self.configurations[i] for i in index]
        columns = {name: values[list(index)] for name, values in self.columns.items()}
        return SpaceTable(chosen, columns, self.features[list(index)])


def _buckets(columns: dict[str, Floats]) -> Floats:
    """The bucket in use; where nothing is reduced, the middle of those that are used elsewhere."""
    size = np.maximum(columns["data_bucket_mib"], columns["zero_bucket_mib"])
    used = columns["data"] > 1
    middle = np.exp2(np.median(np.log2(size[used]))) if used.any() else 1.0
    return np.where(used, size, middle)
