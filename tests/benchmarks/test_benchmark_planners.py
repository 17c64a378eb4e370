"""The planners' benchmark: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest

from shardweave.benchmarks.amp_data import planner_runs
from shardweave.benchmarks.planners import main


def test_amp_prints_correlations_and_writes_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["amp", "--setup", "homogeneous", "--quick", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "literal: Spearman 0.93" in printed
    assert "corrected: Spearman 0.9" in printed
    report = json.loads(out.read_text())
    assert report["num_runs"] == len(report["runs"]) == 53
    assert report["num_succeeded"] == 47


@pytest.mark.parametrize("setup", ["het_cluster", "het_model"])
def test_amp_takes_a_file_of_another_setup(
    setup: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["# made from the published estimates", "setup,mbs,tmp,dp,pp,ds_partition,measured_s"]
    for run in planner_runs(setup):
        one, cuts = run.strategy, " ".join(map(str, run.cuts))
        sizes = f"{one.micro_batch},{one.tensor},{one.data},{one.pipeline}"
        lines.append(f"{setup},{sizes},{cuts},{run.published_s}")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines))
    assert main(["amp", "--setup", setup, "--measured", str(path), "--quick"]) == 0
    assert "literal: Spearman 1.0000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("setup,mbs\nhomogeneous,1\n", "there is no column 'dp'; expected"),
        ("setup,mbs,tmp,dp,pp,measured_s\nother,1,1,16,1,1.0\n", "found no run of setup"),
        ("mbs,tmp,dp,pp,measured_s\n1,1,8,1,1.0\n", "found 8 devices, expected the 16"),
        ("mbs,tmp,dp,pp,measured_s\n1,1,16,1,inf\n", "found 0 successful runs"),
        ("mbs,tmp,dp,pp,measured_s\n1,1,16,1,fast\n", "write numbers"),
    ],
)
def test_amp_says_what_is_wrong_with_a_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    assert main(["amp", "--measured", str(path), "--quick"]) == 2
    assert message in capsys.readouterr().err


def test_amp_says_that_a_file_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["amp", "--measured", "no-such-file.csv"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_axonn_prints_its_grid_beside_the_published_systems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["axonn", "--quick", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "GPT-5B" in printed
    assert "DeepSpeed-3D" in printed
    report = json.loads(out.read_text())
    (row,) = report["rows"]
    assert row["published"] == {"Megatron-LM": 37, "ZeRO-3": 55, "DeepSpeed-3D": 33, "AxoNN": 67}
    # Products reach 80% of the peak, and the formula counts recomputed ones that are kept here.
    assert 30 < row["utilisation_pct"] < 90
    assert report["gpt20b_32_gpus"]["rank_ms"] < 100
