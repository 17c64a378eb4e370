"""How true the step of a deep model is that `auto` takes from a few of its blocks.

`python benchmarks/auto_depth.py [--models NAME ..] [--quick] [--json OUT]` takes plans of one stage
and one micro-batch, which are simulated op by op: with three blocks and with five, and on the line
through both up to the model's own. Beside that it simulates the whole model under each plan, and
prints by how much the seconds and the bytes of the line are off. Plans with stages or micro-batches
are simulated in full depth, and are not shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.auto_speed import LLAMA_8B
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.predict.predict import predict_plan

MODELS: Mapping[str, tuple[str, str]] = {
    "GPT, 20 layers of hidden 1024": (
        "gpt:layers=20,hidden=1024,heads=16,vocab=50304,seq=1024,batch=64",
        "perlmutter:nodes=2",
    ),
    "GPT, 24 layers of hidden 2048": (
        "gpt:layers=24,hidden=2048,heads=16,vocab=50304,seq=2048,batch=64",
        "h100-pod:nodes=2",
    ),
    "GPT, 40 layers of hidden 5120": (
        "gpt:layers=40,hidden=5120,heads=40,vocab=50304,seq=2048,batch=64",
        "h100-pod",
    ),
    "Llama-3-8B": (f"{LLAMA_8B},intermediate_size=14336,batch=128,seq=4096", "h100-pod"),
}
"""A model as `build_example` reads it, and the cluster that it is planned for."""

QUICK = "GPT, 20 layers of hidden 1024"
"""The model of a quick run, the one with the fewest ops."""


def points(devices: int) -> list[JointPoint]:
    """Points of one stage and one micro-batch on so many devices."""
    whole, pairs = JointPoint(data=devices), JointPoint(data=devices // 2, tensor=2)
    shared = JointPoint(replica=devices // 4, data=4)
    return [
        whole,
        whole.with_value(buckets=32),
        whole.with_value(buckets=256),
        whole.with_value(zero=1),
        whole.with_value(zero=3, buckets=32),
        whole.with_value(zero=3, buckets=256),
        whole.with_value(zero=2, recompute="layer"),
        shared.with_value(zero=3),
        shared.with_value(zero=3, buckets=256),
        pairs.with_value(zero=1),
        pairs.with_value(zero=1, sub_batches=2, schedule="cross-pass"),
        pairs.with_value(sequence_parallel=True, zero=3, buckets=256),
        pairs.with_value(sequence_parallel=True, zero=1, recompute="after-products"),
    ]


@dataclass(frozen=True)
class Row:
    """A plan's seconds and bytes from a few blocks, and from all."""

    model: str
    point: str
    few_s: float
    whole_s: float
    few_bytes: float
    whole_bytes: float

    @property
    def time_error(self) -> float:
        return self.few_s / self.whole_s - 1

    @property
    def memory_error(self) -> float:
        return self.few_bytes / self.whole_bytes - 1


def rows_of(name: str) -> Iterator[Row]:
    """A row for each point that the model can have."""
    spec, place = MODELS[name]
    with FakeTensorMode():
        example = build_example(spec, dtype=torch.bfloat16)
    program = capture(example.module, kwargs=example.kwargs)
    cluster = find_cluster(place)
    evaluator = Evaluator(PlanMaker(Estimator(CostReader(Depths.of(program), cluster)), place))
    lowerings = Lowerings(program, most=RECENT)
    for point in points(cluster.num_devices):
        few = evaluator.predict(point)
        if few is None:
            print(f"{name}: not {point}: {evaluator.problems[point]}", file=sys.stderr)
            continue
        whole = predict_plan(lowerings, evaluator.maker.plan(point, program), cluster)
        yield Row(name, str(point), few.time_s, whole.time_s, few.peak_bytes, whole.peak_bytes)


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=None)
    for name in ("model", "plan"):
        table.add_column(name, overflow="fold")
    for name in ("all blocks", "seconds off", "memory off"):
        table.add_column(name, justify="right", min_width=11)
    for row in rows:
        table.add_row(
            row.model, row.point, f"{1e3 * row.whole_s:.1f} ms",
            f"{row.time_error:+.2%}", f"{row.memory_error:+.2%}",
        )  # fmt: skip
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in [QUICK] if options.quick else options.models:
        for row in rows_of(name):
            rows.append(row)
            print(f"{name}: {row.point}: {row.time_error:+.2%}", file=sys.stderr, flush=True)
    Console(width=max(120, Console().width)).print(table_of(rows))
    if options.json:
        found = [
            {**vars(row), "time_error": row.time_error, "memory_error": row.memory_error}
            for row in rows
        ]
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
