"""A measure of the tests: `python benchmarks/mutants.py [--n 60] [--room ir/proof] [--seed 0 1]`.

A mutant is the package with one fault at a random place: a comparison is flipped, a `+` becomes a
`-`, a number is off by one, a condition is negated, or a check or a call is deleted. Cosmic Ray
plants the faults; only the operator that deletes statements is ours.

First all fast tests run once in a copy of the repository, which records the tests that reach each
faulty line. Then each fault is planted alone, and the tests that reach its line run until one
fails. Tests in the nearest files (those that import the faulty file or are named after it) run
first, then the others, the shortest first. A row names the test that failed, the seconds until
then, and the number of tests that reach the line. Mutants that survive are printed as diffs: a
person decides whether they change any result.

`--n`: faults for each seed. `--room`: draw them below this folder. `--nearest`: run only the
nearest files, and record nothing. `--workers`: processes of pytest. `--limit-s`: most seconds of
tests for a fault; tests beyond them are left out and counted. `--timeout-s`: most seconds of one
run of tests; a mutant that takes longer counts as killed. `--quick`: three faults and their nearest
tests. `--json FILE`: write the rows after each fault, and skip those that the file holds. Exits 1
if more than 5% survive.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast
from unittest import mock

import parso
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    break_continue,
    comparison_operator_replacement,
    number_replacer,
    unary_operator_replacement,
)
from cosmic_ray.operators.operator import Example, Operator
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shardweave.benchmarks import reached

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("ir", "passes", "planners", "backends", "driver")
QUICK = 3
GOAL = 0.95
"""The share of mutants that are to be killed."""


class DeleteStatement(Operator):
    """Replace a call whose result is not used, or an `if` that only raises, by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if _is_call(node) or _is_check(node):
            yield (node.start_pos, node.end_pos)

    def mutate(self, node: Any, index: int) -> Any:
        return parso.parse(node.get_first_leaf().prefix + "pass\n")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(x)\n", "pass\n"),)


def _is_call(node: Any) -> bool:
    if node.type != "simple_stmt" or node.children[0].type not in ("power", "atom_expr"):
        return False
    last = node.children[0].children[-1]
    return last.type == "trailer" and last.children[0].value == "("


def _is_check(node: Any) -> bool:
    if node.type != "if_stmt" or len(node.children) != 4 or node.children[3].type != "suite":
        return False
    statements = [one for one in node.children[3].children if one.type == "simple_stmt"]
    return len(statements) == 1 and statements[0].children[0].type == "raise_stmt"


def _named(module: Any, *names: str) -> list[Operator]:
    """Operators of a module of Cosmic Ray, by parts of their names."""
    classes = {value.__name__: value for value in vars(module).values() if isinstance(value, type)}
    chosen = [kind for name, kind in classes.items() if any(part in name for part in names)]
    return [kind() for kind in chosen if kind.__module__ == module.__name__]


@cache
def kinds() -> dict[str, list[Operator]]:
    """The operators by the kind of fault that they plant; each kind is drawn as often."""
    return {
        "comparison": _named(
            comparison_operator_replacement,
            "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "_Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is",
        ),
        "arithmetic": _named(
            binary_operator_replacement, "Add_Sub", "Sub_Add", "Mul_Div", "FloorDiv_Mul", "Mod_Add"
        ),
        "number": [number_replacer.NumberReplacer()],
        "condition": [
            *_named(boolean_replacer, "ReplaceTrue", "ReplaceFalse", "ReplaceAnd", "ReplaceOr"),
            *_named(boolean_replacer, "AddNot"),
            *_named(unary_operator_replacement, "Delete_Not", "USub_UAdd"),
            *_named(break_continue, "Replace"),
        ],
        "deletion": [DeleteStatement()],
    }  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault. diff: the lines that change; text: the whole file with the fault."""

    path: str
    line: int
    kind: str
    diff: str
    text: str


@dataclass(frozen=True)
class Row:
    """The outcome of one mutant.

    killer: the test that failed; empty if none did. reached: the number of tests that reach the
    line, of which `left` were not run; None if that was not recorded.
    """

    place: str
    kind: str
    diff: str
    killer: str
    seconds: float
    reached: int | None = None
    left: int = 0


@cache
def positions(source: str, kind: str) -> list[tuple[Operator, int, int]]:
    """(operator, occurrence, line) of each place at which a kind of fault fits."""
    tree, skipped = parso.parse(source), _skipped(source)
    places: list[tuple[Operator, int, int]] = []
    for operator in kinds()[kind]:
        find = cast("Any", operator).mutation_positions
        occurrence = 0
        for node in _nodes(tree):
            for start, _ in find(node):
                if start[0] not in skipped:
                    places.append((operator, occurrence, start[0]))
                occurrence += 1
    return places


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _skipped(source: str) -> set[int]:
    """Lines on which a fault changes no result: types, decorators, imports and texts of errors."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parts = [node.returns, *(one.annotation for one in every), *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            parts = [*node.decorator_list]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.Raise):
            parts = [node]
        for part in filter(None, parts):
            lines.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))  # pyright: ignore[reportAttributeAccessIssue]
    return lines


