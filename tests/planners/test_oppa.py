"""plan_oppa and what it is made of: space, formulas, expected improvement, processes, search."""

import math
import time
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from shardweave.benchmarks.baselines.random_trials import RandomChooser
from shardweave.benchmarks.oppa_literal import (
    CorrectedMemory,
    CorrectedThroughput,
    LiteralMemory,
    LiteralThroughput,
)
from shardweave.benchmarks.oppa_space import BUCKETS_MIB, SearchSpace
from shardweave.benchmarks.oppa_step_model import StepModel, Transformer
from shardweave.benchmarks.oppa_trials import SimulatedTrial
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.auto.space.constraints import point_of
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.oppa import choosers
from shardweave.planners.oppa.choosers import (
    BayesianChooser,
    History,
    chance_below,
    expected_improvement,
)
from shardweave.planners.oppa.gp import fit
from shardweave.planners.oppa.joint import JointPlans
from shardweave.planners.oppa.planner import run_trials
from shardweave.planners.oppa.prior import (
    MemoryPrior,
    Samples,
    ThroughputPrior,
    columns_of,
    fit_formula,
    predict,
)
from shardweave.planners.plan.plan_parts import RECOMPUTE, PlanError
from shardweave.planners.planning import plan
from shardweave.planners.trials.space import Configuration, SpaceTable
from shardweave.planners.trials.trials import Outcome, Record, TrialFile
from shardweave.tests.zoo import captured

SMALL = SearchSpace(8, 4, 4, 16, data_buckets_mib=(1, 16), zero_buckets_mib=(1, 16))
MODEL = Transformer("small", 4, 512, 4, 2048, 1000, 128, 16)


