"""The page of errors and warnings, written from their docstrings and the messages in the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import shardweave as sw

_ROOT = Path(__file__).resolve().parents[1]
_ROOMS = ("ir", "passes", "planners", "backends", "driver")


def raised() -> dict[str, list[str]]:
    """Messages by the name of the class that is raised or warned with, `{..}` for what varies."""
    messages: dict[str, set[str]] = defaultdict(set)
    for room in _ROOMS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            for name, message in _calls(ast.parse(path.read_text())):
                messages[name].add(message)
    return {name: sorted(texts) for name, texts in messages.items()}


def _calls(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each class that is called with a text, or that is warned with, and the text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            *_, kind = node.args if ast.unparse(node.func).endswith("warn") else (node.func,)
            message = _text(node.args[0])
            if isinstance(kind, ast.Name) and len(re.sub(r"\{\.\.\}|\W", "", message)) > 12:
                yield kind.id, " ".join(message.split())


def _text(node: ast.expr) -> str:
    """The text of a literal; empty if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return ""
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "{..}" for part in node.values
    )


def classes() -> Iterator[tuple[str, type[Exception]]]:
    """The public errors, then the public warnings, by name."""
    named = [(name, getattr(sw, name)) for name in sorted(sw.__all__)]
    kinds = [(name, kind) for name, kind in named if inspect.isclass(kind)]
    for is_warning in (False, True):
        for name, kind in kinds:
            if issubclass(kind, Exception) and issubclass(kind, Warning) is is_warning:
                yield name, kind


def errors() -> str:
    """The page: each class, what it means, and the messages that the code gives it."""
    messages = raised()
    lines = [
        "# Errors and warnings",
        "",
        "Reference for those who met a message: every class that shardweave raises or warns with, "
        "what it means, and its messages (`{..}` stands for what varies). "
        "[Troubleshooting](troubleshooting.md) begins with symptoms.",
        "",
        'Warnings are silenced by class, such as `warnings.simplefilter("ignore", sw.PlanNote)`.',
    ]
    for name, kind in classes():
        base = next(each.__name__ for each in kind.__mro__[1:] if each.__module__ == "builtins")
        doc = " ".join((inspect.getdoc(kind) or "").split())
        lines += ["", f"## {name}", "", f"A `{base}`. {doc}"]
        if texts := messages.get(name):
            lines += ["", "```text", *texts, "```"]
    for name in ("ValueError", "TypeError", "RuntimeError"):
        lines += ["", f"## {name}", "", "```text", *messages[name], "```"]
    return "\n".join(lines) + "\n"