def draw(root: Path, room: str, count: int, seed: int) -> list[Mutant]:
    """Faults at random places of the files below a folder, all different.

    Raises ValueError if the folder holds fewer places than are asked for.
    """
    rng = random.Random(seed)
    folders = [room] if room else list(LAYERS)
    files = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    sizes = [len(path.read_text().splitlines()) for path in files]
    if not files:
        raise ValueError(f"--room {room} holds no Python files; name a folder such as ir/proof.")
    mutants: dict[tuple[str, str], Mutant] = {}
    drawn = set[tuple[Path, Operator, int]]()
    for _ in range(100 * count):
        if len(mutants) == count:
            break
        path = rng.choices(files, sizes)[0]
        kind = rng.choice(sorted(kinds()))
        source = path.read_text()
        places = positions(source, kind)
        if not places:
            continue
        operator, occurrence, line = rng.choice(places)
        if (path, operator, occurrence) in drawn:
            continue
        drawn.add((path, operator, occurrence))
        text = mutate_code(source, operator, occurrence)
        if text is None or text == source:
            continue
        name = path.relative_to(root).as_posix()
        diff = "\n".join(
            one
            for one in difflib.unified_diff(
                source.splitlines(), text.splitlines(), n=0, lineterm=""
            )
            if not one.startswith(("---", "+++", "@@"))
        )
        mutants[name, text] = Mutant(name, line, kind, diff, text)
    if len(mutants) < count:
        raise ValueError(f"--n {count}: only {len(mutants)} places were drawn; give fewer.")
    return list(mutants.values())


@cache
def importers(root: Path) -> dict[str, list[str]]:
    """The files that import each module of the package, by the module's dotted name."""
    files = [path for folder in (*LAYERS, "tests") for path in (root / folder).rglob("*.py")]
    names: dict[str, list[str]] = defaultdict(list)
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                targets = [one.name for one in node.names]
            else:
                continue
            for target in targets:
                names[target].append(path.relative_to(root).as_posix())
    return names


def nearest_tests(root: Path, path: str) -> list[str]:
    """Test files named after a file of the package, and those that import it in fewest steps; then
    the golden tests, which reach every folder."""
    stem = Path(path).stem
    named = sorted((root / "tests").rglob(f"test_{stem}.py"))
    level, seen, tests = [path], {path}, list[str]()
    while level and not tests:
        reached: list[str] = []
        for one in level:
            module = "shardweave." + one.removesuffix(".py").replace("/", ".")
            reached += importers(root)[module.removesuffix(".__init__")]
        level = [one for one in dict.fromkeys(reached) if one not in seen]
        seen.update(level)
        tests = [one for one in level if Path(one).name.startswith("test_")]
    golden = sorted((root / "tests/golden").glob("test_*.py"))
    own, last = ([file.relative_to(root).as_posix() for file in files] for files in (named, golden))
    return list(dict.fromkeys([*own, *tests, *last]))


def copy_of(root: Path, folder: Path) -> Path:
    """A copy of the files that git knows, in a folder named as the package."""
    target = folder / "shardweave"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    return target


@dataclass(frozen=True)
class Reached:
    """Tests by the number of the mutant whose line they reach, and the seconds of each test.

    A test that failed before a fault was planted is in neither.
    """

    tests: dict[int, set[str]]
    seconds: dict[str, float]


def record_reached(root: Path, mutants: Sequence[Mutant], options: argparse.Namespace) -> Reached:
    """Run all fast tests in a copy with marked lines."""
    seconds, failed = defaultdict[str, float](float), set[str]()
    tests = defaultdict[int, set[str]](set)
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(root, Path(folder))
        reached.mark_lines(copy, [(mutant.path, mutant.line) for mutant in mutants])
        records = Path(folder) / "records"
        records.mkdir()
        arguments = ["-n", str(options.workers), "tests"]
        with mock.patch.dict(os.environ, {reached.FOLDER: str(records)}):
            failed_first = run_tests(copy, arguments, options.timeout_s, reached.__name__)
        if not (records / "durations").exists():
            raise RuntimeError(f"No test ran in the copy of {root}: {failed_first}")
        for line in (records / "durations").read_text().splitlines():
            test, duration, outcome = line.split("\t")
            seconds[test] += float(duration)
            if outcome == "failed":
                failed.add(test)
        for file in records.glob("reached-*"):
            for line in file.read_text().splitlines():
                number, test = line.split("\t")
                if test in seconds and test not in failed:
                    tests[int(number)].add(test)
    return Reached(tests, seconds)


