"""The house drawn as a graph: no import circle, directions within a layer, sizes, and names.

An import counts wherever it stands: in a function, or for types alone.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import networkx as nx
import pytest

from shardweave.ir.library.pure_ops import pure_ops

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("ir", "passes", "planners", "backends", "driver")
P95_LINES = 330

STRATA = {
    "ir": (
        "mesh",
        "library",
        "dialects",
        "ops",
        "program",
        "sharding",
        "capture",
        "verify",
        "inspect",
        "proof",
    ),
    "planners": (
        "plan",
        "cost",
        "simulate",
        "overlap",
        "schedules",
        "lowering",
        "predict",
        "structure",
        "trials",
        "megatron",
        "axonn",
        "oases",
        "amp",
        "auto",
        "oppa",
    ),
}
"""The folders of a layer, bottom up: each may import those before it, and the layer's own files."""

MAX_FILES = 12


def files() -> list[Path]:
    """The package's Python files."""
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def module_of(path: Path) -> str:
    """`ir.sharding.flow`; a package is called as its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, parsed."""
    return {module_of(path): ast.parse(path.read_text()) for path in files()}


def imported(tree: ast.Module, known: set[str]) -> set[str]:
    """The package's modules that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                nested = f"{node.module}.{alias.name}"
                is_module = nested.removeprefix("shardweave.") in known
                names.add(nested if is_module else node.module)
    return {name.removeprefix("shardweave.") for name in names} & known


@cache
def graph() -> nx.DiGraph:
    """An edge from each module to each that it imports."""
    known = set(trees())
    edges = [(name, other) for name in known for other in imported(trees()[name], known)]
    return nx.DiGraph(edges)


def circles(imports: nx.DiGraph) -> list[list[str]]:
    """Groups of modules that import each other, over however many files."""
    return [sorted(part) for part in nx.strongly_connected_components(imports) if len(part) > 1]


def test_import_in_a_function_or_for_types_closes_a_circle() -> None:
    typed = "if TYPE_CHECKING:\n    from shardweave.ir.b import B"
    lazy = "def f():\n    from shardweave.ir import a"
    known = {"ir.a", "ir.b"}
    edges = [
        ("ir.a", imported(ast.parse(typed), known)),
        ("ir.b", imported(ast.parse(lazy), known)),
    ]
    assert edges == [("ir.a", {"ir.b"}), ("ir.b", {"ir.a"})]
    drawn = nx.DiGraph([(name, other) for name, others in edges for other in others])
    assert circles(drawn) == [["ir.a", "ir.b"]]


def test_no_modules_import_each_other() -> None:
    assert len(graph()) > 200
    assert circles(graph()) == []


def folder_of(module: str) -> str:
    """`ir.sharding` of `ir.sharding.rules.matmul`, `ir` of `ir.mesh.mesh`."""
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    parts = module.split(".")
    return ".".join((parts if is_package else parts[:-1])[:2])


@pytest.mark.parametrize("layer", STRATA)
def test_folders_of_a_layer_import_those_below_them_alone(layer: str) -> None:
    order = {f"{layer}.{name}": level for level, name in enumerate(STRATA[layer])}
    upward = [
        f"{module} -> {target}"
        for module, target in graph().edges
        if folder_of(module) in order and folder_of(target) in order
        if order[folder_of(target)] > order[folder_of(module)]
    ]
    assert upward == []


@pytest.mark.parametrize("layer", STRATA)
def test_every_folder_of_a_layer_has_a_stratum(layer: str) -> None:
    folders = {folder_of(module) for module in trees() if module.split(".")[0] == layer}
    assert folders - {layer} == {f"{layer}.{name}" for name in STRATA[layer]}


def test_a_folder_holds_at_most_twelve_files() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in files():
        if path.name != "__init__.py":
            counts[path.parent.relative_to(ROOT).as_posix()] += 1
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_files_are_short() -> None:
    lengths = sorted(len(path.read_text().splitlines()) for path in files())
    assert lengths[int(0.95 * (len(lengths) - 1))] <= P95_LINES


ENTRIES = {"add_parser"}
"""Functions that every module of a kind defines: `driver.cli` calls each command's by this name."""


def homes_of(kind: type[ast.FunctionDef] | type[ast.ClassDef]) -> dict[str, list[str]]:
    """The modules that define each public function or class of more than one home."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, kind) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_public_function_has_one_home() -> None:
    several = homes_of(ast.FunctionDef)
    assert {name: several[name] for name in several.keys() - ENTRIES} == {}


def test_class_name_means_one_thing() -> None:
    assert homes_of(ast.ClassDef) == {}


HOMES = {
    "bytes_moved": "ir.program.traffic",
    "storage_of": "ir.program.storage",
    "kept_values": "ir.program.storage",
    "state_bytes": "planners.cost.memory",
    "propagate": "passes.partition.propagate_shardings",
    "reshard": "ir.sharding.reshard",
}
"""Facts with one home: the functions that say them, and where."""


@pytest.mark.parametrize("name", HOMES)
def test_fact_has_one_home(name: str) -> None:
    homes = [
        module
        for module, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert homes == [HOMES[name]]


def words_in(node: ast.AST) -> Iterator[str]:
    """The words of a table: its string constants, a dict's keys among them, and texts to split."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield from inner.value.split()


