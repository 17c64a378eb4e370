"""Pages of the site that are written by the code: public names, commands, passes and planners."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from importlib import import_module
from types import FunctionType
from typing import Any

import shardweave as sw
from shardweave.docs.errors import errors
from shardweave.docs.figures import figures
from shardweave.docs.papers import papers
from shardweave.driver.cli import TASKS, command_line
from shardweave.driver.commands.arguments import commands_of
from shardweave.passes.presets import PREFIX, PRESETS, SUMMARIES
from shardweave.passes.registry import PASSES
from shardweave.planners.registry import PLANNERS

_WIDTH = 92
"""Columns of the usages of commands."""

_MODULE = re.compile(r"\b(?:\w+\.)+(?=[A-Za-z_])")
_RAISES = re.compile(r"(?<=[.)]) (?=Raises )")
_MARKUP = re.compile(r"(`[^`]*`)")


def python_names() -> str:
    """The page of what `import shardweave as sw` has: each name with what its docstring says."""
    lines = [
        "# Python names",
        "",
        "Reference for those who call shardweave from Python: every public name, with what its "
        "docstring says. You will be able to look up arguments, results and errors.",
        "",
        "Here `sw` is `shardweave`.",
    ]
    for name in sorted(sw.__all__, key=str.lower):
        lines += ["", f"## sw.{name}", "", *_named(f"sw.{name}", getattr(sw, name))]
    return "\n".join(lines) + "\n"


def _named(name: str, value: Any) -> Iterator[str]:
    """A function, or a class with its public methods and properties."""
    if not inspect.isclass(value):
        yield from _described(name, value)
        return
    if issubclass(value, Exception):
        base = next(one for one in value.__mro__[1:] if one.__module__ == "builtins")
        yield from (f"An error: a `{base.__name__}`.", "")
        yield from _paragraphs(_doc(value), ())
        return
    yield from _described(name, value)
    for member, found in members_of(value):
        function = read_by(found)
        if found is function:
            yield from ("", "```text", *_signature(f".{member}", function), "```", "")
        else:
            yield from ("", "```text", f".{member}: {_returned(function)}", "```", "")
        yield from _paragraphs(_doc(function), _parameters(function))


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class has from this project, in its own order."""
    known: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("shardweave."):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in known:
                continue
            known.add(name)
            if isinstance(value, (classmethod, staticmethod)):
                yield name, value.__func__
            elif isinstance(value, (FunctionType, property, cached_property)):
                yield name, value


def read_by(member: Any) -> Any:
    """The function of a method, or that which a property calls."""
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, cached_property) else member


def _described(name: str, value: Any) -> Iterator[str]:
    yield from ("```text", *_signature(name, value), "```", "")
    yield from _paragraphs(_doc(value), _parameters(value))


