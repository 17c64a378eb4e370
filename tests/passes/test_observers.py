"""Observers on a real captured model: times, changes, programs, numbered files, failures."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.program.program import Program
from shardweave.passes.observers import (
    DumpFiles,
    Observers,
    PassWatch,
    PrintChanges,
    PrintPrograms,
)
from shardweave.passes.pipeline import PassError, PassPipeline, run_passes
from shardweave.tests.real_step import MESH, annotated, captured

PASSES = "propagate-shardings,insert-collectives,cse,dce"


@dataclass(frozen=True)
class BreakTypesPass(ModulePass):
    """Gives a matrix product of layer h.1 a type that torch would not."""

    name = "break-types"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for one in Program(op).ops:
            if layer_of(one) == "h.1.mlp.fc_in" and one.name == "aten.mm":
                one.results[0]._type = builtin.TensorType(builtin.f32, [3])  # pyright: ignore[reportPrivateUsage]
                return


@dataclass(frozen=True)
class CrashPass(ModulePass):
    """Has a defect."""

    name = "crash"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        raise KeyError("lost")


def test_watch_counts_ops_and_notices_what_changes() -> None:
    watch = PassWatch()
    result = PassPipeline(f"{PASSES},dce").run(annotated(), observer=watch)
    assert [one.spec for one in watch.seen] == [*PASSES.split(","), "dce"]
    assert [one.changed for one in watch.seen] == [True, True, True, False, False]
    counts = [count for one in watch.seen for count in one.num_ops]
    assert counts[0] == sum(1 for _ in annotated().ops)
    assert counts[-1] == sum(1 for _ in result.ops)
    assert counts[1:-1:2] == counts[2::2]


def test_table_has_a_line_for_each_pass_and_the_sum() -> None:
    watch = PassWatch()
    PassPipeline("insert-collectives,dce").run(
        PassPipeline("propagate-shardings").run(annotated()), observer=watch
    )
    head, insert, dce, total = watch.table().splitlines()
    assert head.split() == ["seconds", "share", "ops", "change", "pass"]
    before, after = watch.seen[0].num_ops
    assert insert.split()[2:] == [str(after), f"{after - before:+d}", "insert-collectives"]
    assert dce.split()[3:] == ["-", "dce"]
    assert float(total.split()[0]) == pytest.approx(
        sum(one.seconds for one in watch.seen), abs=1e-3
    )


def test_changes_are_the_changed_lines_alone() -> None:
    out = io.StringIO()
    local = PassPipeline("propagate-shardings,insert-collectives").run(annotated())
    cleaned = PassPipeline("cse,dce").run(local, observer=PrintChanges(out))
    text = out.getvalue()
    assert text.startswith("// after cse\n@@ layer ")
    assert "// after dce" not in text
    removed = [line[1:].strip() for line in text.splitlines() if line.startswith("-")]
    before, after = str(local).splitlines(), str(cleaned).splitlines()
    assert removed
    assert set(removed) <= {line.strip() for line in before}
    gone = len(before) - len(after)
    added = sum(line.startswith("+") for line in text.splitlines())
    assert len(removed) - added == gone


def test_changed_arguments_are_lines_of_their_own() -> None:
    out = io.StringIO()
    program = captured().clone()
    program.set_mesh(MESH)
    plan = 'apply-plan{json="{\\"parameters\\": {\\"h.0.mlp.fc_in.weight\\": \\"[{\\\\\\"tensor\\\\\\"}, {}]\\"}}"}'
    PassPipeline(plan).run(program, observer=PrintChanges(out))
    added = [line for line in out.getvalue().splitlines() if line.startswith("+")]
    assert len(added) == 1
    assert "%h.0.mlp.fc_in.weight: " in added[0]
    assert '#dist.sharding<[{"tensor"}, {}]>' in added[0]


def test_whole_programs_are_printed_before_and_after_named_passes() -> None:
    out = io.StringIO()
    watch = PrintPrograms(["cse"], ["insert-collectives"], out)
    PassPipeline(PASSES).run(annotated(), observer=watch)
    _, after, before = out.getvalue().split("// ")
    assert after.startswith("after insert-collectives\n")
    assert before.startswith("before cse\n")
    after_text, before_text = (part.partition("\n")[2] for part in (after, before))
    assert Program.parse(after_text) == Program.parse(before_text)


def test_dump_has_the_input_and_each_result_by_number(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    result = run_passes(annotated(), PASSES, dump_dir=folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "000-input.mlir",
        "001-propagate-shardings.mlir",
        "002-insert-collectives.mlir",
        "003-cse.mlir",
        "004-dce.mlir",
    ]
    assert Program.load(folder / "000-input.mlir") == annotated()
    assert Program.load(folder / "004-dce.mlir") == result
    again = PassPipeline("cse,dce").run(Program.load(folder / "002-insert-collectives.mlir"))
    assert again == result


def test_dump_replaces_an_earlier_dump_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "001-notes.mlir").write_text("mine")
    DumpFiles(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["001-notes.mlir"]
    run_passes(annotated(), "cse,dce", dump_dir=tmp_path)
    run_passes(annotated(), "dce", dump_dir=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000-input.mlir", "001-dce.mlir"]


def test_dump_into_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ValueError, match="is a file, but a folder is needed"):
        DumpFiles(path)


def test_failing_pass_names_itself_op_layer_and_line_and_leaves_the_program_before_it(
    tmp_path: Path,
) -> None:
    watch = DumpFiles(tmp_path)
    with pytest.raises(PassError) as error:
        PassPipeline(["propagate-shardings,cse", BreakTypesPass(), "dce"]).run(
            annotated(), observer=Observers([watch, PassWatch()])
        )
    message = str(error.value)
    assert message.startswith("pass 'break-types' left an invalid program: aten.mm (%")
    assert "in layer 'h.1.mlp.fc_in' at " in message
    assert "gpt.py:" in message
    (note,) = error.value.__notes__
    said, _, path = note.rpartition(" is in ")
    assert said == "the program before pass 'break-types'"
    assert Program.load(path) == PassPipeline("propagate-shardings,cse").run(annotated())


def test_pass_with_a_defect_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as error:
        PassPipeline(["dce", CrashPass()]).run(captured(), observer=DumpFiles(tmp_path))
    assert error.value.__notes__[0] == "in pass 'crash'"
    assert error.value.__notes__[1].endswith("001-dce.mlir")


def test_failure_of_the_first_pass_points_at_the_input(tmp_path: Path) -> None:
    with pytest.raises(PassError) as error:
        run_passes(captured(), "insert-collectives", dump_dir=tmp_path)
    assert error.value.__notes__ == [
        f"the program before pass 'insert-collectives' is in {tmp_path / '000-input.mlir'}"
    ]


def test_without_verification_in_between_the_end_is_still_verified() -> None:
    broken = PassPipeline(["propagate-shardings", BreakTypesPass(), "cse"])
    with pytest.raises(PassError, match="pass 'break-types' left"):
        broken.run(annotated())
    with pytest.raises(PassError, match="pass 'cse' left an invalid program"):
        broken.run(annotated(), verify_each=False)


def test_pipeline_until_a_pass_ends_with_it() -> None:
    pipeline = PassPipeline(PASSES)
    assert str(pipeline.until("insert-collectives")) == "propagate-shardings,insert-collectives"
    with pytest.raises(ValueError, match="'merge' is not in the pipeline; it has propagate"):
        pipeline.until("merge")
