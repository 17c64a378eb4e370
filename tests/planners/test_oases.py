"""The planner oases: blocks read off programs, their chain, and plans of mixed degrees."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardweave.backends.reference.reference import values_of
from shardweave.driver.checking.check import run_eager
from shardweave.driver.models.models import Example
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.annotations import copy_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import functions_of
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.oases.blocks import read_blocks
from shardweave.planners.oases.chain import linearise
from shardweave.planners.oases.degree import Axes, plan_of_degrees, prime_factors
from shardweave.planners.oases.dp import solve_chain
from shardweave.planners.oases.planner import plan_oases
from shardweave.planners.oases.program import ChainOptions, ProgramChain, chain_of_program
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline, PlanError
from shardweave.planners.planning import plan as make_plan
from shardweave.planners.predict.predict import predict_plan
from shardweave.planners.structure.structure import find_pairs
from shardweave.tests.marks import slow, slow_where
from shardweave.tests.zoo import SPECS, Captured, assert_equals_eager, captured

CLUSTER = "oases-3090"

MIXED = {
    "gpt": (4, 2, 1, 4, 2),
    "llama": (1, 2, 4, 2, 4),
    "bert": (2, 4, 4, 1, 2),
}
"""Degrees that grow and shrink, within layers and between them."""


class Chain(nn.Module):
    """Two MLPs without anything else: no names, no norms, no residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16),
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


class OwnPair(Chain):
    """Two MLPs, and a pair of linear maps whose weights the root module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.linear(nn.functional.linear(x, self.up), self.down))


@cache
def mlps() -> Captured:
    torch.manual_seed(0)
    module = Chain().double()
    kwargs = {"x": torch.randn(16, 16, dtype=torch.float64)}
    eager = run_eager(module, kwargs)
    module.zero_grad()
    program = capture(module, kwargs=kwargs)
    example = Example(module, kwargs)
    values = values_of(program, module, kwargs)
    return Captured(example, program, values, eager.loss, eager.gradients, eager.buffers)


@cache
def chain_on(program: Program, mesh: Mesh) -> ProgramChain:
    options = ChainOptions("after-communication")
    return chain_of_program(
        program, Axes.of(mesh, "tensor", "data", 2), find_cluster(CLUSTER), options
    )


def assert_runs(case: Captured, mesh: Mesh, plan: Plan) -> Program:
    """The plan gives what eager gives, on the user's mesh, which knows nothing of digits."""
    target = case.program.clone()
    target.set_mesh(mesh)
    local = PassPipeline(plan_passes(plan)).run(target)
    assert_equals_eager(local, case)
    return local


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("gpt", ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "head"]),
        (
            "llama",
            [f"model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn", "mlp")]
            + ["lm_head"],
        ),
        (
            "bert",
            [
                "bert.encoder.layer.0.attention",
                "bert.encoder.layer.0",
                "bert.encoder.layer.1.attention",
                "bert.encoder.layer.1",
                "cls.predictions.decoder",
            ],
        ),
        (
            "vit",
            [f"vit.layers.{i}.{part}" for i in (0, 1) for part in ("attention", "mlp")]
            + ["classifier"],
        ),
    ],
)
def test_blocks_are_attention_mlp_and_head_though_no_name_is_looked_at(
    spec: str, names: list[str]
) -> None:
    program = captured(SPECS[spec]).program
    blocks = read_blocks(program, find_pairs(program, "t", 2))
    assert [block.name for block in blocks] == names
    assert all(len(block.pairs) == 1 for block in blocks)
    forward = [op for block in blocks for op in block.forward]
    assert len(set(forward)) == len(forward)
    assert all(block.gradient is not None for block in blocks[:-1])


def test_blocks_of_mlps_without_names_or_residuals() -> None:
    program = mlps().program
    blocks = read_blocks(program, find_pairs(program, "t", 2))
    assert [len(block.pairs) for block in blocks] == [1, 1]
    assert [block.name for block in blocks] == ["net", "net"]


def test_pairs_with_several_values_between_them_share_a_block() -> None:
    program = captured(SPECS["t5"]).program
    blocks = read_blocks(program, find_pairs(program, "t", 2))
    # Every layer of the decoder but the last feed-forward one is followed by a reader of the
    # encoder's output, so that its stream is not all that crosses.
    assert [len(block.pairs) for block in blocks] == [1, 1, 1, 1, 5, 1, 1]


def test_program_without_pairs_has_no_blocks() -> None:
    program = capture(nn.LayerNorm(8), args=(torch.randn(4, 8),), train=False)
    with pytest.raises(ValueError, match="no column- and row-parallel pair"):
        plan_oases(program, Mesh(tensor=2), cluster=find_cluster(CLUSTER))


