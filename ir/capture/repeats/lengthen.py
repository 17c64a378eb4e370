# pyright: basic
# torch's tracing API is private and only partly typed.
"""Derive the traced graph of a long chain of equal blocks from that of a short chain.

The short chain has blocks 1, 2, n-1 and n. Each op's trace depends only on its operands' shapes and
dtypes, and autograd runs backward in the reverse order of forward. So if blocks 2 and n-1 have
equal traces, forward and backward, and read the same values of both neighbours, every block between
them has that trace too. This is checked here, node for node; otherwise the whole graph is traced.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import fx

from shardweave.ir.capture.repeats.alike import same_constant, tensor_facts
from shardweave.ir.capture.repeats.chain import (
    BlockChain,
    block_path_of,
    chains_of,
    parameter_order,
    without_blocks,
)
from shardweave.ir.capture.repeats.rebuild import (
    Entry,
    flat_results,
    is_gradient,
    numbered,
    parameter_in_block,
    rebuilt,
    renamed_stack,
)
from shardweave.ir.torch_private import pytree

Trace = Callable[[fx.GraphModule], fx.GraphModule]

logger = logging.getLogger(__name__)

_ENDS = ("placeholder", "output")
_CONSTANT = re.compile(r"_tensor_constant\d+(_\d+)?$")
_NAME = re.compile(r"(.*?)(?:_(\d+))?$")


class Irregular(Exception):
    """Raised if the blocks of a chain were traced differently; the message says where."""


def joint_graph(exported: fx.GraphModule, trace: Trace) -> tuple[fx.Graph, fx.GraphModule]:
    """Trace forward and backward as one graph: only the ends of chains of equal blocks are traced,
    and middle blocks are copied. Returns the graph, and the module that holds its constants."""
    chains = chains_of(exported.graph)
    if chains:
        with all_names() as names:
            short = trace(without_blocks(exported, chains))
        try:
            return lengthened(short.graph, names, chains, parameter_order(exported)), short
        except Irregular as reason:
            logger.info("all blocks are traced, since a chain's came out unlike: %s", reason)
    joint = trace(exported)
    return joint.graph, joint


@contextlib.contextmanager
def all_names() -> Iterator[list[str]]:
    """Collect the names of all nodes of a graph traced in the context, dead nodes included."""
    names: list[str] = []
    eliminate = fx.Graph.eliminate_dead_code

    def noting(graph: fx.Graph, *args: Any, **kwargs: Any) -> bool:
        if not names:
            names.extend(node.name for node in graph.nodes if node.op not in _ENDS)
        return eliminate(graph, *args, **kwargs)

    with mock.patch.object(fx.Graph, "eliminate_dead_code", noting):
        yield names


def lengthened(
    graph: fx.Graph, names: Sequence[str], chains: Sequence[BlockChain], order: Mapping[str, int]
) -> fx.Graph:
    """Return the graph with all blocks of the chains, made from the trace with short chains.

    names: the names of all traced nodes, in order. order: the index of each parameter among the
    inputs. Raises Irregular if the blocks' traces differ.
    """
    entries = _entries(graph, names)
    for chain in chains:
        entries = _Lengthening(graph, entries, chain).entries()
    return rebuilt(graph, entries, order)


def _entries(graph: fx.Graph, names: Sequence[str]) -> list[Entry]:
    """Make an entry for each call, also dropped ones. Raises Irregular if names have gaps."""
    nodes = {node.name: node for node in graph.nodes if node.op not in _ENDS}
    if [name for name in names if name in nodes] != list(nodes):
        raise Irregular("calls were reordered")
    entries: list[Entry] = []
    firsts: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for name in names:
        if _CONSTANT.match(name):
            entries.append(Entry(name, None, nodes.get(name), None, False))
            continue
        base = _base(name)
        if base not in counts:  # fx numbers the names of Python's own from 1
            counts[base] = firsts[base] = int(name == f"{base}_1")
        if name != numbered(base, counts[base]):
            raise Irregular(f"traced name {name} is not the next in the sequence of its kind")
        counts[base] += 1
        node = nodes.get(name)
        is_backward = node is not None and bool(node.meta.get("autograd_backward"))
        block = None if node is None else block_path_of(node)
        entries.append(Entry(base, firsts[base], node, block, is_backward))
    return entries


def _base(name: str) -> str:
    match = _NAME.match(name)
    assert match is not None
    return match[1]


class _Lengthening:
    """Inserts copies of the second block for the removed blocks of one chain."""

    def __init__(self, graph: fx.Graph, entries: list[Entry], chain: BlockChain) -> None:
        self.all, self.chain = entries, chain
        self.forward = self._spans(chain.kept, is_backward=False)
        self.backward = self._spans(chain.kept[::-1], is_backward=True)[::-1]
        if not all(self.forward) or any(map(bool, self.backward)) != all(map(bool, self.backward)):
            raise Irregular("a block has no calls")
        spans = zip(self.forward, self.backward, strict=True)
        self.blocks = [_nodes((*forward, *backward)) for forward, backward in spans]
        self.owner = {node: index for index, block in enumerate(self.blocks) for node in block}
        self.earlier: dict[fx.Node, fx.Node] = {}
        self.later: dict[fx.Node, fx.Node] = {}
        self._check_alike()
        self._check_closed(graph)

    def _spans(self, paths: Sequence[str], is_backward: bool) -> list[list[Entry]]:
        """Split the entries by block, where each block's first call is. Raises Irregular."""
        starts, end = [], 0
        for path in paths:
            places = [
                place
                for place, entry in enumerate(self.all)
                if entry.block == path and entry.is_backward == is_backward
            ]
            if not places:
                return [[] for _ in paths]
            starts.append(places[0])
            end = places[-1] + 1
        while end < len(self.all) and _is_sum_of_gradients(self.all[end]):
            end += 1
        spans = [self.all[a:b] for a, b in zip(starts, [*starts[1:], end], strict=True)]
        for path, span in zip(paths, spans, strict=True):
            if any(entry.block not in (path, None) for entry in span):
                raise Irregular(f"ops of block {path} are mixed with ops of other blocks")
            if any(entry.node and entry.is_backward != is_backward for entry in span):
                raise Irregular(f"block {path} has backward ops before its last forward op")
        return spans

    # Whether the second block and the last but one are alike

    def _check_alike(self) -> None:
        for spans in (self.forward, self.backward):
            if [e.base for e in spans[1]] != [e.base for e in spans[2]]:
                raise Irregular("the blocks call different ops in the forward pass")
            if [e.node is None for e in spans[1]] != [e.node is None for e in spans[2]]:
                raise Irregular("the blocks call different ops in the backward pass")
        self.partner = dict(zip(self.blocks[1], self.blocks[2], strict=True))
        for first, second in self.partner.items():
            self._check_pair(first, second)
        self.original = {second: first for first, second in self.partner.items()}

    def _check_pair(self, first: fx.Node, second: fx.Node) -> None:
        if first.target != second.target or not _same_meta(first, second, self.chain.kept[1:3]):
            raise Irregular(f"op {first.name} of one block and op {second.name} of the next differ")
        if not self._same_arguments((first.args, first.kwargs), (second.args, second.kwargs)):
            raise Irregular(f"{first.name} and {second.name} of two blocks read different operands")

    def _same_arguments(self, first: Any, second: Any) -> bool:
        (mine, spec), (theirs, other_spec) = map(pytree.tree_flatten, (first, second))
        return spec == other_spec and all(
            self._same_operand(a, b)
            if isinstance(a, fx.Node) and isinstance(b, fx.Node)
            else same_constant(a, b)
            for a, b in zip(mine, theirs, strict=True)
        )

    def _same_operand(self, first: fx.Node, second: fx.Node) -> bool:
        """True if the second and the last-but-one block read corresponding values."""
        places = self.owner.get(first), self.owner.get(second)
        if places == (1, 2):
            return self.partner[first] is second
        if places == (0, 1):
            return self.earlier.setdefault(first, second) is second
        if places == (2, 3):
            return self.later.setdefault(first, second) is second
        if places != (None, None):
            return False
        if first is second:
            return parameter_in_block(first, self.chain.kept[1]) is None
        names = [
            parameter_in_block(n, path)
            for n, path in zip((first, second), self.chain.kept[1:3], strict=True)
        ]
        return names[0] is not None and names[0] == names[1]

    def _check_closed(self, graph: fx.Graph) -> None:
        """Raises Irregular if other readers than their neighbours read results of the two blocks,
        except gradients of parameters."""
        output = graph.output_node()
        descs: dict[Any, Any] = dict(zip(flat_results(output), output.meta["desc"], strict=True))
        for index in (1, 2):
            for node in self.blocks[index]:
                for user in node.users:
                    place = self.owner.get(user)
                    if place is not None and abs(place - index) <= 1:
                        continue
                    desc: Any = descs.get(node) if user is output else None
                    name = desc.grad_of.target if is_gradient(desc) else ""
                    if not name.startswith(f"model.{self.chain.kept[index]}."):
                        raise Irregular(f"another block reads the result of {node.name}")

    # The long chain

    def entries(self) -> list[Entry]:
        """Entries of the long graph: the traced ones, and copies of each chain's second block."""
        cut = self.chain.cut
        copies = [self._copies(path) for path in cut]
        self._connect(copies)
        forward = [entry for copied, _ in copies for entry in copied]
        backward = [entry for _, copied in reversed(copies) for entry in copied]
        first = self.all.index(self.forward[2][0])
        entries = [*self.all[:first], *forward]
        if backward:
            second = self.all.index(self.backward[1][0])
            entries += [*self.all[first:second], *backward, *self.all[second:]]
        else:
            entries += self.all[first:]
        return entries

    def _copies(self, path: str) -> tuple[list[Entry], list[Entry]]:
        def copied(span: list[Entry]) -> list[Entry]:
            rename = (self.chain.kept[1], path)
            return [replace(entry, block=path, renamed=rename, operands={}) for entry in span]

        return copied(self.forward[1]), copied(self.backward[1])

    def _connect(self, copies: list[tuple[list[Entry], list[Entry]]]) -> None:
        """Point each copy's operands to its own values and its neighbours'."""
        second, last_but_one = self._by_node(1), self._by_node(2)
        line = [second]
        line += [{e.node: e for span in spans for e in span if e.node} for spans in copies]
        for place, values in enumerate(line):
            before = line[place - 1] if place else None
            after = line[place + 1] if place + 1 < len(line) else None
            for entry in values.values():
                for operand in _operands(entry):
                    owner = self.owner.get(operand)
                    if owner == 1 and place:
                        entry.operands[operand] = values[operand]
                    elif owner == 0 and before is not None:
                        entry.operands[operand] = before[self.earlier[operand]]
                    elif owner == 2:
                        other = self.original[operand]
                        entry.operands[operand] = after[other] if after else last_but_one[operand]
        for node, entry in last_but_one.items():
            for operand in node.all_input_nodes:
                if self.owner.get(operand) == 1:
                    entry.operands[operand] = line[-1][operand]

    def _by_node(self, index: int) -> dict[Any, Entry]:
        return {e.node: e for e in (*self.forward[index], *self.backward[index]) if e.node}


def _is_sum_of_gradients(entry: Entry) -> bool:
    """True if an entry adds up gradients, and torch does not say for which block."""
    is_sum = entry.node is not None and entry.node.meta.get("is_gradient_acc", False)
    return is_sum and entry.block is None


def _operands(entry: Entry) -> list[fx.Node]:
    return [] if entry.node is None else entry.node.all_input_nodes


def _nodes(entries: Sequence[Entry]) -> list[fx.Node]:
    return [entry.node for entry in entries if entry.node is not None]


def _same_meta(first: fx.Node, second: fx.Node, paths: Sequence[str]) -> bool:
    if first.meta.get("stack_trace") != second.meta.get("stack_trace"):
        return False
    if _forms(first.meta.get("val")) != _forms(second.meta.get("val")):
        return False
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stacks = (
            renamed_stack(first.meta.get(key), *paths),
            renamed_stack(second.meta.get(key), *paths),
        )
        if list((stacks[0] or {}).values()) != list((stacks[1] or {}).values()):
            return False
    return True


def _forms(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_facts(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_forms, value))
    return repr(value)
