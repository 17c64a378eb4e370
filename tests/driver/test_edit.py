"""A dumped program changed by hand: run if it is right, answered with line and caret if not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shardweave.driver.cli import main
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.tests import zoo
from shardweave.tests.compiled import compile_copy as compile_step
from shardweave.tests.real_step import MODEL, annotated, assert_equals_eager, local, save

Captured = pytest.CaptureFixture[str]
Lines = list[str]


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    """The scheduled program of a real model, with started collectives, in sub-batches."""
    return save(local("preset:oases"), tmp_path)


def edit(path: Path, change: Callable[[Lines], object]) -> Path:
    """Change the lines of a file."""
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("\n".join(lines) + "\n")
    return path


def find(lines: Lines, pattern: str) -> int:
    return next(index for index, line in enumerate(lines) if re.search(pattern, line))


def move(lines: Lines, start: int, end: int) -> None:
    lines.insert(end, lines.pop(start))


def run(path: Path) -> int:
    options = ["--backend", "reference", "--dtype", "float64", "--check"]
    return main(["run", MODEL, "--program", str(path), *options])


def assert_points_at(err: str, path: Path, what: str, message: str) -> None:
    """Assert that an answer names file, line and column, and has a caret below `what`."""
    first, line, caret = err.splitlines()[:3]
    found = re.match(rf"error: {re.escape(str(path))}:(\d+):(\d+): ", first)
    assert found is not None, first
    assert message in first
    row, column = int(found[1]), int(found[2])
    text = path.read_text().splitlines()[row - 1]
    assert text[column - 1 :].startswith(what), text
    assert line.strip().startswith(f"{row} | ")
    at = caret.index("^")
    assert caret.strip(" |^") == ""
    assert line[at:].startswith(what)


def test_dumped_program_runs_unchanged(dumped: Path, capsys: Captured) -> None:
    assert run(dumped) == 0
    assert "equal to eager" in capsys.readouterr().out


def test_wait_moved_to_just_before_its_use_still_equals_eager(
    dumped: Path, capsys: Captured
) -> None:
    def later(lines: Lines) -> None:
        at = find(lines, r"%all_reduce = dist.wait")
        use = find(lines[at + 1 :], r"%all_reduce[,)]") + at + 1
        assert use > at + 1
        move(lines, at, use - 1)

    before = dumped.read_text()
    assert edit(dumped, later).read_text() != before
    assert run(dumped) == 0
    assert "equal to eager" in capsys.readouterr().out


def test_start_moved_behind_other_work_still_equals_eager(dumped: Path) -> None:
    def later(lines: Lines) -> None:
        at = find(lines, r"%started_2 = ")
        move(lines, at, find(lines, r"dist.wait\(%started_2\)") - 1)

    program = Program.load(edit(dumped, later))
    check(program)
    assert program != local("preset:oases")
    assert_equals_eager(program)


def test_sharding_changed_by_hand_is_propagated_anew(tmp_path: Path) -> None:
    """One block's pair of linear maps is left whole, in the text that the passes then take."""
    path = save(annotated(), tmp_path)
    text = path.read_text()
    for name in ("fc_in.weight", "fc_in.bias", "fc_out.weight"):
        slot = re.search(rf'dist.name = "h\.0\.mlp\.{name}"(, dist.sharding = #[^>]*>)', text)
        assert slot is not None
        text = text.replace(slot[0], slot[0].removesuffix(slot[1]))
    path.write_text(text)
    out = tmp_path / "local.mlir"
    assert main(["opt", str(path), "--passes", "preset:partition", "-o", str(out)]) == 0
    edited = Program.load(out)
    assert edited.stats().count("all_reduce", ("tensor",)) < local().stats().count(
        "all_reduce", ("tensor",)
    )
    assert_equals_eager(edited)


def test_program_can_be_given_to_compile(dumped: Path) -> None:
    case = zoo.captured(MODEL)
    step = compile_step(
        case.example.module, kwargs=case.example.kwargs, program=Program.load(dumped),
        backend="reference",
    )  # fmt: skip
    loss = step(**case.example.kwargs)
    assert abs(loss.item() - case.loss) <= 1e-12 * abs(case.loss)


