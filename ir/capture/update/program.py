# pyright: basic
# torch's dispatch modes are private and only partly typed.
"""The update of one parameter as a graph of ATen ops, traced from an optimizer's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from shardweave.ir.capture.fx_import import import_graph
from shardweave.ir.capture.site import CaptureError
from shardweave.ir.capture.trace import InputKind, OutputKind, Traced
from shardweave.ir.capture.update.held import instances_in
from shardweave.ir.capture.update.ops_seen import is_masked, on_host, reduction_of
from shardweave.ir.capture.update.reads import Calls, MetaCopy, Sizes, copied, run_step
from shardweave.ir.dialects.annotations import set_phase
from shardweave.ir.program.program import Program
from shardweave.ir.torch_private import (
    OpOverload,
    TorchDispatchMode,
    disable_current_modes,
    pytree,
    schema_of,
)
from shardweave.ir.tracing import tracing


@dataclass(frozen=True)
class Update:
    """The optimizer update of one parameter, on full values.

    graph: computes the new parameter and state tensors from the parameter, its gradient, its state
    tensors and `numbers`. numbers: learning rates and other floats, in the order of
    `Calls.numbers`; None if they do not match the graph's floats, which then stay constants.
    """

    graph: fx.Graph
    shape: tuple[int, ...]
    numbers: tuple[float, ...] | None

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        return list(self.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]

    @property
    def joined(self) -> list[Tensor]:
        """List reductions of tensors of the parameter's shape: fake results, float32 or wider."""
        return [
            x.to(torch.promote_types(x.dtype, torch.float32))
            for node in self.graph.nodes
            if node.op == "call_function" and reduction_of(node.target)
            if tuple(node.args[0].meta["val"].shape) == self.shape
            for x in [node.meta["val"]]
        ]


def capture_update(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    sizes: Sequence[Sizes],
    index: int,
    calls: Calls,
    *,
    is_assumed: bool = False,
) -> Update:
    """Trace the next update of parameter `index`; the optimizer itself does not change.

    calls: the update's calls (`calls_of`). is_assumed: for a cost estimate only; a tensor whose
    value the step asks for reads as 1 and becomes an output too. Raises CaptureError for a step
    that changes the gradient, or reads a tensor that is no state of the parameter.
    """
    has_gradient = [i == index for i in range(len(parameters))]
    shapes = [size.full for size in sizes]
    on_meta = MetaCopy(optimizer, parameters, sizes, shapes, has_gradient)
    parameter = on_meta.parameters[index]
    leaves = pytree.tree_leaves(on_meta.optimizer.state.get(parameter))
    states = [x for x in leaves if isinstance(x, Tensor) and x.is_meta]
    others = instances_in(list(on_meta.optimizer.state.values()), Tensor)
    wanted = [_is_traced(x) for x in pytree.tree_leaves(calls.state)]

    def update(given: Tensor, gradient: Tensor, *tensors: Tensor) -> list[Tensor]:
        memo: dict[int, Any] = {id(x): x for x in (*on_meta.parameters, *others)}
        memo |= {id(x): y for x, y in zip((parameter, *states), (given, *tensors), strict=True)}
        made = copied(on_meta.optimizer, memo)
        given.grad = gradient
        assumed = Assumed()
        with _Host(), _WrittenOut(), assumed if is_assumed else nullcontext():
            run_step(made)
        new = pytree.tree_leaves(made.state.get(given))
        new = [x for x, is_traced in zip(new, wanted, strict=True) if is_traced]
        return [given, *new, *assumed.asked]

    arguments = [x.detach() for x in (parameter, parameter, *states)]
    with tracing():
        graph = make_fx(functionalize(update))(*arguments).graph
    if is_assumed:
        _write_out_masks(graph)
    _check(graph)
    return Update(graph, sizes[index].full, _take_numbers(graph, calls.numbers))


