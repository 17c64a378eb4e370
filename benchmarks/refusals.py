"""Refusals that no test provokes: `python benchmarks/refusals.py [--room driver] [tests ..]`.

A copy of the repository notes each `raise Error(..)` that is reached, in all processes. The tests
run there, by default all fast ones, and the statements that none reached are listed. `--room` takes
those below one folder. `--notes FOLDER` keeps the notes, so that several runs add up. Other options
(`-k ..`) are pytest's. Left out are errors of what a program itself got wrong (AssertionError,
NotImplementedError, TypeError, AttributeError). Exits 1 if the tests do not run to their end.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardweave.benchmarks.mutants import LAYERS, ROOT, copy_of

INTERNAL = frozenset(("AssertionError", "NotImplementedError", "TypeError", "AttributeError"))


def raises(source: str) -> Iterator[ast.Raise]:
    """The statements of a file that make an error for a user."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if ast.unparse(node.exc.func).split(".")[-1] not in INTERNAL:
                yield node


def noting(source: str, name: str, folder: Path) -> str:
    """The source with a note, a file in a folder, before each statement that raises."""
    lines = source.splitlines(keepends=True)
    for node in raises(source):
        line, at = lines[node.lineno - 1], node.col_offset
        path = str(folder / f"{name.replace('/', '+')}:{node.lineno}")
        note = f"__import__('pathlib').Path({path!r}).touch(); "
        lines[node.lineno - 1] = line[:at] + note + line[at:]
    return "".join(lines)


def unreached(
    root: Path, room: str, tests: list[str], notes: Path | None = None
) -> tuple[list[str], int, int]:
    """Statements that no test reached, how many there are, and pytest's exit code."""
    sites: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        reached = (notes or folder / "reached").absolute()
        reached.mkdir(parents=True, exist_ok=True)
        copy = copy_of(root, folder)
        for layer in LAYERS:
            for path in sorted((copy / layer).rglob("*.py")):
                source, name = path.read_text(), path.relative_to(copy).as_posix()
                path.write_text(noting(source, name, reached))
                if name.startswith(room):
                    for node in raises(source):
                        text = " ".join(ast.unparse(node).split())
                        sites[f"{name}:{node.lineno}"] = text[:160]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        code = subprocess.run(command, cwd=copy, env=environment).returncode
        seen = {path.name.replace("+", "/") for path in reached.iterdir()}
    return [f"{one}: {text}" for one, text in sites.items() if one not in seen], len(sites), code


def main() -> int:
    """Run the tests and print the list. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--room", default="")
    parser.add_argument("--notes", type=Path)
    options, tests = parser.parse_known_args()
    missing, count, code = unreached(ROOT, options.room, tests, options.notes)
    print(f"{len(missing)} of {count} refusals are reached by no test", *missing, sep="\n")
    return int(code not in (0, 1))


if __name__ == "__main__":
    sys.exit(main())
