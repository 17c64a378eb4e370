"""Programs as text: what is printed parses back, and what does not parse says where and why."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from xdsl.dialects.builtin import FileLineColLoc, IntAttr, StringAttr

from shardweave.ir import strings
from shardweave.ir.dialects.annotations import layer_of, set_layer
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import ProgramTextError, print_module
from shardweave.ir.verify.program import verify
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import SPECS, captured, megatron, partitioned

TEXT = """builtin.module {
  func.func @step(%x: tensor<4xf64> {dist.kind = "input", dist.name = "x"}) -> (tensor<4xf64> {dist.kind = "output", dist.name = "0"}) {
    %y = aten.neg(%x) {layer = "h", phase = forward} : tensor<4xf64>
    %z = aten.add.Scalar(%y, other = 1) : tensor<4xf64>
    func.return %z : tensor<4xf64>
  }
}
"""

EVERYTHING = """
    param %w : tensor<8x16xf64> [{}, {"tensor":4}]
    input %x : tensor<4x8xf64> [{"data"}, {}]
    %h = aten.mm(%x, %w) {layer = "h.0.fc", phase = forward, sharding = [#dist.sharding<[{"data"}, {}], unreduced = ["tensor"]>]} : tensor<4x16xf64>
    %a, %i = aten.max.dim(%h, dim = 1, keepdim = true) : tensor<4x1xf64>, tensor<4x1xi64>
    %c = aten.cat([%a, %h], dim = 1) : tensor<4x17xf64>
    %d = aten.index.Tensor(%h, [none, %i]) : tensor<4x4x1xf64>
    %f = aten.full(fill_value = -1.0e-05) {phase = backward} : tensor<2xf64>
    %g = aten.full(fill_value = inf) {phase = recompute, origin = 3 : i64} : tensor<2xf16>
    %b = aten.full(fill_value = true) : tensor<2xi1>
    %n = aten.gelu(%h, approximate = "tanh") : tensor<4x16xf64>
    %r = dist.all_reduce(%f, %f, axes = ["data", "tensor"]) : tensor<2xf64>, tensor<2xf64>
    output %c
    grad w = %w [{}, {"tensor":4}]
""".replace("%r =", "%r, %s =")


def error_of(text: str) -> str:
    with pytest.raises(ProgramTextError) as error:
        Program.parse(text, "f.mlir")
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.mlir:1:1: the text is empty; give a program, as `shardweave capture` writes it."),
        (" \n", "f.mlir:1:1: the text is empty; give a program, "),
        (
            TEXT + "}\n",
            "a program is one builtin.module, and nothing beside it.",
        ),
        (TEXT[: len(TEXT) // 2], "the text ends before the program does; give all of it ("),
    ],
)
def test_text_that_is_no_program_is_answered_with_what_to_give(text: str, message: str) -> None:
    assert message in error_of(text)


def test_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "step.mlir").write_bytes(b"\xe7\x00\xff")
    with pytest.raises(
        ProgramTextError, match=r"step\.mlir' is not text; give the file of a program"
    ):
        Program.load(tmp_path / "step.mlir")


def test_text_prints_as_it_was_written() -> None:
    assert str(Program.parse(TEXT)) == TEXT


def test_every_kind_of_operand_argument_and_annotation_reads_back() -> None:
    program = step(EVERYTHING, "data=2,tensor=2")
    text = str(program)
    parsed = Program.parse(text)
    assert parsed == program
    assert str(parsed) == text
    for line in filter(lambda line: line.strip().startswith("%"), EVERYTHING.splitlines()):
        assert line.strip() in text


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2", "data=4,tensor=2"])
def test_partitioned_programs_read_back(mesh: str, sequence_parallel: bool) -> None:
    for name in ("gpt2", "cnn"):
        plan = megatron(SPECS[name], mesh, sequence_parallel=sequence_parallel)
        program = partitioned(SPECS[name], mesh, plan)
        assert Program.parse(str(program)) == program


def test_value_names_survive_the_round_trip() -> None:
    program = captured(SPECS["gpt"]).program
    names = [result.name_hint for op in program.ops for result in op.results]
    parsed = Program.parse(str(program))
    assert [r.name_hint for op in parsed.ops for r in op.results] == names
    assert {"add.1", "embedding", "native_layer_norm"} <= set(names)


def test_saved_program_keeps_the_source_line_of_each_op(tmp_path: Path) -> None:
    program = captured(SPECS["gpt"]).program
    program.save(tmp_path / "step.mlir")
    loaded = Program.load(tmp_path / "step.mlir")
    assert loaded == program
    assert [op.location for op in loaded.ops] == [op.location for op in program.ops]
    assert re.search(r'loc\(".*gpt\.py":\d+:1\)', (tmp_path / "step.mlir").read_text())


def test_printed_text_has_no_locations() -> None:
    assert "loc(" not in str(captured(SPECS["gpt"]).program)


def test_programs_that_differ_in_one_argument_are_not_equal() -> None:
    assert Program.parse(TEXT) == Program.parse(TEXT.replace("%y", "%other"))
    assert Program.parse(TEXT) != Program.parse(TEXT.replace("other = 1", "other = 1.0"))
    assert Program.parse(TEXT) != Program.parse(TEXT.replace("phase = forward", "phase = backward"))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("neg(%x)", "neg(%q)", "3:19: %q is used before it is defined; move its definition up"),
        ("aten.neg", "aten.ngeg", "3:10: there is no op 'aten.ngeg'; did you mean 'aten.neg'?"),
        (
            "phase = forward",
            "phase = forwards",
            "3:45: Expected one of 'backward', 'forward', 'optimizer', 'recompute' as the phase",
        ),
        (
            "phase",
            "fase",
            "3:42: 'fase' is not an annotation or is given twice; known: layer, phase, origin, "
            "copy, sharding",
        ),
        ('"h"', '"h', "3:32: the string is not closed on its line"),
        ("neg(%x)", "neg(%x", "3:22: ')' expected"),
        ("neg(%x)", "neg([[%x]])", "3:20: expected an operand"),
        ("other = 1", "other = 1, other = 2", "4:47: argument 'other' cannot be given here or is"),
        ("%y, other = 1", "other = 1, %y", "4:37: operands come before named arguments"),
        ("other = 1", "other = index", "4:38: index is not a dtype"),
        (
            "other = 1",
            "other = 99999999999999999999",
            "4:58: Integer value 99999999999999999999 is",
        ),
        (
            "%y, other = 1",
            "%y",
            "4:5: aten.add.Scalar lacks its argument 'other'; write other = a n",
        ),
        ("other = 1", 'other = "x"', "4:5: aten.add.Scalar: other is 'x', expected a number."),
        ("other = 1", "other = [1]", "4:5: aten.add.Scalar: other is [1], expected a number."),
        (
            "add.Scalar(%y, other = 1)",
            "sum.dim_IntList(%y, dim = [0, 1.5])",
            "dim is [0, 1.5], expected a list of values, each a whole number, or none.",
        ),
        (
            "add.Scalar(%y, other = 1)",
            "sum(%y, dtype = 3)",
            "4:5: aten.sum: dtype is 3, expected a dtype, such as f32, or none.",
        ),
        ("%z =", "%y =", "4:5: SSA value %y is already defined"),
        ("%y =", "%y, %w =", "3:5: Operation has 1 results, but was given 2 to bind."),
        (
            "func.return %z : tensor<4xf64>",
            "",
            "6:3: the function must be one block that ends in func.return.",
        ),
        (
            "builtin.module {",
            "builtin.module {\n  func.func @other() { func.return }",
            "3:3: a program is a module with exactly one func.func, and nothing else.",
        ),
        (
            "builtin.module {",
            'builtin.module attributes {dist.mesh = #dist.mesh<["a" = 0]>} {',
            "1:59: mesh axis 'a' has size 0; use a size >= 1.",
        ),
        (
            "builtin.module {",
            'builtin.module attributes {dist.mesh = #dist.mesh<["a" = 2, "a" = 2]>} {',
            "1:68: mesh axes ['a', 'a'] are not distinct; name each axis once.",
        ),
        (
            '"input"',
            '"input", dist.sharding = #dist.sharding<[{"a"}], reduced = []>',
            "found 'reduced', expected unreduced or max_unreduced",
        ),
    ],
)
def test_error_says_line_column_what_was_found_and_expected(
    old: str, new: str, expected: str
) -> None:
    assert old in TEXT
    message = error_of(TEXT.replace(old, new, 1))
    assert message.startswith("f.mlir:")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["", "x", "\0", "{" * 3000, "builtin.module {", "builtin.module {}"]
)
def test_text_that_is_no_module_is_one_line(text: str) -> None:
    assert re.fullmatch(r"f\.mlir:\d+:\d+: .+", error_of(text))


def test_unclosed_string_is_found_at_once() -> None:
    # xDSL's own lexer takes time exponential in the length of such a string.
    assert error_of(f'"{"a" * 1000}') == "f.mlir:1:1: the string is not closed on its line"
    assert error_of(TEXT.replace('"h"', f'"{"h" * 1000}')).startswith("f.mlir:3:32: the string")


@pytest.mark.parametrize("layer", ["Größe", "日本.0", 'a"b', "a\\b", "é\n\t\x00", ""])
def test_layer_of_any_name_reads_back(layer: str, tmp_path: Path) -> None:
    program = Program.parse(TEXT)
    first = next(program.ops)
    set_layer(first, layer)
    first.location = FileLineColLoc(StringAttr(f"/é/{layer}.py"), IntAttr(3), IntAttr(1))
    assert Program.parse(str(program)) == program
    program.save(tmp_path / "step.mlir")
    loaded = next(Program.load(tmp_path / "step.mlir").ops)
    assert (layer_of(loaded), loaded.location) == (layer, first.location)


PIECES = {
    "number": r"\b\d+\b",
    "name": r"%[\w.]+",
    "word": r"\b[a-z_]+\b",
    "type": r"tensor<[^>]*>",
    "op": r"(aten|dist)\.[\w.]+",
    "line": r"(?m)^ .*\n",
}
STRANGERS = (
    "0", "-1", "99999999999999999999", "f32", "index", "none", "true", "inf", "[]", '"data"', "%x",
    "tensor<0xf32>", "tensor<?xf32>", "tensor<*xf32>", "vector<4xf32>", "tensor<4xi7>", "backward",
    "aten.cat", "aten.view", "aten.add_.Tensor", "dist.slice", "func.return", "builtin.module",
    "#dist.mesh<[]>", "",
)  # fmt: skip


def disfigured(text: str, rng: random.Random) -> str:
    """The text with one or two of its pieces replaced by others of their kind, or by strangers."""
    for _ in range(rng.randint(1, 2)):
        found = list(re.finditer(PIECES[rng.choice(list(PIECES))], text))
        if found:
            piece = rng.choice(found)
            new = rng.choice((rng.choice(found).group(), rng.choice(STRANGERS)))
            text = text[: piece.start()] + new + text[piece.end() :]
    return text


def parsed_or_refusal(text: str) -> Program | str:
    """The program of a text, or what the parser says of it."""
    try:
        return Program.parse(text, "f.mlir")
    except ProgramTextError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(10))
def test_disfigured_program_is_refused_in_one_line_or_its_problems_are_listed(seed: int) -> None:
    rng = random.Random(seed)
    texts = [str(step(EVERYTHING, "data=2,tensor=2")), TEXT]
    outcomes = set[str]()
    for _ in range(40):
        text = disfigured(rng.choice(texts), rng)
        program = parsed_or_refusal(text)
        if isinstance(program, str):
            assert re.fullmatch(r"f\.mlir:\d+:\d+: .+", program), text
            outcomes.add("refused")
            continue
        problems = verify(program)
        assert all("\n" not in problem for problem in problems), text
        outcomes.add("invalid" if problems else "valid")
        assert Program.parse(str(program)) == program, text
    assert "refused" in outcomes


REPEATED = """builtin.module {
  func.func @step(%x: tensor<4xf32> {dist.kind = "input", dist.name = "x"}) -> (tensor<4xf32> {dist.kind = "output", dist.name = "0"}) {
    %a, %i = aten.max.dim(%x, dim = 0, keepdim = true) {layer = "h.0", phase = forward} : tensor<1xf32>, tensor<1xi64> loc("m.py":1:1)
    %b = aten.cat([%x, %a], dim = 0) {layer = "h.0", phase = forward} : tensor<5xf32> loc("m.py":2:1)
    %c, %j = aten.max.dim(%b, dim = 0, keepdim = true) {layer = "h.1", phase = forward} : tensor<1xf32>, tensor<1xi64> loc("m.py":2:1)
    %d = aten.cat([%x, %c], dim = 0) {layer = "h.1", phase = forward} : tensor<5xf32> loc("m.py":1:1)
    func.return %x : tensor<4xf32>
  }
}
"""


def test_line_that_differs_in_names_alone_is_read_as_the_first_of_its_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Program.parse(REPEATED)
    a, b, c, d = program.ops
    assert [layer_of(op) for op in (a, b, c, d)] == ["h.0", "h.0", "h.1", "h.1"]
    assert [*c.operands, *d.operands][::2] == [b.results[0], c.results[0]]
    for wrong, words in (
        ("[%x, %q]", "%q is used before it is defined"),
        ("[%x, %d]", "%d is used before it is defined"),
    ):
        with pytest.raises(ProgramTextError, match=words):
            Program.parse(REPEATED.replace("[%x, %c]", wrong))
    for wrong, words in (
        ("%b, %j = ", "already defined"),
        ("%c = ", "2 results"),
        ("%c, %j, %k = ", "2 results"),
    ):
        with pytest.raises(ProgramTextError, match=words):
            Program.parse(REPEATED.replace("%c, %j = ", wrong))
    fast = print_module(program.module, locations=True)
    monkeypatch.setattr(strings, "_OP_LINE", re.compile("(?!)"))
    assert print_module(Program.parse(REPEATED).module, locations=True) == fast
