"""Emit programs as readable Python modules.

A module has one function, `step(rt, given)`: one statement per op in the order of the program,
each value freed after its last use. `rt` is the rank's runtime (`backends.distributed.runtime`);
`given` and the returned dict map the kind and name of each slot to this rank's tensor.
"""

from __future__ import annotations

import hashlib
import keyword
import linecache
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

from torch import Tensor
from xdsl.ir import Operation, SSAValue
from xdsl.printer import Printer

from shardweave.backends.emit.additions import additions_of
from shardweave.backends.emit.audit import KNOWN, audit
from shardweave.backends.emit.calls import FUNCTIONS
from shardweave.backends.emit.statements import Code, fused_statement, key_text, statement
from shardweave.backends.programs import Key, completions, free_name, last_uses
from shardweave.backends.triton.source.parts import joins
from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import joined_layers, phase_of, shortened
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import dtype_of_value, dtype_word, shape_of
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import STAGE_KINDS
from shardweave.ir.program.text import without_gc
from shardweave.ir.sharding.ragged import ragged_values
from shardweave.passes.kernels.unfuse_kernels import without_regions
from shardweave.passes.messages.pending_gradients import pending_terms

StepFunction = Callable[[Any, dict[Key, Tensor]], dict[Key, Tensor]]
"""`step(rt, given)`. A stage function's step pops the arguments that it frees from `given`."""

_HEADER = '''\
"""{what}

Written by shardweave: {num_ops} ops. `rt` is this rank's runtime, which holds the collectives;
`given` maps the kind and name of each argument to this rank's shard; gradients and sums in it are
added to in place. {end}
"""
'''

_RETURNS = "Returns this rank's shard of each result by kind and name."
_YIELDS = "Puts this rank's shard of each result into `results`, and yields after each gradient."

_IMPORTS = """
from math import inf, nan

import torch

from shardweave.backends.emit.attention import flash_attention, flash_attention_backward
from shardweave.backends.emit.calls import random_numbers, scaled_mm
from shardweave.backends.emit.grouped import (
    all_rows,
    grouped_mm,
    grouped_outer,
    own_rows,
    row_bounds,
    row_routes,
)
from shardweave.backends.emit.positional_attention import (
    merge_attention,
    positional_attention,
    positional_attention_backward,
)

aten = torch.ops.aten
"""

_FUNCTIONS = tuple(function.__name__ for function in FUNCTIONS.values())
_RESERVED = {*KNOWN, *_FUNCTIONS, "given", "results", "step", "inf", "nan", "_"}


def emit(
    program: Program,
    *,
    kernels: bool = False,
    in_parts: bool = True,
    pending: Collection[str] = (),
    order: list[Key] | None = None,
) -> str:
    """Return the source of a module that runs a program on one rank.

    kernels: whether fused regions are called as `kernels[0]`, `kernels[1]`, .. in program order;
    pass these functions to `load_step`. Else their ops run one by one. in_parts: whether kernels
    may leave partial results; one more kernel, the last, joins them. pending: names of gradients
    whose unreduced terms are added to the entry of `given` under `"pending"`. order: if given, the
    module is a generator, `step(rt, given, results)`, that yields when a gradient is complete; the
    gradients' keys are appended to it. Raises ValueError for an op that has no Python form.
    """
    program = program if kernels else without_regions(program)
    names = _names(program)
    arguments = "rt, given" if order is None else "rt, given, results"
    end = _RETURNS if order is None else _YIELDS
    lines = [_header(program, end) + _IMPORTS, "", f"def step({arguments}):"]
    lines += _argument_lines(program, names)
    terms_of = pending_terms(program) if pending else {}
    terms = {gradient: terms_of[gradient] for gradient in pending}
    joined = joins(program, set(terms.values())) if kernels and in_parts else {}
    additions = additions_of(program, names, terms, joined)
    complete = {} if order is None else completions(program, joined)
    dying, place, num_fused = last_uses(program), None, 0
    ragged = ragged_values(program.ops)
    for op in program.ops:
        if place != (place := (_layers(op), phase_of(op))):
            lines += ["", f"    # {_one_line(place[0])}, {place[1]}"]
        lines += [f"    {line}" for line in additions.before.get(op, ())]
        if isinstance(op, FusedOp):
            lines.append(f"    # {', '.join(inner.name for inner in op.fused_ops)}")
            line = fused_statement(op, names, num_fused)
            num_fused += 1
        else:
            line = additions.products.get(op) or statement(op, names, ragged)
        lines.append(f"    {line}{_type_comment(op)}")
        lines += [f"    {line}" for line in additions.behind.get(op, ())]
        if op in dying:
            lines.append(f"    del {', '.join(names[value] for value in dying[op])}")
        if op in complete:
            lines += _handed_over(complete[op], names)
            place = None  # a range of the profiler does not reach over a yield
    lines += [f"    {line}" for line in additions.before.get(program.return_op, ())]
    early = [slot for slots in complete.values() for slot in slots]
    if order is not None:
        order += [(slot.kind, slot.name) for slot in early]
        rest = [slot for slot in program.results if slot not in early]
        return "\n".join([*lines, *_handed_over(rest, names), ""])
    lines += ["", "    return {"]
    lines += [f"        ({key_text(slot)}): {names[slot.value]}," for slot in program.results]
    return "\n".join([*lines, "    }", ""])


