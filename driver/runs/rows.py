"""Measured runs of others as rows of a table; the columns are those of docs/clusters.md."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardweave.driver.runs.frameworks import framework_of

HELD_OUT = 3
"""One group of so many is not looked at until the end."""

OUTER_LAYERS = 2
"""What stands before and behind all layers, where a note counts it."""


@dataclass(frozen=True)
class MeasuredRun:
    """A row. Counts that it does not say are 1; None: not known. step_s: seconds of a step; 0 where
    none was measured. memory_bytes: the most that a device held, 0 where it does not say."""

    source: str
    cluster: str
    gpu: str
    gpus: int
    per_node: int
    model: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int
    micro_batch: int | None
    data: int
    tensor: int
    pipeline: int
    chunks: int
    sequence_parallel: bool
    zero: int
    recompute: str
    is_fused: bool
    precision: str
    framework: str
    step_s: float
    memory_bytes: float
    status: str
    note: str

    @property
    def noted_layers(self) -> int:
        """Layers of all stages that the note has; 0 where it has none."""
        return sum(self._noted)

    @property
    def contradiction(self) -> str:
        """What of the note contradicts the row; empty if nothing does."""
        if self.noted_layers in (0, self.layers, self.layers + OUTER_LAYERS):
            return ""
        return (
            f"its note has stages of {self.noted_layers} layers, its row a model of {self.layers}"
        )

    @property
    def _noted(self) -> list[int]:
        found = re.search(r"layers/stage=\[([\d, ]+)\]", self.note)
        return [] if found is None else [int(word) for word in found[1].split(",")]

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage, where the note says so (`layers/stage=[7, 9, 9, 9]`); else none.

        It may count what stands before and behind all layers as one layer each.
        """
        counts = self._noted
        if sum(counts) == self.layers + OUTER_LAYERS:
            counts[0] -= 1
            counts[-1] -= 1
        is_whole = sum(counts) == self.layers and len(counts) == self.pipeline and min(counts) > 0
        return tuple(counts) if is_whole else ()

    @property
    def group(self) -> tuple[object, ...]:
        """Runs of which a planner would choose one: equal model, devices and batch."""
        return (
            self.source, self.cluster, self.framework, self.precision, self.model, self.layers,
            self.hidden, self.seq, self.gpus, self.batch,
        )  # fmt: skip

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.md5(repr(self.group).encode()).digest()
        return digest[0] % HELD_OUT == 0

    @property
    def name(self) -> str:
        sizes = f"{self.model} {self.layers}x{self.hidden}, seq {self.seq}"
        degrees = f"data={self.data},tensor={self.tensor},pipeline={self.pipeline}"
        return (
            f"{sizes}, batch {self.batch} by {self.micro_batch}, {self.gpus} {self.gpu}, {degrees}"
        )


def read_runs(paths: Iterable[Path]) -> list[MeasuredRun]:
    """Raises ValueError, with the file and the line, for a row that cannot be read; OSError."""
    found: list[MeasuredRun] = []
    for path in paths:
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                try:
                    found.append(_run(row))
                except (KeyError, ValueError) as error:
                    raise ValueError(
                        f"{path}:{number}: {error!r}; expected the columns of docs/clusters.md, "
                        "empty where nothing is known"
                    ) from error
    return found


def _run(row: dict[str, str]) -> MeasuredRun:
    def number(name: str, default: int = 1) -> int:
        return int(float(row[name])) if row[name] else default

    hidden = number("hidden")
    gpus, tensor, pipeline = number("gpus"), number("tp"), number("pp")
    attention = row["attention"]
    framework = framework_of(row["framework"], row["source"])
    return MeasuredRun(
        source=row["source"],
        cluster=row["cluster"],
        gpu=row["gpu"],
        gpus=gpus,
        per_node=number("gpus_per_node", gpus),
        model=row["model"],
        layers=number("layers"),
        hidden=hidden,
        heads=number("heads"),
        ffn=number("ffn", 4 * hidden),
        vocab=number("vocab", framework.vocab),
        seq=number("seq"),
        batch=number("gbs"),
        micro_batch=number("mbs") if row["mbs"] else None,
        data=number("dp", gpus // tensor // pipeline),
        tensor=tensor,
        pipeline=pipeline,
        chunks=number("vpp"),
        sequence_parallel=row["sp"] == "True",
        zero=number("zero", 0),
        recompute=row["recompute"] or "none",
        is_fused="flash" in attention,
        precision=row["precision"] or framework.precision,
        framework=row["framework"],
        step_s=float(row["step_ms"]) / 1e3 if row["step_ms"] else 0.0,
        memory_bytes=float(row["mem_gib"]) * 2**30 if row["mem_gib"] else 0.0,
        status=row["status"] or "ok",
        note=row["note"],
    )