def program_of(
    part: Callable[..., list[Tensor]], given: Sequence[Tensor], numbers: Sequence[float]
) -> Program:
    """Import a part of an update as a program. given: operands on the meta device. Raises
    CaptureError for an op that programs do not have."""
    with tracing():
        graph = make_fx(lambda *tensors: part(*tensors, *numbers))(*given).graph
    inputs: list[tuple[InputKind, str]] = [("input", f"x{i}") for i in range(len(given))]
    count = len(graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
    outputs: list[tuple[OutputKind, str]] = [("output", str(i)) for i in range(count)]
    program = Program(import_graph(Traced(graph, tuple(inputs), tuple(outputs), {}), {}))
    for op in program.ops:
        set_phase(op, "optimizer")
    return program


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


class _Host(TorchDispatchMode):
    """Computes scalars on the host at once, unseen by the trace."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_hosts = given and all(type(x) is Tensor and not (x.is_meta or x.ndim) for x in given)
        moved = on_host(func, args, kwargs, given)
        if is_hosts or moved is not kwargs:
            with disable_current_modes():
                return func(*args, **moved)
        return func(*args, **kwargs)


class _WrittenOut(TorchFunctionMode):
    """Writes out in-place methods that functionalization does not know, such as `square_`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            name = getattr(func, "__name__", "")
            if "alias annotations" not in str(error) or not name.endswith("_"):
                raise
            return args[0].copy_(getattr(args[0], name.rstrip("_"))(*args[1:], **(kwargs or {})))


class Assumed(TorchFunctionMode):
    """Mode in which the value of a meta tensor reads as 1; `asked` lists the tensors read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ANSWERS and args[0].is_meta:
            self.asked.append(args[0])
            return _ANSWERS[func](1)
        if func is Tensor.copy_ and not (args[0].is_meta or args[0].ndim):
            return args[0]  # a count or a rate, whose next value no price needs
        return func(*args, **(kwargs or {}))


_ANSWERS: dict[Any, Callable[[int], float]] = {
    Tensor.item: float,
    Tensor.__float__: float,
    Tensor.__int__: int,
    Tensor.__bool__: bool,
}


def _write_out_masks(graph: fx.Graph) -> None:
    """Replace writes of a constant number under a mask by `masked_fill`."""
    for node in list(graph.nodes):
        args = pytree.tree_map_only(fx.Node, lambda x: x.meta.get("val"), node.args)
        if node.op != "call_function" or _writes(node) or not is_masked(args):
            continue
        into, (mask,), value = node.args[:3]
        while value.op != "get_attr":
            value = value.args[0]
        number = getattr(graph.owning_module, value.target).item()
        with graph.inserting_before(node):
            filled = graph.call_function(torch.ops.aten.masked_fill.Scalar, (into, mask, number))
        filled.meta = dict(node.meta)
        node.replace_all_uses_with(filled)
    graph.eliminate_dead_code()


def _check(graph: fx.Graph) -> None:
    """Remove final writes to inputs, since the outputs have the values. Raises CaptureError."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in list(graph.nodes):
        if node.op == "get_attr":
            raise CaptureError("its step reads a tensor that is not in the parameter's state")
        if node.op != "call_function" or not _writes(node):
            continue
        into = node.args[0]
        if node.users or into not in inputs or into is inputs[1]:
            raise CaptureError(
                f"its step ({node.target}) changes a tensor other than the parameter and its state"
            )
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _writes(node: fx.Node) -> bool:
    """True if a node's op writes to an operand; getitem does not."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _take_numbers(graph: fx.Graph, numbers: Sequence[float]) -> tuple[float, ...] | None:
    """Turn floats in a graph's calls into inputs; None, unchanged, if they are not `numbers`."""
    slots = [
        (node, position)
        for node in _of_inputs(graph)
        for position, leaf in enumerate(pytree.tree_leaves((node.args, node.kwargs)))
        if isinstance(leaf, float)
    ]
    standing = [pytree.tree_leaves((node.args, node.kwargs))[at] for node, at in slots]
    if standing != list(numbers):
        return None
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for index, (node, position) in enumerate(slots):
        with graph.inserting_after(last):
            last = graph.placeholder(f"number_{index}")
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        leaves[position] = last
        node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)
    return tuple(numbers)


def _of_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The calls that depend on an input, in order."""
    known = {node for node in graph.nodes if node.op == "placeholder"}
    calls: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function" and known.intersection(node.all_input_nodes):
            known.add(node)
            calls.append(node)
    return calls
