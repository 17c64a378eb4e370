"""A plan file of each paper's planner trains a GPT of four layers as its paper does.

The messages, the kept values and the order of the program that `run --plan` runs.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import copy_of, phase_of
from shardweave.ir.dialects.dist import RecvOp, SendOp, StartedOp, WaitOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import functions_of
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.picture import schedule_table_of
from shardweave.planners.plan.plan import Plan
from shardweave.planners.planning import plan as make_plan
from shardweave.planners.schedules.schedules import find_schedule
from shardweave.tests.planners.small_clusters import DEVICE, cluster
from shardweave.tests.zoo import assert_equals_eager, captured

SPEC = "gpt:layers=4,hidden=32,heads=4,vocab=32,seq=8,batch=8,tie=false"
LAYERS = 4
CLUSTER = "perlmutter:nodes=1"


def trained(path: Path, plan: Plan) -> Program:
    """The program that runs the plan's file; its values are those of eager."""
    plan.save(path / "plan.json")
    read = Plan.load(path / "plan.json")
    program = partition(captured(SPEC).program, Mesh(**read.mesh), read)
    assert_equals_eager(program, captured(SPEC))
    return program


def started(program: Program, kind: str, *axes: str) -> list[StartedOp]:
    return [
        op
        for op in program.ops
        if isinstance(op, StartedOp) and op.name == f"dist.start_{kind}" and op.axes == axes
    ]


def beside(program: Program, message: StartedOp) -> list[Operation]:
    """Ops between the start of a message and its wait."""
    ops = list(program.ops)
    (use,) = message.results[0].uses
    assert isinstance(use.operation, WaitOp)
    return ops[ops.index(message) + 1 : ops.index(use.operation)]


def test_oases(tmp_path: Path) -> None:
    # Two rows on each device: a sub-batch each, so that no degree but 2 divides.
    program, nodes = captured(SPEC).program, "perlmutter:nodes=2"
    plan = make_plan(program, "data=4,tensor=2", "oases", cluster=nodes, refine=0)
    program = trained(tmp_path, plan)
    messages = started(program, "all_reduce", "tensor")
    counts = Counter((phase_of(op), copy_of(op)) for op in messages)
    # Of each sub-batch, one for attention and one for the MLP of each layer; the embedding has one
    # more and the loss two, of which the head sends one back. Section 3.2: none is sent again.
    assert counts == {
        ("forward", (0,)): 2 * LAYERS + 3,
        ("forward", (1,)): 2 * LAYERS + 3,
        ("backward", (0,)): 2 * LAYERS + 1,
        ("backward", (1,)): 2 * LAYERS + 1,
    }
    # Nor is the row-parallel product that a kept message ends.
    again = Counter(op.name for op in program.ops if phase_of(op) == "recompute")
    # q, k, v and fc_in, of two sub-batches.
    assert again["aten.mm"] + again["aten.addmm"] == 2 * 4 * LAYERS
    # Algorithms 1 and 2: a message of one sub-batch travels beside compute of the other.
    for message in messages:
        between = beside(program, message)
        assert not any(op in messages for op in between)  # line 7: one is on its way at a time
        assert any(copy_of(op) not in (None, copy_of(message)) for op in between)
    # Section 3.1: what is recomputed runs beside messages of the backward pass.
    backward = [op for op in messages if phase_of(op) == "backward"]
    crossing = [
        message
        for message in backward
        if any(phase_of(op) == "recompute" for op in beside(program, message))
    ]
    assert len(crossing) == 2 * 2 * LAYERS  # all but the last of each sub-batch


def test_axonn(tmp_path: Path) -> None:
    plan = make_plan(
        captured(SPEC).program, "z=2,y=2,x=2", "axonn", cluster="perlmutter:nodes=2",
        checkpointing=True, keep_gathered=True,
    )  # fmt: skip
    program = trained(tmp_path, plan)
    maps = 6 * LAYERS + 2
    # Overlap D: each weight is gathered once, and not again to recompute; B: each is scattered.
    assert len(started(program, "all_gather", "z")) == maps
    scattered = started(program, "reduce_scatter", "z")
    assert len(scattered) == maps
    reduced = [
        sum(phase_of(op) == "backward" for op in started(program, "all_reduce", axis))
        for axis in ("x", "y")
    ]
    assert reduced == [2 * LAYERS + 1, 2 * LAYERS]
    # A: beside the all-reduce of a gradient of I is the product for that of W.
    for message in (*started(program, "all_reduce", "x"), *started(program, "all_reduce", "y")):
        is_hidden = any(op.name == "aten.mm" for op in beside(program, message))
        assert is_hidden == (phase_of(message) == "backward")
    # B: reduce-scatters are waited for once the backward pass is over.
    last = max(n for n, op in enumerate(program.ops) if op.name == "aten.mm")
    ops = list(program.ops)
    for message in scattered:
        (use,) = message.results[0].uses
        assert ops.index(use.operation) > last
    # C: a weight is gathered beside the product before; the embedding is none.
    hidden = [
        any(op.name == "aten.mm" for op in beside(program, message))
        for message in started(program, "all_gather", "z")
    ]
    assert hidden == [False, False] + [True] * (maps - 2)


def test_amp(tmp_path: Path) -> None:
    # Without latency, where micro-batches cost nothing.
    slow = replace(
        cluster(2, 2, nic=1e9), devices={"unit": replace(DEVICE, flops={"float64": 1e9})}
    )
    plan = make_plan(captured(SPEC).program, "pipeline=2,data=2", "amp", cluster=slow)
    assert plan.pipeline is not None
    count = plan.pipeline.micro_batches
    assert count > 1
    program = trained(tmp_path, plan)
    # 1F1B, with the cuts of its partition.
    table, stages = schedule_table_of(program)
    assert stages == 2
    assert table == find_schedule("1f1b").table(2, count, 1)
    functions = functions_of(program)
    names = {f"{kind}_{stage}" for kind in ("forward", "backward", "after") for stage in (0, 1)}
    assert names <= set(functions)
    # What crosses the boundary goes there and back for each micro-batch.
    for name, kind in (("forward_0", SendOp), ("forward_1", RecvOp), ("backward_0", RecvOp)):
        assert any(isinstance(op, kind) for op in functions[name].ops), name
    # Gradients are reduced once a step, at its end.
    sums = {
        name: sum("all_reduce" in op.name for op in function.ops)
        for name, function in functions.items()
    }
    assert all(sums[f"{kind}_{stage}"] == 0 for kind in ("forward", "backward") for stage in (0, 1))
    assert all(sums[f"after_{stage}"] > 0 for stage in (0, 1))


def test_oppa(tmp_path: Path) -> None:
    """Algorithm 1 returns the fastest trial that fits; the plan carries its whole configuration."""
    file = tmp_path / "trials.jsonl"
    plan = make_plan(
        captured(SPEC).program, "pipeline=2,tensor=2", "oppa", cluster=CLUSTER,
        trials=4, file=str(file), seed=3,
    )  # fmt: skip
    trained(tmp_path, plan)
    rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    ran = [row for row in rows if row["outcome"]["status"] == "ok"]
    best = min(ran, key=lambda row: sum(row["outcome"]["times_s"]))
    (took_s,) = best["outcome"]["times_s"]
    assert plan.predicted is not None
    assert plan.predicted.time_s == took_s
    assert plan.pipeline is not None
    chosen = best["configuration"]
    assert plan.pipeline.micro_batches == chosen["micro_batches"]
    assert plan.recompute == chosen["recompute"]
    assert (plan.schedule or "in-order") == chosen["schedule"]
