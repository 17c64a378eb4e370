"""Degrees of tensor parallelism by block: all assignments simulated, beside those that are chosen.

`python benchmarks/planners.py oases-degrees [--json FILE] [--quick]`. A layer of a GPT and its head
have three blocks, attention, MLP and head; on data=2,tensor=4 each can have the degrees 1, 2 and 4,
27 assignments in all, with two sub-batches, recomputation and schedule of the paper. Each is
simulated on a preset. Compared are the chain model's choice, the same refined by simulation (as
`auto` asks for it) and `auto` itself on that mesh; regret is over the fastest assignment that fits.
`--quick`: one case.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from scipy.stats import spearmanr
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.call import call_planner
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.oases.chain import linearise, runs
from shardweave.planners.oases.degree import Axes, plan_of_degrees
from shardweave.planners.oases.planner import REFINED, plan_oases
from shardweave.planners.oases.program import ChainOptions, chain_of_program
from shardweave.planners.plan.plan_parts import Predicted
from shardweave.planners.predict.predict import predict_plan

MESH = Mesh(data=2, tensor=4)
CASES: tuple[tuple[int, int, bool], ...] = (
    (2048, 32, True), (4096, 16, True), (2048, 32, False), (4096, 16, False),
)  # fmt: skip
"""Hidden size, batch, and whether the head has the weight of the embedding. The paper's chain is of
layers alone; a tied weight adds costs that depend on the first block and the last, which no chain
of neighbours has."""

CLUSTERS = ("oases-3090", "oases-nvlink-3090")
RECOMPUTE, SCHEDULE = "after-communication", "cross-pass"


def captured(hidden: int, batch: int, *, tied: bool) -> Program:
    """One layer and its head, heads of 64 features as in the paper."""
    spec = f"gpt:layers=1,hidden={hidden},heads={hidden // 64},vocab=51200,seq=1024,batch={batch}"
    spec += f",tie={str(tied).lower()}"
    with FakeTensorMode():
        example = build_example(spec, dtype=torch.float32)
        return capture(example.module, kwargs=example.kwargs)


def row_of(program: Program, name: str) -> dict[str, Any]:
    """All assignments on a preset, and what the planners' plans take."""
    cluster = find_cluster(name)
    axes = Axes.of(MESH, "tensor", "data", 2)
    found = chain_of_program(program, axes, cluster, ChainOptions(RECOMPUTE))
    chain, costs = found.chain, linearise(found.chain)
    lowerings = Lowerings(program, most=RECENT)
    simulated: dict[tuple[int, ...], Predicted] = {}
    estimated: dict[tuple[int, ...], tuple[float, float]] = {}
    for degrees in product(*([one.degree for one in block.choices] for block in chain.blocks)):
        plan = replace(
            plan_of_degrees(program, found.space, degrees), recompute=RECOMPUTE, schedule=SCHEDULE
        )
        simulated[degrees] = predict_plan(lowerings, plan, cluster)
        path = chain.path(degrees)
        estimated[degrees] = costs.time_s(path), float(sum(chain.memory_parts(path)))
    fitting = {degrees: one.time_s for degrees, one in simulated.items() if one.fits}
    best = min(fitting, key=lambda degrees: fitting[degrees])
    literal = plan_oases(program, MESH, cluster=cluster, refine=0)
    refined = plan_oases(program, MESH, cluster=cluster)
    chosen = predict_plan(lowerings, literal, cluster)
    auto = call_planner("auto", program, MESH, cluster=name)
    assert refined.predicted is not None, "refined degrees are simulated"
    assert auto.predicted is not None, "a plan of auto is simulated"
    pairs = [(estimated[d][0], simulated[d].time_s) for d in simulated]
    by_chain, in_full = ([pair[number] for pair in pairs] for number in (0, 1))
    sizes = sorted(estimated[d][1] / simulated[d].peak_bytes for d in simulated)
    return {
        "assignments": len(simulated),
        "fit": len(fitting),
        "best": runs(best),
        "best_s": fitting[best],
        "spearman": float(spearmanr(by_chain, in_full).statistic),
        "time_ratio": sorted(one / other for one, other in pairs)[len(pairs) // 2],
        "memory_ratio": sizes[len(sizes) // 2],
        "model": literal.candidates[0].name,
        "model_regret": chosen.time_s / fitting[best] - 1,
        "refined": refined.candidates[0].name,
        "refined_regret": refined.predicted.time_s / fitting[best] - 1,
        "auto": auto.candidates[0].name,
        "auto_regret": auto.predicted.time_s / fitting[best] - 1,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Print a line for each case, and return them."""
    rows: list[dict[str, Any]] = []
    for hidden, batch, tied in CASES[: 1 if options.quick else None]:
        program = captured(hidden, batch, tied=tied)
        for name in CLUSTERS[: 1 if options.quick else None]:
            case = {"cluster": name, "hidden": hidden, "batch": batch, "tied": tied}
            row = {**case, **row_of(program, name)}
            rows.append(row)
            print(
                f"{name}, hidden {hidden}, tied {tied}: {row['assignments']} assignments, "
                f"{row['fit']} fit; "
                f"best {row['best']} in {1e3 * row['best_s']:.1f} ms; "
                f"Spearman {row['spearman']:.2f}; model {row['model']} "
                f"{row['model_regret']:.1%}, refined {row['refined']} "
                f"{row['refined_regret']:.1%}, auto {row['auto']} {row['auto_regret']:.1%}",
                flush=True,
            )
    return {"mesh": str(MESH), "refine": REFINED, "rows": rows}
