"""All golden cases by name, and the versions of what their figures depend on."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardweave.tests.golden import commands, lowered, planned, programs, steps
from shardweave.tests.golden.figures import Figures

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("ir", "passes", "planners", "backends", "driver")


def threshold_figures(layer: str) -> Figures:
    """Figures of a layer's constants: each module-level assignment that holds a number."""
    figures: dict[str, list[str]] = {}
    for path in sorted((ROOT / layer).rglob("*.py")):
        tree = ast.parse(path.read_text())
        values = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        texts = [ast.unparse(node) for node in values if any(_numbers_in(node))]
        if texts:
            figures[path.relative_to(ROOT).as_posix()] = texts
    return figures


def _numbers_in(node: ast.AST) -> Iterator[ast.Constant]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and type(inner.value) in (int, float):
            yield inner


def _cases(
    kind: str, names: Mapping[str, object], figures: Callable[[str], Figures]
) -> dict[str, Callable[[], Figures]]:
    return {f"{kind}: {name}": partial(figures, name) for name in names}


CASES: dict[str, Callable[[], Figures]] = {
    **_cases("capture", dict.fromkeys(programs.CAPTURED), programs.capture_figures),
    **_cases("plan", lowered.PLANS, lowered.plan_figures),
    **_cases("passes", lowered.PIPELINES, lowered.pipeline_figures),
    **_cases("planner", planned.PROBLEMS, planned.planner_figures),
    **_cases("command", commands.COMMANDS, commands.command_figures),
    **_cases("step", steps.STEPS, steps.step_figures),
    **_cases("thresholds", dict.fromkeys(LAYERS), threshold_figures),
    "flags": commands.flag_figures,
    "refusals": commands.refusal_figures,
}

PACKAGES = ("python", "torch", "transformers", "botorch")
"""Packages on whose versions figures depend."""

_MODELS = {
    **{f"capture: {name}": name for name in programs.CAPTURED},
    **{f"plan: {name}": row[0] for name, row in lowered.PLANS.items()},
    **{f"passes: {name}": row[0] for name, row in lowered.PIPELINES.items()},
    **{f"planner: {name}": row[1] for name, row in planned.PROBLEMS.items()},
}


def depends_on(name: str) -> Iterator[str]:
    """Yield the packages on whose version a case depends: torch and transformers where it captures
    a model."""
    if name.startswith(("command:", "flags", "refusals")):
        yield "python"  # argparse writes its texts otherwise in each version
    if name.startswith(("capture:", "command:", "step:")) or _MODELS.get(name) in programs.LIVE:
        yield "torch"
    if programs.LIVE.get(_MODELS.get(name, ""), "").startswith("hf:"):
        yield "transformers"
    if name == "planner: oppa":
        yield "botorch"


def versions() -> dict[str, str]:
    """Return the installed versions up to the minor number; empty for what is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    if package == "python":
        return ".".join(map(str, sys.version_info[:2]))
    try:
        return ".".join(version(package).split(".")[:2])
    except PackageNotFoundError:
        return ""


def moved(name: str, recorded: Mapping[str, str]) -> str:
    """Name a package whose version differs from the recorded one, if a case depends on it."""
    for package in depends_on(name):
        if recorded[package] != _version(package):
            now = _version(package) or "not installed"
            return f"{package} is {now}, and the record is of {recorded[package]}"
    return ""
