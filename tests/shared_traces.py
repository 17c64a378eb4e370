"""One trace of each model per test run: equal models on inputs of equal shapes share it.

Tracing is most of what a small test costs. What it gives follows from the module (its class, its
attributes, the shapes and dtypes of its tensors) and from the shapes and dtypes of the inputs, so
these are the key: the module pickled with its parameters and buffers described in place of stored.
The processes of a run share traces as files: of each node what a capture reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.nn.modules import module as module_hooks

from shardweave.ir.capture import capture as captures
from shardweave.ir.capture.arguments import Form
from shardweave.ir.capture.outputs import Kind
from shardweave.ir.capture.trace import Traced, trace

READ = ("val", "nn_module_stack", "fwd_nn_module_stack", "stack_trace")
"""The entries of a node's `meta` that a capture reads."""

FOLDER = "SHARDWEAVE_TEST_TRACES"
"""Environment variable: the folder in which the processes of a run share traces."""

NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises for what it cannot write."""


@dataclass
class SharedTraces:
    """The traces of a run: those of this process, and a folder with those of every process."""

    folder: Path
    traces: dict[str, Traced] = field(default_factory=dict[str, Traced])

    def trace(
        self,
        model: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        kind: Kind,
        form: Form | None = None,
    ) -> Traced:
        """As `trace`; a model that cannot be pickled, or has hooks, is traced each time."""
        if _has_hooks(model):
            return trace(model, args, kwargs, kind, form)
        try:
            described = _described(model, args, kwargs) + pickle.dumps((kind, form))
            key = hashlib.sha256(described).hexdigest()
        except NOT_PICKLED:  # such as local classes
            return trace(model, args, kwargs, kind, form)
        if key not in self.traces:
            file = self.folder / key
            shared = _read(file.read_bytes()) if file.exists() else None
            self.traces[key] = shared or trace(model, args, kwargs, kind, form)
            if shared is None:
                self._write(file, self.traces[key])
        return self.traces[key]

    def _write(self, file: Path, traced: Traced) -> None:
        """Write a trace for the other processes, if it can be: they see the whole file or none."""
        with contextlib.suppress(*NOT_PICKLED):  # such as operators other than those of ATen
            written = _written(traced)
            own = file.with_suffix(f".{os.getpid()}")
            own.write_bytes(written)
            own.replace(file)


def share_traces() -> None:
    """Let the captures of this process, one that a test started, share the traces of the run."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        captures.trace = SharedTraces(Path(folder)).trace


def _has_hooks(model: torch.nn.Module) -> bool:
    """Whether there are hooks of which the pickled model says nothing."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    parameters = any(getattr(p, kind, None) for p in model.parameters() for kind in kinds)
    return parameters or bool(module_hooks._global_forward_hooks)


def _described(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    described = [*model.parameters(), *model.buffers(), *args, *kwargs.values()]
    described = [value for value in described if isinstance(value, torch.Tensor)]
    aside = [module._state_dict_pre_hooks for module in model.modules()]
    _Describing(buffer, described, aside).dump((model, list(args), dict(kwargs)))
    return buffer.getvalue()


class _Describing(pickle.Pickler):
    """Writes a description in place of each of some tensors, others as they are, sets in order.

    aside: objects that say nothing of a trace, such as the hook that a step registers on its model.
    """

    def __init__(
        self, buffer: io.BytesIO, tensors: Sequence[torch.Tensor], aside: Sequence[Any]
    ) -> None:
        super().__init__(buffer)
        self.aside = {id(value) for value in aside}
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, (set, frozenset)):
            return (type(obj).__name__, sorted(map(repr, obj)))
        if id(obj) in self.aside:
            return "aside"
        if type(obj).__name__ == "GenerationConfig":  # keeps a hash, another in each process
            return (type(obj).__name__, obj.to_json_string())
        if id(obj) not in self.numbers:
            return None
        layout = (tuple(obj.shape), obj.stride(), str(obj.dtype), str(obj.device))
        return (type(obj).__name__, self.numbers[id(obj)], layout, obj.requires_grad)


def _written(traced: Traced) -> bytes:
    buffer = io.BytesIO()
    nodes = [
        (node.op, node.name, node.target, node.args, node.kwargs, _read_of(node.meta))
        for node in traced.graph.nodes
    ]
    _Writing(buffer).dump(
        (
            nodes,
            traced.inputs,
            traced.outputs,
            dict(traced.constants),
            traced.returned,
            traced.notes,
            dict(traced.kept),
        )
    )
    return buffer.getvalue()


def _read_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a capture reads of a node's `meta`, without the classes in its module stacks."""
    kept = {key: meta[key] for key in READ if meta.get(key) is not None}
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        if key in kept:
            kept[key] = {module: (path, None) for module, (path, _) in kept[key].items()}
    return kept


class _Writing(pickle.Pickler):
    """Writes nodes and ops by their names, and fake tensors as tensors on the meta device."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.fx.Node):
            return ("node", obj.name)
        if isinstance(obj, torch._ops.OpOverload):
            return ("op", obj.namespace, obj._opname, obj._overloadname)
        if isinstance(obj, torch._subclasses.FakeTensor):
            return ("tensor", tuple(obj.shape), obj.dtype)
        return None


def _read(written: bytes) -> Traced | None:
    """Read a trace; None if it names a module of tests that this process cannot import."""
    graph = torch.fx.Graph()
    try:
        nodes, *rest = _Reading(io.BytesIO(written)).load()
    except ModuleNotFoundError:
        return None
    by_name: dict[str, torch.fx.Node] = {}

    def node_of(part: Any) -> Any:
        return by_name[part.name] if isinstance(part, _Named) else part

    for op, name, target, args, kwargs, meta in nodes:
        args, kwargs = map_aggregate((args, kwargs), node_of)
        by_name[name] = graph.create_node(op, target, args, kwargs, name)
        by_name[name].meta = meta
    return Traced(graph, *rest)


@dataclass(frozen=True)
class _Named:
    """Stands for the node of a name."""

    name: str


class _Reading(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "node":
            return _Named(*rest)
        if kind == "tensor":
            shape, dtype = rest
            return torch.empty(shape, dtype=dtype, device="meta")
        namespace, name, overload = rest
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
