# pyright: basic
"""Chains of equal blocks in dynamo's graph, and the graph with a chain's middle cut out.

The blocks of a chain follow each other directly. Each block but the first reads only its own
parameters, results of the previous block, and values from before the chain. A chain of any length
is traced as its first two and last two blocks alone, and lengthened afterwards (`lengthen`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardweave.ir.capture.repeats.record import BLOCK
from shardweave.ir.torch_private import codegen_of

_KEPT = 2
"""Blocks that are kept at each end of a chain."""


@dataclass(frozen=True)
class BlockChain:
    """Equal blocks called one after another, as paths in the order of their calls."""

    paths: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, str, str, str]:
        first, second, *_, last_but_one, last = self.paths
        return first, second, last_but_one, last

    @property
    def cut(self) -> tuple[str, ...]:
        return self.paths[_KEPT:-_KEPT]


def block_path_of(node: fx.Node) -> str | None:
    """Return the path of the recorded or copied block that a graph node belongs to; else None."""
    tag = node.meta.get("custom", {}).get(BLOCK)
    return None if tag is None else tag[1]


def chains_of(graph: fx.Graph) -> list[BlockChain]:
    """Find all chains of more than four equal blocks. Takes time linear in the nodes."""
    links = _links(graph)
    chains: list[BlockChain] = []
    run: list[_Link] = []
    for link in [*links, None]:
        if run and (link is None or not link.continues(run)):
            chain = BlockChain(tuple(linked.path for linked in run))
            if len(run) > 2 * _KEPT and _is_closed(run):
                chains.append(chain)
            # The last block may be the first of the next run.
            run = run[-1:] if link is not None and link.follows(run[-1]) else []
        if link is not None:
            run.append(link)
    return chains


@dataclass
class _Link:
    """The nodes of one block. reads: the origin of each operand, equal for blocks of one chain.

    number: the number of its record. start: index of its first call in the graph.
    """

    path: str
    number: int
    start: int
    nodes: list[fx.Node]
    reads: list[Any]

    def follows(self, other: _Link) -> bool:
        is_next = self.start == other.start + len(other.nodes)
        return is_next and self.number == other.number and len(self.nodes) == len(other.nodes)

    def continues(self, run: list[_Link]) -> bool:
        """True if this block extends the chain of equal blocks `run`. The first block of the chain
        may read other values than the later ones."""
        last = run[-1]
        return self.follows(last) and (len(run) == 1 or self.reads == last.reads)


def _links(graph: fx.Graph) -> list[_Link]:
    links: list[_Link] = []
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    for place, node in enumerate(calls):
        path = block_path_of(node)
        if path is None:
            continue
        if not links or links[-1].path != path:
            links.append(_Link(path, node.meta["custom"][BLOCK][0], place, [], []))
        links[-1].nodes.append(node)
    for before, link in zip([None, *links], links, strict=False):
        link.reads = _reads(link, before)
    return links


def _reads(link: _Link, before: _Link | None) -> list[Any]:
    own = {node: index for index, node in enumerate(link.nodes)}
    others = {} if before is None else {node: index for index, node in enumerate(before.nodes)}
    prefix = f"model.{link.path}."
    reads: list[Any] = []
    for node in link.nodes:
        for operand in node.all_input_nodes:
            if operand in own:
                reads.append(("own", own[operand]))
            elif operand in others:
                reads.append(("before", others[operand]))
            elif operand.op == "get_attr" and str(operand.target).startswith(prefix):
                reads.append(("parameter", str(operand.target)[len(prefix) :]))
            elif operand.op == "get_attr":
                reads.append(("attribute", operand.target))
            else:
                reads.append(("outside", operand))
    return reads


def _is_closed(run: list[_Link]) -> bool:
    """True if each block's results are read only by it and the next, its parameters only by it."""
    for link, following in zip(run, [*run[1:], None], strict=True):
        allowed = {*link.nodes, *(following.nodes if following else ())}
        prefix = f"model.{link.path}."
        for node in link.nodes:
            if following is not None and not allowed.issuperset(node.users):
                return False
            for operand in node.all_input_nodes:
                is_own = operand.op == "get_attr" and str(operand.target).startswith(prefix)
                if is_own and not set(link.nodes).issuperset(operand.users):
                    return False
    return True


def without_blocks(exported: fx.GraphModule, chains: list[BlockChain]) -> fx.GraphModule:
    """Copy an exported graph without the middle blocks of all chains and their parameters."""
    cut = {path for chain in chains for path in chain.cut}
    graph = fx.Graph()
    bridges = _bridges(exported.graph, chains)
    values: dict[fx.Node, fx.Node] = {}
    needed = {
        operand
        for node in exported.graph.nodes
        if block_path_of(node) not in cut
        for operand in node.all_input_nodes
    }
    for node in exported.graph.nodes:
        if block_path_of(node) in cut or (node.op == "get_attr" and node not in needed):
            continue
        values[node] = graph.node_copy(node, lambda n: values[bridges.get(n, n)])
    graph.set_codegen(codegen_of(exported.graph))
    short = fx.GraphModule(exported, graph)
    short.meta.update(exported.meta)
    short.train(exported.training)
    return short


def _bridges(graph: fx.Graph, chains: list[BlockChain]) -> dict[fx.Node, fx.Node]:
    """Map the last removed block's nodes to nodes of the last block kept before it."""
    nodes: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        path = block_path_of(node)
        if path is not None:
            nodes.setdefault(path, []).append(node)
    pairs = [(chain.cut[-1], chain.paths[_KEPT - 1]) for chain in chains]
    return {a: b for old, new in pairs for a, b in zip(nodes[old], nodes[new], strict=True)}


def parameter_order(exported: torch.nn.Module) -> dict[str, int]:
    """Map each parameter and buffer to its index among the inputs of a traced graph."""
    names = (*dict(exported.named_parameters(remove_duplicate=False)),)
    names += (*dict(exported.named_buffers(remove_duplicate=False)),)
    return {name: place for place, name in enumerate(names)}
