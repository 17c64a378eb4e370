"""A program in lines: its layers as a table, or the ops of some."""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches

from xdsl.ir import Operation

from shardweave.ir.dialects.attributes import PHASES
from shardweave.ir.inspect.diff_table import Lines
from shardweave.ir.inspect.outline import Fold, fold, layers_of, select
from shardweave.ir.program.program import Program
from shardweave.planners.cost.quantity import bytes_text

Selection = dict[str, str | None]
"""Patterns of names for `layer`, `phase` and `op`; None: any."""


def outline(program: Program, *, is_folded: bool = True) -> str:
    """Format a line per layer: ops by phase, collectives, parameters. is_folded: fold equal
    layers."""
    layers = layers_of(program)
    folds = fold(layers) if is_folded else [Fold((layer,)) for layer in layers]
    phases = [p for p in PHASES if any(p in layer.ops for layer in layers)]
    width = max([len("layer"), *(len(row.name) for row in folds)])
    head = "".join(f" {phase:>10}" for phase in phases)
    lines = [f"{'layer':{width}}{head} {'parameters':>12}  collectives"]
    for row in folds:
        counts = "".join(f" {row.first.ops.get(phase, 0) or '-':>10}" for phase in phases)
        size = row.first.parameter_bytes
        held = bytes_text(size) if size else "-"
        lines.append(f"{row.name:{width}}{counts} {held:>12}  {row.first.moves}".rstrip())
    return "\n".join(lines)


def selection(program: Program, wanted: Selection, *, is_counted: bool, is_folded: bool) -> str:
    """Format selected ops as lines. is_counted: count them by op name. ValueError if none."""
    chosen = list(select(program, **wanted))
    if not chosen:
        raise ValueError(_nothing(program, wanted))
    total = sum(1 for _ in program.ops)
    said = f"{len(chosen)} of {total} ops"
    if is_counted:
        rows = Counter(op.name for op in chosen).most_common()
        return "\n".join([*(f"{count:6}  {name}" for name, count in rows), said])
    folds = fold(layers_of(program)) if is_folded else []
    return "\n".join([*_lines(program, chosen, folds), said])


def _lines(program: Program, chosen: list[Operation], folds: list[Fold]) -> list[str]:
    lines = Lines(program)
    wanted = set(chosen)
    hidden: dict[Operation, str] = {}
    for row in folds:
        first, *others = row.layers
        if not others or wanted.isdisjoint(first.members):
            continue
        names = others[0].name + (f" .. {others[-1].name}" if len(others) > 1 else "")
        hidden |= {op: f"... {names}: as {first.name}" for o in others for op in o.members}
    lines_shown: list[str] = []
    is_gap = False
    for op in program.ops:
        if op not in wanted or op in hidden:
            is_gap = bool(lines_shown)
            continue
        lines_shown += ["...", lines.line(op)] if is_gap else [lines.line(op)]
        is_gap = False
    return [*lines_shown, *dict.fromkeys(hidden[op] for op in chosen if op in hidden)]


def _nothing(program: Program, wanted: Selection) -> str:
    """Explain why nothing is selected, and what there is instead."""
    patterns = {key: value for key, value in wanted.items() if value is not None}
    for key, value in patterns.items():
        if any(True for _ in select(program, **{key: value})):
            continue
        names = {
            "layer": program.layers(),
            "phase": dict.fromkeys(PHASES),
            "op": {op.name: None for op in program.ops},
        }[key]
        near = get_close_matches(value, names, 3, cutoff=0.5) or [n for n in names if n][:4]
        return f"no op has {key} '{value}'; there is {', '.join(near)}."
    said = " and ".join(f"{key} '{value}'" for key, value in patterns.items())
    return f"no op has {said}; leave one of them out."
