# pyright: basic
# torch's graphs are only partly typed.
"""Split an update into a part on shards, a core on full values, and another part on shards.

Elementwise ops on values of the parameter's shape run on each rank's shard. Ops that need full
values are the core; its operands are gathered. Its results of the parameter's shape return as
shards, others replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from shardweave.ir.capture.update.ops_seen import is_elementwise
from shardweave.ir.capture.update.program import Update
from shardweave.ir.torch_private import OpOverload, pytree

_LINALG_FLOPS = 10
"""FLOPs of a matrix decomposition (eigh, qr, ..), divided by elements times columns."""


@dataclass(frozen=True)
class Sent:
    """A value that the update's core reads or returns. shape: its full shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_sharded: bool

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Part = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class CutUpdate:
    """An optimizer update in three parts, each a function of tensors and of the update's numbers.

    before: computes, from shards of parameter, gradient and states, the core's operands
    (`gathered`). core: computes `results` on full values. after: computes the new parameter and
    states from the operands of `before` and shards of `results`. States of another shape than the
    parameter are full.
    """

    before: Part
    core: Part
    after: Part
    gathered: tuple[Sent, ...]
    results: tuple[Sent, ...]
    flops: int
    temporary_bytes: int
    """Bytes of all full values that the core computes."""


def cut_update(update: Update, device: torch.device) -> CutUpdate:
    """Split an update into its three parts. device: the device of constants that the parts make."""
    graph, shape = update.graph, update.shape
    early = _early(graph, shape)
    core = _core(graph, shape, early)
    gathered = _read_by(core, early)
    late = [n for n in graph.nodes if n.op == "call_function" and n not in {*early, *core}]
    results = [n for n in _read_by([*late, graph.output_node()], core)]
    inputs = update.inputs
    count = len(inputs) - (0 if update.numbers is None else len(update.numbers))
    tensors, numbers = inputs[:count], inputs[count:]
    make = _Maker(graph, device)
    return CutUpdate(
        make(tensors, numbers, gathered),
        make(gathered, numbers, results),
        make([*tensors, *results], numbers, update.outputs),
        tuple(_sent(node, shape) for node in gathered),
        tuple(_sent(node, shape) for node in results),
        sum(map(_flops, core)),
        sum(_sent(node, shape).num_bytes for node in core if isinstance(_value(node), Tensor)),
    )


def _early(graph: fx.Graph, shape: tuple[int, ...]) -> dict[fx.Node, None]:
    """Return the nodes that each rank can compute from its shards or replicated values."""
    early: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            early[node] = None
        elif node.op == "call_function" and all(x in early for x in node.all_input_nodes):
            is_whole = not any(_is_of(x, shape) for x in (node, *node.all_input_nodes))
            if is_whole or _is_on_shards(node, shape):
                early[node] = None
    return early


def _core(
    graph: fx.Graph, shape: tuple[int, ...], early: Collection[fx.Node]
) -> dict[fx.Node, None]:
    """Return the ops that need full values, and all ops between two of them."""
    core: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node not in early:
            if not _is_on_shards(node, shape) or core.intersection(node.users):
                core.add(node)
    return {node: None for node in graph.nodes if node in core}


def _read_by(readers: Collection[fx.Node], sources: Collection[fx.Node]) -> list[fx.Node]:
    """List tensors of `sources` that `readers` read; for a tuple in `sources`, its operands."""
    read: dict[fx.Node, None] = {}
    for source in (x for node in readers for x in node.all_input_nodes if x in sources):
        if isinstance(_value(source), Tensor):
            read[source] = None
        else:
            read |= dict.fromkeys(_read_by([source], sources))
    return list(read)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _is_of(node: fx.Node, shape: tuple[int, ...]) -> bool:
    leaves = pytree.tree_leaves(_value(node))
    return any(isinstance(x, Tensor) and tuple(x.shape) == shape for x in leaves)


def _is_on_shards(node: fx.Node, shape: tuple[int, ...]) -> bool:
    """True if an op computes a shard of its result from shards of its operands alone."""
    args = pytree.tree_map_only(fx.Node, _value, node.args)
    if not isinstance(node.target, OpOverload) or not is_elementwise(node.target, args):
        return False
    if not _is_of(node, shape):
        return False
    values = [x for operand in node.all_input_nodes if (x := _value(operand)) is not None]
    return all(isinstance(x, Tensor) and tuple(x.shape) in (shape, ()) for x in values)


def _sent(node: fx.Node, shape: tuple[int, ...]) -> Sent:
    value = _value(node)
    return Sent(tuple(value.shape), value.dtype, tuple(value.shape) == shape)


def _flops(node: fx.Node) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        values = [_value(x) if isinstance(x, fx.Node) else x for x in node.args]
        return int(flop_registry[packet](*values, out_val=_value(node)))
    operands = [x for n in node.all_input_nodes if isinstance(x := _value(n), Tensor)]
    is_decomposition = "linalg" in str(node.target) and not isinstance(_value(node), Tensor)
    if is_decomposition and operands:
        return _LINALG_FLOPS * operands[0].numel() * operands[0].shape[-1]
    is_view = getattr(node.target, "is_view", False)
    return 0 if is_view else sum(x.numel() for x in operands)


@dataclass(frozen=True)
class _Maker:
    """Makes a function of part of a graph: it maps nodes `given` and `numbers` to `wanted`."""

    graph: fx.Graph
    device: torch.device

    def __call__(
        self, given: Sequence[fx.Node], numbers: Sequence[fx.Node], wanted: Sequence[fx.Node]
    ) -> Part:
        needed = self._needed(given, wanted)
        made = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        for node in (*given, *numbers):
            known[node] = made.placeholder(node.name)
        for node in self.graph.nodes:
            if node in needed:
                known[node] = made.node_copy(node, lambda x: known[x])
                self._move(known[node])
        made.output([known[node] for node in wanted])
        return fx.GraphModule({}, made).forward

    def _needed(self, given: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> set[fx.Node]:
        stop, needed, stack = set(given), set[fx.Node](), list(wanted)
        while stack:
            node = stack.pop()
            if node not in stop and node not in needed and node.op == "call_function":
                needed.add(node)
                stack += node.all_input_nodes
        return needed

    def _move(self, node: fx.Node) -> None:
        if node.kwargs.get("device") == torch.device("meta"):
            node.kwargs = {**node.kwargs, "device": self.device}
