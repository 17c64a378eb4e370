"""An outline of a program by layers, with equal neighbouring layers folded into one: as data, and
as HTML for notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from html import escape
from itertools import groupby

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import arguments_of, layer_of, phase_of
from shardweave.ir.dialects.dist import CollectiveOp, ReshardOp
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.inspect.diff_table import Lines
from shardweave.ir.ops.registry import flops_of
from shardweave.ir.program.blocks import Blocks, blocks_of
from shardweave.ir.program.program import Program

OUTSIDE = "(outside layers)"


@dataclass(frozen=True)
class Layer:
    """One repeated block (`h.0`) or other top-level part of the model, with all its ops.

    ops, flops: by phase. collectives: counts by kind and axes. reshards: the number of reshard ops
    in a propagated program. parameter_bytes: bytes of the layer's parameters; on one rank, if the
    program is local.
    """

    name: str
    members: tuple[Operation, ...] = field(repr=False)
    ops: dict[str, int]
    flops: dict[str, int]
    collectives: dict[str, int]
    reshards: int
    parameter_bytes: int

    @property
    def moves(self) -> str:
        """The layer's communication in words: `2 all_reduce over tensor`; `5 reshard` if global."""
        counts = {**self.collectives, "reshard": self.reshards}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


@dataclass(frozen=True)
class Fold:
    """Neighbouring layers whose ops are the same except the layers' names."""

    layers: tuple[Layer, ...]

    @property
    def first(self) -> Layer:
        return self.layers[0]

    @property
    def name(self) -> str:
        """`h.0`, or `h.0 .. h.11 (12 equal)`."""
        if len(self.layers) == 1:
            return self.first.name
        return f"{self.first.name} .. {self.layers[-1].name} ({len(self.layers)} equal)"


def part_of(layer: str, blocks: Blocks) -> str:
    """Return the outline entry of a layer: its repeated block, or the first word of its name."""
    return blocks.of_layer(layer) or layer.partition(".")[0] or OUTSIDE


def layers_of(program: Program) -> list[Layer]:
    """List a program's layers in order of first appearance. Takes time linear in its ops."""
    blocks = blocks_of(program)
    members: dict[str, list[Operation]] = {}
    for op in program.ops:
        members.setdefault(part_of(layer_of(op), blocks), []).append(op)
    sizes: Counter[str] = Counter()
    for slot in program.arguments:
        if slot.kind == "param":
            part = part_of(slot.name.rpartition(".")[0], blocks)
            sizes[part] += num_bytes(tensor_type_of(slot.value))
    return [_layer(name, ops, sizes[name]) for name, ops in members.items()]


def _layer(name: str, ops: Sequence[Operation], parameter_bytes: int) -> Layer:
    flops: Counter[str] = Counter()
    collectives: Counter[str] = Counter()
    for op in ops:
        flops[phase_of(op)] += flops_of(op)
        if isinstance(op, CollectiveOp):
            collectives[f"{op.kind()} over {', '.join(op.axes)}"] += 1
    counts = Counter(phase_of(op) for op in ops)
    reshards = sum(isinstance(op, ReshardOp) for op in ops)
    return Layer(
        name, tuple(ops), dict(counts), dict(flops), dict(collectives), reshards, parameter_bytes
    )


def fold(layers: Sequence[Layer]) -> list[Fold]:
    """Group neighbouring layers with equal ops into `Fold`s. Takes time linear in the ops."""
    groups = groupby(
        layers, key=lambda layer: (body_of(layer.name, layer.members), layer.parameter_bytes)
    )
    return [Fold(tuple(group)) for _, group in groups]


def body_of(name: str, members: Sequence[Operation]) -> tuple[object, ...]:
    """Return a key that is equal for layers with the same computation under any names."""
    inside: dict[SSAValue, tuple[int, int]] = {}
    body: list[object] = []
    for index, op in enumerate(members):
        inside.update((result, (index, place)) for place, result in enumerate(op.results))
        arguments = arguments_of(op, "phase", "copy", "sharding")
        if isinstance(op, ReshardOp):
            arguments -= {("why", op.why_attr)}
        operands = tuple(inside.get(operand) for operand in op.operands)
        types = tuple(op.result_types)
        body.append((op.name, layer_of(op).removeprefix(name), operands, types, arguments))
    return tuple(body)


def select(
    program: Program, layer: str | None = None, phase: str | None = None, op: str | None = None
) -> Iterator[Operation]:
    """Yield the ops of a layer (with its sublayers), a phase and an op name; None matches any.
    layer and op may be shell patterns: `h.*.attn`, `dist.*`."""
    for candidate in program.ops:
        name = layer_of(candidate)
        is_in_layer = layer is None or any(
            fnmatchcase(name, form) for form in (layer, f"{layer}.*")
        )
        is_in_phase = phase is None or phase_of(candidate) == phase
        if is_in_layer and is_in_phase and (op is None or fnmatchcase(candidate.name, op)):
            yield candidate


# As HTML

MAX_LINES = 2000
"""Lines of ops in one page; a notebook is slow with more, and the folded layers say the rest."""

_STYLE = (
    "font-family:monospace;font-size:12px;white-space:pre;overflow-x:auto;margin:0 0 0 1.5em;"
    "padding:0"
)


def program_html(program: Program) -> str:
    """Return the program as HTML without scripts or external files: one closed section per fold."""
    lines = Lines(program)
    parts = [f"<div><b>{escape(repr(program)[1:-1])}</b>", _boundary(program)]
    left = MAX_LINES
    for group in fold(layers_of(program)):
        parts.append(_section(group, lines, max(left, 0)))
        left -= len(group.first.members)
    return "".join([*parts, "</div>"])


def _section(group: Fold, lines: Lines, left: int) -> str:
    layer = group.first
    counts = [f"{count} {phase}" for phase, count in layer.ops.items()]
    summary = ", ".join(filter(None, [*counts, layer.moves]))
    shown = [lines.line(op) for op in layer.members[:left]]
    hidden = len(layer.members) - len(shown)
    if hidden:
        shown.append(f"... and {hidden} more ops; str(program) has all of them")
    return _details(f"<b>{escape(group.name)}</b>: {escape(summary)}", shown)


def _boundary(program: Program) -> str:
    rows = [
        f"{slot.kind:8} {slot.name or '-'} : {slot.value.type} {slot.sharding_attr or ''}".rstrip()
        for slot in (*program.arguments, *program.results)
    ]
    return _details(f"{len(program.arguments)} arguments, {len(program.results)} results", rows)


def _details(summary: str, lines: Sequence[str]) -> str:
    """Return a closed `<details>` section. summary: HTML. lines: plain text."""
    text = escape("\n".join(lines))
    return f'<details><summary>{summary}</summary><pre style="{_STYLE}">{text}</pre></details>'
