"""A diff in a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardweave.driver.report.text import plain_table
from shardweave.ir.inspect.diff import (
    Change,
    ChangeGroup,
    StructuralDiff,
    blocks_text,
    count_by_kind,
)
from shardweave.ir.program.program_stats import ProgramStats
from shardweave.planners.cost.quantity import bytes_text, seconds_text
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
from shardweave.planners.simulate.simulation import Simulation

Simulated = Simulation | PipelineSimulation | None

SHOWN = 20
"""Default number of changes shown for each group."""

STYLES = {"added": "+ green", "removed": "- red", "moved": "> blue", "changed": "~ yellow"}


def plain_text(diff: StructuralDiff, numbers: list[Number]) -> str:
    """The diff without colour, in lines of any length."""
    stream = StringIO()
    console = Console(file=stream, color_system=None, width=1000, legacy_windows=False)
    print_diff(diff, numbers, console)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def print_diff(
    diff: StructuralDiff, numbers: list[Number], console: Console, *, shown: int | None = SHOWN
) -> None:
    """Print up to `shown` changes of each group (None: all), and both programs' numbers."""
    console.print(Text(headline(diff)), soft_wrap=True)
    for group in diff.groups():
        console.print()
        console.print(Text(group_title(group), style="bold"), soft_wrap=True)
        for line in _group_lines(group, shown):
            console.print(line, soft_wrap=True)
    console.print()
    console.print(_numbers_table(numbers))


def headline(diff: StructuralDiff) -> str:
    """Count the ops of both programs, and the changes by kind."""
    before, after = diff.num_ops
    if not diff.changes:
        return f"the programs are the same: {before} ops"
    counts = ", ".join(f"{n} {kind}" for kind, n in count_by_kind(diff).items())
    hunks = diff.num_hunks
    return f"{before} ops -> {after} ops: {counts}; {hunks} {'hunk' if hunks == 1 else 'hunks'}"


def group_title(group: ChangeGroup) -> str:
    """Format the title of a group: `h.0 … h.95: the same 3 changes`."""
    count = len(group.changes)
    what = "change" if count == 1 else f"{count} changes"
    same = "" if len(group.blocks) == 1 else "the same "
    count_text = "1 " if count == 1 and not same else ""
    return f"{blocks_text(group.blocks)}: {same}{count_text}{what}"


def where(change: Change) -> str:
    """Format the layer and phase of a change, as the title of all changes there."""
    return ", ".join(filter(None, (change.layer, change.phase)))


def detail_lines(change: Change) -> Iterator[str]:
    """Describe the changes of an op: `dim: 0 -> 1`."""
    for detail in change.details:
        yield f"{detail.what}: {detail.before or '(none)'} -> {detail.after or '(none)'}"
    if change.kind == "moved":
        yield f"place: {change.at[0]} -> {change.at[1]}"


def _group_lines(group: ChangeGroup, shown: int | None) -> Iterator[Text]:
    changes = group.changes if shown is None else _first(group.changes, shown)
    for title, rows in groupby(changes, key=where):
        yield Text(f"  {title}", style="dim")
        for change in rows:
            yield from _change_lines(change)
    left = len(group.changes) - len(changes)
    if left:
        yield Text(f"  ... {left} more (--all shows them)", style="dim")


def _first(changes: Sequence[Change], shown: int) -> list[Change]:
    """Choose `shown` of a group's changes, in their order. Prefers added, removed and moved ops to
    ops with changed details."""
    by_kind = sorted(range(len(changes)), key=lambda index: changes[index].kind == "changed")
    return [changes[index] for index in sorted(by_kind[:shown])]


def _change_lines(change: Change) -> Iterable[Text]:
    sign, style = STYLES[change.kind].split()
    line = change.after or change.before or change.op
    yield Text(f"  {sign} {line}", style=style)
    for detail in detail_lines(change):
        yield Text(f"      {detail}", style=style)


