"""Table 3 of Oases (arXiv 2305.16121) simulated: five methods, three models, two clusters.

The programs go through the compiler: a stack of transformer layers is captured with fake weights,
cut as Megatron-LM does, split, recomputed and scheduled by the same passes as any other, and then
simulated. `python benchmarks/oases_table3.py [--quick] [--preset] [--json FILE]`.

Nothing is fitted to Table 3. Blocks take the time that the authors' profile gives them (each op
of a block is scaled by the same factor), and all-reduces that of the profile, by ranks
(`oases_data.ring_share`). Hidden 8192 is not in the profile and takes the rows of
`oases_data.row_of`. Communication does not slow compute down. As in the authors' benchmark, there
are no embeddings, and gradients are reduced over the data axis every 20th step, after it, which
is added. Two numbers of layers are simulated and the line through them is followed. The
`planner` column is not a program: it is the fine-grained schedule, faster by what the chain model
says that the best degrees are faster than the default ones.

`--preset`: the roofline and rings of the presets `oases-3090` and `oases-nvlink-3090` instead,
whose bandwidths and slowdown were chosen with Table 3 in sight.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from xdsl.ir import Operation

from shardweave.benchmarks.layer_stack import step_of_layers
from shardweave.benchmarks.oases_data import (
    BUDGET_BYTES,
    CLUSTERS,
    SEQ,
    Model,
    all_reduce_curve,
    chain_of,
    model_of,
    profiled_cluster,
    row_of,
    tables,
)
from shardweave.driver.models.gpt import GPTConfig
from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.cost.cluster import Cluster, time_at
from shardweave.planners.cost.model import CostModel, kind_of, signature_text
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.oases.chain import linearise
from shardweave.planners.oases.dp import solve_chain
from shardweave.planners.simulate.simulate import simulate

PARTITION = (
    "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,unroll-time-axes,"
    "cse,dce,merge-collectives"
)
SPLIT = "split-batch{n=2}"
DELETE = "delete-redundant-collectives"
METHODS: dict[str, tuple[str, str, str]] = {
    "Megatron-LM": ("", "", "blocking"),
    "Merak": (SPLIT, "", "sub-batch"),
    "cross_pass": (SPLIT, "", "cross-pass"),
    "fine_grained_recompute": (SPLIT, DELETE, "cross-pass"),
}
"""Table 3's name: passes before partitioning, passes after recomputation, schedule."""

NAMES = (*METHODS, "planner")
SIMULATED_LAYERS = (2, 4)
SYNC_EVERY = 20


@dataclass(frozen=True)
class Line:
    """One row of Table 3: thousands of tokens a second of each method, the paper's and ours."""

    cluster: str
    hidden: int
    paper: dict[str, float]
    simulated: dict[str, float]

    def speedups(self) -> tuple[dict[str, float], dict[str, float]]:
        """Over Megatron-LM: the paper's and ours."""
        first, second = (
            {name: values[name] / values[NAMES[0]] for name in NAMES}
            for values in (self.paper, self.simulated)
        )
        return first, second

    @property
    def order(self) -> str:
        """How the methods, each faster than the one before it in the paper, stand in ours."""
        values = [self.simulated[name] for name in NAMES]
        if any(after <= before for before, after in pairwise(values[:-1])):
            return "differs"
        if values[-1] == values[-2]:
            return "planner ties"
        return "as paper" if values[-1] > values[-2] else "differs"


