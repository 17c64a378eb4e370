"""The command line: what each command does, prints and answers to bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardweave.__init__ import __version__
from shardweave.driver.checking import check
from shardweave.driver.cli import main
from shardweave.ir.program.program import Program
from shardweave.passes.presets import PREFIX, PRESETS
from shardweave.passes.registry import PASSES
from shardweave.planners.cost.quantity import bytes_text, seconds_text
from shardweave.planners.plan.plan import Plan
from shardweave.tests.warm import WarmProcess, run_warm

GPT = "gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=4"
CNN = "cnn:depth=10,channels=4,size=8,batch=4"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A captured program in a file."""
    path = tmp_path / "step.mlir"
    assert main(["capture", GPT, "-o", str(path)]) == 0
    return path


def error_of(captured: Captured) -> str:
    """The one line that a failing command says, and what it adds below: a place, a file."""
    out, err = captured.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


def test_capture_writes_a_program_and_says_what_it_holds(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "step.mlir"
    assert main(["capture", GPT, "-o", str(path)]) == 0
    program = Program.load(path)
    said = capsys.readouterr().out
    assert f"{sum(1 for _ in program.ops)} ops" in said
    assert "20 parameters" in said
    assert float(said.split(" s: ")[0].rpartition(" ")[2]) < 300
    assert f"wrote {path}" in said


def test_capture_without_a_file_prints_nothing_but_the_program(capsys: Captured) -> None:
    assert main(["capture", GPT, "--dtype", "float64"]) == 0
    out, err = capsys.readouterr()
    assert "tensor<32x16xf64>" in str(Program.parse(out))
    assert "captured" in err


def test_capture_for_evaluation_has_no_backward_pass(capsys: Captured) -> None:
    assert main(["capture", GPT, "--eval"]) == 0
    out = capsys.readouterr().out
    assert "phase = forward" in out
    assert "backward" not in out


def test_opt_runs_passes_on_a_mesh(file: Path, tmp_path: Path, capsys: Captured) -> None:
    result = tmp_path / "local.mlir"
    passes = "propagate-shardings,insert-collectives"
    given = [str(file), "--passes", passes, "--mesh", "data=2", "-o", str(result)]
    assert main(["opt", *given]) == 0
    assert Program.load(result).is_local
    assert "2 passes, 2 of which changed the program" in capsys.readouterr().out


def test_opt_reads_standard_input(file: Path) -> None:
    command = [sys.executable, "-m", "shardweave", "opt", "-"]
    done = run_warm(command, input=file.read_text(), timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert Program.parse(done.stdout) == Program.load(file)


def test_opt_lists_every_pass_with_what_it_does(capsys: Captured) -> None:
    assert main(["opt", "--list-passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    presets = sorted(PREFIX + name for name in PRESETS)
    assert [line.split()[0] for line in lines] == sorted(PASSES) + presets
    assert all(len(line.split()) > 2 for line in lines)


def test_run_in_this_process_checks_and_trains(capsys: Captured) -> None:
    assert main(["run", GPT, "--check", "--steps", "2", "--dtype", "float64"]) == 0
    out = capsys.readouterr().out
    assert "equal to eager" in out
    assert "2 steps of AdamW" in out
    assert "tokens/s" in out


def test_run_says_what_goes_between_stages(capsys: Captured) -> None:
    model = GPT.replace("layers=1", "layers=2,tie=false")
    assert main(["run", model, "--mesh", "stage=2", "--backend", "reference"]) == 0
    out = capsys.readouterr().out
    # Of each micro-batch of one sequence what the first stage gives, and its gradient; the loss.
    assert "2 stages, 4 micro-batches: 9 messages of 4.0 KiB in all between stages" in out
    assert "no collectives within stages" in out


def test_run_in_one_process_stops_at_its_time_limit(capfd: Captured) -> None:
    options = ["--backend", "reference", "--steps", "1000000", "--no-eager"]
    start_s = time.monotonic()
    assert main(["run", GPT, *options, "--time-limit", "1"]) == 1
    assert time.monotonic() - start_s < 60
    assert "did not end within the time limit of 1 s" in capfd.readouterr().err


def test_run_under_torchrun_stops_at_its_time_limit() -> None:
    options = ["run", GPT, "--steps", "1000000", "--no-eager", "--time-limit", "0.5"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "-m",
            "shardweave",
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "error: rank 0 was still running after the time limit of 0.5 s" in done.stderr


def test_run_writes_json_with_all_it_found(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "run.json"
    options = ["--mesh", "data=2,tensor=2", "--backend", "reference", "--dtype", "float64"]
    assert main(["run", GPT, *options, "--check", "--steps", "3", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["model"] == GPT
    assert (found["mesh"], found["plan"]) == ("data=2,tensor=2", "megatron")
    assert (found["dtype"], found["backend"]) == ("float64", "reference")
    assert found["equal"] is True
    assert found["loss"] == pytest.approx(found["eager_loss"], rel=1e-12)
    assert 0 <= found["max_rel_grad_error"] < 1e-9
    assert found["worst_parameter"]
    assert found["losses"] == pytest.approx(found["eager_losses"], rel=1e-9)
    assert len(found["losses"]) == 3
    assert found["step_s"] > 0
    assert found["eager_step_s"] > 0
    kinds = {(row["kind"], *row["axes"]): row["count"] for row in found["collectives"]}
    assert kinds["all_reduce", "tensor"] > 0
    assert kinds["all_reduce", "data"] > 0
    assert all(row["bytes"] > 0 for row in found["collectives"])
    assert found["notes"]


def test_run_says_what_the_plan_predicts_beside_what_it_measured(
    tmp_path: Path, capsys: Captured
) -> None:
    file, path = tmp_path / "plan.json", tmp_path / "run.json"
    planning = ["--planner", "megatron", "--mesh", "data=2", "--cluster", "testbed:nodes=2"]
    assert main(["plan", GPT, *planning, "-o", str(file)]) == 0
    capsys.readouterr()
    options = ["--plan", str(file), "--backend", "reference", "--steps", "2", "--no-eager"]
    assert main(["run", GPT, *options, "--json", str(path)]) == 0
    predicted, found = Plan.load(file).predicted, json.loads(path.read_text())
    assert predicted is not None
    lines = [line for line in capsys.readouterr().out.splitlines() if "plan predicts" in line]
    assert lines == [
        f"the plan predicts {seconds_text(predicted.time_s)} per step (simulated, without the "
        f"optimizer's update); measured {seconds_text(found['step_s'])}, with it",
        f"the plan predicts {bytes_text(predicted.peak_bytes)} of memory on the fullest device "
        f"({', '.join(predicted.memory_bytes)}); measured {bytes_text(found['peak_bytes'])} on "
        "rank 0 (the whole process)",
    ]
    assert found["predicted_step_s"] == predicted.time_s
    assert found["predicted_peak_bytes"] == predicted.peak_bytes


def test_run_checks_the_buffers_of_batch_norm(capsys: Captured) -> None:
    options = ["--mesh", "data=2", "--backend", "reference", "--dtype", "float64"]
    assert main(["run", CNN, *options, "--check"]) == 0
    assert "buffers: largest relative error" in capsys.readouterr().out


def test_run_on_real_processes_equals_eager(tmp_path: Path, capfd: Captured) -> None:
    path = tmp_path / "run.json"
    options = ["--mesh", "tensor=2", "--dtype", "float64", "--sequence-parallel"]
    limit = ["--time-limit", "300"]
    assert main(["run", GPT, *options, "--check", "--json", str(path), *limit]) == 0
    assert "2 processes" in capfd.readouterr().out
    found = json.loads(path.read_text())
    assert found["equal"] is True
    assert found["backend"] == "distributed"


def test_run_says_which_passes_of_the_plan_have_no_effect(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "plan.json"
    plan = Plan(mesh={"data": 2}, inputs={"*": '[{"data"}, {}]'})
    run = ["run", GPT, "--plan", str(file), "--backend", "reference"]
    for one in (plan, replace(plan, attention_parts=4)):
        one.save(file)
        assert main(run) == 0
        said = (
            "note: split-attention: no fused attention has keys that are sharded along the sequence"
        )
        out = capsys.readouterr().out
        assert (said in out) is (one.attention_parts > 1)
        assert out.count("note: ") == (one.attention_parts > 1)


def test_run_that_is_not_equal_fails_and_names_the_parameter(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def run_other(
        model: nn.Module, batch: Mapping[str, Tensor], how: check.EagerOptions
    ) -> check.Expected:
        eager = check.run_eager(model, batch, how)
        name = "h.0.mlp.fc_in.weight"
        return replace(eager, gradients={**eager.gradients, name: 1.01 * eager.gradients[name]})

    monkeypatch.setattr("shardweave.driver.checking.measure.run_eager", run_other)
    assert main(["run", GPT, "--check"]) == 1
    out, err = capsys.readouterr()
    assert "NOT equal to eager" in out
    assert "not equal to eager: relative error of the gradient of 'h.0.mlp.fc_in.weight'" in err
    assert "is 0.0099, bound 0.0001." in err


def test_check_takes_a_second_step_with_other_inputs(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A step that is right once, and forgets what it should leave for the next."""
    batches: list[dict[str, Tensor]] = []

    def run_other(
        model: nn.Module, batch: Mapping[str, Tensor], how: check.EagerOptions
    ) -> check.Expected:
        batches.append(dict(batch))
        eager = check.run_eager(model, batch, how)
        return replace(eager, loss=eager.loss * 1.01) if len(batches) > 1 else eager

    monkeypatch.setattr("shardweave.driver.checking.measure.run_eager", run_other)
    assert main(["run", GPT, "--check"]) == 1
    first, second = batches
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert "relative error of the loss is 0.0099" in capsys.readouterr().err


def test_bad_input_in_a_process_is_said_once_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.setattr("shardweave.driver.processes.launch.subprocess.Popen", WarmProcess)
    assert main(["run", "gpt:layers=x", "--mesh", "tensor=2", "--time-limit", "300"]) == 1
    assert "gpt: layers=x must be an integer" in error_of(capfd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["capture", "gpt:width=3"], "unknown key 'width'"),
        (["capture", GPT, "-o", "nowhere/step.mlir"], "there is no folder 'nowhere'"),
        (["run", GPT, "--json", "."], "'.' is a folder"),
        (["opt"], "opt needs the FILE to read"),
        (["opt", "no-such-file"], "'no-such-file': No such file"),
        (["opt", __file__], "test_cli.py:1:"),
        (["run", GPT, "--mesh", "4"], "found '4', expected NAME=SIZE"),
        (["capture", GPT, "--mesh", "data=2"], f"or 'shardweave run {GPT} --mesh data=2'."),
        (["run", GPT, "--plan", "nobody"], "plan 'nobody' is neither a planner"),
        (["run", GPT, "--plan", "megatorn"], "did you mean 'megatron'? "),
        (
            ["run", GPT, "--passes", "split-btach"],
            "'split-btach'; did you mean 'split-batch'? the passes",
        ),
        (["run", GPT, "--passes", "nothing"], "there is no pass 'nothing'"),
    ],
)
def test_bad_input_is_one_line_that_says_what_was_found(
    arguments: list[str], message: str, capsys: Captured
) -> None:
    assert main(arguments) == 1
    assert message in error_of(capsys)


def test_run_refuses_a_plan_that_no_model_has_before_it_starts_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("shardweave.driver.processes.launch.subprocess.Popen", None)
    Plan(mesh={"tensor": 2}).save(tmp_path / "plan.json")
    run = ["run", GPT, "--mesh", "tensor=2", "--plan"]
    for options, message in (
        (["auto"], "planner 'auto' needs a cluster"),
        ([str(tmp_path / "plan.json"), "--sequence-parallel"], "is an option of planners"),
        (["replicated", "--sequence-parallel"], "has no option 'sequence_parallel'"),
    ):
        assert main([*run, *options]) == 1
        assert message in error_of(capsys)


def test_run_refuses_blocks_in_which_the_plan_recomputes_nothing(
    tmp_path: Path, capsys: Captured
) -> None:
    Plan(mesh={"data": 2}, recompute_in=("h.0",)).save(tmp_path / "plan.json")
    assert main(["run", GPT, "--plan", str(tmp_path / "plan.json"), "--backend", "reference"]) == 1
    assert "has 'recompute_in', a list of blocks to recompute, but 'recompute' is none" in error_of(
        capsys
    )


def test_opt_says_which_pass_failed_and_why(file: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert main(["opt", str(file), "--passes", "insert-collectives"]) == 1
    assert "pass 'insert-collectives': the program has no mesh" in error_of(capsys)


def test_debug_shows_the_traceback(capsys: Captured) -> None:
    assert main(["opt", "no-such-file", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_defect_of_ours_shows_its_traceback_unasked(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(path: str) -> Program:
        raise KeyError(path)

    monkeypatch.setattr("shardweave.driver.commands.read_programs.read", fail)
    assert main(["opt", "step.mlir"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: 'step.mlir'\n")


@pytest.mark.parametrize(
    "arguments",
    [[], ["shard"], ["run"], ["run", GPT, "--steps", "-1"], ["run", GPT, "--time-limit", "0"]],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: Captured) -> None:
    assert main(arguments) == 2
    assert "usage: shardweave" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit(0)", "ended the program at .*:1 (SystemExit: 0); --debug"),
        ("import nothing_such", "failed at .*:1 (ModuleNotFoundError: No module named"),
        ("def", "failed at .*(SyntaxError: "),
    ],
)
def test_file_of_passes_that_fails_is_named(
    text: str, said: str, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    assert main(["opt", "--load", str(path), "--list-passes"]) == 1
    assert re.search(
        f"--load {path} {re.escape(said).replace(re.escape('.*'), '.*')}", error_of(capsys)
    )


def test_command_that_is_stopped_while_it_starts_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardweave.driver.cli.command_line", interrupted)
    assert main(["show"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_reader_that_has_enough_ends_the_command_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shardweave", "completion", "bash"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_help_needs_no_torch() -> None:
    code = "import sys; from shardweave.driver.cli import main; main(['--help']); "
    code += "assert 'torch' not in sys.modules and 'xdsl' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_version_is_printed(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardweave {__version__}\n"