@pytest.mark.parametrize("mesh", ["tensor=4", slow("data=2,tensor=4")])
@pytest.mark.parametrize("spec", slow_where(lambda spec: spec != "gpt", MIXED))
def test_mixed_degrees_equal_eager(spec: str, mesh: str) -> None:
    case = captured(SPECS[spec])
    found = chain_on(case.program, Mesh.parse("tensor=4"))
    plan = plan_of_degrees(case.program, found.space, MIXED[spec])
    if mesh != "tensor=4":
        # Eight samples over two devices, two sub-batches and two digits leave one each.
        degrees = [max(2, degree) for degree in MIXED[spec]]
        found = chain_on(case.program, Mesh.parse(mesh))
        plan = plan_of_degrees(case.program, found.space, degrees)
    plan = replace(plan, recompute="after-communication", schedule="cross-pass")
    assert Plan.from_json(plan.to_json()) == plan
    local = assert_runs(case, Mesh.parse(mesh), plan)
    assert local.mesh is not None
    assert [name for name in local.mesh.names if name.startswith("tensor")] == [
        "tensor.0",
        "tensor.1",
    ]


@pytest.mark.parametrize("degrees", [(4, 1), (1, 2), (2, 4), (1, 1)])
def test_mixed_degrees_of_mlps_equal_eager(degrees: tuple[int, int]) -> None:
    case = mlps()
    found = chain_on(case.program, Mesh(tensor=4))
    assert_runs(case, Mesh(tensor=4), plan_of_degrees(case.program, found.space, degrees))


def test_growing_degree_gathers_the_batch_forward_and_shrinking_one_backward() -> None:
    case = captured(SPECS["gpt"])
    mesh = Mesh(tensor=4)
    found = chain_on(case.program, mesh)
    counts: dict[tuple[int, ...], list[int]] = {}
    for degrees in ((2, 2, 4, 4, 4), (4, 4, 2, 2, 2)):
        plan = replace(plan_of_degrees(case.program, found.space, degrees), batch_split=1)
        target = case.program.clone()
        target.set_mesh(mesh)
        local = PassPipeline(plan_passes(plan)).run(target)
        gathers = [c for c in local.stats().collectives if c.kind == "all_gather"]
        counts[degrees] = [
            sum(c.count for c in gathers if c.phase == phase) for phase in ("forward", "backward")
        ]
    assert counts[2, 2, 4, 4, 4] == [1, 0]
    # A norm's gradient may be scattered and gathered again, which sends no more than reducing it.
    forward, backward = counts[4, 4, 2, 2, 2]
    assert forward == 0
    assert 1 <= backward <= 2


@pytest.mark.parametrize("spec", ["gpt", "bert"])
@pytest.mark.parametrize("share", [1.0, 0.9])
def test_degrees_are_the_best_of_all(spec: str, share: float) -> None:
    program = captured(SPECS[spec]).program
    chain = chain_on(program, Mesh(tensor=4)).chain
    costs = linearise(chain)
    paths = list(itertools.product(*(range(len(block.choices)) for block in chain.blocks)))
    largest = max(costs.memory(path) for path in paths)
    budget = share * largest
    best = min(costs.time_s(path) for path in paths if costs.memory(path) <= budget)
    found = solve_chain(chain, budget)
    assert math.isclose(found.time_s, best, rel_tol=1e-12)
    assert found.memory_bytes <= budget


def test_plan_is_the_whole_step_of_oases() -> None:
    case = captured(SPECS["gpt"])
    cluster, mesh = find_cluster(CLUSTER), Mesh(data=2, tensor=2)
    plan = plan_oases(case.program, mesh, cluster=cluster, refine=0)
    assert (plan.batch_split, plan.recompute, plan.schedule) == (
        2,
        "after-communication",
        "cross-pass",
    )
    assert plan.inputs["input_ids"] == '[{"data"}, {}]'
    assert plan.candidates[0].name in plan.notes[-1]
    times = [one.predicted.time_s for one in plan.candidates]
    assert times[0] == min(times)
    local = assert_runs(case, mesh, plan)
    assert local.stats().count("all_reduce") > 0 or "start_all_reduce" in str(local)


def test_stages_run_1f1b_with_two_sub_batches_in_each_micro_batch() -> None:
    """Sec. 5.4. Four micro-batches a stage would leave no sample for a second sub-batch."""
    case = captured(SPECS["gpt"])
    mesh = "pipeline=2,tensor=4"
    plan = make_plan(case.program, mesh, "oases", cluster=CLUSTER, refine=1)
    assert plan.pipeline is not None
    assert (plan.pipeline.schedule, plan.pipeline.micro_batches, plan.batch_split) == ("1f1b", 4, 2)
    assert plan.predicted == predict_plan(case.program, plan, find_cluster(CLUSTER))
    assert_runs(case, Mesh.parse(mesh), plan)


