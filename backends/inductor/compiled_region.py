"""Compilation of a `kernel.fused` by Inductor, from the program and not by tracing."""

from __future__ import annotations

import logging
import operator
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from xdsl.ir import SSAValue

from shardweave.backends.emit.calls import callee_of, returned_by, takes_device
from shardweave.backends.triton.launch.launch import run_on_aten
from shardweave.ir.dialects.annotations import ANNOTATIONS, layer_of, properties_without
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.notes import TorchNote, warn
from shardweave.ir.ops.aten_args import arguments
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.torch_private import standalone_compile
from shardweave.ir.tracing import tracing

logger = logging.getLogger(__name__)

Results = Sequence[Tensor]
Strides = tuple[tuple[int, ...], ...]

COMPILED: dict[tuple[str, torch.device, Strides], Callable[..., Results]] = {}
"""Functions that Inductor has compiled, by a region's text, device and strides."""


class CompiledRegion:
    """A fused region as a function of tensors, compiled at the first call with new strides.

    If Inductor does not compile it, it runs op by op, with a warning; `reason` says why.

    agreed: calls its argument, which compiles the region, on one rank, and returns its result on
    all. The other ranks then read the region from Inductor's cache, so that all compute the same.
    """

    def __init__(
        self,
        op: FusedOp,
        device: torch.device,
        agreed: Callable[[Callable[[], str]], str] = lambda compile_first: compile_first(),
    ) -> None:
        self.op = op
        self.device = device
        self.reason: str | None = None
        self._text = text_of(op)
        self._agreed = agreed
        self._ready: dict[Strides, Callable[..., Results]] = {}

    def __call__(self, *tensors: Tensor) -> Results:
        strides = tuple([tensor.stride() for tensor in tensors])
        run = self._ready.get(strides)
        if run is None:
            if self.reason is None:
                self.reason = self._agreed(lambda: self._problem_with(tensors, strides))
            run = self._on_aten if self.reason else self._compiled_for(tensors, strides)
            self._ready[strides] = run
        return run(*tensors)

    def _problem_with(self, tensors: Sequence[Tensor], strides: Strides) -> str:
        """Compile the region; returns the reason if Inductor fails, empty if it succeeds."""
        try:
            self._compiled_for(tensors, strides)
        except (RuntimeError, AssertionError) as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            warn(
                f"Inductor cannot compile {self._place}; they run one by one: {problem}",
                TorchNote,
            )
            return problem
        return ""

    def _compiled_for(self, tensors: Sequence[Tensor], strides: Strides) -> Callable[..., Results]:
        key = self._text, self.device, strides
        if key not in COMPILED:
            began = time.perf_counter()
            COMPILED[key] = _compiled(graph_of(self.op, self.device), tensors)
            took = time.perf_counter() - began
            logger.info("Inductor compiled %s in %.1f s", self._place, took)
        return COMPILED[key]

    def _on_aten(self, *tensors: Tensor) -> Results:
        return run_on_aten(self.op, tensors, self.device)

    @property
    def _place(self) -> str:
        return f"{len(self.op.fused_ops)} ops of {layer_of(self.op) or 'the model'}"

    def explain(self, device: torch.device) -> str:
        """Describe in one line how the region is computed: by Inductor or ATen, and its ops."""
        del device
        names = ", ".join(op.name.removeprefix("aten.") for op in self.op.fused_ops)
        if self.reason:
            return f"ATen, op by op, since Inductor does not compile it ({self.reason}): {names}"
        return f"Inductor, {len(self.op.fused_ops)} ops: {names}"


def _compiled(graph: fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Results]:
    # Inductor imports modules that torch deprecates.
    with torch.no_grad(), tracing(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return standalone_compile(graph, list(tensors), dynamic_shapes="from_example_inputs")


def text_of(op: FusedOp) -> str:
    """Return the computation of a region as text, the same for equal layers."""
    numbers: dict[SSAValue, int] = {}
    for argument in op.block.args:
        numbers[argument] = len(numbers)
    lines = [", ".join(str(argument.type) for argument in op.block.args)]
    for inner in op.block.ops:
        given = [numbers[operand] for operand in inner.operands]
        for result in inner.results:
            numbers[result] = len(numbers)
        types = [str(result.type) for result in inner.results]
        facts = {k: str(v) for k, v in sorted(properties_without(inner, *ANNOTATIONS).items())}
        lines.append(f"{inner.name} {given} {facts} {types}")
    return "\n".join(lines)


def graph_of(op: FusedOp, device: torch.device) -> fx.GraphModule:
    """Build a torch.fx graph of the region's ATen calls, which returns a tuple."""
    graph = fx.Graph()
    nodes: dict[SSAValue, fx.Node] = {}
    for number, argument in enumerate(op.block.args):
        nodes[argument] = graph.placeholder(f"arg{number}")
    for inner in op.fused_ops:
        nodes.update(zip(inner.results, _calls(graph, inner, nodes, device), strict=True))
    graph.output(tuple(nodes[value] for value in op.yielded))
    return fx.GraphModule(torch.nn.Module(), graph)


def _calls(
    graph: fx.Graph, op: AtenOp, nodes: dict[SSAValue, fx.Node], device: torch.device
) -> list[fx.Node]:
    """Add the call of an op to the graph; returns a node for each of its results."""

    def given(value: SSAValue) -> fx.Node:
        node = nodes[value]
        if not spec_of(op).needs_contiguous:
            return node
        return graph.call_function(torch.ops.aten.contiguous.default, (node,))

    positional, keywords = arguments(op, given)
    if takes_device(op):
        keywords["device"] = device
    call = graph.call_function(callee_of(op), tuple(positional), keywords)
    returned = returned_by(op)
    if returned is None:
        return [call]
    places = [place for place, is_result in enumerate(returned) if is_result]
    return [graph.call_function(operator.getitem, (call, place)) for place in places]
