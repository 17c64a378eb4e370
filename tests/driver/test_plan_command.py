"""`shardweave plan`: plans that run equal to eager, and what it says, compares and draws."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardweave.benchmarks import mixed_speeds
from shardweave.driver import model_size
from shardweave.driver.cli import main
from shardweave.driver.models.models import example_to_trace
from shardweave.driver.report.plan import print_candidates
from shardweave.ir.torch_private import FakeTensor
from shardweave.planners.cost.cluster_file import save_cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import seconds_text
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, Pipeline, Predicted
from shardweave.tests.marks import slow, slow_where
from shardweave.tests.zoo import SPECS

Captured = pytest.CaptureFixture[str]

MODEL = "gpt:layers=2,hidden=32,heads=4,vocab=32,seq=8,batch=8"
CLUSTER = "perlmutter:nodes=1"
OPTIONS = {
    "megatron": ["--mesh", "data=2,tensor=2"],
    "replicated": ["--mesh", "data=2"],
    "amp": ["-O", "max_stages=1"],
    "auto": ["--mesh", "data=2,tensor=2", "-O", "simulate=4", "-O", "propose=false"],
    "oases": ["--mesh", "data=2,tensor=2"],
    "axonn": [],
    "oppa": ["--mesh", "data=2,tensor=2", "-O", "trials=7"],
}


def planned(tmp_path: Path, *options: str, model: str = MODEL, cluster: str = CLUSTER) -> Plan:
    file = tmp_path / "plan.json"
    assert main(["plan", model, "--cluster", cluster, *options, "-o", str(file)]) == 0
    return Plan.load(file)


def check_runs(tmp_path: Path, model: str, planner: str, capsys: Captured) -> None:
    """Plan, then run the file on its own mesh against eager."""
    planned(tmp_path, "--planner", planner, *OPTIONS[planner], model=model)
    run = ["run", model, "--plan", str(tmp_path / "plan.json"), "--check"]
    assert main([*run, "--backend", "reference", "--dtype", "float64"]) == 0
    assert "equal to eager" in capsys.readouterr().out


@pytest.mark.parametrize("planner", slow_where(lambda name: name not in ("auto", "oases"), OPTIONS))
def test_plan_of_each_planner_runs_equal_to_eager(
    planner: str, tmp_path: Path, capsys: Captured
) -> None:
    check_runs(tmp_path, MODEL, planner, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("planner", OPTIONS)
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "unet"])
def test_plan_of_each_planner_for_each_model_runs_equal_to_eager(
    name: str, planner: str, tmp_path: Path, capsys: Captured
) -> None:
    check_runs(tmp_path, SPECS[name], planner, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--mesh", "pipeline=2,data=2"],
        ["--mesh", "pipeline=4"],
        ["--mesh", "pipeline=2,data=2", "-O", "zero=1"],
        ["--mesh", "pipeline=2,data=2", "-O", "zero=3"],
        ["--mesh", "pipeline=4", "-O", "anneal=50"],
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5"])
def test_plans_of_stages_on_mixed_devices_run_equal_to_eager(
    name: str, options: list[str], tmp_path: Path, capsys: Captured
) -> None:
    cluster = mixed_speeds.slowed(find_cluster("testbed"))
    save_cluster(cluster, tmp_path / "mixed.yaml")
    more = ["--planner", "amp", *options]
    plan = planned(tmp_path, *more, model=SPECS[name], cluster=str(tmp_path / "mixed.yaml"))
    assert plan.num_stages > 1
    run = ["run", SPECS[name], "--plan", str(tmp_path / "plan.json"), "--check"]
    assert main([*run, "--backend", "reference", "--dtype", "float64"]) == 0
    assert "equal to eager" in capsys.readouterr().out


def test_plan_of_stages_explains_itself_and_is_run(tmp_path: Path, capsys: Captured) -> None:
    picture = tmp_path / "plans.png"
    options = ["--planner", "amp", "--mesh", "pipeline=2,data=2", "--explain", "--plot"]
    plan = planned(tmp_path, *options, str(picture))
    out = capsys.readouterr().out
    for word in (
        "compute",
        "data",
        "exposed",
        "bubble",
        "tokens/s",
        "chosen",
        "next best",
        "slower",
    ):
        assert word in out
    assert plan.num_stages == 2
    assert picture.stat().st_size > 1000
    options = ["--plan", str(tmp_path / "plan.json"), "--backend", "reference"]
    assert main(["run", MODEL, *options, "--dtype", "float64", "--check"]) == 0
    assert "equal to eager" in capsys.readouterr().out


def test_columns_of_many_axes_keep_their_names() -> None:
    axes = (
        "data",
        "tensor",
        "replica,data",
        "replica,tensor",
        "data,tensor",
        "replica,data,tensor",
    )
    kinds: list[str] = ["parameters", "gradients", "optimizer", "activations"]
    parts = dict.fromkeys(kinds, 1e9)
    found = Predicted(1.0, 0.5, dict.fromkeys(axes, 0.1), 0.2, 0.1, parts, 8e9, "simulated")
    out = io.StringIO()
    print_candidates([Candidate("one", found)], out)
    assert all(name in out.getvalue() for name in (*axes, *parts, "exposed", "source"))


def test_two_planners_and_a_plans_file_stand_side_by_side(tmp_path: Path, capsys: Captured) -> None:
    planned(tmp_path, "--planner", "replicated", "--mesh", "data=2")
    other = str(tmp_path / "plan.json")
    capsys.readouterr()
    options = ["--cluster", CLUSTER, "--mesh", "data=2,tensor=2", "--compare", f"megatron,{other}"]
    assert main(["plan", MODEL, *options]) == 0
    out = capsys.readouterr().out
    assert "data=2,tensor=2" in out
    assert "simulated" in out
    assert "communication: tensor" in out
    assert "- parameters 'wte.weight': [{\"tensor\"}, {}]" in out
    assert f"note: {other}: the mesh data=2 uses 2 of the 4 devices of cluster" in out
    assert out.count("stay idle") == 1


def test_program_from_a_file_plans_like_its_model_and_prints_json(
    tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "step.mlir"
    assert main(["capture", MODEL, "-o", str(file)]) == 0
    capsys.readouterr()
    options = ["--cluster", CLUSTER, "--planner", "megatron"]
    assert main(["plan", str(file), *options, "-o", "-"]) == 0
    found = Plan.from_json(capsys.readouterr().out)
    assert found.mesh == {"data": 1, "tensor": 4}
    assert found.predicted is not None
    assert found.predicted.source == "simulated"


def test_rule_on_a_mesh_needs_no_cluster_and_others_say_that_they_do(
    tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "plan.json"
    options = ["--planner", "megatron", "--mesh", "tensor=2", "-o", str(file)]
    assert main(["plan", MODEL, *options]) == 0
    assert Plan.load(file).mesh == {"tensor": 2}
    assert main(["plan", "no_such_file:model"]) == 1
    assert "planner 'auto' needs a cluster; give" in capsys.readouterr().err


def test_update_that_a_plan_names_is_counted_by_every_command(
    tmp_path: Path, capsys: Captured
) -> None:
    plan = planned(tmp_path, *OPTIONS["auto"], "--update", "adamw")
    assert plan.update == "AdamW"
    assert plan.predicted is not None
    assert plan.predicted.update_s > 0
    assert plan.predicted.memory_bytes["optimizer"] == 2 * plan.predicted.memory_bytes["parameters"]
    program, file = str(tmp_path / "program.mlir"), str(tmp_path / "plan.json")
    assert main(["capture", MODEL, "-o", program]) == 0
    capsys.readouterr()
    options = [program, "--cluster", CLUSTER, "--plan", file]
    assert main(["simulate", *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["time_s"] == plan.predicted.time_s
    assert said["update"]["time_s"] == plan.predicted.update_s
    assert main(["report", *options, "-o", str(tmp_path / "page.html")]) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[1].startswith(f"iteration      {seconds_text(plan.predicted.time_s)} ")
    assert f"update         {seconds_text(plan.predicted.update_s)} of AdamW" in page
    assert main(["simulate", *options, "--json", "--update", "SGD"]) == 0
    assert json.loads(capsys.readouterr().out)["update"]["state_bytes"] == 0


def test_plan_says_how_parameters_are_stored_where_none_is_cut(capsys: Captured) -> None:
    for options, said in (
        (["--planner", "replicated", "--mesh", "data=2"], "every parameter replicated"),
        (["--planner", "megatron", "--mesh", "tensor=2"], "21 parameters sharded"),
    ):
        assert main(["plan", MODEL, *options]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith(f"=2: {said}")


def test_plan_beyond_the_memory_is_shown_and_not_written(tmp_path: Path, capsys: Captured) -> None:
    small, file = tmp_path / "small.yaml", tmp_path / "plan.json"
    cluster = find_cluster(CLUSTER)
    device = replace(cluster.devices["A100-40GB"], memory_bytes=1000)
    save_cluster(replace(cluster, devices={device.name: device}), small)
    options = ["--cluster", str(small), "--planner", "megatron", "-o", str(file)]
    assert main(["plan", MODEL, *options]) == 1
    found = capsys.readouterr()
    assert "simulated step" in found.out
    assert "the plan of 'megatron' needs " in found.err
    assert "than its fullest device has, and is not written" in found.err
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--planner", "none"], "there is no planner 'none'; use one of amp"),
        (["--cluster", "moon"], "cluster 'moon' is neither a preset nor a file"),
        (["-O", "x=1"], "planner 'auto' has no option 'x'"),
        (["--fix", "tensr=2"], "fix: found 'tensr=2', expected DIMENSION=VALUE; did you mean"),
        (["--planner", "megatron", "--fix", "tensor=2"], "'megatron' has no option 'fix'"),
        (["--fix", "tensor=2", "-O", "fix=zero=1"], "option 'fix' is given both by -O and"),
        (
            ["--planner", "amp", "-O", "max_stages=x"],
            "'max_stages' is 'x', expected a whole number",
        ),
        (["-O", "x"], "option 'x' in 'x' is not of the form key=value"),
        (["--plot", "x.xyz"], "its suffix is not a picture format; use one of .png"),
        (
            ["--compare", "amp,axonn", "-o", "x.json"],
            "--compare compares two plans and writes none",
        ),
        (
            ["--mesh", "stages=4"],
            "the mesh has an axis 'stages', but planner 'auto' plans the axes replica,",
        ),
        (["--mesh", "stages=4"], "did you mean 'stage'?"),
        (["--compare", "amp,axonn", "--explain"], "leave --explain out, or plan without --compare"),
        (["--compare", "amp,axonn", "--planner", "oppa"], "leave --planner out, or plan without"),
        (["--compare", "a.json,b.json", "--fix", "zero=1"], "leave out fix, which are options of"),
        (["--compare", "amp"], "must name two planners or plan files"),
        (["--compare", "amp,none.json"], "'none.json' is neither a planner"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(
    options: list[str], expected: str, capsys: Captured
) -> None:
    assert main(["plan", MODEL, "--cluster", CLUSTER, *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert expected in error


def test_rules_are_compared_without_a_cluster(capsys: Captured) -> None:
    options = ["--mesh", "data=2,tensor=2", "--compare", "megatron,replicated"]
    assert main(["plan", MODEL, *options]) == 0
    assert "sharded parameters" in capsys.readouterr().out


def test_what_would_do_nothing_is_refused(tmp_path: Path, capsys: Captured) -> None:
    text = tmp_path / "step.mlir"
    assert main(["capture", MODEL, "-o", str(text)]) == 0
    rule = ["--planner", "megatron", "--mesh", "data=2,tensor=2"]
    for options, expected in (
        ([*rule, "--dtype", "bfloat16"], "--dtype bfloat16 applies to a model"),
        ([*rule, "--explain"], "--explain shows predicted step times"),
        ([*rule, "--plot", str(tmp_path / "x.png")], "--plot shows predicted step times"),
    ):
        assert main(["plan", str(text), *options]) == 1
        assert expected in capsys.readouterr().err


def test_proposal_without_stages_is_no_answer_to_a_mesh_with_them(tmp_path: Path) -> None:
    found = planned(tmp_path, "--mesh", "pipeline=2", "-O", "simulate=2")
    assert found.num_stages == 2


def test_stage_that_names_no_layer_is_refused_where_it_is_run(
    tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "staged.json"
    stages = (("wte", "wpe", "h.0"), ("h.1", "ln_f", "haed"))
    Plan(mesh={"pipeline": 2}, pipeline=Pipeline(stages)).save(file)
    assert main(["run", MODEL, "--plan", str(file), "--backend", "reference"]) == 1
    assert "stage 1 of the plan names layer 'haed', which this program" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        slow("--mesh stage=2,data=2 --fix pipeline=list"),
        "--mesh data=2,tensor=2 --fix schedule=list",
    ],
)
def test_plan_that_orders_for_a_cluster_is_checked_in_a_dtype_that_the_cluster_lacks(
    options: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_cluster(CLUSTER)
    devices = {
        name: replace(device, flops={"float32": device.flops["float32"]})
        for name, device in found.devices.items()
    }
    save_cluster(replace(found, devices=devices), "own.yaml")
    few = ["-O", "propose=false", "-O", "simulate=2"]
    plan = planned(tmp_path, *options.split(), *few, cluster="own.yaml")
    assert "list" in (plan.schedule, plan.pipeline and plan.pipeline.schedule)
    run = ["run", MODEL, "--plan", "plan.json", "--backend", "reference"]
    assert main([*run, "--dtype", "float64", "--check"]) == 0
    assert "equal to eager" in capsys.readouterr().out


def test_mesh_of_fewer_devices_than_the_cluster_has_is_noted(capsys: Captured) -> None:
    for mesh, is_said in (("data=2", True), ("data=2,tensor=2", False)):
        options = ["--planner", "megatron", "--cluster", CLUSTER, "--mesh", mesh]
        assert main(["plan", MODEL, *options]) == 0
        said = f"note: the mesh data=2 uses 2 of the 4 devices of cluster '{CLUSTER}', and the"
        assert (said in capsys.readouterr().out) is is_said


def test_large_model_to_capture_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_size, "memory_bytes", lambda: 2**20)
    example = example_to_trace("hf:llama:num_hidden_layers=2,vocab_size=100000")
    assert all(isinstance(parameter, FakeTensor) for parameter in example.module.parameters())
    small = example_to_trace("gpt:layers=1")
    assert not any(isinstance(parameter, FakeTensor) for parameter in small.module.parameters())
