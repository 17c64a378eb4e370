"""Pages of the documentation as blocks of code, and how each kind of block is run.

A comment right above a block says more about it: `<!-- file: step.mlir -->` saves it in the page's
folder, `<!-- excerpt: step.mlir -->` says that its lines come from a program there (`...` stands
for left out lines), `<!-- after: cse,dce -->` that it is what these passes make of the program
above it (`<!-- after: cse,dce; excerpt -->`, lines of that), `<!-- invalid -->` that it is not a
program and the text below it says why, `<!-- differs: a.py b.py -->` that it is how these two files
of the project differ, but for what they say of themselves.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardweave.driver.cli import main
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.passes.pipeline import run_passes

_BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_ROOT = Path(__file__).resolve().parents[1]
_OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block: its first line's number, language, text and what its comment says."""

    line: int
    language: str
    text: str
    notes: dict[str, str]


def blocks_of(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for match in _BLOCK.finditer(page):
        line = page.count("\n", 0, match.start("text")) + 1
        notes = [note.partition(":") for note in (match["note"] or "").split(";") if note.strip()]
        yield Block(
            line,
            match["language"],
            match["text"],
            {key.strip(): value.strip() for key, _, value in notes},
        )


@dataclass
class PageRun:
    """Runs the blocks of one page, in order, in one folder and one Python namespace."""

    folder: Path
    namespace: dict[str, Any] = field(default_factory=dict)
    program: Program | None = None
    output: str | None = None
    """What the block above has to say, if a block of text may follow that repeats it."""

    def run(self, block: Block) -> None:
        """Raises AssertionError, or the block's own error, if it is not as the page says."""
        if "file" in block.notes:
            (self.folder / block.notes["file"]).write_text(block.text)
        said, self.output = self.output, None
        if block.language == "mlir":
            self._mlir(block)
        elif block.language == "python":
            self._python(block)
        elif block.language == "console":
            self._console(block)
        elif block.language == "json":
            json.loads(block.text)
        elif "differs" in block.notes:
            assert block.text == difference(*block.notes["differs"].split())
        elif block.language == "text" and said is not None:
            assert_output(block.text, said)

    def _mlir(self, block: Block) -> None:
        if "invalid" in block.notes:
            self.output = _problem(block.text)
        elif "after" in block.notes:
            assert self.program is not None
            self.program = run_passes(self.program, block.notes["after"])
            if "excerpt" in block.notes:
                assert_excerpt(block.text, str(self.program))
            else:
                found = str(self.program)
                assert without_space(block.text) == without_space(found), f"found:\n{found}"
        elif "excerpt" in block.notes:
            source = Program.load(self.folder / block.notes["excerpt"])
            assert_excerpt(block.text, str(source))
        else:
            self.program = Program.parse(block.text)
            check(self.program)

    def _python(self, block: Block) -> None:
        # Lines in front, so that a traceback gives the line of the page.
        code = compile("\n" * (block.line - 1) + block.text, "page", "exec")
        with _captured() as output:
            exec(code, self.namespace)
        self.output = output.getvalue()

    def _console(self, block: Block) -> None:
        for command, expected in commands_of(block.text):
            with _captured() as output:
                program, *arguments = shlex.split(command)
                assert program == "shardweave", f"this cannot run '{command}'"
                code = main(arguments)
            assert (code == 0) is ("fails" not in block.notes), output.getvalue()
            assert_output(expected, output.getvalue())


def difference(before: str, after: str) -> str:
    """How two Python files of the project differ, from their imports on, with a line around."""
    first = "from __future__ import annotations\n"
    texts = [(_ROOT / path).read_text().partition(first)[2] for path in (before, after)]
    old, new = (text.splitlines(keepends=True) for text in texts)
    _, _, *found = difflib.unified_diff(old, new, n=1)
    return "".join("@@\n" if line.startswith("@@") else line for line in found)


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with its output."""
    for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def assert_output(expected: str, found: str) -> None:
    """`...` stands for anything; the length of white space does not matter."""
    ok = doctest.OutputChecker().check_output(expected, found, _OUTPUT)
    assert ok, f"the page says:\n{expected}\nfound:\n{found}"


def assert_excerpt(excerpt: str, text: str) -> None:
    """The lines of an excerpt stand in a text, side by side but for `...`."""
    lines = [part.strip() for line in text.splitlines() for part in _arguments_apart(line)]
    at, skips = 0, True
    for wanted in filter(None, map(str.strip, excerpt.splitlines())):
        if wanted == "...":
            skips = True
            continue
        assert wanted in lines[at:], f"not in the program, or out of order: {wanted}"
        found = lines.index(wanted, at)
        assert skips or found == at, f"lines are left out before: {wanted}"
        at, skips = found + 1, False


def _arguments_apart(line: str) -> list[str]:
    """The head of a function has a line for each argument and one for its results."""
    if "func.func" not in line:
        return [line]
    return re.sub(r"(?<=[(,]) ?(?=%\w+: )|(?<=\)) (?=-> )", "\n", line).splitlines()


def without_space(text: str) -> str:
    return "".join(text.split())


def _problem(text: str) -> str:
    try:
        check(Program.parse(text))
    except ValueError as error:
        return str(error)
    raise AssertionError(f"this is a valid program:\n{text}")


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output
