"""A plan edited by hand: a planner begins, some lines of its JSON change, the result is run."""

import copy
import json
from pathlib import Path

import torch

import shardweave as sw
from shardweave.driver.models.models import build_example

MESH = "data=2,tensor=2"

example = build_example(
    "gpt:layers=2,hidden=16,heads=2,vocab=32,seq=8,batch=4", dtype=torch.float64
)
step = sw.capture(example.module, kwargs=example.kwargs)
path = Path("plan.json")
sw.plan(step, MESH, "megatron").save(path)

# As in an editor: layer h.1 keeps the linear maps of its MLP whole, and so needs no all-reduce.
plan = json.loads(path.read_text())
for name in ("fc_in.weight", "fc_in.bias", "fc_out.weight"):
    del plan["parameters"][f"h.1.mlp.{name}"]
plan["notes"].append("h.1.mlp is whole: it is small, and its all-reduces are not")
path.write_text(json.dumps(plan, indent=2))

for given in ("megatron", path):
    compiled = sw.compile(
        copy.deepcopy(example.module),
        kwargs=example.kwargs,
        mesh=MESH,
        plan=given,
        backend="reference",
    )
    torch.testing.assert_close(compiled(**example.kwargs), example.module(**example.kwargs))
    count = compiled.program.stats().count("all_reduce", ("tensor",))
    print(f"{given}: {count} all-reduces over tensor, equal to eager")
