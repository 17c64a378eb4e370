"""`shardweave show` and the notebook's view on a real captured model: layers, folded."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from shardweave.driver.cli import main
from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.program.program import Program
from shardweave.tests.real_step import captured, local, save
from shardweave.tests.zoo import captured as captured_model

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(save(captured(), tmp_path))


def ops_in(program: Program, layer: str, phase: str) -> int:
    return sum(
        1
        for op in program.ops
        if phase_of(op) == phase and f"{layer_of(op)}.".startswith(f"{layer}.")
    )


def test_layers_are_lines_and_equal_ones_are_one(file: str, capsys: Captured) -> None:
    assert main(["show", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{sum(1 for _ in captured().ops)} ops (")
    assert lines[1].split() == ["layer", "forward", "backward", "parameters", "collectives"]
    (row,) = [line for line in lines if line.startswith("h.")]
    assert row.startswith("h.0 .. h.1 (2 equal) ")
    counts = [ops_in(captured(), "h.1", phase) for phase in ("forward", "backward")]
    assert row.split()[5:7] == [str(count) for count in counts]
    assert main(["show", file, "--all"]) == 0
    assert [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("h.")
    ] == ["h.0", "h.1"]


def test_ops_of_a_layer_and_phase_are_shown_as_the_text_has_them(
    file: str, capsys: Captured
) -> None:
    assert main(["show", file, "--layer", "h.0", "--phase", "backward"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    count = ops_in(captured(), "h.0", "backward")
    assert last == f"{count} of {sum(1 for _ in captured().ops)} ops"
    text = [line.strip() for line in str(captured()).splitlines()]
    shown = [line for line in lines if line != "..."]
    assert len(shown) == count
    assert set(shown) <= set(text)
    assert all('layer = "h.0' in line and "phase = backward" in line for line in shown)
    positions = [text.index(line) for line in shown]
    assert positions == sorted(positions)
    gaps = sum(second - first > 1 for first, second in pairwise(positions))
    assert lines.count("...") == gaps


def test_ops_of_a_name_are_shown_once_for_equal_layers(file: str, capsys: Captured) -> None:
    options = ["--layer", "h.*.mlp.*", "--op", "aten.addmm"]
    assert main(["show", file, *options]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "h.1" in line] == ["... h.1: as h.0"]
    assert last.startswith("4 of ")
    assert main(["show", file, *options, "--all"]) == 0
    assert capsys.readouterr().out.count("aten.addmm") == 4


def test_collectives_can_be_counted(tmp_path: Path, capsys: Captured) -> None:
    file = save(local(), tmp_path)
    assert main(["show", str(file), "--op", "dist.*", "--phase", "backward", "--counts"]) == 0
    out = capsys.readouterr().out
    expected = sum(c.count for c in local().stats().collectives if c.phase == "backward")
    assert out.split()[:2] == [str(expected), "dist.all_reduce"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", "h.9"], "no op has layer 'h.9'; there is h."),
        (["--op", "aten.adddmm"], "no op has op 'aten.adddmm'; there is aten.addmm"),
        (["--phase", "recompute"], "no op has phase 'recompute'; there is"),
        (
            ["--layer", "h.0", "--op", "aten.embedding"],
            "no op has layer 'h.0' and op 'aten.embedding'; leave one of them out.",
        ),
    ],
)
def test_nothing_found_is_answered_with_what_there_is(
    file: str, options: list[str], message: str, capsys: Captured
) -> None:
    assert main(["show", file, *options]) == 1
    assert message in capsys.readouterr().err


def test_layers_that_differ_are_not_folded(tmp_path: Path, capsys: Captured) -> None:
    text = str(captured())
    name = next(
        line for line in text.splitlines() if 'layer = "h.1.mlp"' in line and "gelu" in line
    )
    changed = name.replace('approximate = "tanh"', 'approximate = "none"')
    assert changed != name
    path = tmp_path / "changed.mlir"
    path.write_text(text.replace(name, changed))
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "equal)" not in out
    assert "\nh.0 " in out
    assert "\nh.1 " in out


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_notebook_shows_layers_folded_with_every_line(file: str) -> None:
    program = captured()
    tags = Tags()
    tags.feed(program._repr_html_())
    assert tags.open == []
    assert {"script", "link", "img"}.isdisjoint(tags.seen)
    text = "".join(tags.text)
    assert "h.0 .. h.1 (2 equal)" in text
    lines = [line.strip() for line in str(program).splitlines() if " = aten." in line]
    outside = [line for line in lines if 'layer = "h.1' not in line]
    assert [line for line in outside if line not in text] == []
    assert "h.1.mlp.fc_in.weight" in text  # of the arguments


def test_notebook_shows_a_large_program_in_part() -> None:
    program = captured_model("gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=4").program
    from shardweave.ir.inspect import outline as program_html

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_html, "MAX_LINES", 10)
        html = program._repr_html_()
    shown = html.count(" = aten.")
    assert shown == 10
    assert "more ops; str(program) has all of them" in html


@pytest.mark.parametrize("command", ["show", "report", "simulate", "explore"])
def test_model_in_place_of_a_program_is_answered_with_the_command_that_writes_one(
    command: str, capsys: Captured, tmp_path: Path
) -> None:
    output = ["-o", str(tmp_path / "out")] if command in ("report", "explore") else []
    cluster = ["--cluster", "h100-pod"] if command != "show" else []
    assert main([command, "mine:example", *cluster, *output]) == 1
    assert "`shardweave capture mine:example -o step.mlir`" in capsys.readouterr().err
