"""The diff command and `sw.diff`: text, JSON and HTML, numbers of both programs, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import shardweave as sw
from shardweave.driver.cli import main
from shardweave.driver.diff import diff
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.tests.browser import data_of
from shardweave.tests.real_step import PROPAGATION, annotated, local, save
from shardweave.tests.zoo import SPECS, captured, megatron

Captured = pytest.CaptureFixture[str]
PASSES = (
    "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,cse,dce,merge-collectives"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The program of each rank without and with recomputation, in files."""
    folder = tmp_path_factory.mktemp("programs")
    spec = SPECS["gpt"]
    plan = ApplyPlanPass.of(megatron(spec, "data=2,tensor=2"))
    program = run_passes(captured(spec).program, [plan, PASSES], mesh="data=2,tensor=2")
    paths = str(folder / "kept.mlir"), str(folder / "recomputed.mlir")
    program.save(paths[0])
    run_passes(program, "rematerialize").save(paths[1])
    return paths


def test_text_says_what_changed_by_layer_and_the_numbers_of_both(
    files: tuple[str, str], capsys: Captured
) -> None:
    assert main(["diff", *files, "--cluster", "perlmutter"]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "54 added, 18 changed" in lines[0]
    assert "h.0, h.1: the same 36 changes" in lines
    assert any(line.startswith("+ %native_layer_norm") for line in lines)
    assert any(line.startswith("FLOPs, recompute 0 3.932e+05 new") for line in lines)
    rows = {line.split(" ")[0:2][0] + " " + line.split(" ")[1] for line in lines if " " in line}
    assert {"simulated step", "simulated exposed", "simulated peak", "kept for"} <= rows
    assert "\x1b[" not in out


def test_colour_is_there_when_it_is_asked_for(files: tuple[str, str], capsys: Captured) -> None:
    assert main(["diff", *files, "--color", "always"]) == 0
    assert "\x1b[32m  + %" in capsys.readouterr().out


def test_only_some_changes_of_a_layer_are_shown_unless_all_are_asked_for(
    files: tuple[str, str], capsys: Captured
) -> None:
    main(["diff", *files])
    assert "... 16 more (--all shows them)" in capsys.readouterr().out
    main(["diff", *files, "--all"])
    assert "more (--all" not in capsys.readouterr().out


def test_reshards_are_shown_before_ops_that_only_got_shardings(
    tmp_path: Path, capsys: Captured
) -> None:
    before, after = save(annotated(), tmp_path), save(local(PROPAGATION), tmp_path, "after.mlir")
    assert main(["diff", str(before), str(after)]) == 0
    out = capsys.readouterr().out
    assert out.count("dist.reshard(") > 20
    assert 'why = "a sum pending over tensor meets aten.add.Tensor"' in out


def test_json_has_every_change_and_number(files: tuple[str, str], capsys: Captured) -> None:
    assert main(["diff", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert found["counts"] == {"added": 54, "changed": 18}
    assert len(found["changes"]) == 72
    assert found["groups"][0]["blocks"] == ["h.1", "h.0"]
    kept = next(n for n in found["numbers"] if n["name"] == "kept for the backward pass")
    assert kept["unit"] == "bytes"
    assert kept["after"] < kept["before"]


def test_html_is_one_page_that_needs_nothing_else(
    files: tuple[str, str], tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "diff.html"
    assert main(["diff", *files, "--html", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    html = path.read_text()
    assert re.findall(r"(?:src|href)=|<link|https?://", html.partition('id="data">')[0]) == []
    before, after = data_of(html)["moments"]
    assert (before["name"], after["name"]) == files
    assert after["counts"] == {"added": 54, "changed": 18}
    numbers = {name: row for name, *row in after["numbers"]}
    assert numbers["FLOPs, recompute"] == ["0", "3.932e+05", "new"]
    assert "simulated step" not in numbers


def test_exit_code_is_as_git_has_it(files: tuple[str, str], capsys: Captured) -> None:
    assert main(["diff", files[0], files[0], "--exit-code"]) == 0
    assert capsys.readouterr().out.startswith("the programs are the same: ")
    assert main(["diff", *files, "--exit-code"]) == 1
    assert main(["diff", *files]) == 0
    assert main(["diff", files[0], "absent.mlir", "--exit-code"]) == 2
    assert main(["diff", files[0], "absent.mlir"]) == 1
    assert capsys.readouterr().err.count("error: 'absent.mlir'") == 2


def test_both_programs_cannot_be_standard_input(capsys: Captured) -> None:
    assert main(["diff", "-", "-"]) == 1
    assert "give the path of at least one" in capsys.readouterr().err


def test_program_that_cannot_be_simulated_says_why(files: tuple[str, str]) -> None:
    program = sw.load(files[0])
    whole = captured(SPECS["gpt"]).program.clone()
    whole.set_mesh(sw.Mesh(data=2, tensor=2))
    with pytest.raises(ValueError, match="not partitioned for its mesh"):
        diff(program, whole, cluster="perlmutter")


def test_diff_from_python_prints_as_the_command_does(
    files: tuple[str, str], capsys: Captured
) -> None:
    before, after = sw.load(files[0]), sw.load(files[1])
    found = sw.diff(before, after)
    assert "h.0, h.1: the same 36 changes" in str(found)
    assert "\x1b[" not in str(found)
    assert sw.diff(before, before).is_empty


def test_programs_of_stages_are_simulated_too(tmp_path: Path, capsys: Captured) -> None:
    plan = ApplyPlanPass.of(megatron(SPECS["gpt"], "stage=2,data=2"))
    cut = f"{PASSES},cut-stages"
    staged = run_passes(captured(SPECS["gpt"]).program, [plan, cut], mesh="stage=2,data=2")
    path = str(save(staged, tmp_path))
    assert main(["diff", path, path, "--cluster", "perlmutter"]) == 0
    assert "simulated bubble" in capsys.readouterr().out
