"""Launches and bytes of the kernels of a layer and of a head, ours and Inductor's:
`python benchmarks/kernel_bytes.py [--quick] [--json FILE]`.

A row is a model, a dtype, a mesh and a part. A layer is the difference between steps of two layers
and of one, forward and backward; the head is the rest of a step of one: embedding, last norm, loss.
On tensor=2 a rank's program is counted, without its messages. Every launch counts, those that join
parts too. Bytes are what a kernel reads and writes, a value once for each loop over it; a call of a
library counts as one launch, with its operands and results, on both sides. Bounds are what no
fusion can go below with the same calls of the library (`kernel_bounds.py`), as a part of
Inductor's.

Nothing is run: values are fake. Inductor's Triton scheduling sees a mocked driver of an H100, and
the same program as one graph without autograd, so that it may fuse and recompute across the turn
from forward to backward. Exits 1 if a row misses a goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

import shardweave as sw
from shardweave.benchmarks.inductor_kernels import inductor_counts
from shardweave.benchmarks.kernel_bounds import lower_bound
from shardweave.benchmarks.kernel_counts import Counts, own_counts
from shardweave.driver.models.models import build_example
from shardweave.passes.notes import PassNote
from shardweave.planners.lowering.apply_plan import ApplyPlanPass

MODELS = {
    "gpt": "gpt:layers={layers},hidden=1024,heads=16,vocab=50304,seq=1024,batch=8",
    "llama": (
        "hf:llama:num_hidden_layers={layers},hidden_size=1024,num_attention_heads=16,"
        "num_key_value_heads=16,intermediate_size=2816,vocab_size=32000,batch=8,seq=1024"
    ),
    "bert": (
        "hf:bert:num_hidden_layers={layers},hidden_size=1024,num_attention_heads=16,"
        "intermediate_size=4096,vocab_size=30528,max_position_embeddings=512,batch=16,seq=512"
    ),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MESHES = (None, "tensor=2")
PASSES = "preset:kernels"
RECOMPUTED = "sum-by-local-maxima,recompute-producers{matmul=false}"
GENERATED = "recompute-producers,fuse-kernels"
"""The same with products in kernels, where they fit."""
GOALS = {"launches": 0.80, "moved_bytes": 0.85}


@dataclass(frozen=True)
class Total:
    """launches; moved_bytes: between kernels and memory."""

    launches: int
    moved_bytes: int

    @staticmethod
    def of(counts: Counts) -> Total:
        return Total(sum(counts.launches.values()), sum(counts.moved.values()))

    def __sub__(self, other: Total) -> Total:
        return Total(self.launches - other.launches, self.moved_bytes - other.moved_bytes)


@dataclass(frozen=True)
class Row:
    """One part of one model. generated: ours with products in kernels. bound: by `lower_bound`."""

    model: str
    dtype: str
    mesh: str
    part: str
    ours: Total
    generated: Total
    bound: Total
    inductor: Total

    def ratio(self, what: str, of: str = "ours") -> float:
        """Of Inductor's. of: `ours` or `bound`."""
        return getattr(getattr(self, of), what) / getattr(self.inductor, what)

    @property
    def is_met(self) -> bool:
        return all(self.ratio(what) <= goal for what, goal in GOALS.items())


def local_program(kind: str, layers: int, dtype: torch.dtype, mesh: str | None) -> sw.Program:
    """A rank's program before its kernels are fused; its values are never made."""
    with FakeTensorMode():
        example = build_example(MODELS[kind].format(layers=layers), dtype=dtype)
    program = sw.capture(example.module, kwargs=example.kwargs)
    if mesh is None:
        return sw.run_passes(program, "cse,dce")
    plan = ApplyPlanPass.of(sw.plan(program, mesh, "megatron"))
    return sw.PassPipeline([plan, "preset:partition"]).run(program)


def rows_of(kind: str, dtype: str, mesh: str | None) -> Iterator[Row]:
    """The rows of the layer and of the head."""
    counted: list[tuple[Total, ...]] = []
    for layers in (1, 2):
        program = local_program(kind, layers, DTYPES[dtype], mesh)
        counts = [own_counts(sw.run_passes(program, passes)) for passes in (PASSES, GENERATED)]
        counts += [lower_bound(sw.run_passes(program, RECOMPUTED)), inductor_counts(program)]
        counted.append(tuple(map(Total.of, counts)))
    layer = [two - one for one, two in zip(*counted, strict=True)]
    head = [one - part for one, part in zip(counted[0], layer, strict=True)]
    yield Row(kind, dtype, mesh or "one device", "layer", *layer)
    yield Row(kind, dtype, mesh or "one device", "head", *head)


def show(rows: list[Row], console: Console) -> None:
    """A line for each row, with what misses its goal marked."""
    table = Table("model", "dtype", "mesh", "part", box=None, pad_edge=False)
    columns = ("launches", "Inductor", "ratio", "bound", "MiB", "Inductor", "ratio", "bound")
    for column in (*columns, "generated MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        cells: list[str] = []
        for what, goal in GOALS.items():
            scale = 2**20 if what == "moved_bytes" else 1
            numbers = (getattr(side, what) / scale for side in (row.ours, row.inductor))
            mark = "" if row.ratio(what) <= goal else " !"
            cells += [*(f"{number:.0f}" for number in numbers), f"{row.ratio(what):.2f}{mark}"]
            cells.append(f"{row.ratio(what, 'bound'):.2f}")
        cells.append(f"{row.generated.moved_bytes / 2**20:.0f}")
        table.add_row(row.model, row.dtype, row.mesh, row.part, *cells)
    console.print(table)
    met = sum(row.is_met for row in rows)
    words = " and ".join(f"{what} <= {goal}" for what, goal in GOALS.items())
    console.print(f"{met} of {len(rows)} rows meet both goals: {words} of Inductor's")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--quick", action="store_true", help="one model in bf16 on one device")
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    kinds = [options.model] if options.model else list(MODELS)[: 1 if options.quick else None]
    cases = [(k, d, m) for k in kinds for d in DTYPES for m in MESHES]
    rows: list[Row] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PassNote)
        for kind, dtype, mesh in cases[: 1 if options.quick else None]:
            for row in rows_of(kind, dtype, mesh):
                rows.append(row)
                print(f"counted {row}", file=sys.stderr, flush=True)
    show(rows, Console(width=130))
    if options.json:
        result = {"torch": torch.__version__, "goals": GOALS, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
