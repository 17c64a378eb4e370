"""The rules of the house: import direction, file size, registries, and what sources may not say.

CONTRIBUTING.md says them for people; this file keeps them true.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardweave.passes.registry import PASSES
from shardweave.planners.registry import PLANNERS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "shardweave"
LAYERS = ("ir", "passes", "planners", "backends", "driver")  # each may import those before it
SOURCE_FOLDERS = (*LAYERS, "tests", "benchmarks", "examples", "docs")
MAX_LINES = 500
MACHINE_PATH = re.compile(r"(?<![\w.$}~/-])/(?:home|root|Users|tmp|work|opt|mnt)/[\w.]")


def name_of(path: Path) -> str:
    """The path as a person says it, from the repository's root."""
    return path.relative_to(ROOT).as_posix()


def source_files(suffix: str) -> list[Path]:
    """The repository's own files that end in `suffix`, the root's first."""
    nested = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob(f"*{suffix}")]
    return sorted(ROOT.glob(f"*{suffix}")) + sorted(nested)


def layer_files() -> list[Path]:
    """Every .py file below one of the layers' folders."""
    return [path for path in source_files(".py") if path.relative_to(ROOT).parts[0] in LAYERS]


def imported_names(source: str, package: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The line and the dotted name, in parts, of all that a file of `package` imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, [*base, *module, alias.name]


def forbidden_imports(source: str, package: list[str]) -> list[str]:
    """What a file of `package` (`["shardweave", "ir", ..]`) imports against the direction."""
    layer = package[1]
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    found: list[str] = []
    for line, parts in imported_names(source, package):
        if parts[0] in LAYERS:
            found.append(f"line {line}: '{parts[0]}' is a top-level module only in this folder")
        if parts[0] != PACKAGE:
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in LAYERS else None
        if target is None and layer != "driver":
            found.append(f"line {line}: '{layer}' imports the root package, which imports it")
        elif target is not None and target not in allowed:
            found.append(f"line {line}: '{layer}' imports '{target}'")
    return found


@pytest.mark.parametrize(
    ("source", "is_allowed"),
    [
        ("import shardweave.ir.mesh.mesh", True),
        ("from shardweave.planners import registry", False),
        ("from ..planners.plan import Plan", False),
        ("from ..ir.mesh.mesh import Mesh", True),
        ("from .registry import PASSES", True),
        ("import torch.distributed", True),
        ("from shardweave.backends import reference", False),
        ("from shardweave import driver", False),
        ("from ..driver.cli import main", False),
        ("def f():\n    import shardweave.driver.cli", False),
        ("import shardweave", False),
        ("from shardweave import capture", False),
        ("import ir.mesh.mesh", False),
    ],
)
def test_import_check_tells_down_from_up(source: str, is_allowed: bool) -> None:
    assert (forbidden_imports(source, [PACKAGE, "passes"]) == []) is is_allowed


@pytest.mark.parametrize("path", layer_files(), ids=name_of)
def test_imports_run_from_driver_down_to_ir(path: Path) -> None:
    package = [PACKAGE, *path.relative_to(ROOT).parent.parts]
    assert forbidden_imports(path.read_text(), package) == []


def test_no_python_file_is_longer_than_500_lines() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in source_files(".py")}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_file_outside_tests_is_a_bag_of_utils_or_helpers() -> None:
    bags = [path for path in source_files(".py") if path.stem in {"utils", "helpers"}]
    assert [name_of(path) for path in bags if "tests" not in path.relative_to(ROOT).parts] == []


def test_no_source_names_a_path_of_one_machine() -> None:
    files = [ROOT / "Makefile", ROOT / ".ci" / "run"]
    for suffix in (".py", ".md", ".toml", ".yaml", ".json"):
        files += source_files(suffix)
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_every_package_is_listed_in_pyproject_and_has_an_init() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in layer_files()} | {Path()}
    assert set(listed) == {".".join([PACKAGE, *folder.parts]) for folder in folders}
    assert [name_of(ROOT / f) for f in folders if not (ROOT / f / "__init__.py").exists()] == []


def resolve(target: str) -> Any:
    """The object that a registry's "module:name" stands for."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def defined_names(layer: str) -> set[tuple[str, str]]:
    """(module, name) of every class and function at the top level of a layer's files."""
    return {
        (".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]), node.name)
        for path in (ROOT / layer).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


@pytest.mark.parametrize("name", PASSES)
def test_pass_is_registered_documented_and_tested_under_its_own_name(name: str) -> None:
    stem = name.replace("-", "_")
    module, _, class_name = PASSES[name].partition(":")
    assert module.rpartition(".")[2] == stem
    assert class_name.lower() == f"{name.replace('-', '')}pass"
    pass_class = resolve(PASSES[name])
    assert pass_class.name == name
    assert dataclasses.is_dataclass(pass_class)
    doc = inspect.getdoc(pass_class) or ""
    assert "Requires:" in doc, f"the docstring of '{name}' must say what the pass requires"
    assert "Ensures:" in doc, f"the docstring of '{name}' must say what the pass ensures"
    assert (ROOT / "tests" / "passes" / f"test_{stem}.py").is_file()


def test_every_pass_file_is_registered() -> None:
    registered = set(PASSES.values())
    passes = {
        f"{module}:{name}"
        for module, name in defined_names("passes") | defined_names("planners")
        if name.endswith("Pass")
    }
    assert passes - registered == set()


@pytest.mark.parametrize("name", PLANNERS)
def test_planner_is_registered_documented_and_tested_under_its_own_name(name: str) -> None:
    stem = name.replace("-", "_")
    module, _, function = PLANNERS[name].partition(":")
    assert module.startswith("shardweave.planners.")
    assert function == f"plan_{stem}"
    planner = resolve(PLANNERS[name])
    assert callable(planner)
    assert inspect.getdoc(planner), f"planner '{name}' needs a docstring: objective, units, source"
    assert (ROOT / "tests" / "planners" / f"test_{stem}.py").is_file()


def test_every_planner_is_registered() -> None:
    functions = {target.rpartition(":")[2] for target in PLANNERS.values()}
    planners = {
        name
        for module, name in defined_names("planners")
        if name == f"plan_{module.rpartition('.')[2]}"
    }
    assert planners - functions == set()
