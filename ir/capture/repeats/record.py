# pyright: basic
# torch's tracing API is private and only partly typed.
"""Record a block's call while dynamo traces it, and copy the nodes for equal blocks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from shardweave.ir.capture.repeats.alike import Likeness, tensor_facts
from shardweave.ir.capture.repeats.call import (
    BlockCall,
    Unfit,
    check_unwritten,
    structure_of,
    torch_state,
    writes_of,
)
from shardweave.ir.torch_private import (
    ConstantVariable,
    TensorVariable,
    TupleVariable,
    memory_key,
    version_of,
    wrap_proxy,
)

BLOCK = "shardweave.block"
"""Key of a node's `custom` metadata: (number of the record, path of the block)."""

_WORD = re.compile(r"\w+")


@dataclass
class TracedBlock:
    """The nodes that dynamo traced for a block's call. words: the identifiers in the names of
    everything that the block's code read."""

    path: str
    call: BlockCall
    number: int
    words: set[str] = field(default_factory=set)
    nodes: list[fx.Node] = field(default_factory=list)
    results: Any = None
    versions: list[int] = field(default_factory=list)
    sources: Any = None
    first_calls: dict[str, int] = field(default_factory=dict)
    tensors: dict[int, str] = field(default_factory=dict)
    """The name of each parameter and buffer within the block, by id of the tensor."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        output = self.call.tx.output
        tracer = output.current_tracer
        sources, self.sources = tracer.traced_sources, type(tracer.traced_sources)()
        before = set(tracer.graph.nodes)
        calls = dict(self.call.tx.num_calls)
        self.versions = [version_of(_example(node)) for node in self.call.nodes]
        tracer.traced_sources = self.sources
        try:
            yield
        finally:
            tracer.traced_sources = sources
            for source in self.sources:
                sources.add(source)
        self.nodes = [node for node in tracer.graph.nodes if node not in before]
        self.first_calls = {
            name: count
            for name, count in self.call.tx.num_calls.items()
            if calls.get(name) != count
        }

    # What must hold for any copy

    def finish(self, result: Any) -> None:
        """Complete the record of a block's call. Raises Unfit if the call had effects that its
        nodes in dynamo's graph do not show."""
        call, module = self.call, self.call.variable.value
        check_unwritten(call.writes, writes_of(call.tx))
        if torch_state(call.tx) != call.state:
            raise Unfit("the block changes a mode of torch, such as grad mode")
        if [version_of(_example(node)) for node in call.nodes] != self.versions:
            raise Unfit("the block changes its inputs in place")
        leaves: list[Any] = []
        structure = structure_of(result, leaves)
        self.results = (structure, [leaf.as_proxy().node for leaf in leaves])
        named = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        self.tensors = {id(tensor): name for name, tensor in named}
        self._note_words()
        self._check_nodes()
        self._check_results(leaves)
        prefix = call.name
        if not all(
            name == prefix or name.startswith((f"{prefix}.", f"{prefix}["))
            for name in self.first_calls
        ):
            raise Unfit("the block calls modules that are not its own submodules")

    def _note_words(self) -> None:
        for source in self.sources:
            # Every attribute of a module has __dict__ in its name; `Repeats.read` notes true reads.
            self.words.update(set(_WORD.findall(source.name)) - {"__dict__"})

    def _check_nodes(self) -> None:
        own = set(self.nodes)
        given = set(self.call.nodes)
        attributes = self.call.tx.output.nn_modules
        for node in self.nodes:
            if node.op == "get_attr":
                continue
            if node.op not in ("call_function", "call_method"):
                raise Unfit(f"the block makes a node of kind {node.op}")
            for operand in node.all_input_nodes:
                if operand.op == "get_attr":
                    tensor = attributes.get(operand.target)
                    if not isinstance(tensor, Tensor):
                        raise Unfit("the block calls a higher-order operator")
                    if version_of(_example(operand)):
                        raise Unfit(
                            f"the block changes {self.tensors.get(id(tensor), 'a tensor')} in place"
                        )
                elif operand not in own and operand not in given:
                    raise Unfit("the block reads an outside value that is no argument of it")

    def _check_results(self, leaves: list[Any]) -> None:
        own = set(self.nodes)
        outside = {
            memory_key(_example(operand))
            for node in self.nodes
            for operand in (node, *node.all_input_nodes)
            if operand not in own or operand.op == "get_attr"
            if isinstance(_example(operand), Tensor)
        }
        given = set(self.call.nodes)
        leaves = [leaf for leaf in leaves if leaf.as_proxy().node not in given]
        storages = [memory_key(_example(leaf.as_proxy().node)) for leaf in leaves]
        for leaf, storage in zip(leaves, storages, strict=True):
            node = leaf.as_proxy().node
            example = _example(node)
            if node not in own or storage in outside or storages.count(storage) > 1:
                raise Unfit("the block returns a view of an input or of another result")
            if type(leaf) is not TensorVariable or leaf.source is not None:
                raise Unfit("the block returns something other than a newly computed plain tensor")
            if not torch.ops.aten.is_non_overlapping_and_dense(example) or example.storage_offset():
                raise Unfit("the block returns a tensor that is not dense in memory")

    # Copying

    def copy(self, call: BlockCall, path: str) -> Any:
        """Copy the recorded nodes for an equal block's `call`; return the call's result. Raises
        Unfit or Unlike if the two calls differ."""
        old, new = self.call.variable, call.variable
        if call.structure != self.call.structure:
            raise Unfit("two calls of equal blocks get arguments of different structure")
        if call.state != self.call.state:
            raise Unfit("two equal blocks are called from different code or modes of torch")
        check_unwritten(self.call.writes, call.writes)
        likeness = Likeness()
        likeness.compare(old.value, new.value, "")
        read = likeness.differing & self.words
        if likeness.differing and "__dict__" in self.words:
            read = likeness.differing
        if read:
            name = min(read)
            raise Unfit(f"two blocks that look equal differ in {name}")
        values = self._given(call)
        renaming = _Renaming(self.call, call)
        values.update(self._attributes(call, likeness, renaming))
        return self._emit(call, path, values, renaming)

    def _given(self, call: BlockCall) -> dict[fx.Node, fx.Node]:
        values: dict[fx.Node, fx.Node] = {}
        for old, new in zip(self.call.leaves, call.leaves, strict=True):
            old_node, new_node = old.as_proxy().node, new.as_proxy().node
            if values.setdefault(old_node, new_node) is not new_node:
                raise Unfit("two arguments are one tensor in one call and two tensors in the other")
            if old_node is new_node:
                continue
            if type(old) is not type(new) or old.source is not None or new.source is not None:
                raise Unfit("two equal blocks get different model inputs as arguments")
            if tensor_facts(_example(old_node)) != tensor_facts(_example(new_node)):
                raise Unfit("two equal blocks get tensors of different shape, dtype or layout")
        if len(set(values.values())) != len(values):
            raise Unfit("the block gets one tensor as two arguments")
        return values

    def _attributes(
        self, call: BlockCall, likeness: Likeness, renaming: _Renaming
    ) -> dict[fx.Node, fx.Node]:
        """Map the nodes that read the old block's parameters and buffers to the new block's."""
        values: dict[fx.Node, fx.Node] = {}
        output = call.tx.output
        old_source, new_source = self.call.variable.source, call.variable.source
        used = dict.fromkeys(operand for node in self.nodes for operand in node.all_input_nodes)
        for node in used:
            if node.op != "get_attr":
                continue
            tensor = output.nn_modules[node.target]
            if id(tensor) not in self.tensors:
                values[node] = node
                continue
            source = output.param_name_to_source[node.target]
            renamed = source.clone(lambda s: new_source if s == old_source else s)
            partner = likeness.partners[id(tensor)]
            if (renamed == source) != (partner is tensor):
                raise Unfit("the block reads a parameter through a different attribute path")
            values[node] = _read(output, renamed, partner, renaming.meta(node))
        return values

    def _emit(
        self, call: BlockCall, path: str, values: dict[fx.Node, fx.Node], renaming: _Renaming
    ) -> Any:
        graph = call.tx.output.current_tracer.graph
        self._mark(self.nodes, self.path)
        made: list[fx.Node] = []
        for node in self.nodes:
            if node.op == "get_attr":
                continue
            args = map_arg(node.args, values.__getitem__)
            kwargs = map_arg(node.kwargs, values.__getitem__)
            copied = graph.create_node(node.op, node.target)
            copied.args, copied.kwargs = args, kwargs  # create_node looks into all of them
            copied.meta = renaming.meta(node)
            values[node] = copied
            made.append(copied)
        self._mark(made, path)
        for name, count in self.first_calls.items():
            call.tx.num_calls[renaming.name(name)] = count
        structure, nodes = self.results
        given = dict(zip(self.call.nodes, call.leaves, strict=True))
        leaves = [given.get(n) or self._fresh(call.tx, values[n], n) for n in nodes]
        return _result(structure, iter(leaves))

    def _mark(self, nodes: list[fx.Node], path: str) -> None:
        for node in nodes:
            if node.op != "get_attr":
                node.meta["custom"] = node.meta.get("custom", {}) | {BLOCK: (self.number, path)}

    def _fresh(self, tx: Any, node: fx.Node, old: fx.Node) -> Any:
        """Make dynamo's variable of a copied result, with a new fake tensor like the old one's."""
        example = _example(old)
        with tx.fake_mode, torch.no_grad():
            value = torch.empty_strided(
                example.shape, example.stride(), dtype=example.dtype, device=example.device
            )
        if example.requires_grad:
            with tx.fake_mode, torch.enable_grad():
                value = value.requires_grad_().clone()
        if tensor_facts(value) != tensor_facts(example):
            raise AssertionError(
                f"copy has {tensor_facts(value)}, original {tensor_facts(example)}"
            )
        del node.meta["example_value"]
        return wrap_proxy(tx, fx.Proxy(node, tx.output.current_tracer), example_value=value)


