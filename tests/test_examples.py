"""The examples run as a reader would run them, each in a folder of its own, and say what is so."""

from __future__ import annotations

import io
import json
import re
import runpy
import shutil
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import shardweave as sw
from shardweave.benchmarks.loss_curve import distance
from shardweave.driver.cli import main
from shardweave.passes.prepare.cse import CsePass
from shardweave.passes.registry import PASSES
from shardweave.tests.pages import difference
from shardweave.tests.real_step import annotated, assert_equals_eager, save

FOLDER = Path(sw.__file__).parent / "examples"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def output_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """What an example prints, in this process: in its own it would import torch again.

    Any warning fails it; passes that it registers are forgotten.
    """

    def run(name: str) -> str:
        printed = io.StringIO()
        monkeypatch.chdir(tmp_path)
        with redirect_stdout(printed), patch.dict(PASSES), warnings.catch_warnings():
            warnings.simplefilter("error")
            runpy.run_path(str(FOLDER / name), run_name="__main__")
        return printed.getvalue()

    return run


def test_own_pass_hides_communication(output_of: Callable[[str], str]) -> None:
    before, after = re.findall(r"([\d.]+) ms of communication", output_of("own_pass.py"))
    assert 0 < float(after) < float(before)


def test_own_pass_has_thirty_lines_at_most() -> None:
    text = (FOLDER / "own_pass.py").read_text()
    body = text[text.index("from dataclasses") : text.index("if __name__")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 30


def test_own_pass_is_loaded_by_the_command_line_and_exact(tmp_path: Path, capsys: Captured) -> None:
    path, out = save(annotated(), tmp_path), tmp_path / "late.mlir"
    passes = "preset:sub-batches,start-collectives,late-waits"
    own = str(FOLDER / "own_pass.py")
    with patch.dict(PASSES):
        assert main(["opt", str(path), "--load", own, "--passes", passes, "-o", str(out)]) == 0
        assert "3 of which" not in capsys.readouterr().out
        assert main(["opt", "--load", own, "--list-passes"]) == 0
    assert "late-waits" in capsys.readouterr().out
    program = sw.load(out)
    blocking = sw.run_passes(annotated(), "preset:sub-batches,start-collectives")
    assert program != blocking
    # What is still under way when the backward pass begins is kept for it.
    assert replace(program.stats(), kept_bytes=None) == replace(blocking.stats(), kept_bytes=None)
    assert_equals_eager(program)


def test_name_of_a_pass_cannot_be_taken() -> None:
    class OtherPass(CsePass):
        pass

    with pytest.raises(ValueError, match="there is a pass 'cse' already"):
        sw.register_pass(OtherPass)


def test_file_to_load_must_be_one(tmp_path: Path, capsys: Captured) -> None:
    assert main(["opt", "--load", str(tmp_path), "--list-passes"]) == 1
    assert "expected a Python file that registers passes" in capsys.readouterr().err


def test_plan_edited_by_hand_runs_with_fewer_all_reduces(
    output_of: Callable[[str], str],
) -> None:
    lines = output_of("edit_plan.py").splitlines()
    counts = [
        int(re.findall(r": (\d+) all-reduces over tensor, equal to eager", x)[0]) for x in lines
    ]
    assert len(counts) == 2
    assert counts[1] < counts[0]


def test_two_plans_are_compared(output_of: Callable[[str], str]) -> None:
    out = output_of("compare_plans.py")
    assert "0 parameters differ" in out
    assert re.search(r"^activations '.*': not given -> \[", out, re.M)
    rows = dict(re.findall(r"^([\w-]+) +([\d.]+) ms", out, re.M))
    assert set(rows) == {"megatron", "sequence-parallel", "replicated"}


def losses_of(text: str) -> dict[int, float]:
    return {
        int(n): float(loss) for n, loss in re.findall(r"^step (\d+)/\d+  loss ([\d.]+)", text, re.M)
    }


def trained(
    output_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, name: str, *options: str
) -> str:
    """What a training of a few small steps prints."""
    sizes = ["--steps", "4", "--show-every", "1", "--save-every", "2", "--batch", "8"]
    monkeypatch.setattr("sys.argv", [name, *sizes, *options])
    return output_of(name)


def test_training_has_the_losses_of_its_eager_twin_and_goes_on_where_it_was(
    output_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # In bfloat16 the two drift apart by what either's rounding is, in float32 by less than is shown.
    no_dropout = ("--dropout", "0", "--precision", "")
    whole = ("--checkpoint", "whole.pt")
    eager = trained(output_of, monkeypatch, "train_eager.py", *no_dropout, *whole)
    text = trained(output_of, monkeypatch, "train.py", *no_dropout, "--cluster", "oases-3090")
    losses = losses_of(text)
    assert list(losses) == [1, 2, 3, 4]
    assert losses == pytest.approx(losses_of(eager), abs=1.5e-4)
    assert losses[4] < losses[1]
    assert text.count("validation loss") == eager.count("validation loss") == 2
    assert text.count("(simulated ") == 2 * 4
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-4")
    again = trained(output_of, monkeypatch, "train.py", *no_dropout)
    assert again.startswith("starting after step 2 of 4\n")
    assert losses_of(again) == {step: losses[step] for step in (3, 4)}
    assert losses_of(trained(output_of, monkeypatch, "train.py", *no_dropout)) == {}


def test_training_differs_from_its_eager_twin_in_a_few_lines() -> None:
    lines = difference("examples/train_eager.py", "examples/train.py").splitlines()
    counts = {sign: sum(line.startswith(sign) for line in lines) for sign in "-+"}
    assert counts["-"] <= 25
    assert counts["+"] <= 30
    assert len((FOLDER / "train.py").read_text().splitlines()) <= 150


def test_sharded_losses_stay_as_near_to_eager_as_rounding_explains() -> None:
    results = FOLDER.parent / "benchmarks" / "results"
    for name in ("loss_curve", "loss_curve_dropout"):
        losses = json.loads((results / f"{name}.json").read_text())["losses"]
        assert {len(curve) for curve in losses.values()} == {200}
        assert distance(losses, "sharded")[0] < 0.001
    kills = json.loads((results / "kills.json").read_text())
    assert kills["problems"] == []
    assert kills["final_loss"] == kills["final_loss_left_alone"]


@pytest.mark.slow
def test_training_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    from shardweave.benchmarks import kills

    result = tmp_path / "kills.json"
    with patch("sys.argv", ["kills.py", "--quick", "--json", str(result)]):
        assert kills.main() == 0
    found = json.loads(result.read_text())
    assert len(found["kills"]) == 2
    assert found["final_loss"] == found["final_loss_left_alone"]


@pytest.mark.slow
def test_losses_on_three_meshes_are_those_of_eager(tmp_path: Path) -> None:
    from shardweave.benchmarks import loss_curve

    result = tmp_path / "curve.json"
    with patch(
        "sys.argv", ["loss_curve.py", "--quick", "--dropout", "0.05", "--json", str(result)]
    ):
        assert loss_curve.main() == 0
    losses = json.loads(result.read_text())["losses"]
    assert losses["sharded"] == pytest.approx(losses["eager"], abs=2e-3)
    assert list(losses["sharded"]) == list(losses["eager"])
