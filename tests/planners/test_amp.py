"""AMP's estimates and searches: the published numbers, and the corrections one by one."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.benchmarks.amp_data import (
    gpt2,
    planner_runs,
    read_measured,
    setup_of,
    setups,
)
from shardweave.benchmarks.amp_literal import literal_costs, literal_cuts
from shardweave.benchmarks.amp_planner import DATA, estimate_runs, quality, search_s
from shardweave.benchmarks.amp_work import LayerWork, fixed_shares
from shardweave.planners.amp import network
from shardweave.planners.amp.annealing import Annealing, anneal, board_of, domino_grid
from shardweave.planners.amp.costs import Estimate, corrected_costs, estimate
from shardweave.planners.amp.memory import shortfall, stage_bytes
from shardweave.planners.amp.model import LayeredModel, Strategy, strategies
from shardweave.planners.amp.network import (
    ClusterArrays,
    Grid,
    boundary_bandwidths,
    megatron_grid,
    ring_bandwidths,
)
from shardweave.planners.amp.search import best_cuts, search_strategies
from shardweave.planners.cost.cluster import Cluster, DeviceType, NodeType
from shardweave.planners.cost.links import hops_at_once
from shardweave.planners.plan.plan_parts import PlanError

FAST = DeviceType("fast", {"float16": 1e12}, 10**9, 1e12)
SLOW = replace(FAST, name="slow")


def cluster(*nodes: NodeType) -> Cluster:
    return Cluster("mixed", {"fast": FAST, "slow": SLOW}, nodes)


def node(device: str, count: int = 1, devices: int = 2, nic: float = 1e6) -> NodeType:
    return NodeType(device, devices, count, bandwidth_bytes_s=1e7, nic_bandwidth_bytes_s=nic)


def chain(layers: int = 6, *, size: float = 1e3, slowdown: float = 3.0) -> LayeredModel:
    """Equal layers of 10 ms that hand on 1,000 elements; `size` parameters each."""
    times = {1: (0.01,) * layers}
    return LayeredModel(
        name="chain",
        batch=8,
        profile={"fast": times, "slow": {1: (0.01 * slowdown,) * layers}},
        outputs={1: (1e3,) * layers},
        parameters={1: (size,) * layers},
        kept_bytes={1: (1e3,) * layers},
        repeated=(0, layers),
    )


# The published planner


@pytest.mark.parametrize("name", setups())
def test_literal_estimates_are_the_published_ones(name: str) -> None:
    setup = setup_of(name)
    links = ClusterArrays.of(setup.cluster)
    runs = planner_runs(name)
    assert {run.strategy for run in runs} == set(strategies(setup.model, setup.cluster))
    for run in runs:
        found = literal_costs(setup.model, links, run.strategy, megatron_grid(run.strategy))
        cuts = setup.cuts_of_rows(run.cuts)
        ours = estimate(setup.model, run.strategy, found, cuts)
        assert ours.seconds == pytest.approx(run.published_s, rel=1e-4)


@pytest.mark.parametrize("name", setups())
def test_literal_cuts_are_never_worse_than_the_published_ones(name: str) -> None:
    setup = setup_of(name)
    links = ClusterArrays.of(setup.cluster)
    for run in planner_runs(name):
        found = literal_costs(setup.model, links, run.strategy, megatron_grid(run.strategy))
        cuts = setup.cuts_of_rows(run.cuts)
        theirs = estimate(setup.model, run.strategy, found, cuts)
        ours = literal_cuts(setup.model, run.strategy, found)
        assert ours.pipeline_s <= theirs.pipeline_s * (1 + 1e-12)
        if found.problem.repeats == 0:
            assert ours.cuts == cuts


@pytest.mark.slow  # timed: right on a quiet machine, and beside a second worker by chance
@pytest.mark.parametrize("literal", [True, False])
@pytest.mark.parametrize("name", setups())
def test_full_search_of_a_published_setup_takes_at_most_50_ms(name: str, literal: bool) -> None:
    assert search_s(setup_of(name), 5, literal=literal) <= 0.05


def test_corrected_estimates_order_the_measured_runs_better_than_the_literal_ones() -> None:
    rows = estimate_runs(
        setup_of("homogeneous"), read_measured(DATA / "amp_results.csv", "homogeneous")
    )
    done = [row for row in rows if row.succeeded]
    measured = [row.run.measured_s or 0.0 for row in done]
    literal = quality([row.literal.seconds for row in done], measured)
    corrected = quality([row.corrected.seconds for row in done], measured)
    assert len(done) == 47
    assert literal.spearman == pytest.approx(0.935, abs=5e-4)
    assert corrected.spearman >= 0.93
    assert corrected.spearman > literal.spearman
    assert all(row.fits for row in done), "what ran must not be said to be too large"


# The corrections


def test_stage_takes_the_times_of_the_devices_it_runs_on() -> None:
    model = chain()
    links = ClusterArrays.of(cluster(node("fast"), node("slow")))
    strategy = Strategy(2, 2, 1, 1)
    found = corrected_costs(model, links, strategy, megatron_grid(strategy))
    times = found.problem.times[list(found.problem.kinds)]
    np.testing.assert_allclose(times[:, 0], [0.03, 0.09])
    best = best_cuts(model, strategy, found)
    assert best is not None
    assert np.diff(best.cuts).tolist() == [5, 1]


def test_stage_of_mixed_devices_waits_for_the_slowest() -> None:
    links = ClusterArrays.of(cluster(node("fast"), node("slow")))
    strategy = Strategy(1, 4, 1, 1)
    found = corrected_costs(chain(), links, strategy, megatron_grid(strategy))
    np.testing.assert_allclose(found.problem.times, 0.09)


def test_flows_that_cross_at_once_share_a_nic() -> None:
    links = ClusterArrays.of(cluster(node("fast", count=2)))
    assert boundary_bandwidths(links, megatron_grid(Strategy(2, 2, 1, 1))) == [5e5]
    assert boundary_bandwidths(links, megatron_grid(Strategy(4, 1, 1, 1))).tolist() == [
        1e7,
        1e6,
        1e7,
    ]


@given(
    st.permutations(range(6)),
    st.permutations(range(6)),
    st.sampled_from([("fast", "slow"), ("fast",), ("slow", "fast", "fast")]),
)
def test_arrays_share_links_as_the_cost_model_does(
    left: list[int], right: list[int], names: tuple[str, ...]
) -> None:
    nodes = [node(name, devices=2, nic=1e6 * (index + 1)) for index, name in enumerate(names)]
    found = cluster(*nodes)
    count = found.num_devices
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if max(a, b) < count]
    shared = ClusterArrays.of(found).shared(
        np.array([a for a, _ in pairs], dtype=np.intp),
        np.array([b for _, b in pairs], dtype=np.intp),
    )
    assert shared.tolist() == [bandwidth for bandwidth, _ in hops_at_once(found, pairs)]


def test_ring_runs_at_its_slowest_hop() -> None:
    links = ClusterArrays.of(cluster(node("fast"), node("fast", nic=5e5), node("fast")))
    assert ring_bandwidths(links, megatron_grid(Strategy(1, 6, 1, 1))) == [5e5]
    assert ring_bandwidths(links, megatron_grid(Strategy(3, 2, 1, 1))).tolist() == [1e7] * 3


def test_sizes_are_in_bytes_of_the_dtype_and_both_ways() -> None:
    links = ClusterArrays.of(cluster(node("fast", count=1)))
    strategy = Strategy(2, 1, 1, 2)
    found = corrected_costs(chain(), links, strategy, megatron_grid(strategy))
    assert found.problem.boundary[0, 1] == pytest.approx(2 * 2 * 2 * 1e3 / 1e7)


def test_small_layers_on_fast_devices_hardly_grow_with_the_micro_batch() -> None:
    shares = setup_of("het_model").model.fixed_shares("V100-16GB", Strategy(1, 1, 1, 1))
    wide, narrow = shares[1:13], shares[13:]
    assert wide.min() > 0.8
    assert narrow.max() < 0.5
    slow = setup_of("homogeneous").model.fixed_shares("T4", Strategy(1, 1, 1, 1))
    assert slow.max() < 0.2


def test_fixed_share_is_what_neither_work_nor_all_reduces_explain() -> None:
    # Of 10 ms: 1 GFLOP and 2 x 0.5 GB take 1 ms each at full rate, 2 + 2 ms at half of it.
    work = LayerWork(1e9, 0.5e9, all_reduces=2)
    found = fixed_shares(chain(1), (work,), cluster(node("fast")), "fast", 1, reached=0.5)
    np.testing.assert_allclose(found, [1 - 0.004 / 0.01])


def test_synchronisation_is_part_of_what_the_cuts_minimise() -> None:
    model = replace(chain(4, size=1.0), parameters={1: (1e6, 1e6, 1.0, 1.0)})
    links = ClusterArrays.of(cluster(node("fast", count=1, devices=4)))
    strategy = Strategy(2, 2, 1, 4)
    found = corrected_costs(model, links, strategy, megatron_grid(strategy))
    best = best_cuts(model, strategy, found)
    assert best is not None
    every = [estimate(model, strategy, found, (0, cut, 4)).seconds for cut in range(1, 4)]
    assert best.seconds == min(every)
    assert best.cuts == (0, 1, 4)


@pytest.mark.parametrize("name", setups())
def test_best_cuts_with_synchronisation_are_the_best_of_all_bounds(name: str) -> None:
    setup = setup_of(name)
    links = ClusterArrays.of(setup.cluster)
    for strategy in strategies(setup.model, setup.cluster):
        if strategy.pipeline != 2:
            continue
        found = corrected_costs(setup.model, links, strategy, megatron_grid(strategy))
        assert found.problem.first is not None
        layers = setup.model.num_layers
        every = [
            estimate(setup.model, strategy, found, (0, cut, layers)).seconds
            for cut in range(1, layers)
            if found.problem.first[0, cut] <= 0 and found.problem.first[1, layers] <= cut
        ]
        best = best_cuts(setup.model, strategy, found)
        if best is None:
            assert every == []
        else:
            assert best.seconds == pytest.approx(min(every), rel=1e-12)


# Memory


def test_first_stage_keeps_more_micro_batches_than_the_last() -> None:
    model = chain(4)
    used = stage_bytes(model, Strategy(2, 1, 1, 1), (0, 2, 4))
    assert [parts["activations"] for parts in used] == [4e3, 2e3]
    assert used[0]["optimizer"] == 12 * 2e3


def test_search_leaves_out_what_does_not_fit() -> None:
    model = chain(size=2e7)  # 320 MB of states a layer, 1.9 GB in all, on devices of 1 GB
    found = search_strategies(model, cluster(node("fast", count=2)))
    assert {placed.estimate.strategy.pipeline for placed in found} == {2, 4}
    for placed in found:
        parts = stage_bytes(model, placed.estimate.strategy, placed.estimate.cuts)
        assert max(sum(part.values()) for part in parts) <= 1e9


def test_cluster_too_small_in_memory_is_told_the_smallest_shortfall_by_part() -> None:
    model = chain(size=1e8)  # 1.6 GB of states a layer
    with pytest.raises(PlanError, match=r"nearest is pipeline 4, .*optimizer 2\.24.* too many"):
        search_strategies(model, cluster(node("fast", count=2)))
    links = ClusterArrays.of(cluster(node("fast", count=2)))
    strategy = Strategy(4, 1, 1, 1)
    short = shortfall(model, links, strategy, megatron_grid(strategy))
    assert max(np.diff(short.cuts)) == 2
    assert short.missing_bytes == pytest.approx(2 * 1.6e9 + 2e3 * 4 - 1e9, rel=1e-3)


# Placement


def test_annealing_brings_equal_devices_together_in_a_stage() -> None:
    nodes = [node(name, devices=1) for name in ("fast", "slow", "fast", "slow")]
    plain = search_strategies(chain(), cluster(*nodes))
    annealed = search_strategies(chain(), cluster(*nodes), annealing=Annealing(steps=60))
    assert annealed[0].seconds < plain[0].seconds
    by_strategy = {placed.estimate.strategy: placed.seconds for placed in plain}
    for placed in annealed:
        assert placed.seconds <= by_strategy[placed.estimate.strategy]
        assert sorted(placed.grid.flat) == [0, 1, 2, 3]


def test_annealing_keeps_tensor_groups_within_their_node() -> None:
    setup = setup_of("het_cluster")
    for placed in search_strategies(setup.model, setup.cluster, annealing=Annealing(steps=50)):
        nodes = ClusterArrays.of(setup.cluster).node[placed.grid]
        assert (nodes == nodes[:, :, :1]).all()


def test_dominoes_tile_the_board_upright_and_lying() -> None:
    links = ClusterArrays.of(setup_of("het_cluster").cluster)
    board, dice = board_of(links), random.Random(0)
    assert (links.node[board] == links.node[board][0]).all()  # a column is a node
    row, column = np.empty(16, int), np.empty(16, int)
    row[board], column[board] = np.indices((4, 4))
    shapes = set[tuple[int, int]]()
    for strategy in (Strategy(8, 2, 1, 1), Strategy(4, 2, 2, 1), Strategy(2, 4, 2, 1)):
        for _ in range(20):
            grid = domino_grid(board, strategy, dice)
            assert grid is not None
            assert sorted(grid.flat) == list(range(16))
            for stage in grid:
                height, width = np.ptp(row[stage]) + 1, np.ptp(column[stage]) + 1
                assert height * width == stage.size  # a rectangle without gaps
                shapes.add((int(height), int(width)))
            assert (column[grid] == column[grid][:, :, :1]).all()  # tensor groups are upright
    assert shapes == {(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)}
    assert domino_grid(board, Strategy(2, 8, 1, 1), dice) is None  # eight in a row do not fit


def test_annealing_moves_to_neighbours_with_their_best_cuts_and_records_what_it_accepts() -> None:
    setup = setup_of("het_cluster")
    links, among = ClusterArrays.of(setup.cluster), list(strategies(setup.model, setup.cluster))
    tried: list[Strategy] = []

    def best_on(strategy: Strategy, grid: Grid) -> Estimate | None:
        tried.append(strategy)
        return best_cuts(setup.model, strategy, corrected_costs(setup.model, links, strategy, grid))

    accepted = anneal(board_of(links), among, best_on, Annealing(steps=60, start=1e-9))
    assert len({s.micro_batch for s in tried}) > 2
    assert len({(s.tensor, s.data) for s in tried}) > 4
    times = [best.seconds for best, _ in accepted.values()]
    assert times == sorted(times, reverse=True)  # a cold search accepts nothing slower
    for strategy, (best, grid) in accepted.items():
        assert best_on(strategy, grid) == best


def test_cluster_of_two_device_types_and_three_link_speeds_is_planned() -> None:
    mixed = cluster(
        NodeType("fast", 4, 2, bandwidth_bytes_s=1e9, nic_bandwidth_bytes_s=1e8),
        NodeType("slow", 4, 1, bandwidth_bytes_s=5e8, nic_bandwidth_bytes_s=5e7),
    )
    best = search_strategies(replace(chain(12), batch=24), mixed)[0]
    assert best.grid.size == 12
    assert best.estimate.cuts[-1] == 12


def test_cluster_of_as_many_devices_as_can_be_planned_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = cluster(node("fast"), node("slow"))
    monkeypatch.setattr(network, "MOST_DEVICES", pair.num_devices)
    assert len(ClusterArrays.of(pair).kind) == pair.num_devices
    monkeypatch.setattr(network, "MOST_DEVICES", pair.num_devices - 1)
    with pytest.raises(ValueError, match=f"at most {pair.num_devices - 1}"):
        ClusterArrays.of(pair)


# What does not fit together


def test_strategies_are_all_that_use_every_device() -> None:
    found = set(strategies(gpt2(), setup_of("homogeneous").cluster))
    assert len(found) == 53
    assert all(one.pipeline * one.data * one.tensor == 16 for one in found)
    assert all(32 % (one.data * one.micro_batch) == 0 for one in found)


def test_cuts_of_rows_are_cuts_between_layers() -> None:
    setup = setup_of("het_model")
    cuts = setup.cuts_of_rows([0, 12, 44, 49, 56])
    assert cuts == (0, 10, 16, 21, 25)
    with pytest.raises(ValueError, match="leave a stage without layers"):
        setup.cuts_of_rows([0, 15, 41, 56])


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy(1, 4, 1, 3), "does not divide into 4 replicas with micro-batches of 3"),
        (Strategy(1, 2, 2, 1), "no profile on device 'fast' at tensor degree 2"),
    ],
)
def test_strategy_that_does_not_fit_the_model_is_refused(strategy: Strategy, message: str) -> None:
    links = ClusterArrays.of(cluster(node("fast", count=2)))
    with pytest.raises(PlanError, match=message):
        corrected_costs(chain(), links, strategy, megatron_grid(strategy))


def test_cuts_of_another_number_of_stages_are_refused() -> None:
    strategy = Strategy(2, 2, 1, 1)
    links = ClusterArrays.of(cluster(node("fast", count=2)))
    found = corrected_costs(chain(), links, strategy, megatron_grid(strategy))
    with pytest.raises(PlanError, match="make 3 stages that end at layer 6, expected 2"):
        estimate(chain(), strategy, found, (0, 2, 4, 6))
