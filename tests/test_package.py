"""The package that people install: what it exports, which plugins it loads, what its wheel holds."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardweave as sw
from shardweave.ir.plugins import load_plugins
from shardweave.passes.registry import find_pass
from shardweave.planners.simulate.timeline import new_figure

ROOT = Path(__file__).resolve().parent.parent

INTERNAL = {
    "CanonicalError": "becomes a CaptureError",
    "UnreachableSharding": "becomes a PassError",
    "JoinedMicroBatches": "becomes a PassError, or a note",
    **dict.fromkeys(
        ("Irregular", "Unlike", "Unfit", "Unseen", "OutOfTime"), "caught where it is raised"
    ),
    "OwnMessagesError": "becomes a ValueError with what to do",
    "UnfitError": "becomes a note: the region runs on ATen",
    "NotReadyError": "orders the statements of a kernel",
    "SourceError": "a guard against files that were tampered with",
}
"""Errors that no user catches by name, and why."""


def errors() -> Iterator[tuple[str, list[str]]]:
    """The names of the package's errors and warnings, each with those of its bases."""
    for layer in ("ir", "passes", "planners", "backends", "driver"):
        for path in sorted((ROOT / layer).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    bases = [ast.unparse(base) for base in node.bases]
                    if any(base.endswith(("Error", "Warning", "Exception")) for base in bases):
                        yield node.name, bases


def test_every_error_for_users_is_exported_or_derives_from_one_that_is() -> None:
    hidden = {
        name for name, bases in errors() if name not in sw.__all__ and not {*bases} & {*sw.__all__}
    }
    assert hidden == set(INTERNAL)


PLUGIN = """
from dataclasses import dataclass
from xdsl.passes import ModulePass
import shardweave as sw

@sw.register_pass
@dataclass(frozen=True)
class AcmePass(ModulePass):
    name = "acme-pass"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a plugin, as pip installs it; its module is still to be written."""
    folder = tmp_path / "acme-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[shardweave.plugins]\nacme = acme_passes\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("shardweave.passes.registry.PASSES", {})
    load_plugins.cache_clear()
    yield tmp_path / "acme_passes.py"
    load_plugins.cache_clear()
    sys.modules.pop("acme_passes", None)


def test_pass_of_an_installed_plugin_is_known(installed: Path) -> None:
    installed.write_text(PLUGIN)
    load_plugins()
    assert find_pass("acme-pass").__module__ == "acme_passes"


def test_plugin_that_fails_is_named_with_its_package(installed: Path) -> None:
    installed.write_text("import no_such_module")
    message = r"plugin 'acme' \(acme_passes\) of acme fails: ModuleNotFoundError: .* uninstall it"
    with pytest.raises(ValueError, match=message):
        load_plugins()


def test_pictures_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'shardweave\[plot\]'"):
        new_figure(1, 1)


IMPORTED = """
import shardweave as sw
program = sw.load("step.mlir")
print(sw.__file__, sw.simulate(program, "testbed").time_s > 0)
from shardweave.driver.report.explorer import page
"""


@pytest.mark.slow
def test_wheel_built_from_the_sdist_is_whole(tmp_path: Path) -> None:
    """It is installed alone into a folder; torch and all else is this environment's."""
    source, site = tmp_path / "source", tmp_path / "site"
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")[:-1]
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    make = "from setuptools import build_meta as b; print(b.build_sdist('.'))"
    environment = {**os.environ, "PYTHONPATH": "", "MPLCONFIGDIR": str(tmp_path)}
    made = subprocess.check_output([sys.executable, "-c", make], cwd=source, text=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    sdist = source / made.splitlines()[-1]
    subprocess.run([*pip, "--target", site, sdist], check=True, env=environment)
    packaged = {
        path.relative_to(site / "shardweave").as_posix()
        for path in (site / "shardweave").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    layers = ("ir/", "passes/", "planners/", "backends/", "driver/")
    expected = {name for name in files if name.startswith(layers)}
    assert packaged == expected | {"__init__.py", "__main__.py", "py.typed"}
    (tmp_path / "step.mlir").write_text(STEP)
    run = [sys.executable, "-c", IMPORTED]
    environment["PYTHONPATH"] = str(site)
    said = subprocess.check_output(run, cwd=tmp_path, env=environment, text=True)
    assert said.split() == [str(site / "shardweave/__init__.py"), "True"]
    command = [str(site / "bin/shardweave"), "show", "step.mlir"]
    said = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert said.startswith("1 ops (1 forward)")


STEP = """
builtin.module {
  func.func @step(%x: tensor<4x8xf32> {dist.kind = "input", dist.name = "x"})
      -> (tensor<4x8xf32> {dist.kind = "output", dist.name = "0"}) {
    %y = aten.relu(%x) {layer = "", phase = forward} : tensor<4x8xf32>
    func.return %y : tensor<4x8xf32>
  }
}
"""
