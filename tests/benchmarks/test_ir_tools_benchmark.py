"""The benchmark of the IR's tools measures a large, valid program and says if a bound is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardweave.benchmarks.ir_tools import BOUNDS_S, NUM_OPS, bound_s, large_program, main
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import verify


def test_repeated_step_is_a_valid_program_with_layers_of_its_own() -> None:
    program = large_program(900, "gpt:layers=2,hidden=16,heads=4,vocab=32,seq=8,batch=4")
    ops = list(program.ops)
    assert 900 <= len(ops) < 1300
    assert verify(program) == []
    blocks = {name.split(".")[1] for name in program.layers() if name.startswith("h.")}
    assert blocks == {str(index) for index in range(len(blocks))}
    assert len(blocks) >= 8
    assert Program.parse(str(program)) == program


def test_bounds_are_those_of_the_full_size_and_shrink_with_it() -> None:
    assert {tool: bound_s(tool, NUM_OPS) for tool in BOUNDS_S} == BOUNDS_S
    assert bound_s("parse", NUM_OPS // 10) == 2.5


@pytest.mark.slow
def test_report_has_the_time_of_each_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    status = main(["--quick", "--json", str(path)])
    report = json.loads(path.read_text())
    bounds_s = report["bounds_s"]
    assert status == any(report["seconds"][tool] > bounds_s[tool] for tool in bounds_s)
    assert report["seconds"].keys() == BOUNDS_S.keys()
    assert report["num_ops"] >= 5_000
    printed = capsys.readouterr().out
    assert all(tool in printed for tool in BOUNDS_S)