def captured(model: Model, layers: int) -> Program:
    """The step of one data-parallel group, on a mesh of its tensor axis alone."""
    batch = model.batch // model.data
    config = GPTConfig(layers, model.hidden, model.hidden // 64, seq=SEQ, batch=batch)
    program = step_of_layers(config)
    program.set_mesh(Mesh(tensor=model.tensor))
    return program


def scheduled(program: Program, method: str) -> Program:
    """The local program of one of the methods."""
    before, after, schedule = METHODS[method]
    assert program.mesh is not None
    plan = ApplyPlanPass.of(plan_megatron(program, program.mesh))
    recompute = 'rematerialize{policy="layer"}'
    overlap = f'overlap-communication{{schedule="{schedule}"}}'
    spec = [before, PARTITION, recompute, after, "start-collectives", overlap]
    return PassPipeline([plan, ",".join(filter(None, spec))]).run(program)


def with_profile(program: Program, cluster: Cluster, model: Model, copies: int) -> Cluster:
    """The cluster whose ops take what the published profile says of the blocks they are in.

    The roofline gives the ops of a block their shares of the block's time. An op that both kinds
    of block have takes the mean.
    """
    row = row_of(model.hidden, model.tensor, model.batch // model.data // copies)
    assert row is not None, f"the profile does not cover {model} in {copies} parts"
    wanted = {
        ("attn", "forward"): row.attn[0], ("attn", "backward"): row.attn[1],
        ("mlp", "forward"): row.mlp[0], ("mlp", "backward"): row.mlp[1],
    }  # fmt: skip
    mesh = program.mesh
    assert mesh is not None
    costs = CostModel(cluster, mesh)
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    members: defaultdict[str, list[tuple[tuple[str, str], float]]] = defaultdict(list)
    layers: set[str] = set()
    for op in program.ops:
        key = _block_of(op)
        if kind_of(op) == "compute" and key in wanted:
            sums[key] += costs.op_time_s(op)
            members[signature_text(op)].append((key, costs.op_time_s(op)))
            layers.add(layer_of(op).split(".")[1])
    per_block = len(layers) * copies
    measured = {
        text: sum(t * wanted[key] / 1e3 * per_block / sums[key] for key, t in found) / len(found)
        for text, found in members.items()
    }
    devices = {name: replace(one, measured=measured) for name, one in cluster.devices.items()}
    return replace(cluster, devices=devices)


def _block_of(op: Operation) -> tuple[str, str]:
    """The kind of block and pass that an op is in; `("", ..)` if it is in none."""
    parts = layer_of(op).split(".")
    kind = {"attn": "attn", "ln_1": "attn", "mlp": "mlp", "ln_2": "mlp"}
    return kind.get(parts[2], "") if len(parts) > 2 else "", phase_of(op)


def sync_s(model: Model) -> float:
    """Seconds per step of reducing the gradients, all ranks of a node sharing its adapter.

    The profile's ring of all 32 ranks crosses each adapter once; here it carries as many rings
    as a node has tensor ranks.
    """
    size = 4 * 12 * model.hidden**2 * model.layers / model.tensor
    flows = min(4, model.tensor)
    share = (model.data - 1) / model.data / (31 / 32)
    return flows * share * time_at(all_reduce_curve(), size) / SYNC_EVERY


def step_times(model: Model, method: str, preset: bool) -> dict[str, float]:
    """Seconds of a step on each cluster."""
    copies = 2 if METHODS[method][0] else 1
    points: dict[str, list[float]] = {name: [] for name in CLUSTERS}
    for layers in SIMULATED_LAYERS:
        program = scheduled(captured(model, layers), method)
        for name, preset_name in CLUSTERS.items():
            cluster = find_cluster(preset_name) if preset else profiled_cluster(name)
            if not preset:
                cluster = with_profile(program, cluster, model, copies)
            points[name].append(simulate(program, cluster).time_s)
    few, more = SIMULATED_LAYERS
    return {
        name: t0 + (model.layers - few) * (t1 - t0) / (more - few) + sync_s(model)
        for name, (t0, t1) in points.items()
    }


def planner_gain(model: Model, cluster: str) -> float:
    """How many times faster the chain model is with the best degrees than with the default."""
    chain = chain_of(model, cluster)
    default = linearise(chain).time_s(chain.path([model.tensor] * len(chain.blocks)))
    return default / solve_chain(chain, BUDGET_BYTES).time_s


def line_of(row: dict[str, float], times: dict[str, dict[str, float]], model: Model) -> Line:
    """A row of Table 3 beside the simulation. times: seconds by method and cluster."""
    cluster = str(row["cluster"])
    tokens = model.batch * SEQ / 1e3
    simulated = {name: tokens / found[cluster] for name, found in times.items()}
    simulated["planner"] = simulated[NAMES[-2]] * planner_gain(model, cluster)
    return Line(cluster, model.hidden, {name: row[name] for name in NAMES}, simulated)


def table_of(lines: Sequence[Line]) -> Table:
    """Throughput and speed-up over Megatron-LM, the paper's before ours."""
    table = Table(title="Table 3: speed-up over Megatron-LM, paper / simulated")
    for title in ("cluster", "hidden", "Megatron-LM, ktok/s", *NAMES[1:-1], "planner (chain)",
                  "order"):  # fmt: skip
        table.add_column(title)
    for line in lines:
        paper, ours = line.speedups()
        first = f"{line.paper[NAMES[0]]:.1f} / {line.simulated[NAMES[0]]:.1f}"
        cells = [f"{paper[name]:.2f} / {ours[name]:.2f}" for name in NAMES[1:]]
        table.add_row(line.cluster, str(line.hidden), first, *cells, line.order)
    return table


def correlations(lines: Sequence[Line]) -> dict[str, float]:
    """Spearman's correlation of simulated and published speed-ups and throughputs."""
    pairs = [(p[n], s[n]) for p, s in (line.speedups() for line in lines) for n in NAMES[1:]]
    rates = [(line.paper[n], line.simulated[n]) for line in lines for n in NAMES]
    return {"speedup": _spearman(pairs), "throughput": _spearman(rates)}


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    first, second = zip(*pairs, strict=True)
    return float(np.asarray(spearmanr(first, second))[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print the table, write the JSON if asked."""
    options = _parser().parse_args(argv)
    rows = tables()["table3_ablation_ktok_s"]
    hiddens = sorted({row["H"] for row in rows}, reverse=True)[: 1 if options.quick else None]
    lines: list[Line] = []
    for hidden in hiddens:
        model = model_of(hidden)
        times = {method: step_times(model, method, options.preset) for method in METHODS}
        lines += [line_of(row, times, model) for row in rows if row["H"] == hidden]
    lines.sort(key=lambda line: (line.cluster, line.hidden))
    found = correlations(lines)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table_of(lines))
    console.print(
        f"{sum(line.order == 'as paper' for line in lines)} of {len(lines)} rows have the paper's "
        f"order, in {sum(line.order == 'planner ties' for line in lines)} more the planner ties; "
        f"Spearman {found['speedup']:.3f} of speed-ups, {found['throughput']:.3f} of throughputs",
        highlight=False,
    )
    console.print(
        "planner: the fine-grained column times what the chain model gains by mixing degrees; "
        "mixed degrees are not run as a program",
        highlight=False,
    )
    if options.json:
        result = {
            "times": "preset" if options.preset else "published profile",
            "spearman": found,
            "rows": [asdict(line) | {"order": line.order} for line in lines],
        }
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Simulate Table 3 of Oases.")
    parser.add_argument("--quick", action="store_true", help="only the largest hidden size")
    parser.add_argument("--preset", action="store_true", help="the presets as they are")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
