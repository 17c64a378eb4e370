"""IR tests as text: a short text in, the expected lines out.

A text has one line for each argument, op and result of the step:

    param %w : tensor<8x4xf64> [{"tensor"}, {}]
    input %x : tensor<4x8xf64>
    %y = aten.mm(%x, %w) : tensor<4x4xf64>
    output %y
    grad w = %dw

The sharding of an argument or result may be left out, and so may the annotations of an op.
"""

from __future__ import annotations

import re
from textwrap import dedent

import torch
from torch import Tensor

from shardweave.backends.reference.reference import run_reference
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.program.program import Program, Slot
from shardweave.passes.pipeline import as_mesh, run_passes

_ARGUMENT = re.compile(r"(param|buffer|input|tangent) %([\w.]+) : (tensor<\S*>) ?(.*)$")
_RESULT = re.compile(r"(output|grad|buffer) (?:([\w.]+) = )?%([\w.]+) ?(.*)$")
_OP = re.compile(r"((?:%[\w.]+(?:, )?)+) = .* : (.*)$")
_ANNOTATIONS = re.compile(r" \{((?:layer|phase|origin|sharding|wanted) = .*)\}")
_SHARDING = re.compile(r"(?:sharding|wanted) = \[(.*)\]$")


def step(text: str, mesh: str = "", *, local: bool = False) -> Program:
    """The program of a text, on `mesh` (`data=2,tensor=2`) if one is named."""
    arguments, ops, results = [], [], []
    types: dict[str, str] = {}
    for line in filter(None, map(str.strip, dedent(text).splitlines())):
        if found := _ARGUMENT.match(line):
            kind, name, type_, sharding = found.groups()
            arguments.append(f"%{name}: {type_} {_attributes(kind, name, sharding)}")
            types[name] = type_
        elif found := _RESULT.match(line):
            kind, name, value, sharding = found.groups()
            results.append((value, _attributes(kind, name or "0", sharding)))
        else:
            found = _OP.match(line)
            assert found is not None, f"neither an argument, an op nor a result: {line}"
            names = found[1].replace("%", "").split(", ")
            types |= dict(zip(names, found[2].split(", "), strict=True))
            ops.append(line)
    returned = ", ".join(f"{types[value]} {attributes}" for value, attributes in results)
    values = ", ".join(f"%{value}" for value, _ in results)
    value_types = ", ".join(types[value] for value, _ in results)
    body = "\n    ".join([*ops, f"func.return {values} : {value_types}"])
    return Program.parse(
        f"builtin.module {_module_attributes(mesh, local)}{{\n"
        f"  func.func @step({', '.join(arguments)}) -> ({returned}) {{\n    {body}\n  }}\n}}\n"
    )


def _attributes(kind: str, name: str, sharding: str) -> str:
    written = f", dist.sharding = #dist.sharding<{sharding}>" if sharding else ""
    return f'{{dist.kind = "{kind}", dist.name = "{name}"{written}}}'


def _module_attributes(mesh: str, local: bool) -> str:
    axes = ", ".join(f'"{axis.name}" = {axis.size}' for axis in as_mesh(mesh).axes)
    entries = (["dist.local"] if local else []) + (
        [f"dist.mesh = #dist.mesh<[{axes}]>"] if mesh else []
    )
    return f"attributes {{{', '.join(entries)}}} " if entries else ""


def lines(program: Program, *, shardings: bool = False) -> list[str]:
    """The ops of a program and its return, without layers and phases."""
    body = str(program).split("{\n", 2)[2].split("\n  }\n")[0]
    found = [
        _ANNOTATIONS.sub(_keep_sharding if shardings else "", line) for line in body.splitlines()
    ]
    return [line.strip() for line in found]


def _keep_sharding(match: re.Match[str]) -> str:
    sharding = _SHARDING.search(match[1])
    text = sharding[1].replace("#dist.sharding", "") if sharding else "none"
    return f" {text}"


def collectives(program: Program) -> list[str]:
    """The lines of the ops of the `dist` dialect."""
    return [line for line in lines(program) if " = dist." in line]


def assert_lines(found: list[str], expected: str) -> None:
    """Assert that the lines are those expected, where `...` stands for any lines.

    The return at the end need not be given.
    """
    wanted = [line.strip() for line in dedent(expected).strip().splitlines()]
    if not any(line.startswith("func.return") for line in wanted):
        found = [line for line in found if not line.startswith("func.return")]
    assert _matches(found, wanted), (
        "found:\n" + "\n".join(found) + "\nexpected:\n" + "\n".join(wanted)
    )


def _matches(found: list[str], wanted: list[str]) -> bool:
    if not wanted:
        return not found
    if wanted[0] == "...":
        return any(_matches(found[skip:], wanted[1:]) for skip in range(len(found) + 1))
    return bool(found) and found[0] == wanted[0] and _matches(found[1:], wanted[1:])


def assert_passes_to(
    passes: str, text: str, expected: str, mesh: str = "", **options: bool
) -> Program:
    """Run passes over a text, compare the lines and the values that come out, return the program.

    Whatever the lines, the program must still compute what the text computes.
    """
    before = step(text, mesh, **options)
    after = run_passes(before, passes)
    assert_lines(lines(after), expected)
    assert_same_values(before, after)
    return after


def assert_same_values(before: Program, after: Program) -> None:
    """Assert that two programs give equal global results on random arguments."""
    values = random_values(before)
    expected, found = run_reference(before, values), run_reference(after, values)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, msg=lambda m, key=key: f"{key}: {m}")


def random_values(program: Program) -> dict[tuple[str, str], Tensor]:
    """Global arguments: normal numbers, and integers that are 0 or 1."""
    found: dict[tuple[str, str], Tensor] = {}
    for slot in program.arguments:
        shape = shape_of(slot.value)
        if program.is_local:
            shape = program.sharding_of_slot(slot).global_shape(shape)
        dtype = dtype_of_value(slot.value)
        values = torch.randn(shape) if dtype.is_floating_point else torch.randint(0, 2, shape)
        found[slot.kind, slot.name] = values.to(dtype)
    return found


def shardings(slots: list[Slot]) -> dict[str, str]:
    """By name, the sharding of each argument or result as plans write it; '' if it has none."""
    return {
        slot.name: str(slot.sharding_attr).removeprefix("#dist.sharding<").removesuffix(">")
        if slot.sharding_attr
        else ""
        for slot in slots
    }
