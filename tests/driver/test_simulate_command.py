"""`shardweave simulate`: what it prints and writes, and how it answers bad input."""

import json
from pathlib import Path

import pytest

from shardweave.driver.cli import main
from shardweave.tests.ir_text import step
from shardweave.tests.planners.small_clusters import local

Captured = pytest.CaptureFixture[str]

TEXT = """
    param %w : @
    input %x : @
    %a = aten.mm(%x, %w) : @
    %f = dist.start_all_reduce(%a, axes = ["tensor"]) : @
    %c = aten.mm(%x, %a) : @
    %b = dist.wait(%f) : @
    %d = aten.mm(%b, %c) : @
    output %d
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "step.mlir"
    local(TEXT).save(path)
    return str(path)


def test_summary_trace_and_picture_come_out(file: str, tmp_path: Path, capsys: Captured) -> None:
    trace, picture = tmp_path / "t.json", tmp_path / "t.png"
    options = ["--trace", str(trace), "--plot", str(picture)]
    assert main(["simulate", file, "--cluster", "testbed:rate=100mbit", *options]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 devices of testbed:rate=100mbit" in out
    assert "lower bound" in out
    assert f"wrote {trace}" in out
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.stat().st_size > 1000


def test_json_holds_the_numbers_and_nothing_else(file: str, capsys: Captured) -> None:
    assert main(["simulate", file, "--cluster", "testbed", "--optimizer", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["time_s"] >= found["lower_bound_s"] > 0
    assert found["communication_s"].keys() == {"tensor"}
    assert found["memory_parts"]["optimizer"] == 2 * 40_000
    assert found["peak_bytes"] == sum(found["memory_parts"].values())


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("testbet", "did you mean 'testbed'"),
        (
            "missing.yaml",
            "cannot be read: No such file or directory; give the path of a file",
        ),
        ("testbed:speed=3", "use rate=RATE"),
    ],
)
def test_unknown_cluster_is_one_line(file: str, cluster: str, says: str, capsys: Captured) -> None:
    assert main(["simulate", file, "--cluster", cluster]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_cluster_file_with_a_missing_field_says_what_to_write(
    file: str, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: c\ndevices: {}\nnodes: [{device: a}]\n")
    assert main(["simulate", file, "--cluster", str(path)]) == 1
    err = capsys.readouterr().err
    assert f"{path}: nodes[0]: field 'devices' is missing; write" in err


def test_plan_with_stages_is_simulated_on_the_captured_program(
    tmp_path: Path, capsys: Captured
) -> None:
    model = "gpt:layers=2,hidden=16,heads=4,vocab=32,seq=8,batch=8"
    program, plan = str(tmp_path / "step.mlir"), str(tmp_path / "plan.json")
    assert main(["capture", model, "-o", program]) == 0
    stages = [["wte", "wpe", "h.0"], ["h.1", "ln_f", "head"]]
    pipeline = {"stages": stages, "micro_batches": 4, "schedule": "gpipe"}
    mesh = {"pipeline": 2, "data": 2}
    Path(plan).write_text(json.dumps({"mesh": mesh, "pipeline": pipeline, "zero": 1}))
    trace, picture = tmp_path / "t.json", tmp_path / "t.png"
    options = ["--cluster", "perlmutter:nodes=1", "--plan", plan]
    outputs = ["--trace", str(trace), "--plot", str(picture)]
    assert main(["simulate", program, *options, *outputs]) == 0
    out = capsys.readouterr().out
    assert "2 stages, 4 micro-batches, gpipe" in out
    assert "stage 1" in out
    assert "tokens/s" in out
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.stat().st_size > 1000
    assert main(["simulate", program, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, _ = found["stages"]
    # Both are stored in shards; what is gathered for the step is among its activations.
    assert first["memory_parts"]["optimizer"] == 2 * first["memory_parts"]["parameters"]
    assert found["time_s"] >= found["lower_bound_s"]


def test_plan_is_for_a_captured_program(file: str, tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    assert main(["simulate", file, "--cluster", "testbed", "--plan", str(plan)]) == 1
    assert "already partitioned for one rank; with --plan give" in capsys.readouterr().err


def test_global_program_on_a_cluster_gives_a_hint(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "step.mlir"
    step("input %x : tensor<8x4xf32>\n%y = aten.tanh(%x) : tensor<8x4xf32>\noutput %y").save(path)
    assert main(["simulate", str(path), "--cluster", "testbed"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("note: the program is global, so that one device of the cluster runs all")
    assert "preset:partition" in err
    assert "--plan" in err


def test_local_program_gives_no_hint(file: str, capsys: Captured) -> None:
    assert main(["simulate", file, "--cluster", "testbed"]) == 0
    assert "note:" not in capsys.readouterr().err