def tables_of_ops(tree: ast.Module, ops: Collection[str]) -> list[str]:
    """The module-level tables with two words or more that are names of ops, as a rule.

    ops: without `aten.`. A table is a set, a dict, a list or a tuple, written out or computed.
    Words such as `sum` name other things too, so that a table of names without `aten.` has three,
    and no more words of another kind.
    """
    tables: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            words = list(words_in(node.value))
            marked = sum(word.startswith("aten.") and word != "aten." for word in words)
            plain = sum(word in ops for word in words)
            if marked > 1 or (plain > 2 and 2 * plain >= len(words)):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                tables.append(ast.unparse(target))
    return tables


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('A = frozenset({"aten.mm", "aten.bmm"})', ["A"]),
        ('A: dict[str, int] = {"aten.mm": 1, "aten.bmm": 2}', ["A"]),
        ('A = tuple(f"aten.{name}" for name in "mm bmm dot".split())', ["A"]),
        ('A = ("mm", "bmm", "dot")', ["A"]),
        ('A = "aten.mm"', []),
        ('A = ("rows", "columns", "all", "dot")', []),
        ('def f():\n    return op.name in ("aten.mm", "aten.bmm")', []),
    ],
)
def test_table_of_op_names_is_seen(text: str, names: list[str]) -> None:
    assert tables_of_ops(ast.parse(text), {"mm", "bmm", "dot", "all"}) == names


KINDS = frozenset({"sum", "max", "min"})
"""Names of ops that name reductions too."""

ALLOWED_TABLES = {
    "ir.library.pure_ops": ["CREATES"],  # what the dialect admits, which stands below the records
}
"""Tables that say nothing of what an op is."""


def test_facts_about_ops_stand_in_their_records() -> None:
    """No table of op names stands outside `ir.ops`: a fact about an op is a field of `OpSpec`."""
    names = {name.removeprefix("aten.") for name in pure_ops()} - KINDS
    tables = {
        module: found
        for module, tree in trees().items()
        if not module.startswith("ir.ops.")
        if (found := tables_of_ops(tree, names))
    }
    assert tables == ALLOWED_TABLES


def test_axes_are_assigned_in_one_walk() -> None:
    """Only the flow of propagation asks which axes cut an op, so that no planner walks on its own."""
    askers = {
        module
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "assign"
    }
    assert askers == {"ir.sharding.flow"}


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_planning_enters_no_driver(name: str) -> None:
    from shardweave import _HOMES

    home = _HOMES[name].partition(":")[0]
    assert home.startswith("planners.")
    assert not [module for module in nx.descendants(graph(), home) if module.startswith("driver")]


def writes_after_construction(tree: ast.Module) -> list[str]:
    """Writes of attributes, but for private state that a class's own constructor has begun."""
    allowed: set[ast.AST] = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
        begun, calls = set[str](), ["__init__"]
        for name in calls:  # grows
            for node in ast.walk(methods[name]) if name in methods else ():
                if is_own(node) and isinstance(node.ctx, ast.Store):
                    begun.add(node.attr)
                if isinstance(node, ast.Call) and is_own(node.func) and node.func.attr not in calls:
                    calls.append(node.func.attr)
        for name, method in methods.items():
            for node in ast.walk(method):
                is_state = is_own(node) and node.attr.startswith("_") and node.attr in begun
                if is_state or (is_own(node) and name == "__init__"):
                    allowed.add(node)
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del))
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"))
        if node not in allowed
    ]


def is_own(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Whether a node is an attribute of `self`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"


def test_write_after_construction_is_seen() -> None:
    text = """
class A:
    def __init__(self):
        self.x = 1
        self._reset()
    def _reset(self):
        self._count = 0
    def count(self):
        self._count += 1
    def wrong(self):
        self.x = self._new = 2
def f(a):
    a.x = 3
    setattr(a, "x", 4)
"""
    lines = [int(one.split()[1].rstrip(":")) for one in writes_after_construction(ast.parse(text))]
    assert sorted(lines) == [11, 11, 13, 14]


def test_no_object_is_written_after_construction_in_driver_step() -> None:
    found = {
        module: writes
        for module, tree in trees().items()
        if module.startswith("driver.step") and (writes := writes_after_construction(tree))
    }
    assert found == {}


OPENS_WITH_A_QUESTION = re.compile(r"\s*(What|How|Where|Which|Why|When|Who|Whose)\b")
VAGUE = ("found", "one")


def questions(tree: ast.Module) -> list[str]:
    """The docstrings, of attributes too, that open with a question word."""
    texts = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return [text for text in texts if isinstance(text, str) and OPENS_WITH_A_QUESTION.match(text)]


def vague_variables(tree: ast.Module) -> list[str]:
    """Variables, parameters and attributes whose name does not say what they hold."""
    names = [
        (node.lineno, name)
        for node in ast.walk(tree)
        if (name := bound_name(node)) in VAGUE and isinstance(node, ast.expr | ast.arg)
    ]
    return [f"line {line}: {name}" for line, name in sorted(names)]


def bound_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return None


def test_questions_and_vague_variables_are_seen() -> None:
    tree = ast.parse('''"""What it is."""
A = 1
"""Which number."""
def f(one, *, b=lambda found: 1):
    """Return the number, whatever it is."""
    self.found = [one for one, c in a if (found := c)]
    return found.one
''')
    assert questions(tree) == ["What it is.", "Which number."]
    names = ["4: found", "4: one", "6: found", "6: found", "6: one"]
    assert vague_variables(tree) == [f"line {name}" for name in names]


@pytest.mark.parametrize("layer", LAYERS)
def test_docstrings_name_a_thing_and_variables_say_what_they_hold(layer: str) -> None:
    own = {module: tree for module, tree in trees().items() if module.split(".")[0] == layer}
    opened = {module: texts for module, tree in own.items() if (texts := questions(tree))}
    named = {module: names for module, tree in own.items() if (names := vague_variables(tree))}
    assert (opened, named) == ({}, {})