def naive(space: SearchSpace) -> set[Configuration]:
    """Every combination, those that break a rule left out, the meaningless made equal."""
    found: set[Configuration] = set()
    for tensor, pipeline, zero, data_mib, zero_mib, count, chunks, recompute in product(
        (1, 2, 4, 8, 16), range(1, 9), range(4), space.data_buckets_mib, space.zero_buckets_mib,
        range(1, space.batch + 1), range(1, space.layers + 1), space.recompute,
    ):  # fmt: skip
        data = space.devices // (tensor * pipeline)
        if data * tensor * pipeline != space.devices or space.heads % tensor:
            continue
        if space.layers % pipeline or space.batch % data or (space.batch // data) % count:
            continue
        if count < pipeline or chunks * pipeline > min(space.layers, max(count, pipeline)):
            continue
        if pipeline == 1 and chunks > 1:
            continue
        stage = zero if data > 1 else 0
        found.add(
            Configuration(
                data, tensor, pipeline, stage,
                data_mib if data > 1 and stage == 0 else 1,
                zero_mib if stage else 1,
                count, chunks, recompute,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize(
    "space",
    [
        SMALL,
        replace(SMALL, devices=6, heads=6, layers=6, batch=12),
        replace(SMALL, layers=6, batch=12),
    ],
)
def test_space_equals_naive_enumeration(space: SearchSpace) -> None:
    listed = space.enumerate()
    assert len(listed) == len(set(listed))
    assert set(listed) == naive(space)


def test_space_of_sixteen_devices_has_ten_thousand_and_is_made_at_once() -> None:
    start_s = time.process_time()
    listed = SearchSpace(16, 32, 32, 256).enumerate()
    assert time.process_time() - start_s < 1.0
    assert len(listed) > 10_000
    assert BUCKETS_MIB == (1, 4, 16, 64, 256, 1024, 4096)


def test_space_without_a_configuration_says_so() -> None:
    with pytest.raises(PlanError, match="no configuration uses all 8 devices"):
        SearchSpace(8, 1, 1, 3).enumerate()


ONE = Configuration(2, 4, 2, 1, 1, 16, 8, 2, "layer", sequence_parallel=True)
NUMBERS = {
    "work": 32.0, "recomputed": 0.5, "data_latency": 0.1, "data_transfer": 8.0,
    "tensor_latency": 0.01, "tensor_transfer": 4.0, "pipeline_latency": 0.02,
    "pipeline_transfer": 1.6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        # 32 / 16 x (8 + 1 / 2) / 8; 0.1 + 1/2 x 8/8; 8 (0.02 + 3/4 x 4/16) / 2; 16 (0.02 + 0.1)
        ("corrected", (2.125, 0.6, 0.83, 1.92)),
        # 32 / 16 x (8 + 1 / 2); 0.1 + 1/2 x 8; 8 (0.01 x 2 + 3/4 x 4/8); 16 (0.1 + 1.6/8)
        ("literal", (17.0, 4.1, 3.16, 4.8)),
        # half of the work again; a latency of 0.1 / (8 x 16 MiB)
        ("extended", (3.1875, 0.5 + 0.1 / 128, 0.83, 1.92)),
    ],
)
def test_formulas_of_throughput_equal_hand_worked_numbers(
    form: str, parts: tuple[float, ...]
) -> None:
    priors = {
        "corrected": CorrectedThroughput,
        "extended": ThroughputPrior,
        "literal": LiteralThroughput,
    }
    prior = priors[form]()
    x = columns_of(SpaceTable.of([ONE]))
    of = {name: torch.tensor(value, dtype=torch.float64) for name, value in NUMBERS.items()}
    found = (prior.compute_s, prior.data_s, prior.tensor_s, prior.pipeline_s)
    assert [part(x, of).item() for part in found] == pytest.approx(parts)
    assert prior(x, of).exp().item() == pytest.approx(1 / sum(parts))


def test_formula_of_messages_between_stages_is_zero_for_one_stage() -> None:
    x = columns_of(SpaceTable.of([Configuration(4, 4)]))
    of = {name: torch.tensor(value, dtype=torch.float64) for name, value in NUMBERS.items()}
    assert CorrectedThroughput().pipeline_s(x, of).item() == 0


def test_literal_form_counts_one_micro_batch_and_one_chunk_without_stages() -> None:
    of = {name: torch.tensor(value, dtype=torch.float64) for name, value in NUMBERS.items()}
    prior = LiteralThroughput()
    one, many = (
        columns_of(SpaceTable.of([Configuration(4, 4, micro_batches=count)])) for count in (1, 8)
    )
    assert prior(one, of) == prior(many, of)
    assert prior.compute_s(many, of).item() == NUMBERS["work"] / 16
    assert prior.pipeline_s(many, of).item() == pytest.approx(0.1 + 1.6)
    values = {"weights": 3.2, "activations": 1.6, "constant": 0.1}
    shares = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    # 3.2 / 4 + 1.6 / 16 + 0.1, and clipped to the memory
    assert LiteralMemory()(many, shares).item() == pytest.approx(1.0)
    assert LiteralMemory()(many, {**shares, "constant": torch.tensor(9.0)}).item() == 1.0


@pytest.mark.parametrize(
    ("form", "share"),
    [
        ("corrected", 3.2 / 8 + 12.8 / 128 + 0.1),
        # optimizer state over 2 replicas: 10 / 16; recomputation keeps 1/4, of 2 micro-batches
        ("extended", 3.2 / 8 * 10 / 16 + 12.8 / 128 * 0.5 + 0.1),
    ],
)
def test_formula_of_memory_equals_hand_worked_numbers_and_is_capped(
    form: str, share: float
) -> None:
    prior = {"corrected": CorrectedMemory, "extended": MemoryPrior}[form]()
    values = {"weights": 3.2, "activations": 12.8, "constant": 0.1, "kept": 0.25}
    of = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    x = columns_of(SpaceTable.of([ONE]))
    assert prior(x, of).item() == pytest.approx(share, abs=1e-4)
    assert prior(x, {**of, "constant": torch.tensor(9.0)}).item() == pytest.approx(1.2, abs=1e-6)


def test_expected_improvement_equals_monte_carlo() -> None:
    rng = np.random.default_rng(0)
    mean, variance = np.array([0.0, 0.5, -1.0, 2.0]), np.array([1.0, 0.25, 4.0, 0.0])
    draws = mean + np.sqrt(variance) * rng.standard_normal((400_000, 4))
    sampled = np.maximum(draws - 0.7, 0).mean(0)
    assert expected_improvement(mean, variance, 0.7) == pytest.approx(sampled, abs=5e-3)
    assert chance_below(mean, variance, 0.7) == pytest.approx((draws <= 0.7).mean(0), abs=5e-3)


def test_fit_of_a_formula_finds_the_numbers_that_made_the_samples() -> None:
    table = SpaceTable.of(SMALL.enumerate()[::7])
    prior = CorrectedThroughput()
    made = {name: NUMBERS[name] for name in prior.numbers}
    values = predict(table, prior, made)
    found = fit_formula(Samples(table, values, np.full(len(values), 1e-6)), prior)
    assert predict(table, prior, found) == pytest.approx(values, abs=0.02)


@pytest.fixture(scope="module")
def machine() -> StepModel:
    return StepModel(MODEL, find_cluster("perlmutter:nodes=2"))


def test_process_predicts_as_gpytorch_itself_does() -> None:
    pytest.importorskip("botorch", exc_type=ImportError)
    table = SpaceTable.of(SMALL.enumerate())
    seen, there = table.rows(range(0, 300, 12)), table.rows(range(5, 300, 31))
    values = np.sin(3 * seen.features.sum(1))
    belief = fit(Samples(seen, values, np.full(len(values), 1e-3)), None)
    mean, variance = belief.at(there)
    posterior = belief.model.posterior(torch.tensor(there.features))
    assert mean == pytest.approx(posterior.mean[:, 0].detach().numpy(), abs=1e-5)
    assert variance == pytest.approx(posterior.variance[:, 0].detach().numpy(), abs=1e-5)


def test_search_goes_on_from_its_file_as_if_it_had_not_been_stopped(
    machine: StepModel, tmp_path: Path
) -> None:
    space, trial, chooser = SMALL.enumerate(), SimulatedTrial(machine).run, RandomChooser()
    whole = run_trials(space, trial, chooser, 12)
    for count in (5, 9, 12):
        with TrialFile.open(tmp_path / "t.jsonl", {"a": 1}) as file:
            part = run_trials(space, trial, chooser, count, file=file)
            assert len(part.records) == count
    assert [r.configuration for r in part.records] == [r.configuration for r in whole.records]
    assert [r.outcome for r in part.records] == [r.outcome for r in whole.records]


def test_search_goes_on_the_same_between_two_fits_of_its_numbers(
    machine: StepModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("botorch", exc_type=ImportError)
    monkeypatch.setattr(choosers, "FITTED_EACH", 5)
    space, trial = SMALL.enumerate(), SimulatedTrial(machine).run
    with patch.object(choosers, "fit", wraps=fit) as fitted:
        whole = run_trials(space, trial, BayesianChooser(), 13)
    assert [len(call.args[0].values) for call in fitted.call_args_list] == [5, 10]
    for count in (8, 13):
        with TrialFile.open(tmp_path / "t.jsonl", {}) as file:
            part = run_trials(space, trial, BayesianChooser(), count, file=file)
    assert [r.configuration for r in part.records] == [r.configuration for r in whole.records]


def test_half_a_last_line_is_left_out_and_not_joined_to_the_next(tmp_path: Path) -> None:
    path, record = tmp_path / "t.jsonl", Record(ONE, Outcome("ok", (1.0, 2.0), 5.0))
    for _ in range(2):
        with TrialFile.open(path, {}) as file:
            file.add(record)
    path.write_bytes(path.read_bytes()[:-20])
    with TrialFile.open(path, {}) as file:
        assert "cut off" in file.notes[0]
        assert file.records == [record]
        file.add(record)
    with TrialFile.open(path, {}) as file:
        assert (file.records, file.notes) == ([record, record], [])


def test_trials_of_another_problem_or_search_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"

    def refuse(problem: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanError, match=message), TrialFile.open(path, problem):
            pass

    with TrialFile.open(path, {"cluster": "a"}):
        refuse({"cluster": "a"}, "in use")
    refuse({"cluster": "b"}, "another search: it has cluster 'a', but this search has 'b'")
    path.write_text('{"no": 1}\n')
    refuse({}, "the first line of a trials file")


def test_wrong_trial_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TrialFile.open(path, {}) as file:
        file.add(Record(ONE, Outcome("ok", (1.0,))))
    path.write_text(path.read_text().replace('"data": 2', '"data": "x"'))
    with pytest.raises(PlanError, match=r":2.configuration.data must be a whole number, 0 or more"):
        TrialFile.open(path, {}).__enter__()


def test_variance_of_an_outcome_is_that_of_its_mean() -> None:
    one = Outcome("ok", (1.0, 0.5))
    assert one.throughput == 1.5
    assert one.variance == pytest.approx(0.5 / 2)
    with pytest.raises(ValueError, match="a trial of status ok has step times"):
        Outcome("ok")


def test_random_follows_three_trials_without_memory() -> None:
    table = SpaceTable.of(SMALL.enumerate())
    ran = [Record(table.configurations[0], Outcome("ok", (1.0,)))]
    failed = [Record(table.configurations[i], Outcome("out_of_memory")) for i in (1, 2, 3)]
    history = History(table, range(4), [*ran, *failed], 1.0)
    choice = BayesianChooser(first=1).choose(history, np.random.default_rng(0))
    assert choice.reason == "random: the last 3 ran out of memory"


def test_random_draws_are_as_likely_for_all_sizes_of_the_dimensions() -> None:
    """D.5; a draw over rows would mostly take the sizes that have the most rows."""
    table = SpaceTable.of(SMALL.enumerate())
    records = [Record(one, Outcome("ok", (1.0,))) for one in table.configurations[:1]]
    records += [Record(one, Outcome("out_of_memory")) for one in table.configurations[1:4]]
    history, chooser = History(table, range(4), records, 1.0), BayesianChooser(first=1)
    rows = [chooser.choose(history, np.random.default_rng(seed)).row for seed in range(1000)]
    drawn = Counter(table.configurations[row].degrees for row in rows)
    sizes = Counter(one.degrees for one in table.configurations[4:])
    assert max(sizes.values()) > 3 * min(sizes.values())
    expected = len(rows) / len(sizes)
    assert all(abs(drawn[degrees] - expected) < 5 * expected**0.5 for degrees in sizes)


@pytest.mark.slow
def test_every_oppa_search_is_near_the_best_in_fewer_trials_than_random_ones_need(
    machine: StepModel,
) -> None:
    pytest.importorskip("botorch", exc_type=ImportError)
    space, seeds, trials = SMALL.enumerate(), range(5), 12
    seconds = {one: machine.cost(one).seconds for one in space}
    near = {one for one in space if seconds[one] <= min(seconds.values()) / 0.9}
    missing = math.comb(len(space) - len(near), trials) / math.comb(len(space), trials)
    assert (1 - missing) ** len(seeds) < 0.01  # that as many random searches all come near
    for seed in seeds:
        trial = SimulatedTrial(machine, seed).run
        found = run_trials(space, trial, BayesianChooser(), trials, seed=seed)
        assert near & {record.configuration for record in found.records}


@pytest.mark.parametrize("stage", range(4))
def test_step_model_sends_no_message_smaller_than_a_weight(stage: int) -> None:
    model = Transformer("large", 4, 4096, 4, 16384, 1000, 128, 16)
    large = StepModel(model, find_cluster("perlmutter:nodes=2"))
    one = Configuration(8, zero=stage)
    name = "zero_bucket_mib" if stage else "data_bucket_mib"
    times = [large.cost(replace(one, **{name: size})).seconds for size in BUCKETS_MIB]
    assert times[0] == times[1] == times[2]  # up to 16 MiB; its smallest weight has 32
    assert len(set(times)) > 3


def test_step_model_counts_no_communication_on_one_device() -> None:
    one = StepModel(MODEL, find_cluster("perlmutter:nodes=1")).cost(Configuration())
    assert one.messages_s == one.reduction_s == 0
    assert one.pipeline_s > 0


@pytest.fixture(scope="module")
def program() -> Program:
    example = build_example("gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=4")
    return capture(example.module, kwargs=example.kwargs)


def test_planner_returns_the_fastest_plan_that_it_tried(program: Program, tmp_path: Path) -> None:
    pytest.importorskip("botorch", exc_type=ImportError)
    file = tmp_path / "t.jsonl"
    options: dict[str, Any] = {"trials": 7, "file": str(file)}
    found = plan(program, None, "oppa", cluster="perlmutter:nodes=1", **options)
    assert found.planner == "oppa"
    assert math.prod(found.mesh.values()) == 4
    assert found.predicted is not None
    assert "the fastest of 7 trials" in found.reasons[0]
    assert len(file.read_text().splitlines()) == 8
    again = plan(program, None, "oppa", cluster="perlmutter:nodes=1", **options)
    assert again.to_json() == found.to_json()
    assert found.predicted.time_s == min(one.predicted.time_s for one in found.candidates)
    file.write_text(file.read_text().replace('"joint"', '"plain"'))
    with pytest.raises(
        ValueError, match="of another search: it has space 'plain', but this search has"
    ):
        plan(program, None, "oppa", cluster="perlmutter:nodes=1", **options)


def test_joint_space_has_every_point_of_auto_once(program: Program) -> None:
    cluster = find_cluster("perlmutter:nodes=1")
    plans = JointPlans("auto", program, cluster, None)
    found = plans.configurations()
    every = {point_of(plans.plan(one)) for one in found}
    assert len(every) == len(found)
    assert {one.recompute for one in found if one.pipeline == 1} == set(RECOMPUTE)
    assert {one.zero for one in found} == {0, 1, 2, 3}
    assert {one.context for one in found} == {1, 2, 4}
    assert {"gpipe", "zero-bubble", "zero-bubble-h2"} <= {one.order for one in found}


def test_joint_space_recomputes_quarters_of_the_layers() -> None:
    case = captured("gpt:layers=4,hidden=16,heads=4,vocab=32,seq=8,batch=4")
    cluster = find_cluster("perlmutter:nodes=1")
    for stages, shares in ((1, {0.25, 0.5, 0.75, 1.0}), (2, {0.5, 1.0})):
        plans = JointPlans("random", case.program, cluster, Mesh(pipeline=stages, data=1))
        found = plans.configurations()
        layer = [one for one in found if one.recompute == "layer"]
        assert {one.recomputed_share for one in layer} == shares
        assert all(one.recomputed_share == 1 for one in found if one.recompute != "layer")
        for one in layer[:40]:
            point = point_of(plans.plan(one))
            assert point.recompute_layers == one.recomputed_share % 1 * 4 / stages
        table = SpaceTable.of(found)
        assert set(table.columns["recomputed"]) == {0.0, *shares}


def test_no_trials_are_told(program: Program) -> None:
    with pytest.raises(ValueError, match="'oppa' is asked for 0 trials; use trials >= 1"):
        plan(program, None, "oppa", cluster="perlmutter:nodes=1", trials=0)


def test_real_trials_need_a_model(program: Program) -> None:
    with pytest.raises(ValueError, match="real trials train a model"):
        plan(program, None, "oppa", cluster="perlmutter:nodes=1", real=True)


def test_time_limit_ends_the_search_and_is_said(program: Program) -> None:
    options: dict[str, Any] = {"trials": 20, "time_limit_s": 1e-9}
    made = plan(program, None, "oppa", cluster="perlmutter:nodes=1", **options)
    assert "the fastest of 1 trial" in made.reasons[0]
    assert made.reasons[0].endswith("the time limit of 1e-09 s ended the search")