def _handed_over(slots: Sequence[Slot], names: Mapping[SSAValue, Code]) -> list[str]:
    """Return lines that hand results over to the caller, which alone holds them then."""
    lines = [f"    results[{key_text(slot)}] = {names[slot.value]}" for slot in slots]
    values = dict.fromkeys(names[slot.value] for slot in slots)
    return ["", *lines, *([f"    del {', '.join(values)}"] if values else []), "    yield", ""]


def _layers(op: Operation) -> str:
    """Return the layer of an op; for a collective, the layers of all tensors that it joins."""
    return ", ".join(shortened(joined_layers(op))) or "model"


def load_step(
    source: str, kernels: Sequence[Callable[..., Any]] = (), *, in_ranges: bool = False
) -> StepFunction:
    """Load an emitted module and return its `step`. Tracebacks show the emitted lines. kernels: the
    functions of fused regions (see `emit`). in_ranges: whether torch's profiler shows each layer as
    a range. Raises SourceError for source that does more than a step may."""
    with without_gc():
        tree = audit(source, _IMPORTS, _FUNCTIONS)
    source = _with_ranges(source) if in_ranges else source
    name = f"<shardweave step {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module: dict[str, Any] = {"__name__": name, "kernels": kernels}
    exec(compile(source if in_ranges else tree, name, "exec"), module)
    return module["step"]


def _with_ranges(source: str) -> str:
    """Return the source with a profiler range around each layer.
    A layer's lines reach from its comment to the next empty line."""
    lines: list[str] = []
    shift = before = ""
    for line in source.splitlines():
        shift = shift if line else ""
        if not before and line.startswith("    # "):
            name = line.removeprefix("    # ")
            lines.append(f"    with torch.profiler.record_function({name!r}):")
            shift = "    "
        lines.append(f"{shift}{line}")
        before = line
    return "\n".join([*lines, ""])


def _header(program: Program, end: str) -> str:
    mesh = program.mesh
    where = f"on every rank of mesh {mesh}" if mesh and program.is_local else "on one device"
    kinds = {slot.kind for slot in program.results}
    what = "A training step" if "grad" in kinds else "A forward pass"
    what = f"{what}, as it runs {where}."
    return _HEADER.format(what=what, num_ops=len(list(program.ops)), end=end)


# Names


def _names(program: Program) -> dict[SSAValue, Code]:
    """Map each value to a variable, named like the value in the program's text."""
    printer = Printer(stream=StringIO())
    taken = set(_RESERVED)
    names: dict[SSAValue, Code] = {}
    made = (result for op in program.ops for result in op.results)
    for value in (*program.function.body.block.args, *made):
        word = _identifier(printer.print_ssa_value(value))
        names[value] = Code(free_name(word, taken, "__"))
    return names


def _identifier(name: str) -> str:
    word = re.sub(r"\W", "_", name)
    if word[:1].isdigit():
        word = f"v{word}"
    return f"{word}_" if keyword.iskeyword(word) else word


# Parts of the function


def _argument_lines(program: Program, names: Mapping[SSAValue, Code]) -> Iterable[str]:
    kind = None
    for slot in program.arguments:
        if slot.kind != kind:
            kind = slot.kind
            yield f"    # {_one_line(kind)}"
        sharding = f", {slot.sharding_attr}" if slot.sharding_attr is not None else ""
        comment = _one_line(f"{_type(slot.value)}{sharding}")
        # What earlier functions of a stage have left is freed here, after its last use.
        key = f".pop(({key_text(slot)}))" if slot.kind in STAGE_KINDS else f"[{key_text(slot)}]"
        yield f"    {names[slot.value]} = given{key}  # {comment}"


def _one_line(comment: str) -> str:
    # A program's text may come from anywhere; a line break in a name must not become code, and
    # Python refuses source with a NUL in it.
    text = " ".join(comment.split())
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def _type(value: SSAValue) -> str:
    return f"{dtype_word(dtype_of_value(value))}{list(shape_of(value))}"


def _type_comment(op: Operation) -> str:
    if not op.results:
        return ""
    started = "in flight: " if isinstance(op, dist.StartedOp) else ""
    return f"  # {started}{', '.join(_type(result) for result in op.results)}"


def ops_by_variable(program: Program, *, kernels: bool) -> dict[str, Operation]:
    """Map each variable of the emitted source to the op that computes it."""
    program = program if kernels else without_regions(program)
    names = _names(program)
    return {names[result]: op for op in program.ops for result in op.results}
