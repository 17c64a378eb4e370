"""The pages that the code writes, and that docstrings have what these pages need."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardweave as sw
from shardweave.docs.reference import PAGES, members_of, read_by
from shardweave.driver.cli import TASKS
from shardweave.passes.presets import PREFIX, PRESETS
from shardweave.passes.registry import PASSES
from shardweave.planners.registry import PLANNERS

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = [name for name in sw.__all__ if inspect.isfunction(getattr(sw, name))]


def headings(page: str, level: int) -> set[str]:
    """The headings of one level on a page that the code writes."""
    return set(re.findall(rf"^#{{{level}}} (.*)$", PAGES[page](), re.M))


def test_page_of_names_has_every_public_one() -> None:
    assert headings("python.md", 2) == {f"sw.{name}" for name in sw.__all__}


def test_page_of_commands_has_every_command_with_its_options() -> None:
    commands = {f"shardweave {name}" for names in TASKS.values() for name in names}
    assert headings("commands.md", 3) == commands
    assert re.search(r"^  --check +compare loss and gradients", PAGES["commands.md"](), re.M)


def test_page_of_options_has_every_pass_preset_and_planner() -> None:
    presets = {f"{PREFIX}{name}" for name in PRESETS}
    assert headings("options.md", 3) == {*PASSES, *presets, *PLANNERS}
    assert "| `alone_bytes` | `int` | `2097152` |" in PAGES["options.md"]()


def test_table_of_passes_has_a_row_for_each_made_of_its_docstring() -> None:
    rows = re.findall(r"^\| \[`([\w-]+)`\]\(#\1\) \| (.+) \|$", PAGES["options.md"](), re.M)
    assert [name for name, _ in rows] == sorted(PASSES)
    assert ("dce", "Erase every op without uses, and ops whose results only such ops use.") in rows


@pytest.mark.parametrize("name", sw.__all__)
def test_public_name_and_its_members_say_what_they_are_and_raise(name: str) -> None:
    value = getattr(sw, name)
    assert value.__doc__, f"sw.{name} needs a docstring"
    functions = dict(members_of(value)) if inspect.isclass(value) else {name: value}
    for called, member in functions.items():
        doc = read_by(member).__doc__
        assert doc, f"{name}: '{called}' needs a docstring"
        missing = {error for error in raised_by(read_by(member)) if error not in doc}
        assert missing == set(), f"the docstring of '{called}' must say when it raises these"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_of_a_public_function_names_each_argument(name: str) -> None:
    function = getattr(sw, name)
    words = re.findall(r"\w+", function.__doc__.lower())
    arguments = inspect.signature(function).parameters
    # "a program" and "programs" are words for `program`, "a checkpoint" is none for `number`.
    assert [one for one in arguments if not {one, f"{one}s", one.rstrip("s")} & {*words}] == []


def raised_by(function: Any) -> Iterator[str]:
    """The errors that the body of a function itself raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ast.unparse(node.exc.func)
