# pyright: basic
# torch's tracing API is private and only partly typed.
"""Evaluate `item()` and `tolist()` of tensors that depend on no data while tracing.

`torch.arange(2, x.ndim).tolist()` or `torch.prod(torch.tensor(x.shape)).item()` give the same at
every call, so the trace computes them. The same holds for a tensor that is a plain attribute of a
module; `is_read_as_number` tells whether a change to such a tensor outdates a program. Reads of
random numbers and of buffers are still refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partialmethod
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from shardweave.ir.torch_private import (
    ConstantVariable,
    TensorVariable,
    TorchDispatchMode,
    disable_current_modes,
)

_MOST = 4096
"""Most elements of a tensor that is computed while a model is traced."""

REAL = "real"
"""Key in a node's `meta` of the real tensor that the node reads, if that is a constant."""

READ = "read"
"""Key in a node's `meta` if tracing read the node's value, or one computed from it."""

_READ: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def is_read_as_number(tensor: Tensor) -> bool:
    """True if a trace has read Python numbers out of `tensor`, which programs hold as constants."""
    return _READ.get(id(tensor)) is tensor


class _Random(Exception):
    """Raised for an op that draws random numbers or makes an uninitialized tensor."""


class Deterministic(TorchDispatchMode):
    """Dispatch mode in which ops that draw random numbers or make uninitialized tensors raise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            raise _Random
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def constant_numbers(model: nn.Module) -> Iterator[None]:
    """Let dynamo evaluate `item()` and `tolist()` of tensors that depend on no input, in the
    context."""
    owned = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def called(self: Any, call: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_read = name in ("item", "tolist") and not args and not kwargs
        for read in self.as_proxy().node.graph.find_nodes(op="get_attr") if is_read else ():
            real = tx.output.nn_modules.get(read.target)
            if isinstance(real, Tensor) and id(real) not in owned:
                read.meta[REAL] = real
        value = constant_value(self.as_proxy().node) if is_read else None
        if value is None or (name == "item" and value.numel() != 1):
            return call(self, tx, name, args, kwargs)
        if name == "item":
            return ConstantVariable.create(value.item())
        return type(self).build(tx, value.tolist())

    with contextlib.ExitStack() as patches:
        for kind in (TensorVariable, *TensorVariable.__subclasses__()):  # arrays of numpy too
            if "call_method" in vars(kind):
                method = partialmethod(called, kind.call_method)
                patches.enter_context(mock.patch.object(kind, "call_method", method))
        yield


def constant_value(node: fx.Node) -> Tensor | None:
    """Compute the value of a graph node that depends on no input; None for other nodes."""
    path: dict[fx.Node, None] = {}
    if not _is_constant(node, path) or any(_writes(other, path) for other in node.graph.nodes):
        return None
    values: dict[fx.Node, Any] = {each: each.meta[REAL] for each in path if REAL in each.meta}
    _READ.update({id(tensor): tensor for tensor in values.values()})
    try:
        with disable_current_modes(), torch.no_grad(), Deterministic():
            for each in [node for node in path if node not in values]:
                args, kwargs = map_arg((each.args, each.kwargs), values.__getitem__)
                target: Any = each.target
                values[each] = (
                    target(*args, **kwargs)
                    if each.op == "call_function"
                    else getattr(args[0], target)(*args[1:], **kwargs)
                )
    except _Random:
        return None
    for each in path:
        each.meta[READ] = True
    result = values[node]
    return result if isinstance(result, Tensor) else None


def _is_constant(node: fx.Node, path: dict[fx.Node, None]) -> bool:
    """True if small constants alone determine a node; adds its nodes to path, operands first."""
    if node in path:
        return True
    value = node.meta.get("example_value")
    is_small = isinstance(value, Tensor) and _is_static(value.shape) and value.numel() <= _MOST
    if not is_small:
        return False
    if REAL in node.meta:
        path[node] = None
        return True
    if node.op not in ("call_function", "call_method") or not all(
        _is_constant(operand, path) for operand in node.all_input_nodes
    ):
        return False
    path[node] = None
    return True


def _is_static(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _writes(node: fx.Node, path: dict[fx.Node, None]) -> bool:
    """True if a node may change a tensor of `path` in place, directly or through a view."""
    return changes_operand(node) and not path.keys().isdisjoint(_ancestors(node))


def changes_operand(node: fx.Node) -> bool:
    """True if a call in dynamo's graph may change an operand in place."""
    name = str(getattr(node.target, "__name__", node.target))
    is_named_so = name.endswith("_") and not name.endswith("__")
    return is_named_so or name.strip("_") in _IN_PLACE or "out" in node.kwargs


_IN_PLACE = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift "
    "imatmul".split()
)
"""Names of Python's operators that change their first operand."""


def _ancestors(node: fx.Node) -> set[fx.Node]:
    ancestors: set[fx.Node] = set()
    left = list(node.all_input_nodes)
    while left:
        ancestor = left.pop()
        if ancestor not in ancestors:
            ancestors.add(ancestor)
            left += ancestor.all_input_nodes
    return ancestors