def test_stages_mix_degrees_and_sub_batches_and_equal_eager() -> None:
    case = captured(SPECS["gpt"])
    mesh, cluster = Mesh.parse("pipeline=2,tensor=4"), find_cluster(CLUSTER)
    pipeline = Pipeline(balanced_stages(case.program, 2), 2)
    axes = Axes.of(mesh, "tensor", "data", 2, pipeline)
    found = chain_of_program(case.program, axes, cluster, ChainOptions("after-communication"))
    assert len(found.chain.starts) == 2
    plan = plan_of_degrees(case.program, found.space, (4, 2, 2, 4, 2))
    plan = replace(plan, recompute="after-communication", schedule="cross-pass")
    estimate = linearise(found.chain).time_s(found.chain.path((4, 2, 2, 4, 2)))
    assert 0.5 < estimate / predict_plan(case.program, plan, cluster).time_s < 2
    local = assert_runs(case, mesh, plan)
    forward = functions_of(local)["forward_0"]
    copies = [copy_of(op) for op in forward.ops if op.name == "dist.start_all_reduce"]
    assert len(set(map(str, copies))) == 2


@pytest.mark.parametrize("mesh", ["tensor=2", "pipeline=2,tensor=2"])
def test_pair_of_the_root_module_is_in_the_stage_of_its_operands(mesh: str) -> None:
    """No stage names the root module."""
    program = capture(OwnPair(), (torch.randn(8, 16),))
    plan = make_plan(program, mesh, "oases", cluster=CLUSTER, micro_batches=2, refine=1)
    assert plan.pipeline is not None
    assert plan.pipeline.micro_batches == 2
    assert plan.predicted == predict_plan(program, plan, find_cluster(CLUSTER))


def test_planner_by_name_says_what_a_step_takes() -> None:
    case = captured(SPECS["gpt"])
    plan = make_plan(case.program, "tensor=4", "oases", cluster=CLUSTER, refine=1)
    assert plan.predicted is not None
    assert plan.predicted.source == "simulated"
    assert plan.cluster == CLUSTER


def test_heterogeneous_cluster_is_as_fast_as_its_slowest_devices(tmp_path: Path) -> None:
    text = """
        format: shardweave.cluster/1
        name: mixed
        devices:
          fast: {flops: {float64: 10T, float32: 10T}, memory_bytes: 32GiB,
                 memory_bandwidth_bytes_s: 1000GB/s}
          slow: {flops: {float64: SPEED, float32: 4T}, memory_bytes: 8GiB,
                 memory_bandwidth_bytes_s: 300GB/s}
        nodes:
          - {device: fast, devices: 2, bandwidth_bytes_s: 100GB/s, latency_s: 1us,
             nic_bandwidth_bytes_s: 10GB/s}
          - {device: slow, devices: 2, bandwidth_bytes_s: 10GB/s, latency_s: 1us,
             nic_bandwidth_bytes_s: 2GB/s}
        network_latency_s: 10us
    """
    case = captured(SPECS["gpt"])
    times: list[float] = []
    for speed in ("4T", "0.4M"):
        path = tmp_path / f"{speed}.yaml"
        path.write_text(text.replace("SPEED", speed))
        plan = make_plan(case.program, "data=2,tensor=2", "oases", cluster=path, refine=0)
        assert plan.candidates[0].predicted.capacity_bytes == 0.95 * 8 * 2**30
        times.append(plan.candidates[0].predicted.time_s)
        assert_runs(case, Mesh(data=2, tensor=2), plan)
    assert times[1] > 2 * times[0]


def test_too_little_memory_gives_the_smallest_shortfall_by_part() -> None:
    program = captured(SPECS["gpt"]).program
    cluster = find_cluster(CLUSTER)
    small = {n: replace(d, memory_bytes=2**10) for n, d in cluster.devices.items()}
    with pytest.raises(PlanError, match=r"GiB too much") as failure:
        plan_oases(program, Mesh(tensor=4), cluster=replace(cluster, devices=small))
    assert "parameters, gradients and optimizer" in str(failure.value)
    assert "workspace" in str(failure.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_split": 3}, "batch_split=3, expected 2"),
        ({"tensor": "model"}, "has no axis 'model'"),
        ({"memory_share": 0.0}, "give a fraction above 0, at most 1"),
    ],
)
def test_wrong_option_says_what_to_use(options: dict[str, Any], message: str) -> None:
    program = captured(SPECS["gpt"]).program
    with pytest.raises(ValueError, match=message):
        make_plan(program, "tensor=4", "oases", cluster=CLUSTER, **options)


def test_batch_that_no_degree_divides_is_refused() -> None:
    program = captured(SPECS["gpt"]).program
    with pytest.raises(ValueError, match="in 1 micro-batch of 2 sub-batches on 16 devices"):
        make_plan(program, "data=8,tensor=2", "oases", cluster=CLUSTER)
    with pytest.raises(ValueError, match=r"in 8 micro-batches of 2 .* fewer micro_batches, batch_"):
        make_plan(program, "data=2,tensor=2", "oases", cluster=CLUSTER, micro_batches=8)


def test_factors_are_prime_and_the_smallest_is_innermost() -> None:
    assert prime_factors(12) == (3, 2, 2)
    assert prime_factors(1) == ()
    axes = Axes.of(Mesh(data=2, tensor=6), "tensor", "data", 2)
    assert axes.degrees == (1, 2, 6)
    assert axes.cutting(2) == ("tensor.1",)
    assert axes.spare(2) == ("tensor.0",)
