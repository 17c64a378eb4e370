"""AxoNN: the equations on worked cases, the ranking of grids, and plans that run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shardweave.backends.reference.reference import run_reference
from shardweave.benchmarks.axonn_literal import aware_links, rank_literally
from shardweave.benchmarks.axonn_planner import captured as stack
from shardweave.benchmarks.axonn_planner import gpt_model
from shardweave.driver.checking.validate import in_float64
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.dist import StartedOp, WaitOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import as_mesh, run_passes
from shardweave.planners.axonn.model import (
    AxisLinks,
    Grids,
    LinearLayer,
    Numbers,
    agnostic_links,
    communication_s,
    grids_of,
)
from shardweave.planners.axonn.planner import axonn_layers_of, plan_axonn
from shardweave.planners.axonn.search import Options, grid_memory_of, rank_grids
from shardweave.planners.call import call_planner
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.structure.structure import parallel_pairs
from shardweave.tests.marks import slow
from shardweave.tests.zoo import SHARDING_PASSES, SPECS, assert_equals_eager, captured, partitioned

LAYER = LinearLayer(rows_in=16, rows_out=16, k=4, n=8)
GRID = "data=2,z=2,y=2,x=2"


def grids(*rows: tuple[int, int, int, int]) -> Grids:
    return np.array(rows, dtype=np.int64)


def one(values: Numbers) -> float:
    (value,) = values
    return float(value)


def sent(layer: LinearLayer, grid: Grids) -> tuple[float, float, float, float, float]:
    """Elements that a device sends over x, y, z in gathers, z in scatters, and data."""
    links = agnostic_links(grid, 1.0)
    x, y, z, data = communication_s([layer], grid, links)[:, 0].tolist()
    scattered = float(communication_s([layer], grid, links, gathers=0.0)[2, 0])
    return x, y, z - scattered, scattered, data


def test_equations_1_to_5_on_a_worked_case() -> None:
    # m = 16 / Gdata = 8 rows, k n = 32 weights.
    x, y, gathered, scattered, data = sent(LAYER, grids((2, 2, 2, 2)))
    assert gathered == (2 - 1) * 32 / 8
    assert y == 2 * 1 / 2 * 8 * 8 / 4
    assert x == 2 * 1 / 2 * 8 * 4 / 4
    assert scattered == 1 / 2 * 32 / 4
    assert data == 2 * 1 / 2 * 32 / 8


def test_transposed_layer_swaps_x_and_y() -> None:
    grid = grids((4, 2, 1, 1))
    assert sent(LAYER, grid)[:2] == (48.0, 32.0)
    assert sent(replace(LAYER, is_transposed=True), grid)[:2] == (96.0, 16.0)


def test_convolution_counts_channels_positions_and_kernel() -> None:
    # 2 samples of 4x4, 3x3 kernel, stride 2: 32 rows in, 8 out.
    layer = LinearLayer(rows_in=32, rows_out=8, k=4, n=8, kernel=9)
    x, y, *_ = sent(layer, grids((2, 2, 1, 1)))
    assert y == 2 * 1 / 2 * 8 * 8 / 2
    assert x == 2 * 1 / 2 * 32 * 4 / 2
    assert layer.weights == 4 * 8 * 9


def test_equation_10_shares_the_network_among_groups_that_leave_a_node() -> None:
    links = aware_links(grids((2, 2, 4, 2), (2, 4, 1, 4)), 4, 200.0, 100.0)
    assert (1 / links.element_s[:, 0]).tolist() == [200.0, 200.0, 25.0, 25.0]
    assert (1 / links.element_s[:, 1]).tolist() == [200.0, 50.0, 25.0, 25.0]


def test_seconds_of_two_layers_are_the_sum_of_their_collectives() -> None:
    grid = grids((4, 2, 1, 1))
    links = AxisLinks(np.array([[0.5], [0.25], [1.0], [1.0]]), np.zeros((4, 1)))
    layers = [LAYER, replace(LAYER, is_transposed=True)]
    found = communication_s(layers, grid, links)
    # x carries the gradient of I, then, transposed, O; y the other two.
    assert found[:, 0].tolist() == [0.5 * (48 + 96), 0.25 * (32 + 16), 0.0, 0.0]


def test_recomputation_repeats_the_reductions_of_outputs_and_the_gathers() -> None:
    grid = grids((1, 2, 2, 1))
    links = agnostic_links(grid, 1.0)
    once = communication_s([LAYER], grid, links)
    twice = communication_s([LAYER], grid, links, reductions=2, gathers=2)
    _, y, gathered, *_ = sent(LAYER, grid)
    assert one(twice[1] - once[1]) == y
    assert one(twice[2] - once[2]) == gathered


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (6, 16), (32, 56), (1024, 286)])
def test_grids_are_all_ordered_factorisations(devices: int, count: int) -> None:
    found = grids_of(devices)
    assert (found.prod(axis=1) == devices).all()
    assert len({tuple(row) for row in found.tolist()}) == len(found) == count


def test_without_memory_the_best_grid_is_data_parallel_and_with_it_is_not() -> None:
    """The erratum: the model alone degenerates, so memory has to constrain."""
    model = gpt_model("GPT-20B", samples=64)
    cluster = find_cluster("perlmutter")
    literal = rank_literally(model, cluster, 32)
    assert len(literal) == 56
    assert literal[0].grid == (1, 1, 1, 32)
    limited = rank_grids(model, cluster, 32, Options(checkpointing=True))
    assert 0 < len(limited) < 56
    assert limited[0].grid[3] < 32
    assert all(sum(r.memory_bytes.values()) <= 40e9 for r in limited)
    assert [r.time_s for r in limited] == sorted(r.time_s for r in limited)


def test_placement_aware_ranking_differs_from_ranking_by_volume() -> None:
    model = gpt_model("GPT-20B", samples=64)
    cluster = find_cluster("perlmutter")
    aware, agnostic = (
        [r.grid for r in rank_grids(model, cluster, 32, Options(checkpointing=True, aware=a))]
        for a in (True, False)
    )
    assert sorted(aware) == sorted(agnostic)
    assert aware != agnostic


def test_memory_too_small_names_the_smallest_shortfall() -> None:
    with pytest.raises(PlanError, match=r"Nearest is x=\d+,y=") as error:
        rank_grids(gpt_model("GPT-80B", samples=1024), find_cluster("perlmutter"), 8)
    assert "parameters" in str(error.value)


def test_memory_of_one_device_is_that_of_the_whole_model() -> None:
    model = gpt_model("GPT-5B", samples=4)
    parts = grid_memory_of(model, grids((1, 1, 1, 1)), Options())
    weights = sum(layer.repeats * layer.weights for layer in model.layers)
    assert one(parts["parameters"]) == model.state_bytes * weights + model.other_bytes
    assert one(parts["activations"]) == pytest.approx(model.kept_bytes)
    assert one(parts["gathered"]) == 0


def test_layers_of_a_gpt_alternate() -> None:
    program = captured(SPECS["gpt"]).program
    layers = axonn_layers_of(program, parallel_pairs(program, "x", 2))
    assert [(one_.k, one_.n, one_.is_transposed) for one_ in layers[:6]] == [
        *[(16, 16, False)] * 3,
        (16, 16, True),
        (16, 64, False),
        (64, 16, True),
    ]
    assert {one_.rows_out for one_ in layers} == {8 * 16}


def test_layers_of_a_cnn_are_convolutions_and_a_linear_map() -> None:
    program = captured(SPECS["cnn"]).program
    layers = axonn_layers_of(program, parallel_pairs(program, "x", 2))
    assert layers[0].k == 3
    assert {layer.kernel for layer in layers} == {1, 9}
    assert any(layer.is_transposed for layer in layers)
    assert layers[-1].kernel == 1
    assert layers[-1].rows_in == 8


@cache
def step(name: str, mesh: str) -> Program:
    spec = SPECS[name]
    return partitioned(spec, mesh, plan_axonn(captured(spec).program, as_mesh(mesh)))


@pytest.mark.parametrize("name", ["gpt", slow("gpt2"), slow("bert"), slow("vit"), "unet", "cnn"])
def test_step_on_all_four_axes_equals_eager(name: str) -> None:
    program = step(name, GRID)
    axes = {axis for found in program.stats().collectives for axis in found.axes}
    assert axes == {"x", "y", "z", "data"}
    assert_equals_eager(program, captured(SPECS[name]))


@pytest.mark.parametrize("mesh", ["data=2,z=4,x=2", "z=2,x=4"])
def test_llama_equals_eager_where_its_norms_are_whole(mesh: str) -> None:
    assert_equals_eager(step("llama", mesh), captured(SPECS["llama"]))


@pytest.mark.parametrize("name", ["llama", slow("t5")])
def test_step_whose_norms_are_cut_equals_the_whole_one_with_its_casts_in_float64(name: str) -> None:
    # y cuts the features that these models' norms cast to float32 and sum, whatever the dtype:
    # another order of additions is another result there, so the casts go to float64 in both.
    case = captured(SPECS[name])
    values = {k: v.double() if v.is_floating_point() else v for k, v in case.values.items()}
    whole = run_reference(in_float64(case.program), values)
    gradients = {n: value for (kind, n), value in whole.items() if kind == "grad"}
    exact = replace(case, values=values, loss=whole["output", "0"].item(), gradients=gradients)
    assert_equals_eager(in_float64(step(name, GRID)), exact)


def test_step_has_the_messages_of_the_algorithm() -> None:
    program = step("gpt", GRID)
    maps = 2 * 6 + 1  # and the tied embedding
    layers = 2
    count = program.stats().count
    assert count("reduce_scatter", ("z",)) == maps
    assert count("all_gather", ("z",)) == 2 * maps
    found = {
        (c.kind, c.axes, c.phase): c.count for c in program.stats().collectives if c.axes != ("z",)
    }
    # q, k and v, and fc_in, reduce O over y; proj and fc_out over x.
    assert found["all_reduce", ("y",), "forward"] == 4 * layers + 1
    # Backward: dI of proj and fc_out over y; of q, k, v (added first) and fc_in over x.
    assert found["all_reduce", ("y",), "backward"] == 2 * layers
    assert found["all_reduce", ("x",), "backward"] == 2 * layers + 1
    assert not any(kind == "all_to_all" for kind, _, _ in found)


OVERLAP = (
    "rematerialize{policy=layer},delete-redundant-collectives,start-collectives,"
    "overlap-communication{schedule=list cluster=perlmutter memory-cap=30000000000}"
)


def behind(program: Program, kind: str, axes: tuple[str, ...], phase: str) -> list[set[str]]:
    """For each collective of a sort, the compute between its start and its wait."""
    ops = list(program.ops)
    places = {op: index for index, op in enumerate(ops)}
    found: list[set[str]] = []
    for op in ops:
        if isinstance(op, StartedOp) and op.name == f"dist.start_{kind}" and op.axes == axes:
            if phase_of(op) == phase:
                (use,) = op.results[0].uses
                assert isinstance(use.operation, WaitOp)
                between = ops[places[op] + 1 : places[use.operation]]
                found.append({between_op.name for between_op in between})
    return found


def test_list_schedule_finds_the_overlaps_of_the_paper() -> None:
    large = stack("GPT-5B", 2, 64)  # at its real size, with fake weights
    plan = plan_axonn(large, as_mesh("z=4,y=2,x=2"))
    local = run_passes(large, [ApplyPlanPass.of(plan), SHARDING_PASSES], mesh="z=4,y=2,x=2")
    program = run_passes(local, OVERLAP)
    # A: all-reduces of the gradient of I run behind products, of which dW is one.
    hidden = behind(program, "all_reduce", ("x",), "backward")
    assert sum("aten.mm" in names for names in hidden) >= 3
    assert len(hidden) == 4
    # B: reduce-scatters of dW are waited for later, behind the rest of the backward pass.
    scattered = behind(program, "reduce_scatter", ("z",), "backward")
    assert sum("aten.mm" in names for names in scattered) == len(scattered) - 1 == 11
    # C: weights are gathered ahead, behind products of earlier layers.
    gathered = behind(program, "all_gather", ("z",), "forward")
    ahead = [names for names in gathered if names & {"aten.mm", "aten.addmm"}]
    assert len(ahead) == len(gathered) - 1 == 11
    # D: gathered weights are kept, so that recomputation gathers none.
    assert behind(program, "all_gather", ("z",), "recompute") == []


def test_overlapped_step_equals_eager() -> None:
    assert_equals_eager(run_passes(step("gpt", GRID), OVERLAP), captured(SPECS["gpt"]))


def test_planner_chooses_a_grid_that_divides_and_says_why() -> None:
    program = captured(SPECS["gpt"]).program
    plan = call_planner("axonn", program, None, cluster="perlmutter:nodes=2")
    assert set(plan.mesh) == {"data", "z", "y", "x"}
    assert np.prod(list(plan.mesh.values())) == 8
    assert len(plan.candidates) == 5
    assert plan.candidates[0].reason == "chosen"
    assert "divide the program and fit into memory" in plan.reasons[0]
    assert plan.predicted is not None
    times = [c.predicted.time_s for c in plan.candidates]
    assert times == sorted(times)
    mesh = ",".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    assert_equals_eager(partitioned(SPECS["gpt"], mesh, plan), captured(SPECS["gpt"]))


def test_mesh_of_other_axes_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"axis 'tensor', but planner 'axonn' plans the axes x, y, z, data"
    ):
        plan_axonn(captured(SPECS["gpt"]).program, as_mesh("tensor=2"))


def test_what_does_not_divide_stays_whole_with_a_note() -> None:
    plan = plan_axonn(captured(SPECS["cnn"]).program, as_mesh("y=2"))
    assert any("conv_in.weight' stays whole over y=2" in note for note in plan.notes)


def test_gathered_weights_are_kept_of_as_many_layers_as_fit() -> None:
    """The paper keeps 28 of 32: all of them would leave only grids that divide by y."""
    model, cluster = gpt_model("GPT-80B", samples=2048), find_cluster("perlmutter:nodes=256")
    none = rank_grids(model, cluster, 1024, Options(checkpointing=True))
    some = rank_grids(model, cluster, 1024, Options(checkpointing=True, keep_gathered=True))
    assert {each.grid for each in some} == {each.grid for each in none}
    blocks = len({layer.block for layer in model.layers})
    assert any(0 < each.kept_blocks < blocks for each in some)
    times = {each.grid: each.time_s for each in none}
    for each in some:
        assert sum(each.memory_bytes.values()) <= 40e9
        assert (each.time_s < times[each.grid]) == (each.kept_blocks > 0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_plan_carries_the_order_of_messages_and_the_kept_gathers(checkpointing: bool) -> None:
    program, mesh = captured(SPECS["gpt"]).program, Mesh(z=2, y=2)
    plain = plan_axonn(program, mesh, checkpointing=checkpointing)
    keeping = plan_axonn(program, mesh, checkpointing=checkpointing, keep_gathered=True)
    assert plain.schedule == keeping.schedule == "axonn-abc"
    assert Plan.from_json(keeping.to_json()) == keeping
    again = [count_recomputed_gathers(partition(program, mesh, each)) for each in (plain, keeping)]
    assert again[0] > 0
    assert again[1] == 0


def count_recomputed_gathers(program: Program) -> int:
    return sum(
        isinstance(op, StartedOp) and "all_gather" in op.name and phase_of(op) == "recompute"
        for op in program.ops
    )
