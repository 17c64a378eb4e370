"""Programs as readable Python modules.

A module has one function, `step(rt, given)`: one statement per op in the order of the program,
each value freed after its last use. `rt` is the rank's runtime (`backends.runtime`); `given` and
the result map the kind and name of each argument and result to this rank's tensor.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import linecache
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import Operation, SSAValue
from xdsl.printer import Printer

from shardweave.backends.audit import KNOWN, audit
from shardweave.backends.calls import (
    DIRECT,
    FUNCTIONS,
    NEED_CONTIGUOUS,
    TRANSPOSE,
    callee_of,
    takes_device,
)
from shardweave.backends.programs import Key, free_name, last_uses
from shardweave.backends.triton.parts import joins
from shardweave.ir import dist
from shardweave.ir.annotations import (
    ANNOTATIONS,
    joined_layers,
    phase_of,
    properties_without,
    shortened,
)
from shardweave.ir.aten import AtenOp, overload_named
from shardweave.ir.aten_args import arguments
from shardweave.ir.kernel import FusedOp
from shardweave.ir.literals import to_python
from shardweave.ir.positional_attention import ATTENTION, ATTENTION_BACKWARD
from shardweave.ir.program import Program, Slot
from shardweave.ir.rewrite.pending_gradients import pending_terms
from shardweave.ir.seen_keys import are_counted
from shardweave.ir.staged import STAGE_KINDS
from shardweave.ir.storage import adds_its_result, reduces_in_place
from shardweave.ir.types import dtype_of_value, shape_of
from shardweave.ir.unfuse import without_regions

StepFunction = Callable[[Any, Mapping[Key, Tensor]], dict[Key, Tensor]]
"""`step(rt, given)`. That of a function of a stage takes out of `given`, a dict, what it frees."""

_HEADER = '''\
"""{what}

Written by shardweave: {num_ops} ops. `rt` is this rank's runtime, which holds the collectives;
`given` maps the kind and name of each argument to this rank's part of it; to a gradient or a sum in
it, the new one is added. Returns this rank's part of each result by kind and name.
"""
'''

_IMPORTS = """
from math import inf, nan

import torch

from shardweave.backends.attention import flash_attention, flash_attention_backward
from shardweave.backends.positional_attention import (
    positional_attention,
    positional_attention_backward,
)
from shardweave.backends.random_numbers import random_numbers

aten = torch.ops.aten
"""

_FUNCTIONS = tuple(function.__name__ for function in FUNCTIONS.values())
_RESERVED = {*KNOWN, *_FUNCTIONS, "given", "step", "inf", "nan", "_"}


_ADDED = ("grad", "sum")
"""Kinds of results that are added to what the caller has of them, if it gives that."""


_HOST = '"cpu"'
"""Where positions of attention are counted."""


class _Code(str):
    """Text that is code already, such as a variable's name."""


def emit(program: Program, *, kernels: bool = False, pending: Collection[str] = ()) -> str:
    """The source of a module that runs a program on one rank.

    kernels: fused regions are called as `kernels[0]`, `kernels[1]`, .. in their order, and after
    them one more that joins the results which they left in parts; `load_step` is to be given
    them. Else their ops run one by one. pending: names of gradients whose
    terms are added, before they are reduced, to what `given` has under `"pending"`. Raises
    ValueError for an op that has no Python form.
    """
    program = program if kernels else without_regions(program)
    names = _names(program)
    lines = [_header(program) + _IMPORTS, "", "def step(rt, given):"]
    lines += _argument_lines(program, names)
    found = pending_terms(program) if pending else {}
    terms = {gradient: found[gradient] for gradient in pending}
    joined = joins(program, set(terms.values())) if kernels else {}
    dying, place, num_fused = last_uses(program), None, 0
    added = _added(program, names, terms, joined)
    before = _lines_before(program, joined, added)
    for op in program.ops:
        if place != (place := (_layers(op), phase_of(op))):
            lines += ["", f"    # {_one_line(place[0])}, {place[1]}"]
        lines += before.get(op, [])
        if isinstance(op, FusedOp):
            lines.append(f"    # {', '.join(inner.name for inner in op.fused_ops)}")
            lines.append(f"    {_fused_statement(op, names, num_fused)}{_type_comment(op)}")
            num_fused += 1
        else:
            statement = added.products.get(op) or _statement(op, names)
            lines.append(f"    {statement}{_type_comment(op)}")
        lines += [f"    {line}" for line in added.behind.get(op, ())]
        if op in dying:
            lines.append(f"    del {', '.join(names[value] for value in dying[op])}")
    lines += [*before.get(program.return_op, []), "", "    return {"]
    lines += [f"        ({_key(slot)}): {names[slot.value]}," for slot in program.results]
    return "\n".join([*lines, "    }", ""])


