"""`auto` against every other planner's answer, on problems drawn by seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.baselines.exhaustive import plan_exhaustive
from shardweave.benchmarks.baselines.random_trials import plan_random
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.call import call_planner
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.oppa.planner import TrialOptions
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.predict.predict import predict_plan
from shardweave.tests.marks import slow_where

SMALL, MANY = 8, 40
"""The seed of a problem that is planned in seconds, and how many seeds there are."""

RIVALS = ("megatron", "exhaustive", "amp", "axonn", "oppa", "random")
"""Those that choose the mesh; `oases` is asked on a mesh that is drawn."""

MODELLED = ("megatron", "exhaustive", "amp", "axonn")
"""Those that try nothing out, and are asked in the fast test."""

OPTIONS = {"oppa": {"trials": 8}, "amp": {"simulate": 1}}


@dataclass(frozen=True)
class Problem:
    """A model, a cluster with memory, and a mesh for planners that need one."""

    spec: str
    program: Program
    cluster: Cluster
    mesh: Mesh

    def __str__(self) -> str:
        node = self.cluster.nodes[0]
        memory = self.cluster.devices[node.device].memory_bytes
        network = node.network_bandwidth_bytes_s
        return (
            f"{self.spec} on {node.count} x {node.devices} devices of {memory / 2**20:.0f} MiB, "
            f"{node.bandwidth_bytes_s / 1e9:.3g} and {network / 1e9:.3g} GB/s, {self.mesh}"
        )


def drawn(seed: int) -> Problem:
    """Models of one or two layers, two to eight devices, links a hundredfold apart; memory from
    half of what a plain data-parallel step takes to more than that."""
    random = Random(seed)
    hidden, seq = random.choice((128, 512, 2048)), random.choice((64, 256, 1024))
    layers, batch = random.choice((1, 1, 2)), random.choice((2, 4, 8))
    sizes = f"layers={layers},hidden={hidden},heads=8,vocab={random.choice((512, 8192))}"
    spec = f"gpt:{sizes},seq={seq},batch={batch}"
    if random.random() < 0.25:
        spec = f"unet:channels={hidden // 16},size=16,levels=1,batch={batch}"
    with FakeTensorMode():
        example = build_example(spec)
        program = capture(example.module, kwargs=example.kwargs)
    count, devices = random.choice(((1, 2), (1, 4), (2, 1), (2, 2), (1, 8)))
    found = find_cluster("perlmutter:nodes=1")
    node = replace(
        found.nodes[0],
        devices=devices,
        count=count,
        nics=1,
        bandwidth_bytes_s=found.nodes[0].bandwidth_bytes_s * 10 ** random.uniform(-1.5, 0),
        nic_bandwidth_bytes_s=10 ** random.uniform(8.5, 10.5),
    )
    tensor = random.choice([n for n in (2, 4, 8) if n <= count * devices])
    cluster = replace(found, name=f"drawn {seed}", nodes=(node,))
    plain = predict_plan(program, plan_megatron(program, Mesh(data=1)), cluster)
    memory = int(plain.peak_bytes * random.uniform(0.4, 1.2))
    types = {name: replace(one, memory_bytes=memory) for name, one in cluster.devices.items()}
    mesh = Mesh(data=count * devices // tensor, tensor=tensor)
    return Problem(spec, program, replace(cluster, devices=types), mesh)


def asked(name: str, problem: Problem, mesh: Mesh | None) -> Plan:
    """The plan of a planner, or of a baseline."""
    if name == "exhaustive":
        return plan_exhaustive(problem.program, mesh, cluster=problem.cluster)
    if name == "random":
        options = TrialOptions(trials=8)
        return plan_random(problem.program, mesh, cluster=problem.cluster, options=options)
    return call_planner(
        name, problem.program, mesh, cluster=problem.cluster, options=OPTIONS.get(name, {})
    )


def answers(problem: Problem, rivals: Sequence[str]) -> Iterator[tuple[str, Plan]]:
    """Other planners' plans; those that have none for a problem say so by a ValueError."""
    for name in (*rivals, "oases"):
        mesh = problem.mesh if name == "oases" else None
        try:
            yield name, asked(name, problem, mesh)
        except ValueError:
            continue


@pytest.mark.parametrize("seed", slow_where(lambda seed: seed != SMALL, range(MANY)))
def test_no_planner_has_a_faster_plan_that_fits(seed: int) -> None:
    problem = drawn(seed)
    lowerings = Lowerings(problem.program, most=8)
    rivals = {
        name: found.time_s
        for name, plan in answers(problem, RIVALS if seed != SMALL else MODELLED)
        if (found := predict_plan(lowerings, plan, problem.cluster)).fits
    }
    try:
        plan = call_planner("auto", problem.program, None, cluster=problem.cluster)
    except PlanError:
        assert not rivals, f"{problem}: {rivals}"
        return
    found = predict_plan(lowerings, plan, problem.cluster)
    faster = {name: f"{t / found.time_s:.4f}" for name, t in rivals.items() if t < found.time_s}
    assert found.fits, problem
    assert not faster, f"{problem}: {plan.candidates[0].name}; {faster}"
