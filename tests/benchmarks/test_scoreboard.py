"""The scoreboard: its measures by hand, what it reads, and one run from a row to a prediction."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardweave.benchmarks.runs.decoder import COPIES, COPIES_OF_VIEW, LAYERS, captured_decoder
from shardweave.benchmarks.runs.frameworks import (
    COMPOSER,
    MEGATRON_DEEPSPEED,
    MEGATRON_LM,
    USUAL,
    VTRAIN,
    framework_of,
)
from shardweave.benchmarks.runs.predict import PredictedRun, RunPredictor, placed, stacked
from shardweave.benchmarks.runs.rows import MeasuredRun, read_runs
from shardweave.benchmarks.runs.spec import DecoderSpec
from shardweave.benchmarks.scoreboard import FOLDER, main
from shardweave.benchmarks.scoreboard_score import formula, score_of
from shardweave.benchmarks.scoreboard_twins import end_s, messages_s, oracle_regret
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.workload import BlockWork, Shared, Workload
from shardweave.tests.marks import slow

ROWS = FOLDER / "vtrain_single.csv"
ROOT = Path(__file__).resolve().parents[2]


def runs() -> list[MeasuredRun]:
    return read_runs([ROWS])


def test_every_row_that_is_kept_is_read() -> None:
    found = read_runs(sorted(FOLDER.glob("*.csv")))
    first, later = 840 + 216 + 27 + 36 + 8, 21 + 8 + 34 + 20 + 107 + 14
    assert len(found) == first + later
    assert 0.2 < sum(run.is_held_out for run in found) / len(found) < 0.45
    assert found[0].name


def test_row_that_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    lines = ROWS.read_text().splitlines()[:2]
    file.write_text(f"{lines[0]}\n{lines[1].replace('372.160408', 'fast')}\n")
    with pytest.raises(ValueError, match=r"bad\.csv:2: column 'step_ms' is 'fast'; write what"):
        read_runs([file])


def test_measures_are_those_of_a_group_by_hand() -> None:
    base = replace(runs()[0], memory_bytes=0.0)
    measured = (1.0, 2.0, 3.0, 4.0, 5.0)
    predicted = (2.2, 2.0, 6.0, 8.0, 10.0)  # the second is taken for the fastest
    pairs = [
        (replace(base, step_s=m, memory_bytes=100.0), PredictedRun(p, 110.0, 105.0))
        for m, p in zip(measured, predicted, strict=True)
    ]
    pairs[0] = replace(pairs[0][0], status="oom"), pairs[0][1]
    found = score_of(pairs)
    assert found.error == pytest.approx((1.2 + 0 + 1 + 1 + 1) / 5)
    assert found.scale == pytest.approx(0.5)
    assert found.spearman == pytest.approx(0.9)
    assert found.worst_regret == pytest.approx(2.0)
    assert found.worst_regret_of_3 == pytest.approx(1.0)
    assert found.memory_error == pytest.approx(0.1)
    assert (found.precision, found.recall) == (pytest.approx(0.2), 1.0)


def test_oracle_that_prices_messages_has_no_smaller_worst_regret() -> None:
    timed, cluster = [run for run in runs() if not run.is_held_out], find_cluster("dgx-a100")
    whole, quarter = (oracle_regret(timed, cluster, share) for share in (1.0, 0.25))
    record = json.loads((ROOT / "benchmarks/results/scoreboard.json").read_text())
    worst = record["looked"]["sources"]["vtrain_single"]["worst_regret"]
    assert f"{worst:.2f}" == f"{whole:.2f}"
    assert whole is not None
    assert quarter is not None
    assert whole > quarter > 1


def test_oracle_that_prices_messages_is_wrong_where_a_twin_is_faster_than_they_allow() -> None:
    """Five runs of two devices, of which tensor=2 by 4 samples is measured a tenth faster than
    data=2 by 2; at 10 ms a layer its messages say otherwise, unless they take no time."""
    base = replace(runs()[0], step_s=1.0, gpus=2, per_node=2, batch=8, pipeline=1, layers=12)
    rows = [
        replace(base, data=2, tensor=1, micro_batch=2, step_s=1.0),
        replace(base, data=1, tensor=2, micro_batch=4, step_s=0.9),
        *(replace(base, data=2, tensor=1, micro_batch=1, step_s=s) for s in (2.0, 3.0, 4.0)),
    ]
    cluster = find_cluster("dgx-a100")
    slow = replace(cluster, collectives=(), start_overhead_s=0.0)
    node = replace(slow.nodes[0], rings=(), latency_s=5e-3, bandwidth_bytes_s=1e15)
    slow = replace(slow, nodes=(node,))
    # Two micro-batches of 12 layers, six all-reduces each, of two steps of 5 ms.
    assert messages_s(rows[1], slow) == pytest.approx(2 * 12 * 6 * 2 * 5e-3, rel=1e-3)
    assert messages_s(rows[0], slow) == 0.0
    assert end_s(rows[0], slow) > end_s(rows[1], slow) > 0
    assert oracle_regret(rows, slow) == pytest.approx(1 / 0.9)
    assert oracle_regret(rows, slow, 0.0) == 1.0
    assert oracle_regret(rows[:2], slow) is None


def test_formula_of_four_constants_is_as_good_as_it_is_told_to_be() -> None:
    """On half of the groups of the largest source, fitted on the other half."""
    pairs = [(run, PredictedRun(run.step_s, 0.0, 1.0)) for run in runs()]
    guessed, simulated = formula(pairs)
    errors = [abs(step / run.step_s - 1) for run, step in guessed]
    assert len(guessed) == len(simulated) < len(pairs)
    assert 0.02 < sum(errors) / len(errors) < 0.5
    assert all(step == run.step_s for run, step in simulated)


def test_layers_of_stages_are_those_of_the_note_where_it_has_them() -> None:
    base = replace(runs()[0], layers=32, pipeline=4)
    said = replace(base, note="layers/stage=[7, 9, 9, 9]; gpus/stage=[..]")
    assert said.stage_layers == (6, 9, 9, 8)
    assert replace(said, pipeline=2).stage_layers == ()
    assert base.stage_layers == ()


def test_run_whose_note_contradicts_its_row_is_refused() -> None:
    base = replace(runs()[0], layers=32, pipeline=1, note="layers/stage=[26]; gpus/stage=[..]")
    with pytest.raises(ValueError, match="stages of 26 layers, its row a model of 32"):
        RunPredictor().predict(base, placed(base, find_cluster("dgx-a100")))


def test_run_that_its_note_contradicts_is_told_with_the_error_of_both(tmp_path: Path) -> None:
    """It is not scored; the record has its reason, and what the error is with it."""
    file, out = tmp_path / "two.csv", tmp_path / "out.json"
    with ROWS.open(newline="") as rows:
        cells = next(csv.DictReader(rows))
    cells |= {"layers": "3", "hidden": "64", "ffn": "256", "heads": "4", "seq": "32", "vocab": "64"}
    wrong = {**cells, "note": "layers/stage=[26]", "step_ms": str(2 * float(cells["step_ms"]))}
    with file.open("w", newline="") as written:
        writer = csv.DictWriter(written, list(cells))
        writer.writeheader()
        writer.writerows([cells, wrong])
    assert main(["--runs", str(file), "--json", str(out)]) == 0
    found = source_of(out)
    assert found["runs"] == 1
    (told,) = found["contradicted"]
    assert told["reason"] == "its note has stages of 26 layers, its row a model of 3"
    ratio = told["predicted_s"] / told["measured_s"]
    each = abs(2 * ratio - 1), abs(ratio - 1)
    assert found["error"] == pytest.approx(each[0])
    assert found["error_with_contradicted"] == pytest.approx(sum(each) / 2)


def source_of(out: Path) -> dict[str, Any]:
    (found,) = [part for part in json.loads(out.read_text()).values() if isinstance(part, dict)]
    return found["sources"]["vtrain_single"]


@pytest.mark.slow
def test_one_run_is_predicted_on_the_preset_of_its_device_and_on_a_file(tmp_path: Path) -> None:
    file, out = tmp_path / "one.csv", tmp_path / "out.json"
    file.write_text("\n".join(ROWS.read_text().splitlines()[:2]) + "\n")
    assert main(["--runs", str(file), "--json", str(out)]) == 0
    found = source_of(out)
    assert found["runs"] == 1
    assert found["error"] < 1
    unknown = tmp_path / "unknown.csv"
    unknown.write_text(file.read_text().replace(",A100,", ",B9,"))
    assert main(["--runs", str(unknown), "--cluster", "dgx-a100", "--json", str(out)]) == 0
    assert source_of(out)["runs"] == 1


@pytest.mark.parametrize(
    ("micro_batch", "precision", "has_kernel"),
    [(1, "fp16", False), (2, "fp16", True), slow(2, "fp32", False)],
)
def test_scores_are_masked_by_ops_of_their_own_where_megatron_has_no_kernel(
    micro_batch: int, precision: str, has_kernel: bool
) -> None:
    """Two heads on a device: a micro-batch of two has the four matrices that the kernel takes."""
    run = replace(
        runs()[0], gpus=2, data=1, tensor=2, pipeline=1, heads=4, hidden=32, ffn=64,
        vocab=64, seq=16, batch=2, micro_batch=micro_batch, precision=precision,
    )  # fmt: skip
    cluster = placed(run, find_cluster("dgx-a100"))
    times = {
        name: RunPredictor().predict(replace(run, framework=name), cluster).step_s
        for name in ("Megatron-DeepSpeed", "OneFlow")
    }
    assert (times["Megatron-DeepSpeed"] == times["OneFlow"]) == has_kernel
    assert times["Megatron-DeepSpeed"] >= times["OneFlow"]


def test_source_says_the_vocabulary_where_rows_do_not() -> None:
    """vTrain's ranks each have their share of GPT-2's words, rounded down; others pad theirs."""
    assert {run.vocab for run in runs()} == {50257}
    others = read_runs([FOLDER / "sailor.csv"])
    assert {run.vocab for run in others} == {51200}
    assert framework_of("Megatron-DeepSpeed", "vtrain_single") == VTRAIN
    assert framework_of("Composer FSDP", "vtrain_single") == COMPOSER
    assert framework_of("Megatron-LM", "dlperf_gpt") == MEGATRON_LM
    assert framework_of("Megatron-DeepSpeed") == MEGATRON_DEEPSPEED
    assert framework_of("OtherTrain") == USUAL


@pytest.mark.slow
def test_framework_says_what_rows_do_not() -> None:
    """Sailor's GPT-Neo has no projection to the vocabulary, and drops no scores; memory is that of
    the whole device."""
    run = replace(
        runs()[0], gpus=2, data=1, tensor=2, pipeline=1, layers=3, heads=4, hidden=32, ffn=64,
        vocab=4096, seq=16, batch=2, micro_batch=2, precision="fp32",
    )  # fmt: skip
    sailor = replace(run, framework="Sailor (Megatron-DeepSpeed)")
    cluster, predictor = placed(run, find_cluster("clariden")), RunPredictor()
    usual = predictor.predict(replace(run, framework="Megatron-DeepSpeed"), cluster)
    tied, own, none = (
        predictor.predict(replace(sailor, model=model), cluster)
        for model in ("another", "OPT-350M", "GPT-Neo-2.7B")
    )
    assert none.step_s < tied.step_s < usual.step_s
    assert none.memory_bytes < tied.memory_bytes < own.memory_bytes
    assert tied.memory_bytes > usual.memory_bytes + 4e9


@pytest.mark.parametrize(("is_view", "copies"), [(False, COPIES), (True, COPIES_OF_VIEW)])
def test_masking_scores_in_place_is_copied_backward_as_often_as_pytorch_does(
    is_view: bool, copies: int
) -> None:
    """Eager PyTorch, profiled, on scores as Sailor's models and as others compute them."""
    query, key = torch.zeros(2, 4, 3, requires_grad=True), torch.zeros(2, 3, 4)
    product = torch.baddbmm(torch.empty(2, 4, 4), query, key, beta=0.0)
    scores = product.view(1, 2, 4, 4) if is_view else product
    later = torch.ones(4, 4, dtype=torch.bool).triu(1)
    found = scores.masked_fill_(later, -1e4).softmax(-1)
    grad = torch.ones_like(found)
    profile = torch.autograd.profiler.profile()
    with profile:
        torch.autograd.grad(found, query, grad)
    assert profile.function_events is not None
    names = [event.name for event in profile.function_events]
    assert names.count("aten::copy_") == copies
    assert names.count("aten::masked_fill_") == 1


