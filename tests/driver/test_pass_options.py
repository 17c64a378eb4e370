"""`shardweave opt` on a real captured model: what its options show of the passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

import shardweave as sw
from shardweave.driver.cli import main
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassPipeline
from shardweave.tests.real_step import annotated, local, save

Captured = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class SwapGradientsPass(ModulePass):
    """Returns the gradients of q and k, which have one shape, in each other's place."""

    name = "swap-gradients"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        program = Program(op)
        at = {slot.name: i for i, slot in enumerate(program.results) if slot.kind == "grad"}
        q, k = at["h.0.attn.q.weight"], at["h.0.attn.k.weight"]
        operands = program.return_op.operands
        operands[q], operands[k] = operands[k], operands[q]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(save(annotated(), tmp_path))


def test_preset_runs_and_its_spec_can_be_printed(file: str, capsys: Captured) -> None:
    assert main(["opt", "--passes", "preset:oases", "--print-pipeline"]) == 0
    spec = capsys.readouterr().out.strip()
    assert spec == str(PassPipeline("preset:oases"))
    assert main(["opt", file, "--passes", spec]) == 0
    by_spec = capsys.readouterr().out
    assert main(["opt", file, "--passes", "preset:oases"]) == 0
    assert capsys.readouterr().out == by_spec
    assert Program.parse(by_spec) == local("preset:oases")


def test_changes_are_printed_and_nothing_for_passes_without(file: str, capsys: Captured) -> None:
    assert main(["opt", file, "--passes", "dce,cse,cse", "--print-after-change"]) == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if line.startswith("// after")] == ["// after cse"]
    assert Program.parse(out) == PassPipeline("cse").run(annotated())
    assert len(err) < len(out) / 2


def test_program_is_printed_before_and_after_a_pass(file: str, capsys: Captured) -> None:
    options = ["--print-before", "cse", "--print-after", "cse"]
    assert main(["opt", file, "--passes", "cse,dce", *options]) == 0
    out, err = capsys.readouterr()
    _, before, after = err.split("// ")
    after = after[: after.index("2 passes")]
    assert Program.parse(before.removeprefix("before cse\n")) == annotated()
    assert Program.parse(after.removeprefix("after cse\n")) == Program.parse(out)


def test_program_is_printed_after_each_pass(file: str, capsys: Captured) -> None:
    assert main(["opt", file, "--passes", "cse,dce", "--print-after-all"]) == 0
    out, err = capsys.readouterr()
    _, cse, dce = err[: err.index("2 passes")].split("// after ")
    assert Program.parse(cse.removeprefix("cse\n")) == PassPipeline("cse").run(annotated())
    assert Program.parse(dce.removeprefix("dce\n")) == Program.parse(out)


def test_times_and_op_counts_are_a_table(file: str, capsys: Captured) -> None:
    assert main(["opt", file, "--passes", "dce,cse", "--time-passes"]) == 0
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.split()[-1] for line in lines] == ["pass", "dce", "cse", "all"]
    assert [line.split()[3] for line in lines[1:3]] == ["-", lines[2].split()[3]]
    assert int(lines[2].split()[3]) < 0


def test_dump_and_stop(file: str, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "dump"
    options = ["--dump-dir", str(folder), "--stop-after", "insert-collectives"]
    assert main(["opt", file, "--passes", "preset:partition", *options]) == 0
    assert [path.name for path in sorted(folder.iterdir())] == [
        "000-input.mlir",
        "001-split-addmm.mlir",
        "002-split-axes.mlir",
        "003-block-experts.mlir",
        "004-add-pending-sums.mlir",
        "005-propagate-shardings.mlir",
        "006-insert-collectives.mlir",
    ]
    out = capsys.readouterr().out
    assert Program.parse(out) == Program.load(folder / "006-insert-collectives.mlir")


def test_verification_in_between_can_be_left_out(file: str, capsys: Captured) -> None:
    assert main(["opt", file, "--passes", "preset:partition", "--no-verify-each"]) == 0
    assert Program.parse(capsys.readouterr().out) == local()


def test_failing_pass_leaves_the_program_before_it_only_where_it_is_asked_to(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = ["opt", file, "--passes", "cse,preset:partition,preset:partition"]
    assert main(command) == 1
    first, note = capsys.readouterr().err.splitlines()
    assert first.startswith("error: pass 'split-addmm': ")
    assert note == "run with --dump-dir FOLDER to keep the program before pass 'split-addmm'"
    assert list(tmp_path.iterdir()) == [Path(file)]
    assert main([*command, "--dump-dir", str(tmp_path)]) == 1
    _, note = capsys.readouterr().err.splitlines()
    assert note.startswith("the program before pass 'split-addmm' is in ")
    assert Program.load(note.rpartition(" is in ")[2]) == PassPipeline("cse,preset:partition").run(
        annotated()
    )


def test_pass_that_changes_a_result_leaves_the_program_before_it(tmp_path: Path) -> None:
    with pytest.raises(sw.ValidationError, match="pass 'swap-gradients' changed") as error:
        sw.run_passes(local(), ["cse", SwapGradientsPass()], validate=True, dump_dir=tmp_path)
    assert error.value.__notes__ == [
        f"the program before pass 'swap-gradients' is in {tmp_path / '001-cse.mlir'}"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stop-after", "merge"], "pass 'merge' is not in the pipeline; it has cse, dce."),
        (["--print-before", "merge"], "pass 'merge' is not in the pipeline; it has cse, dce."),
        (["--dump-dir", __file__], "is a file, but a folder is needed"),
    ],
)
def test_wrong_options_are_answered_before_any_pass_runs(
    file: str, options: list[str], message: str, capsys: Captured
) -> None:
    assert main(["opt", file, "--passes", "cse,dce", *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
