"""What does a proof cost beside the passes? `python benchmarks/proof_cost.py [--quick]`

Each model is planned for tensor=8,data=128 and compiled by a preset; the program of a rank is then
proved. Seconds are processor time on one thread. The
share is that of the proof in the time of the passes. `--quick` leaves out the large models,
`--json FILE` holds the rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.compile_time import machine
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.proof.prove import prove
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.megatron.planner import plan_megatron

MESH = "tensor=8,data=128"
LLAMA = "num_hidden_layers={layers},hidden_size=4096,num_attention_heads=32,intermediate_size=11008"
MODELS = {
    "gpt, 12 layers": "gpt:layers=12,hidden=768,heads=16,vocab=51200,seq=1024,batch=256",
    "llama, 12 layers": f"hf:llama:{LLAMA.format(layers=12)},batch=256,seq=2048",
    "llama, 32 layers": f"hf:llama:{LLAMA.format(layers=32)},batch=256,seq=2048",
    "GPT-3, 96 layers": "gpt:layers=96,hidden=12288,heads=96,vocab=51200,seq=2048,batch=256",
}
QUICK = 2
"""The first so many models are small."""


@dataclass(frozen=True)
class CostRow:
    """Seconds of processor time; peak_gib: of the process so far."""

    model: str
    preset: str
    ops: int
    passes_s: float
    proof_s: float
    peak_gib: float

    @property
    def share(self) -> float:
        return self.proof_s / self.passes_s


def measure(model: str, preset: str) -> CostRow:
    with FakeTensorMode():
        example = build_example(MODELS[model])
    program, mesh = capture(example.module, kwargs=example.kwargs), Mesh.parse(MESH)
    plan = ApplyPlanPass.of(plan_megatron(program, mesh))
    times = [time.process_time()]
    local = run_passes(program, [plan, f"preset:{preset}"], mesh=mesh)
    times.append(time.process_time())
    proof = prove(local, against=program)
    times.append(time.process_time())
    passes_s, proof_s = [round(after - before, 2) for before, after in pairwise(times)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return CostRow(model, preset, proof.num_ops, passes_s, proof_s, round(peak, 2))


def print_rows(rows: list[CostRow]) -> None:
    table = Table("model", "preset", "ops", "passes s", "proof s", "share")
    for row in rows:
        table.add_row(
            row.model,
            row.preset,
            f"{row.ops:,}",
            f"{row.passes_s:.1f}",
            f"{row.proof_s:.1f}",
            f"{row.share:.0%}",
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the small models")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[CostRow] = []
    for model in list(MODELS)[: QUICK if options.quick else None]:
        rows += [measure(model, preset) for preset in ("default", "oases")]
        if options.json:
            data = {"machine": machine(), "mesh": MESH, "rows": [asdict(row) for row in rows]}
            options.json.write_text(f"{json.dumps(data, indent=1)}\n")
    print_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
