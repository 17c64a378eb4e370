"""Plain `xdsl-opt` reads, prints and rewrites our programs."""

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from xdsl.xdsl_opt_main import xDSLOptMain

from shardweave.driver.models.gpt import GPTConfig, build_gpt
from shardweave.driver.universe import SHARDWEAVE_UNIVERSE, name_in_xdsl
from shardweave.ir.capture.capture import capture
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.passes.registry import PASSES
from shardweave.tests.warm import run_warm


def xdsl_opt(*arguments: str) -> str:
    """What the tool prints, run in this process: importing torch takes seconds."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        xDSLOptMain(args=arguments).run()
    return printed.getvalue()


def xdsl_opt_in_a_process(*arguments: str) -> str:
    """What the tool prints, run as its users do."""
    command = [sys.executable, "-m", "xdsl.tools.xdsl_opt", *arguments]
    done = run_warm(command, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def program() -> Program:
    config = GPTConfig(layers=1, hidden=16, heads=2, vocab=32, seq=8, batch=2)
    module, batch = build_gpt(config)
    return capture(module, kwargs=batch)


@pytest.fixture
def file(program: Program, tmp_path: Path) -> Path:
    path = tmp_path / "step.mlir"
    program.save(path)
    return path


@pytest.mark.parametrize("form", [(), ("--print-op-generic",), ("--print-debuginfo",)])
def test_text_printed_by_xdsl_opt_parses_back_to_an_equal_program(
    form: tuple[str, ...], program: Program, file: Path
) -> None:
    assert Program.parse(xdsl_opt(str(file), *form)) == program


def test_xdsl_opt_runs_our_pass_under_a_name_that_its_own_do_not_have(
    program: Program, file: Path
) -> None:
    found = Program.parse(xdsl_opt_in_a_process(str(file), "--passes", "shardweave-dce"))
    assert found == program


def test_xdsl_opt_reads_programs_with_kernels(program: Program, tmp_path: Path) -> None:
    fused = run_passes(program, "fuse-kernels")
    fused.save(tmp_path / "fused.mlir")
    assert "kernel.fused" in str(fused)
    assert Program.parse(xdsl_opt(str(tmp_path / "fused.mlir"))) == fused


def test_every_pass_is_offered_under_one_name() -> None:
    assert set(SHARDWEAVE_UNIVERSE.all_passes) == {name_in_xdsl(name) for name in PASSES}
    for name, load in SHARDWEAVE_UNIVERSE.all_passes.items():
        assert load().name == name