def test_decoder_copies_the_gradient_of_masked_scores() -> None:
    spec = DecoderSpec(32, 4, 64, 64, 16, False, False, "float32", masks_view=True)
    view, own = (captured_decoder(replace(spec, masks_view=way), 1).ops for way in (True, False))
    count = sum(1 for _ in view) - sum(1 for _ in own)
    assert count == LAYERS * (COPIES_OF_VIEW - COPIES)


@pytest.mark.parametrize(
    ("layers", "copies"),
    [(1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (5, [1, 2, 2, 2, 3])],
)
def test_decoder_of_any_depth_has_first_inner_and_last_blocks(
    layers: int, copies: list[int]
) -> None:
    def block(number: int) -> BlockWork:
        return BlockWork(f"b{number}", 0 < number <= LAYERS, (), {}, {}, number, 0, 0, 0, {})

    last = LAYERS + 1
    work = Workload(tuple(block(i) for i in range(last + 1)), (Shared(0, last, 4), Shared(1, 2, 8)))
    deep = stacked(work, layers)
    assert [one.parameter_bytes for one in deep.blocks] == [0, *copies, last]
    assert [one.name for one in deep.blocks[1:-1]] == [f"h.{i}" for i in range(layers)]
    assert deep.shared == (Shared(0, layers + 1, 4), Shared(1, 2, 8))
