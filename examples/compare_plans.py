"""Two plans compared: what they say differently, and what each costs on a cluster."""

import warnings

import shardweave as sw
from shardweave.driver.models.models import build_example
from shardweave.passes.notes import PassNote

MESH, CLUSTER = "data=2,tensor=2", "oases-3090"

example = build_example("gpt:layers=2,hidden=256,vocab=256,seq=128,batch=4")
step = sw.capture(example.module, kwargs=example.kwargs)
plans = {
    "megatron": sw.plan(step, MESH, "megatron"),
    "sequence-parallel": sw.plan(step, MESH, "megatron", sequence_parallel=True),
    "replicated": sw.plan(step, MESH, "replicated"),
}

first, second = plans["megatron"], plans["sequence-parallel"]
for what in ("parameters", "inputs", "activations"):
    old, new = getattr(first, what), getattr(second, what)
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    for name in changed[:3]:
        print(f"{what} '{name}': {old.get(name, 'not given')} -> {new.get(name, 'not given')}")
    print(f"{len(changed)} {what} differ")

# "replicated" shards nothing, as propagate-shardings notes; that is what it is here for.
warnings.simplefilter("ignore", PassNote)
print(f"{'plan':18} {'step':>9} {'exposed':>9} {'memory':>9}")
for name, plan in plans.items():
    plan.save("plan.json")
    local = sw.run_passes(step, 'apply-plan{file="plan.json"},preset:partition', mesh=MESH)
    found = sw.simulate(local, CLUSTER, optimizer_multiplier=2)
    print(
        f"{name:18} {found.time_s * 1e3:6.2f} ms {found.exposed_communication_s * 1e3:6.2f} ms "
        f"{found.peak_bytes / 2**20:5.1f} MiB"
    )
