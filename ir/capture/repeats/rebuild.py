# pyright: basic
# torch's tracing API is private and only partly typed.
"""Rebuild a traced graph from a list of its calls, in which calls may be repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from shardweave.ir.capture.site import qualified
from shardweave.ir.torch_private import aot


@dataclass(eq=False)
class Entry:
    """A call in the new graph. node: None for a call that torch dropped, whose name still counts.

    base, first: the node's name without its number, and the first number used for that name; None
    if the name has no number. renamed: (path of the copied block, path of the new block).
    """

    base: str
    first: int | None
    node: fx.Node | None
    block: str | None
    is_backward: bool
    renamed: tuple[str, str] | None = None
    operands: dict[fx.Node, Any] = field(default_factory=dict)
    """Replacements for operands of the node, where they differ."""


def numbered(base: str, number: int) -> str:
    """Append a number to a name as torch.fx does: `add`, `add_1`, `add_2`."""
    return f"{base}_{number}" if number else base


def flat_results(output: fx.Node) -> list[Any]:
    return list(output.args[0])  # type: ignore[arg-type]


def is_gradient(desc: Any) -> bool:
    """True if torch's descriptor of an output is the gradient of a parameter or buffer."""
    return isinstance(desc, aot.GradAOTOutput) and hasattr(desc.grad_of, "target")


def parameter_in_block(node: fx.Node, path: str) -> str | None:
    """Name of a graph input in block `path`; None if it is no parameter or buffer of the block."""
    target = getattr(node.meta.get("desc"), "target", "")
    prefix = f"model.{path}."
    return target[len(prefix) :] if target.startswith(prefix) else None


def renamed_stack(stack: Mapping[str, tuple[str, Any]] | None, old: str, new: str) -> Any:
    """Replace the path of block `old` by the path of `new` in a node's module stack."""
    if not stack:
        return stack
    renamed = {}
    for key, (name, kind) in stack.items():
        path = qualified(name)
        if path == old or path.startswith(f"{old}."):
            path = new + path[len(old) :]
        renamed[key] = (f"model.{path}", kind)
    return renamed


def _next_name(entry: Entry, counts: Counter[str]) -> str:
    if entry.first is None:
        return entry.base
    if entry.base not in counts:
        counts[entry.base] = entry.first
    counts[entry.base] += 1
    return numbered(entry.base, counts[entry.base] - 1)


def rebuilt(graph: fx.Graph, entries: list[Entry], order: Mapping[str, int]) -> fx.Graph:
    """Build an fx graph of `entries`. order: by name, each parameter's index among the inputs."""
    new = fx.Graph()
    renames = list(dict.fromkeys(entry.renamed for entry in entries if entry.renamed))
    inputs = _inputs(graph, new, renames, order)
    made: dict[Entry, fx.Node] = {}
    latest: dict[fx.Node, fx.Node] = {}
    counts: Counter[str] = Counter()
    for entry in entries:
        node = entry.node
        name = _next_name(entry, counts)
        if node is None:
            continue

        def operand(value: fx.Node, entry: Entry = entry) -> fx.Node:
            if value in entry.operands:
                return made[entry.operands[value]]
            if value.op == "placeholder":
                return inputs.get((value, entry.renamed)) or inputs[value, None]
            return latest[value]

        copy = made[entry] = new.create_node(node.op, node.target, name=name)
        # Given to create_node they would be looked through for symbols.
        copy.args, copy.kwargs = map_arg(node.args, operand), map_arg(node.kwargs, operand)
        copy.meta = _meta(node, entry.renamed)
        if entry.renamed is None:
            latest[node] = made[entry]
    copies = {(entry.node, entry.renamed): node for entry, node in made.items()}
    _output(graph, new, copies, renames, order)
    return new


def _meta(node: fx.Node, renamed: tuple[str, str] | None) -> dict[str, Any]:
    if renamed is None:
        return node.meta
    stacks = {
        key: renamed_stack(node.meta[key], *renamed)
        for key in ("nn_module_stack", "fwd_nn_module_stack")
        if key in node.meta
    }
    return node.meta | stacks


_Copies = dict[tuple[fx.Node | None, tuple[str, str] | None], fx.Node]


def _inputs(
    graph: fx.Graph, new: fx.Graph, renames: Sequence[tuple[str, str]], order: Mapping[str, int]
) -> _Copies:
    """Add the placeholders: parameters and buffers of all blocks in order, then the others."""
    wanted: list[tuple[fx.Node, Any, Any]] = [
        (node, None, node.meta["desc"]) for node in graph.find_nodes(op="placeholder")
    ]
    for node, _, desc in tuple(wanted):
        for rename in renames:
            name = parameter_in_block(node, rename[0])
            if name is not None:
                wanted.append((node, rename, replace(desc, target=f"model.{rename[1]}.{name}")))
    wanted.sort(key=lambda item: order.get(getattr(item[2], "target", ""), len(order)))
    copies: _Copies = {}
    for place, (node, rename, desc) in enumerate(wanted):
        copies[node, rename] = new.placeholder(f"input_{place}")
        copies[node, rename].meta = node.meta | {"desc": desc}
    return copies


def _output(
    graph: fx.Graph,
    new: fx.Graph,
    copies: _Copies,
    renames: Sequence[tuple[str, str]],
    order: Mapping[str, int],
) -> None:
    old = graph.output_node()
    slots = list(zip(old.meta["desc"], flat_results(old), strict=True))
    results: list[tuple[Any, Any, Any]] = [(desc, node, None) for desc, node in slots]
    for desc, node in slots:
        for rename in renames:
            name = desc.grad_of.target if is_gradient(desc) else ""
            if name.startswith(f"model.{rename[0]}."):
                target = f"model.{rename[1]}{name[len(f'model.{rename[0]}') :]}"
                grad_of = replace(desc.grad_of, target=target)
                results.append((replace(desc, grad_of=grad_of), node, rename))
    results.sort(key=lambda item: _output_place(item[0], order))
    values = [None if node is None else copies[node, rename] for _, node, rename in results]
    new.output(values)
    new.output_node().meta = old.meta | {"desc": [desc for desc, *_ in results]}


def _output_place(desc: Any, order: Mapping[str, int]) -> int:
    if not isinstance(desc, aot.GradAOTOutput):
        return -1
    return order.get(getattr(desc.grad_of, "target", ""), len(order))