def _layers(op: Operation) -> str:
    """The layer of an op; of a message, the layers of what it joins."""
    return ", ".join(shortened(joined_layers(op))) or "model"


@dataclass
class _Additions:
    """The lines that add gradients to the caller's: behind ops, before them, or in place of
    products."""

    behind: dict[Operation, list[str]] = field(default_factory=dict[Operation, list[str]])
    before: dict[Operation, list[str]] = field(default_factory=dict[Operation, list[str]])
    products: dict[Operation, str] = field(default_factory=dict[Operation, str])

    def add(
        self, value: SSAValue, after: Operation, key: str, names: Mapping[SSAValue, _Code]
    ) -> None:
        """Add a value behind an op, or, where that is a product that can, by the product itself:
        so it is not written to memory and read again."""
        name = names[value]
        if after is value.owner and adds_its_result(after):
            left, right = (names[operand] for operand in after.operands)
            self.products[after] = f"{name} = rt.added_product(given, ({key}), {left}, {right})"
        else:
            self.behind.setdefault(after, []).append(_addition(name, key))

    def add_joined(self, name: _Code, key: str, before: Operation) -> None:
        """Add a value that is joined before an op."""
        self.before.setdefault(before, []).append(_addition(name, key))


def _addition(name: _Code, key: str) -> str:
    return f"{name} = rt.added(given, ({key}), {name})"


def _lines_before(
    program: Program, joined: Mapping[SSAValue, Operation], added: _Additions
) -> dict[Operation, list[str]]:
    """Before each op that needs results which kernels left in parts, the line that joins them, and
    those that add them to the caller's."""
    number = sum(isinstance(op, FusedOp) for op in program.ops)
    join = f"    kernels[{number}]()  # joins results that are in parts"
    return {
        op: [join, *(f"    {line}" for line in added.before.get(op, ()))] for op in joined.values()
    }


def _added(
    program: Program,
    names: Mapping[SSAValue, _Code],
    terms: Mapping[str, SSAValue],
    joined: Mapping[SSAValue, Operation],
) -> _Additions:
    """What adds each gradient to the caller's after the last op that reads it, or makes it.

    So no second set of gradients is ever in memory: neither of a step nor, of sums over
    micro-batches, of a stage. One that is returned twice is left as it is. terms: of pending
    gradients, by name, added as soon as they are there. joined: where values in parts are joined;
    one that nobody reads until then is added there.
    """
    gradients = [s for s in program.results if s.kind in _ADDED and s.name not in terms]
    returned = Counter(program.return_op.operands)
    places = {op: place for place, op in enumerate((*program.ops, program.return_op))}
    last: dict[SSAValue, Operation] = {}
    for op in program.ops:
        for value in (*op.results, *op.operands):
            last[value] = op
    found = _Additions()
    for slot in gradients:
        value = slot.value
        if isinstance(value.owner, Operation) and returned[value] == 1:
            join = joined.get(value)
            if join is not None and places[join] > places[last[value]]:
                found.add_joined(names[value], _key(slot), join)
            else:
                found.add(value, last[value], _key(slot), names)
    for gradient, term in terms.items():
        key = f'"pending", {json.dumps(gradient)}'
        assert isinstance(term.owner, Operation)
        if term in joined:
            found.add_joined(names[term], key, joined[term])
        else:
            found.add(term, term.owner, key, names)
    return found