def _doc(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def _parameters(value: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(value).parameters if name != "self")


def _signature(name: str, value: Any) -> list[str]:
    """The call with annotations as they are written, on as many lines as it takes."""
    found = inspect.signature(value)
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    words = _words(parameters)
    result = "" if inspect.isclass(value) else f" -> {_annotation(found.return_annotation)}"
    line = f"{name}({', '.join(words)}){result}"
    if len(line) <= _WIDTH:
        return [line]
    return [f"{name}(", *(f"    {word}," for word in words), f"){result}"]


def _words(parameters: Sequence[inspect.Parameter]) -> list[str]:
    words: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            if not any(one.kind is one.VAR_POSITIONAL for one in parameters):
                words.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        word = f"{star}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            word += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            word += f" = {_default(parameter.default)}"
        words.append(word)
    return words


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _MODULE.sub("", text)


def _returned(function: Any) -> str:
    return _annotation(inspect.signature(function).return_annotation)


def _default(value: Any) -> str:
    """A value, or for one that is made anew the call that makes it."""
    text = repr(value)
    return "..." if "<" in text else _MODULE.sub("", text)


def _paragraphs(doc: str, parameters: Sequence[str]) -> Iterator[str]:
    """A docstring as Markdown: `name: ...` of a parameter begins an entry of a list."""
    for paragraph in re.split(r"\n\s*\n", doc):
        if paragraph.startswith(" "):
            yield from ("```text", paragraph, "```", "")
            continue
        for part in _RAISES.split(" ".join(paragraph.split())):
            yield from _entries(part, parameters)
            yield ""


def _entries(text: str, parameters: Sequence[str]) -> Iterator[str]:
    if not parameters:
        yield _escaped(text)
        return
    name = "|".join(sorted(map(re.escape, parameters), key=len, reverse=True))
    begins = re.compile(rf"(?:^|(?<=[.;]) )((?:{name})(?:(?:, | and )(?:{name}))*): ")
    first, *rest = begins.split(text)
    if first:
        yield _escaped(first)
        yield ""
    for names, said in zip(rest[::2], rest[1::2], strict=True):
        yield f"- **{names}**: {_escaped(said)}"


def _escaped(text: str) -> str:
    """Words outside of backticks have no markup in them."""
    parts = _MARKUP.split(text)
    return "".join(
        part if i % 2 else re.sub(r"([*_<\[])", r"\\\1", part) for i, part in enumerate(parts)
    )


def commands() -> str:
    """The page of the command line: each command's own help, by task."""
    lines = [
        "# Command line",
        "",
        "Reference for those who use the command `shardweave`: each command with its options, as "
        "`--help` prints them. You will be able to look up any of them.",
    ]
    parsers = commands_of(command_line())
    for task, names in TASKS.items():
        lines += ["", f"## {task[0].upper()}{task[1:]}"]
        for name in names:
            parser = parsers[name]
            parser.formatter_class = _at_width(parser.formatter_class)
            lines += [
                "",
                f"### shardweave {name}",
                "",
                "```text",
                parser.format_help().strip(),
                "```",
            ]
    return "\n".join(lines) + "\n"


def _at_width(kind: Callable[..., argparse.HelpFormatter]) -> Any:
    return partial(kind, width=_WIDTH)


def pass_options() -> str:
    """The page of passes, presets and planners: what each takes, requires and ensures."""
    lines = [
        "# Options of passes and planners",
        "",
        "Reference for those who write pipelines of passes: every pass, preset and planner with "
        "its options and their defaults, as its docstring has them. [Passes](passes.md) shows "
        "programs before and after the main ones, [Planners](planners.md) derives what planners "
        "compute.",
        "",
        "## Passes",
        "",
        _pass_table(),
    ]
    for name, target in sorted(PASSES.items()):
        kind = _loaded(target)
        lines += ["", f"### {name}", "", *_options(_fields_of(kind))]
        lines += _paragraphs(_doc(kind), ("Requires", "Ensures"))
    lines += ["", "## Presets"]
    for name, spec in PRESETS.items():
        lines += ["", f"### {PREFIX}{name}", "", _escaped(SUMMARIES[name]), "", "```text"]
        lines += [spec.replace(",", ",\n"), "```"]
    lines += [
        "",
        "## Planners",
        "",
        "Each is a pass `plan-<planner>` as well, with the same options.",
    ]
    for name, target in sorted(PLANNERS.items()):
        planner = _loaded(target)
        lines += ["", f"### {name}", "", *_options(_arguments_of(planner))]
        lines += _paragraphs(_doc(planner), _parameters(planner))
    return "\n".join(lines) + "\n"


def _pass_table() -> str:
    """All passes, each with a link to its options and the first sentence of its docstring."""
    rows = [
        f"| [`{name}`](#{name}) | {_escaped(_doc(_loaded(target)).splitlines()[0])} |"
        for name, target in sorted(PASSES.items())
    ]
    return "\n".join(["| pass | what it does |", "| --- | --- |", *rows])


def _loaded(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _fields_of(kind: Any) -> list[tuple[str, str, str]]:
    return [
        (one.name, str(one.type), "" if one.default is dataclasses.MISSING else repr(one.default))
        for one in dataclasses.fields(kind)
    ]


def _arguments_of(planner: Any) -> list[tuple[str, str, str]]:
    """What a planner takes beside the program and the mesh."""
    found = inspect.signature(planner).parameters.values()
    return [
        (p.name, _annotation(p.annotation), "" if p.default is p.empty else _default(p.default))
        for p in found
        if p.name not in ("program", "mesh")
    ]


def _options(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Name, type and default, as a table; a default that is missing must be given."""
    if not rows:
        return
    yield from ("| option | type | default |", "| --- | --- | --- |")
    for name, kind, default in rows:
        kind = kind.replace("|", "\\|")
        yield f"| `{name}` | `{kind}` | {f'`{default}`' if default else 'must be given'} |"
    yield ""


PAGES: dict[str, Callable[[], str]] = {
    "python.md": python_names,
    "commands.md": commands,
    "options.md": pass_options,
    "errors.md": errors,
    "figures.md": figures,
    "papers.md": papers,
}
"""The pages by their paths in the site."""
