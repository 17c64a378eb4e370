"""Calibration: numbers that runs tell are found, others stay, and rows that were left out gain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import shardweave as sw
from shardweave.driver.cli import main
from shardweave.driver.profile.calibrate import calibrate, scaled
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.cluster_file import load_cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.tests.zoo import SPECS, captured

CLUSTER = find_cluster("dgx-a100")
LAYERS, TOKENS = 24, 2048


@dataclass(frozen=True)
class Sizes:
    """A decoder's run."""

    hidden: int
    micro_batch: int
    tensor: int
    step_s: float = 0.0


def closed_form(run: Sizes, cluster: Cluster) -> float:
    """The longer of arithmetic and issuing, and messages within a node behind it."""
    (device,) = cluster.devices.values()
    tokens = run.micro_batch * TOKENS
    flops_s = 24 * tokens * run.hidden**2 / run.tensor / device.flops["float16"]
    work_s = max(flops_s / device.efficiency[-1][1], 40 * device.issue_s)
    sent = 4 * tokens * run.hidden * (run.tensor - 1) / run.tensor
    return LAYERS * (work_s + sent / cluster.nodes[0].bandwidth_bytes_s)


def runs_of(truth: Cluster) -> list[Sizes]:
    """Runs of several sizes, as a cluster would measure them, with an error of a percent."""
    found = [
        Sizes(hidden, micro, tensor)
        for hidden in (512, 2048, 8192)
        for micro in (1, 2, 8)
        for tensor in (1, 2, 8)
    ]
    return [
        replace(run, step_s=closed_form(run, truth) * (1.01 if index % 2 else 0.99))
        for index, run in enumerate(found)
    ]


def test_factors_that_runs_tell_are_found_and_others_stay() -> None:
    truth = scaled(CLUSTER, {"products": 0.7, "host": 1.5, "links": 0.4})
    runs = runs_of(truth)
    fitted, held_out = runs[::2], runs[1::2]
    found = calibrate(CLUSTER, fitted, closed_form)
    assert found.before > 0.2
    assert found.after < 0.03
    assert found.left_out < 0.04
    assert found.factors["products"] == pytest.approx(0.7, rel=0.05)
    assert found.factors["links"] == pytest.approx(0.4, rel=0.1)
    assert found.factors["network"] == 1.0
    assert set(found.unmoved) == {"memory", "network", "starting"}
    errors = [abs(closed_form(run, found.cluster) / run.step_s - 1) for run in held_out]
    assert sum(errors) / len(errors) < 0.03
    assert found.cluster.name == CLUSTER.name


def test_runs_that_agree_with_the_cluster_leave_it_as_it_is() -> None:
    found = calibrate(CLUSTER, runs_of(CLUSTER), closed_form)
    assert all(factor == pytest.approx(1.0, abs=0.03) for factor in found.factors.values())


def test_too_few_measured_runs_are_refused() -> None:
    runs = [replace(run, step_s=0.0) for run in runs_of(CLUSTER)]
    with pytest.raises(ValueError, match="0 runs with a measured step"):
        calibrate(CLUSTER, runs, closed_form)


MODEL = "gpt:layers=1,hidden=64,heads=2,vocab=64,seq=16,batch=8"


def rows(*cells: tuple[str, object]) -> str:
    return "\n".join(["plan,model,step_ms", *(f'"{plan}","{MODEL}",{ms}' for plan, ms in cells)])


def test_command_refines_a_preset_by_steps_of_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = captured(MODEL).program
    sw.plan(program, "data=2,tensor=2").save(tmp_path / "plan.json")
    table, out = tmp_path / "runs.csv", tmp_path / "mine.yaml"
    table.write_text(rows(("data=2", 2), ("plan.json", 3), ("data=4", 1.5)))
    assert main(["calibrate", "dgx-a100", str(table), "-o", str(out)]) == 0
    assert "over 3 runs" in capsys.readouterr().out
    assert load_cluster(out).devices.keys() == CLUSTER.devices.keys()


def test_plan_of_another_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = captured(SPECS["unet"]).program
    sw.plan(other, "data=2,tensor=2").save(tmp_path / "plan.json")
    table, out = tmp_path / "runs.csv", str(tmp_path / "mine.yaml")
    table.write_text(rows(("data=2", 2), ("data=4", 1.5), ("plan.json", 3)))
    assert main(["calibrate", "dgx-a100", str(table), "-o", out]) == 1
    assert "runs.csv:4: the plan names parameter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model,mesh,step_ms\n", ":1: the header lacks the column 'plan'"),
        (rows(("data=2", "nan")), ":2: step_ms is 'nan'"),
        (
            rows(("data=2", 1), ("", 1)),
            ":3: the row has too many cells, or its model or plan is empty",
        ),
        (rows(("data=2", 1), ("data=4", 1), ("tensr", 1)), ":4: mesh 'tensr'"),
    ],
)
def test_row_that_cannot_be_read_is_named(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs.csv").write_text(text)
    out = str(tmp_path / "mine.yaml")
    assert main(["calibrate", "dgx-a100", str(tmp_path / "runs.csv"), "-o", out]) == 1
    assert said in capsys.readouterr().err