def test_wait_before_its_start_is_answered_at_the_wait(dumped: Path, capsys: Captured) -> None:
    def earlier(lines: Lines) -> None:
        move(lines, find(lines, r"dist.wait\(%started_2\)"), find(lines, r"%started_2 = "))

    assert run(edit(dumped, earlier)) == 1
    message = "%started_2 is used before it is defined; move its definition up"
    assert_points_at(capsys.readouterr().err, dumped, "%started_2)", message)


def test_deleted_wait_is_answered_at_its_start(dumped: Path, capsys: Captured) -> None:
    def delete(lines: Lines) -> None:
        at = find(lines, r"dist.wait\(%started_2\)")
        result = re.search(r"%\w+", lines.pop(at))
        assert result is not None
        lines[:] = [re.sub(rf"{result[0]}(?=[,)])", "%started_2", line) for line in lines]

    assert run(edit(dumped, delete)) == 1
    message = "add %done = dist.wait(%started) and use %done"
    assert_points_at(capsys.readouterr().err, dumped, "%started_2 = dist.start_all_reduce", message)


def test_deleted_collective_is_answered_where_the_sum_is_read(
    tmp_path: Path, capsys: Captured
) -> None:
    def delete(lines: Lines) -> None:
        at = find(lines, r"%all_reduce_1 = dist.all_reduce\(%mm,")
        assert "unreduced" in lines[at - 1]
        del lines[at]
        lines[:] = [line.replace("%all_reduce_1,", "%mm,") for line in lines]

    path = edit(save(local(), tmp_path), delete)
    assert run(path) == 1
    err = capsys.readouterr().err
    assert_points_at(err, path, "%addmm.3 = aten.add.Tensor(%mm, ", "unreduced")
    assert "in layer 'h.0.attn.proj'" in err


def test_sharding_that_does_not_fit_is_answered_at_its_argument(
    tmp_path: Path, capsys: Captured
) -> None:
    path = save(annotated(), tmp_path)
    name = "h.0.mlp.fc_in.bias"
    text = path.read_text()
    assert f'"{name}", dist.sharding = #dist.sharding<[{{"tensor"}}]>' in text
    path.write_text(
        text.replace(
            f'"{name}", dist.sharding = #dist.sharding<[{{"tensor"}}]>',
            f'"{name}", dist.sharding = #dist.sharding<[{{"tensor"}}, {{}}]>',
        )
    )
    assert main(["opt", str(path), "--passes", "preset:partition"]) == 1
    message = "has 2 dims, but the value has shape (64,); give one {...} per dim"
    assert_points_at(capsys.readouterr().err, path, f"%{name}: ", message)


def test_wrong_type_is_answered_at_its_op(tmp_path: Path, capsys: Captured) -> None:
    def retype(lines: Lines) -> None:
        at = find(lines, r"%all_reduce_1 = ")
        lines[at - 1] = lines[at - 1].replace("tensor<16x16xf64>", "tensor<16x8xf64>")

    path = edit(save(local(), tmp_path), retype)
    assert main(["opt", str(path)]) == 1
    message = "result type is tensor<16x8xf64>, expected tensor<16x16xf64>"
    assert_points_at(capsys.readouterr().err, path, "%mm = aten.mm", message)


def test_unknown_op_is_answered_at_its_name_with_those_that_are_near(
    tmp_path: Path, capsys: Captured
) -> None:
    path = save(local(), tmp_path)
    path.write_text(path.read_text().replace("= dist.all_reduce(", "= dist.allreduce(", 1))
    assert main(["opt", str(path)]) == 1
    message = "there is no op 'dist.allreduce'; did you mean 'dist.all_reduce'?"
    assert_points_at(capsys.readouterr().err, path, "dist.allreduce(", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--mesh", "data=4"],
            "is for mesh data=2,tensor=2, but mesh data=4 is given; leave the mesh out",
        ),
        (["--validate"], "a given program is run unchanged, so that validate would"),
        (["--passes", "cse"], "a given program is run unchanged, so that passes would"),
    ],
)
def test_program_is_run_as_it_is(
    dumped: Path, options: list[str], message: str, capsys: Captured
) -> None:
    assert main(["run", MODEL, "--program", str(dumped), *options]) == 1
    assert message in capsys.readouterr().err


def test_program_that_is_not_partitioned_is_not_run(tmp_path: Path, capsys: Captured) -> None:
    assert run(save(annotated(), tmp_path)) == 1
    assert "the program is not partitioned for its mesh data=2,tensor=2" in capsys.readouterr().err