# Numbers


@dataclass(frozen=True)
class Number:
    """A number of each program, None if the program has none. unit: "", "bytes", "flops" or "s"."""

    name: str
    unit: str
    before: float | None
    after: float | None


def program_numbers(a: ProgramStats, b: ProgramStats) -> Iterator[Number]:
    """Ops and FLOPs by phase, bytes, and collectives by kind and axes."""
    for phase in dict.fromkeys([*a.ops, *b.ops]):
        yield Number(f"ops, {phase}", "", a.ops.get(phase, 0), b.ops.get(phase, 0))
    for phase in dict.fromkeys([*a.flops, *b.flops]):
        yield Number(f"FLOPs, {phase}", "flops", a.flops.get(phase, 0), b.flops.get(phase, 0))
    yield Number("FLOPs, all", "flops", sum(a.flops.values()), sum(b.flops.values()))
    yield Number("parameters", "bytes", a.parameter_bytes, b.parameter_bytes)
    yield Number("kept for the backward pass", "bytes", a.kept_bytes, b.kept_bytes)
    sums = _by_axes(a), _by_axes(b)
    for kind, axes in dict.fromkeys([*sums[0], *sums[1]]):
        name = f"{kind} over {axes}"
        before, after = sums[0][kind, axes], sums[1][kind, axes]
        yield Number(name, "", before[0], after[0])
        yield Number(f"{name}, operands", "bytes", before[1], after[1])
        yield Number(f"{name}, sent", "bytes", before[2], after[2])


def _by_axes(stats: ProgramStats) -> defaultdict[tuple[str, str], tuple[int, int, float]]:
    totals: defaultdict[tuple[str, str], tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
    for c in stats.collectives:
        key = c.kind, ", ".join(c.axes)
        count, size, sent = totals[key]
        totals[key] = count + c.count, size + c.bytes, sent + c.sent_bytes
    return totals


def simulated_numbers(a: Simulated, b: Simulated) -> Iterator[Number]:
    """Yield seconds and peak memory of both simulated steps; nothing without a simulation."""
    sides = [{} if side is None else _simulated(side) for side in (a, b)]
    for name, unit in dict.fromkeys([*sides[0], *sides[1]]):
        before, after = (side.get((name, unit)) for side in sides)
        yield Number(f"simulated {name}", unit, before, after)


def _simulated(step: Simulation | PipelineSimulation) -> dict[tuple[str, str], float]:
    """A step's numbers by (name, unit); a pipeline's are of its busiest, or fullest, stage."""
    is_pipeline = isinstance(step, PipelineSimulation)
    rank = step.busiest if is_pipeline else step
    return {
        ("step", "s"): step.step_s,
        ("compute", "s"): rank.compute_s,
        ("communication", "s"): sum(rank.communication_s.values()),
        ("exposed communication", "s"): rank.exposed_communication_s,
        **({("bubble", "s"): step.bubble_s} if is_pipeline else {}),
        ("peak memory", "bytes"): step.peak_bytes,
    }


def number_cells(number: Number) -> tuple[str, str, str, str]:
    """Cells of a table: name, both values, and their difference."""
    before, after = (_value_text(value, number.unit) for value in (number.before, number.after))
    return number.name, before, after, _change_text(number)


def _value_text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return bytes_text(value)
    if unit == "s":
        return seconds_text(value)
    return f"{value:.4g}" if unit == "flops" else f"{value:.0f}"


def _change_text(number: Number) -> str:
    before, after = number.before, number.after
    if before == after or before is None or after is None:
        return ""
    return f"{(after - before) / before:+.1%}" if before else "new"


def _numbers_table(numbers: list[Number]) -> Table:
    table = plain_table(["numbers"], ["before", "after", "change"])
    for number in numbers:
        style = "bold" if number.before != number.after else "dim"
        table.add_row(*number_cells(number), style=style)
    return table
