"""The `show` command: a program by its layers, or the ops of some."""

from __future__ import annotations

import argparse
from collections import Counter
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xdsl.ir import Operation

    from shardweave.ir.inspect.outline import Fold
    from shardweave.ir.program import Program

PHASES = ("forward", "recompute", "backward", "optimizer")


def add_show_options(command: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command.add_argument("file", metavar="FILE", help="a program's text; - reads standard input")
    command.add_argument(
        "--layer", metavar="NAME", help="the ops of this layer, as h.0 or h.*.attn"
    )
    command.add_argument("--phase", choices=PHASES, help="the ops of this phase")
    command.add_argument("--op", metavar="NAME", help="the ops of this name, as aten.mm or dist.*")
    command.add_argument("--counts", action="store_true", help="count ops, do not print them")
    command.add_argument(
        "--all", action="store_true", help="print each layer, also those equal to the one before"
    )


def show_command(options: argparse.Namespace) -> int:
    """Print the layers of a program, or the ops that the options select."""
    from shardweave.driver.commands.text import describe, read

    program = read(options.file)
    if options.layer is None and options.phase is None and options.op is None:
        print(describe(program))
        print(outline(program, is_folded=not options.all))
        return 0
    print(_selected(program, options))
    return 0


def outline(program: Program, *, is_folded: bool = True) -> str:
    """A line for each layer: ops by phase, collectives, parameters. Equal neighbours are one."""
    from shardweave.driver.report.text import bytes_text
    from shardweave.ir.inspect.outline import Fold, fold, layers_of

    layers = layers_of(program)
    folds = fold(layers) if is_folded else [Fold((layer,)) for layer in layers]
    phases = [p for p in PHASES if any(p in layer.ops for layer in layers)]
    width = max([len("layer"), *(len(one.name) for one in folds)])
    head = "".join(f" {phase:>10}" for phase in phases)
    lines = [f"{'layer':{width}}{head} {'parameters':>12}  collectives"]
    for one in folds:
        counts = "".join(f" {one.first.ops.get(phase, 0) or '-':>10}" for phase in phases)
        size = one.first.parameter_bytes
        held = bytes_text(size) if size else "-"
        sent = ", ".join(f"{n} {what}" for what, n in one.first.collectives.items())
        lines.append(f"{one.name:{width}}{counts} {held:>12}  {sent}".rstrip())
    return "\n".join(lines)


def _selected(program: Program, options: argparse.Namespace) -> str:
    from shardweave.ir.inspect.outline import fold, layers_of, select

    chosen = list(select(program, options.layer, options.phase, options.op))
    if not chosen:
        raise ValueError(_nothing(program, options))
    total = sum(1 for _ in program.ops)
    said = f"{len(chosen)} of {total} ops"
    if options.counts:
        rows = Counter(op.name for op in chosen).most_common()
        return "\n".join([*(f"{count:6}  {name}" for name, count in rows), said])
    folds = [] if options.all else fold(layers_of(program))
    return "\n".join([*_lines(program, chosen, folds), said])


def _lines(program: Program, chosen: list[Operation], folds: list[Fold]) -> list[str]:
    """The lines of ops; those of layers equal to one that is shown are one line."""
    from shardweave.ir.inspect.diff_lines import Lines

    lines = Lines(program)
    wanted = set(chosen)
    hidden: dict[Operation, str] = {}
    for one in folds:
        first, *others = one.layers
        if not others or wanted.isdisjoint(first.members):
            continue
        names = others[0].name + (f" .. {others[-1].name}" if len(others) > 1 else "")
        hidden |= {op: f"... {names}: as {first.name}" for o in others for op in o.members}
    found: list[str] = []
    is_gap = False
    for op in program.ops:
        if op not in wanted or op in hidden:
            is_gap = bool(found)
            continue
        found += ["...", lines.line(op)] if is_gap else [lines.line(op)]
        is_gap = False
    return [*found, *dict.fromkeys(hidden[op] for op in chosen if op in hidden)]


def _nothing(program: Program, options: argparse.Namespace) -> str:
    """Why nothing is selected, and what there is instead."""
    from shardweave.ir.inspect.outline import select

    asked = {"layer": options.layer, "phase": options.phase, "op": options.op}
    given = {key: value for key, value in asked.items() if value is not None}
    for key, value in given.items():
        if any(True for _ in select(program, **{key: value})):
            continue
        names = {
            "layer": program.layers(),
            "phase": dict.fromkeys(PHASES),
            "op": {op.name: None for op in program.ops},
        }[key]
        near = get_close_matches(value, names, 3, cutoff=0.5) or [n for n in names if n][:4]
        return f"no op has {key} '{value}'; there is {', '.join(near)}."
    said = " and ".join(f"{key} '{value}'" for key, value in given.items())
    return f"no op has {said}; leave one of them out."
