"""The four schedules in the simulator, and how long `list` takes to find its own.

`python benchmarks/schedules.py [--quick] [--json FILE]`: the seven models of Oases (arXiv
2305.16121, Table 4, sequences of 1024) on its two clusters, and GPT-3's 96 layers (sequences of
2048) on eight-device nodes, in two sub-batches, cut as Megatron-LM does, each layer recomputed
and its redundant collectives deleted. Weights are fake. Seconds of `list` are those of the pass
alone, processor time on one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.compile_time import machine
from shardweave.benchmarks.oases_data import CLUSTERS, SEQ, tables
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassPipeline, as_mesh
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.overlap.overlap_communication import SCHEDULES
from shardweave.planners.simulate.simulate import simulate

STEP = (
    "split-batch{n=2},split-addmm,add-pending-sums,propagate-shardings,insert-collectives,"
    "unroll-time-axes,cse,dce,"
    'merge-collectives,rematerialize{policy="layer"},delete-redundant-collectives,start-collectives'
)
MODEL = "gpt:layers={layers},hidden={hidden},heads={heads},vocab=51200,seq={seq},batch={batch}"


@dataclass(frozen=True)
class Case:
    """A model, its mesh and the cluster that it is simulated on."""

    name: str
    model: str
    mesh: str
    cluster: str


@dataclass(frozen=True)
class Row:
    """Simulated seconds by schedule; ops: of the program; list_s: that the list pass took."""

    name: str
    cluster: str
    ops: int
    simulated_s: dict[str, float]
    lower_bound_s: float
    list_s: float


def cases(quick: bool) -> Iterator[Case]:
    """All models on all clusters; the two smallest alone if quick."""
    for config in tables()["table4_configs"]:
        hidden, tensor = config["H"], config["tmp"]
        layers = 2 if quick else config["L"]
        # A data group of one sample has no two sub-batches.
        batch = max(config["global_batch"], 2 * config["dp"])
        model = MODEL.format(
            layers=layers,
            hidden=hidden,
            heads=config["heads"],
            seq=SEQ,
            batch=batch,
        )
        for cluster in CLUSTERS.values():
            yield Case(
                f"H={hidden} L={layers}", model, f"tensor={tensor},data={config['dp']}", cluster
            )
    layers = 4 if quick else 96
    gpt3 = MODEL.format(layers=layers, hidden=12288, heads=96, seq=2048, batch=64)
    yield Case(f"GPT-3 L={layers}", gpt3, "tensor=8,data=8", "h100-pod")


def started(model: str, mesh: str) -> Program:
    """The step of a model up to the choice of its schedule."""
    with FakeTensorMode():
        example = build_example(model)
    program = capture(example.module, kwargs=example.kwargs)
    program.set_mesh(as_mesh(mesh))
    plan = ApplyPlanPass.of(plan_megatron(program, as_mesh(mesh)))
    return PassPipeline([plan, STEP]).run(program)


def measure(case: Case, program: Program) -> Row:
    """Schedule and simulate one case."""
    simulated: dict[str, float] = {}
    bound_s = list_s = 0.0
    for schedule in SCHEDULES:
        spec = f'overlap-communication{{schedule="{schedule}" cluster="{case.cluster}"}}'
        begin = time.process_time()
        after = PassPipeline(spec).run(program)
        list_s = time.process_time() - begin
        result = simulate(after, case.cluster)
        simulated[schedule], bound_s = result.time_s, result.lower_bound_s
    num_ops = sum(1 for _ in program.ops)
    return Row(case.name, case.cluster, num_ops, simulated, bound_s, list_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shallow models")
    parser.add_argument("--json", default="", help="write the rows to this file")
    options = parser.parse_args()
    console = Console(width=max(110, Console().width))
    rows: list[Row] = []
    built: dict[tuple[str, str], Program] = {}
    for case in track([*cases(options.quick)], "scheduling", console=console, transient=True):
        key = (case.model, case.mesh)
        if key not in built:
            built = {key: started(*key)}
        rows.append(measure(case, built[key]))
    table = Table(title="Simulated step, ms")
    for title in ("model", "cluster", "ops", *SCHEDULES, "list / bound", "list takes"):
        table.add_column(title, justify="left" if title in ("model", "cluster") else "right")
    for row in rows:
        times = row.simulated_s
        orders = [f"{times[schedule] * 1e3:.0f}" for schedule in SCHEDULES]
        ratio, took = f"{times['list'] / row.lower_bound_s:.2f}", f"{row.list_s:.1f} s"
        table.add_row(row.name, row.cluster, str(row.ops), *orders, ratio, took)
    console.print(table)
    slower = [row.name for row in rows if row.simulated_s["list"] > min(row.simulated_s.values())]
    console.print(f"list is slower than another schedule in {len(slower)} of {len(rows)} rows")
    if options.json:
        found = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
