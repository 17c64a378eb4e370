"""Where the seconds of a simulated step go: Llama-3-405B on sequences of 131,072, on 16,384 H100s.

`python benchmarks/step_parts.py [--json OUT]` takes the plan that `auto` finds there
(`benchmarks/auto_speed.py`) and adds up, over the blocks and micro-batches of the device that has
most of them, what the ops of a block take by kind, beside messages between stages and the bubble.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from xdsl.ir import Operation

from shardweave.benchmarks.auto_speed import CASES
from shardweave.benchmarks.stages.micro_batch import micro_batch_plan
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.dist import CollectiveOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import flops_of, is_attention
from shardweave.ir.ops.seen_keys import num_pieces
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.traffic import merged_bytes
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.point import INTERLEAVED, JointPoint
from shardweave.planners.cost.model import CostModel
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.workload import alone
from shardweave.planners.plan.zero import DATA_AXIS

CASE = "Llama-3-405B on 16,384, context 16"

POINT = JointPoint(
    replica=4, data=2, tensor=8, context=16, stages=16, sequence_parallel=True, zero=1,
    recompute="after-products", micro_batches=16, schedule="cross-pass",
    pipeline=INTERLEAVED, chunks=8,
)  # fmt: skip
"""What `auto` finds."""


def _kind(op: Operation) -> str:
    if isinstance(op, CollectiveOp):
        return f"messages over {', '.join(op.axes)}"
    if is_attention(op):
        return "attention"
    return "products" if flops_of(op) else "pointwise"


def parts() -> dict[str, float]:
    """Seconds of a step by what takes them, and of the whole step."""
    spec, cluster_name, _ = CASES[CASE]
    with FakeTensorMode():
        example = build_example(spec, dtype=torch.bfloat16)
    program = capture(example.module, kwargs=example.kwargs)
    cluster = find_cluster(cluster_name)
    evaluator = Evaluator(PlanMaker(Estimator(CostReader(Depths.of(program), cluster))))
    found = evaluator.predict(POINT)
    assert found is not None, evaluator.problems
    depths = evaluator.depths
    plan = evaluator.maker.plan(POINT, depths.read)
    local = evaluator.lowerings(depths.read).blocking(micro_batch_plan(plan, depths.read))
    device = next(iter(cluster.devices))
    compute = CostModel(alone(cluster, device), cut_by=local.mesh)
    links = CostModel(cluster, Mesh(**plan.mesh).within_stage)
    blocks = blocks_of(local)
    times: defaultdict[str, float] = defaultdict(float)
    most = -(-len(depths.names) // POINT.stages) * POINT.micro_batches
    for op in local.ops:
        if blocks.of_op(op) != blocks.names[1]:
            continue
        if not isinstance(op, CollectiveOp):
            times[_kind(op)] += most * compute.op_time_s(op)
        elif DATA_AXIS not in op.axes:
            times[_kind(op)] += most * links.collective_time_s(op)
        if is_attention(op) and local.mesh is not None:
            size = merged_bytes(op, num_pieces(op, local.mesh))
            moved_s = size / cluster.devices[device].memory_bandwidth_bytes_s
            times["merging"] += most * moved_s
            times["attention"] -= most * moved_s
    times["between stages"] = found.communication_s["pipeline"]
    times["bubble"] = found.bubble_s
    return {**times, "step": found.time_s}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = parts()
    for name, seconds in found.items():
        print(f"{name}: {seconds:.2f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