def load_step(source: str, kernels: Sequence[Callable[..., Any]] = ()) -> StepFunction:
    """The `step` of an emitted module. Tracebacks show its lines.

    Raises SourceError for source that does more than a step does.
    """
    audit(source, _IMPORTS, _FUNCTIONS)
    name = f"<shardweave step {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module: dict[str, Any] = {"__name__": name, "kernels": kernels}
    exec(compile(source, name, "exec"), module)
    return module["step"]


def _header(program: Program) -> str:
    mesh = program.mesh
    where = f"on every rank of mesh {mesh}" if mesh and program.is_local else "on one device"
    kinds = {slot.kind for slot in program.results}
    what = "A training step" if "grad" in kinds else "A forward pass"
    return _HEADER.format(what=f"{what}, as it runs {where}.", num_ops=len(list(program.ops)))


# Names


def _names(program: Program) -> dict[SSAValue, _Code]:
    """A variable for each value, close to its name in the program's text."""
    printer = Printer(stream=StringIO())
    taken = set(_RESERVED)
    names: dict[SSAValue, _Code] = {}
    made = (result for op in program.ops for result in op.results)
    for value in (*program.function.body.block.args, *made):
        word = _identifier(printer.print_ssa_value(value))
        names[value] = _Code(free_name(word, taken, "__"))
    return names


def _identifier(name: str) -> str:
    word = re.sub(r"\W", "_", name)
    if word[:1].isdigit():
        word = f"v{word}"
    return f"{word}_" if keyword.iskeyword(word) else word


# Parts of the function


def _argument_lines(program: Program, names: Mapping[SSAValue, _Code]) -> Iterable[str]:
    kind = None
    for slot in program.arguments:
        if slot.kind != kind:
            kind = slot.kind
            yield f"    # {_one_line(kind)}"
        sharding = f", {slot.sharding_attr}" if slot.sharding_attr is not None else ""
        comment = _one_line(f"{_type(slot.value)}{sharding}")
        # What earlier functions of a stage have left is freed here, after its last use.
        key = f".pop(({_key(slot)}))" if slot.kind in STAGE_KINDS else f"[{_key(slot)}]"
        yield f"    {names[slot.value]} = given{key}  # {comment}"


def _key(slot: Slot) -> str:
    return f"{json.dumps(slot.kind)}, {json.dumps(slot.name)}"


def _one_line(comment: str) -> str:
    # A program's text may come from anywhere; a line break in a name must not become code.
    return " ".join(comment.split())


def _type(value: SSAValue) -> str:
    dtype = str(dtype_of_value(value)).removeprefix("torch.")
    return f"{dtype}{list(shape_of(value))}"


def _type_comment(op: Operation) -> str:
    if not op.results:
        return ""
    started = "in flight: " if isinstance(op, dist.STARTED) else ""
    return f"  # {started}{', '.join(_type(result) for result in op.results)}"


def _statement(op: Operation, names: Mapping[SSAValue, _Code]) -> str:
    if isinstance(op, AtenOp):
        return _aten_statement(op, names)
    if isinstance(op, dist.DistOp):
        return _dist_statement(op, names)
    raise ValueError(f"the distributed backend has no Python form for '{op.name}'; lower it first.")


def _fused_statement(op: FusedOp, names: Mapping[SSAValue, _Code], number: int) -> str:
    operands = ", ".join(names[operand] for operand in op.operands)
    comma = "," if len(op.results) == 1 else ""
    return f"{_targets(op, names)}{comma} = kernels[{number}]({operands})"


def _targets(op: Operation, names: Mapping[SSAValue, _Code]) -> str:
    return ", ".join(names[result] for result in op.results)


def _call(function: str, positional: list[Any], keywords: Mapping[str, Any]) -> str:
    parts = [_literal(value) for value in positional]
    parts += [f"{name}={_literal(value)}" for name, value in keywords.items()]
    return f"{function}({', '.join(parts)})"