def _read(output: Any, source: Any, tensor: Tensor, meta: dict[str, Any]) -> fx.Node:
    """Return the node that reads a parameter or buffer; a new node gets `meta`."""
    if tensor in output.side_effects:
        return output.side_effects[tensor].as_proxy().node
    name = output.module_key_name(source.name)
    if name in output.nn_modules:
        raise Unfit("the traced name of the block's parameter is already used by another")
    output.nn_modules[name] = tensor
    output.param_name_to_source[name] = source
    node = output.root_tracer.graph.create_node("get_attr", name)
    node.meta = meta
    return node


def _result(structure: Any, fresh: Iterator[Any]) -> Any:
    if structure is Tensor:
        return next(fresh)
    if structure and isinstance(structure[0], type) and structure[0] is not Tensor:
        return ConstantVariable.create(None)
    return TupleVariable([_result(item, fresh) for item in structure])


class _Renaming:
    """Renames the modules of one block to another block's."""

    def __init__(self, old: BlockCall, new: BlockCall) -> None:
        self.old, self.new = old.name, new.name
        pairs = zip(
            old.variable.value.named_modules(remove_duplicate=False),
            new.variable.value.named_modules(remove_duplicate=False),
            strict=True,
        )
        self.keys = {str(id(before)): str(id(after)) for (_, before), (_, after) in pairs}

    def name(self, name: str) -> str:
        is_inner = name == self.old or name.startswith((f"{self.old}.", f"{self.old}["))
        return self.new + name[len(self.old) :] if is_inner else name

    def meta(self, node: fx.Node) -> dict[str, Any]:
        """Return a node's metadata with the recorded block's names replaced by the other's."""
        if _STACK not in node.meta:
            return dict(node.meta)
        stack = {}
        for key, (name, kind) in node.meta[_STACK].items():
            module, mark, count = key.partition("@")
            stack[self.keys.get(module, module) + mark + count] = (self.name(name), kind)
        return node.meta | {_STACK: stack}


_STACK = "nn_module_stack"


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")