def run_tests(root: Path, arguments: Sequence[str], timeout_s: float, recorder: str = "") -> str:
    """The first test that fails, "timeout" for tests that do not end, or "" if all pass.

    recorder: a plugin of pytest, with which all tests run, also after one that fails.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE"]
    command += ["-p", recorder] if recorder else ["-x"]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    environment |= {"PYTHONPATH": str(root.parent)}
    with tempfile.TemporaryFile("w+") as output, tempfile.NamedTemporaryFile("w+") as listed:
        listed.write("\n".join(arguments))
        listed.flush()
        process = subprocess.Popen(
            [*command, f"@{listed.name}"],
            cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if code in (0, 5):  # 5: none was collected
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    return failed[1] if failed else f"pytest ended with {code}: {text[-300:]}"


def judge(
    root: Path,
    mutant: Mutant,
    options: argparse.Namespace,
    reaching: Sequence[str] | None = None,
    seconds: Mapping[str, float] = MappingProxyType({}),
) -> Row:
    """Plant a fault in the copy, run the tests, and take it out again.

    reaching: the tests that reach the line; as many run as fit in the limit. If there are none, as
    for a line that runs at import, or without `reaching`, the files of the nearest tests run.
    seconds: the duration of each test.
    """
    near = nearest_tests(root, mutant.path)
    tests, left = near, 0
    if reaching:
        order = sorted(reaching, key=lambda t: (t.partition("::")[0] not in near, seconds[t], t))
        ends = accumulate(seconds[test] for test in order)
        tests = [test for test, end in zip(order, ends, strict=True) if end <= options.limit_s]
        left = len(order) - len(tests)
    path = root / mutant.path
    source = path.read_text()
    path.write_text(mutant.text)
    start = time.monotonic()
    try:
        workers = ["-n", str(0 if reaching else options.workers)]
        killer = run_tests(root, [*workers, *tests], options.timeout_s) if tests else ""
    finally:
        path.write_text(source)
    place = f"{mutant.path}:{mutant.line}"
    reached = None if reaching is None else len(reaching)
    took = round(time.monotonic() - start, 1)
    return Row(place, mutant.kind, mutant.diff, killer, took, reached, left)


def table_of(rows: Sequence[Row]) -> Table:
    """The outcomes, one row for each mutant."""
    table = Table(title=f"{sum(bool(row.killer) for row in rows)} of {len(rows)} mutants killed")
    for name in ("place", "kind", "killed by", "tests", "not run", "s"):
        side = "right" if name in ("tests", "not run", "s") else "left"
        table.add_column(name, justify=side, overflow="fold")
    for row in rows:
        reached = "" if row.reached is None else str(row.reached)
        killer = row.killer or "SURVIVED"
        table.add_row(row.place, row.kind, killer, reached, str(row.left), f"{row.seconds:.0f}")
    return table


def write_rows(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write the rows so far as data, if a file is named."""
    if options.json is not None:
        record = {
            "seeds": options.seed,
            "room": options.room,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Draw, plant, run and print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=60)
    parser.add_argument("--room", default="")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--nearest", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.n, options.nearest = QUICK, True
    try:
        drawn = (draw(ROOT, options.room, options.n, seed) for seed in options.seed)
        mutants = list(dict.fromkeys(chain.from_iterable(drawn)))
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    rows: list[Row] = []
    if options.json is not None and options.json.exists():
        rows += [Row(**row) for row in json.loads(options.json.read_text())["rows"]]
    known = {(row.place, row.diff) for row in rows}
    mutants = [m for m in mutants if (f"{m.path}:{m.line}", m.diff) not in known]
    marked = None if options.nearest else record_reached(ROOT, mutants, options)
    with tempfile.TemporaryDirectory() as folder:
        root = copy_of(ROOT, Path(folder))
        for number, mutant in enumerate(track(mutants, "mutants", console=Console(stderr=True))):
            if marked is None:
                rows.append(judge(root, mutant, options))
            else:
                reaching = sorted(marked.tests[number])
                rows.append(judge(root, mutant, options, reaching, marked.seconds))
            print(f"{rows[-1].place}: {rows[-1].killer or 'SURVIVED'}", file=sys.stderr, flush=True)
            write_rows(rows, options)
    console.print(table_of(rows))
    for row in rows:
        if not row.killer:
            console.print(f"\n{row.place} survived:\n{row.diff}", markup=False, highlight=False)
    return int(sum(bool(row.killer) for row in rows) < GOAL * len(rows))


if __name__ == "__main__":
    sys.exit(main())