def _literal(value: Any) -> str:
    """Python for a value: `inf`, `torch.float32`, `("tensor",)`."""
    if isinstance(value, _Code):
        return value
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(_literal(item) for item in value)}{',' if len(value) == 1 else ''})"
    return repr(value)


def _aten_statement(op: AtenOp, names: Mapping[SSAValue, _Code]) -> str:
    counted = _counted(op)
    call = _aten_call(op, {**names, **counted} if counted else names)
    return f"{_aten_targets(op, names)} = {call}"


def _aten_call(op: AtenOp, names: Mapping[SSAValue, _Code], device: str = "rt.device") -> str:
    form = "{}.contiguous()" if op.name in NEED_CONTIGUOUS else "{}"
    positional, keywords = arguments(op, lambda value: _Code(form.format(names[value])))
    if takes_device(op):
        keywords["device"] = _Code(device)
    # The name of a function of ours; an overload prints as `aten.add.Tensor`.
    function = callee_of(op)
    name = function.__name__ if op.name in FUNCTIONS else DIRECT.get(op.name, str(function))
    if op.name == "aten.permute" and op.value("dims") == [1, 0]:
        name, positional = TRANSPOSE, positional[:1]
    return _call(name, positional, keywords)


def _counted(op: AtenOp) -> dict[SSAValue, _Code]:
    """The positions of an attention as the host counts them, which need not wait for a GPU."""
    if op.name not in (ATTENTION, ATTENTION_BACKWARD):
        return {}
    found = (op.tensor("query_positions"), op.tensor("key_positions"))
    return {
        value: _on_host(value)
        for value in found
        if isinstance(value, SSAValue) and are_counted(value)
    }


def _on_host(value: SSAValue) -> _Code:
    op = value.owner
    assert isinstance(op, AtenOp | dist.DistOp), "positions are counted by these"
    names = {operand: _on_host(operand) for operand in op.operands}
    if isinstance(op, AtenOp):
        return _Code(_aten_call(op, names, _HOST))
    return _Code(_dist_call(op, names, _HOST if isinstance(op, dist.ShardIndexOp) else ""))


def _aten_targets(op: AtenOp, names: Mapping[SSAValue, _Code]) -> str:
    returns = overload_named(op.name)._schema.returns
    if len(returns) == 1:
        is_list = isinstance(returns[0].type, torch.ListType)
        return _targets(op, names) + ("," if is_list else "")
    # A gradient that the op's mask leaves out is None, and not a result of the op.
    has_mask = op.signature.parameter("output_mask") is not None
    mask = op.value("output_mask") if has_mask else [True] * len(returns)
    results = iter(op.results)
    return ", ".join(names[next(results)] if given else "_" for given in mask)


def _dist_statement(op: dist.DistOp, names: Mapping[SSAValue, _Code]) -> str:
    call = _dist_call(op, names)
    return f"{_targets(op, names)} = {call}" if op.results else call


def _dist_call(op: dist.DistOp, names: Mapping[SSAValue, _Code], device: str = "") -> str:
    method = f"rt.{op.name.removeprefix('dist.')}"
    arguments = properties_without(op, *ANNOTATIONS)
    keywords: dict[str, Any] = {name: to_python(value) for name, value in arguments.items()}
    if "axes" in keywords:
        keywords["axes"] = op.axes
    if reduces_in_place(op):
        keywords["in_place"] = True
    if device:
        keywords["device"] = _Code(device)
    operands = [names[operand] for operand in op.operands]
    if isinstance(op, dist.AllReduceOp) and len(operands) > 1:
        return _call(f"{method}_coalesced", [operands], keywords)
    each = [[operand] for operand in operands] if operands else [[]]
    return ", ".join(_call(method, one, keywords) for one in each)


def ops_by_variable(program: Program, *, kernels: bool = False) -> dict[str, Operation]:
    """The ops of emitted source by the variables that it gives their results."""
    program = program if kernels else without_regions(program)
    names = _names(program)
    return {names[result]: op for op in program.ops for result in op.results}
