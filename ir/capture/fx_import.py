"""Import a traced fx graph as a program.

Each call enters in its canonical form. Every op learns its layer (the module it came from;
for a backward op, that of its forward op), its phase (backward if it depends on the gradient
of the loss) and the user's source line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, cast

import torch
from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from shardweave.ir.capture.builder import ImportBuilder
from shardweave.ir.capture.canonical import Call, lookup
from shardweave.ir.capture.canonical.strided import memory_order
from shardweave.ir.capture.observed.layouts import refusal
from shardweave.ir.capture.site import CaptureError, module_path, site_of_node, users_line
from shardweave.ir.capture.substitutes.unwritten import Unwritten
from shardweave.ir.capture.trace import OutputKind, Traced
from shardweave.ir.dialects.annotations import common_path, layer_of, set_phase
from shardweave.ir.dialects.aten import NOT_STORED, op_name, signature_of
from shardweave.ir.dialects.attributes import PhaseAttr
from shardweave.ir.dialects.types import AnyTensor, element_of, tensor_type, tensor_type_of
from shardweave.ir.library.philox import STATE
from shardweave.ir.library.pure_ops import NOT_PURE, is_pure
from shardweave.ir.ops.registry import spec_named
from shardweave.ir.program.program import TANGENT
from shardweave.ir.torch_private import OpOverload

_MAX_RUNS = 64
"""Most runs of equal values in a constant that a program writes out; others are refused."""

_DTYPES: dict[type, torch.dtype] = {
    bool: torch.bool, int: torch.int64, float: torch.float32, complex: torch.complex128,
}  # fmt: skip
"""Dtypes of Python numbers as tensors; they do not change the dtype of other operands."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_$.-]")


def import_graph(traced: Traced, aliases: dict[str, list[str]]) -> builtin.ModuleOp:
    """Return a module whose only function, `step`, computes the traced graph. aliases: further
    qualified names of each tied parameter."""
    importer = _Importer(traced, aliases)
    for node in traced.graph.nodes:
        importer.visit(node)
    return importer.finish()


def readable(name: str) -> str:
    """Turn an fx name into a value name: `mm_3` becomes `mm.3`, which xDSL does not renumber."""
    head, _, digits = name.rpartition("_")
    return f"{head}.{digits}" if head and digits.isdigit() else name


def argument_name(kind: str, name: str) -> str:
    """Turn a qualified name into a value name, `0.weight` into `param.0.weight`: names of values
    begin with a letter. Characters that xDSL does not allow become `_`."""
    plain = _NOT_IN_NAMES.sub("_", name)
    return plain if plain[:1].isalpha() or plain[:1] == "_" else f"{kind}.{plain}"


class _Importer:
    def __init__(self, traced: Traced, aliases: dict[str, list[str]]) -> None:
        self.traced = traced
        self.aliases = aliases
        self.block = Block()
        self.builder = ImportBuilder(self.block, self._next_draw)
        self.state: SSAValue | None = None
        self.num_draws = 0
        self.values: dict[torch.fx.Node, Any] = {}
        self.backward: set[SSAValue] = set()
        self.unwritten = Unwritten()
        self.inputs = iter(traced.inputs)
        self.arguments: dict[tuple[str, str], SSAValue] = {}
        self.argument_attributes: list[Attribute] = []

    def visit(self, node: torch.fx.Node) -> None:
        first_new = self.block.last_op
        try:
            if node.op == "placeholder":
                self.values[node] = self._argument(node)
            elif node.op == "get_attr":
                self.values[node] = self._constant(node)
            elif node.op == "call_function" and (node.users or node.meta.get("val") is not None):
                # What gives nothing is an assertion.
                self._annotate(node)
                self.values[node] = self._call(node)
                self.unwritten.visit(node)
                self._mark_phase(first_new)
        except CaptureError:
            raise
        except ValueError as error:  # no canonical form, or no such dtype in the IR
            raise CaptureError(f"{site_of_node(node)}: {error}") from error

    # Arguments and constants

    def _argument(self, node: torch.fx.Node) -> SSAValue:
        kind, name = next(self.inputs)
        value = node.meta["val"]
        argument = self._add_argument(kind, name, tensor_type(value.shape, value.dtype))
        if kind == "tangent" or name.startswith(TANGENT):
            self.backward.add(argument)
        return argument

    def _add_argument(self, kind: str, name: str, type_: AnyTensor) -> SSAValue:
        argument = self.block.insert_arg(type_, len(self.block.args))
        argument.name_hint = "tangent" if kind == "tangent" else argument_name(kind, name)
        attributes: dict[str, Attribute] = {
            "dist.kind": builtin.StringAttr(kind),
            "dist.name": builtin.StringAttr(name),
        }
        if self.aliases.get(name):
            names = [builtin.StringAttr(alias) for alias in self.aliases[name]]
            attributes["dist.aliases"] = builtin.ArrayAttr(names)
        self.argument_attributes.append(builtin.DictionaryAttr(attributes))
        return argument

    def _constant(self, node: torch.fx.Node) -> SSAValue:
        """Import a constant tensor of the code as a concatenation of its runs of equal values."""
        value = self.traced.constants[str(node.target)]
        elements = [cast("float", element.item()) for element in value.flatten()]
        runs = [(key, len(list(run))) for key, run in groupby(elements)]
        if len(runs) > _MAX_RUNS:
            raise CaptureError(
                f"{site_of_node(next(iter(node.users)))}: forward holds a constant tensor of "
                f"{value.numel()} different values, too many to write into the program; register "
                "it as a buffer in __init__ instead."
            )
        build = self.builder
        if len(runs) <= 1:
            return build.full(value.shape, runs[0][0] if runs else 0, value.dtype)
        parts = [build.full((length,), fill, value.dtype) for fill, length in runs]
        flat = tensor_type((value.numel(),), value.dtype)
        return build.view(
            build.add("aten.cat", [parts], [flat], {"dim": 0}).results[0], value.shape
        )

    def _next_draw(self) -> tuple[SSAValue, int]:
        """Return the random state (an argument that the first draw adds) and the draw's number."""
        if self.state is None:
            self.state = self._add_argument("buffer", STATE, tensor_type((2,), torch.int64))
        self.num_draws += 1
        return self.state, self.num_draws - 1

    def _state_after(self) -> SSAValue:
        """Return the random state for the next call: the number of draws grows by this call's."""
        assert self.state is not None
        self.builder.annotations = {
            "layer": builtin.StringAttr(""),
            "phase": PhaseAttr.of("forward"),
        }
        self.builder.name = None
        return self.builder.call(
            "aten.add.Tensor", self.state, self.builder.count(2, self.num_draws)
        )

    # Calls

    def _call(self, node: torch.fx.Node) -> Any:
        if getattr(node.target, "__name__", "") == "getitem":
            source, index = node.args
            return self.values[cast(torch.fx.Node, source)][cast(int, index)]
        target: Any = node.target
        if not isinstance(target, OpOverload):  # pyright: ignore[reportUnknownMemberType]
            raise CaptureError(f"{site_of_node(node)}: {_no_op(node)}")
        name = op_name(cast("OpOverload[..., Any]", target))
        form = lookup(name)
        if form is None and not is_pure(name):
            raise CaptureError(
                f"{site_of_node(node)}: {name} {NOT_PURE}; compute its result before the step, "
                "and pass it as an input."
            )
        arguments = self._bind(node, name) | memory_order(node)
        call = Call(name, arguments, _result_types(node), self.builder)
        result = form(call) if form is not None else self._plain(call)
        returned = node.meta.get("val")
        if isinstance(returned, (tuple, list)) and isinstance(result, SSAValue):
            return [result]
        return result

    def _bind(self, node: torch.fx.Node, name: str) -> dict[str, Any]:
        def resolve(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return self.values[value]
            if isinstance(value, (list, tuple)):
                return [resolve(item) for item in cast(Sequence[Any], value)]
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise CaptureError(
                    f"input or value {name} has a symbolic size, but programs have fixed shapes; "
                    "do not call maybe_mark_dynamic on inputs."
                )
            return value

        parameters = signature_of(name).parameters
        bound = {p.name: p.default for p in parameters if p.has_default}
        for parameter, value in zip(parameters, node.args, strict=False):
            bound[parameter.name] = resolve(value)
        bound.update({key: resolve(value) for key, value in node.kwargs.items()})
        return bound

    def _plain(self, call: Call) -> Any:
        """Add the call unchanged, without arguments that follow from the result types."""
        derived = spec_named(call.name).derived
        operands: list[Any] = []
        values: dict[str, Any] = {}
        for parameter in signature_of(call.name).parameters:
            given = call.arguments.get(parameter.name)
            if parameter.is_tensor:
                operands.append(self._tensor(given))
            elif parameter.name not in derived and parameter.name not in NOT_STORED:
                if parameter.name in call.arguments:
                    values[parameter.name] = given
        types = [t for t in call.types if t is not None]
        results = iter(self.builder.add(call.name, operands, types, values).results)
        unpacked = [next(results) if t is not None else None for t in call.types]
        return unpacked if len(unpacked) > 1 else unpacked[0]

    def _tensor(self, given: Any) -> Any:
        if isinstance(given, (bool, int, float, complex)):
            return self.builder.full((), given, _DTYPES[type(given)])
        return given

    # Annotations

    def _annotate(self, node: torch.fx.Node) -> None:
        meta = node.meta
        layer = module_path(meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack"))
        if layer is None:
            layer = self._common_layer(node)
        self.builder.name = readable(node.name)
        self.builder.annotations = {
            "layer": builtin.StringAttr(layer),
            "phase": PhaseAttr.of("forward"),
        }
        self.builder.location = _location(meta.get("stack_trace"))

    def _common_layer(self, node: torch.fx.Node) -> str:
        """Return the common path prefix of the operands' layers, for ops that autograd adds."""
        values = map(self.values.get, node.all_input_nodes)
        owners = (value.owner for value in values if isinstance(value, SSAValue))
        return common_path(layer_of(op) for op in owners if isinstance(op, Operation))

    def _mark_phase(self, last_before: Operation | None) -> None:
        op = self.block.first_op if last_before is None else last_before.next_op
        while op is not None:
            if any(operand in self.backward for operand in op.operands):
                set_phase(op, "backward")
                self.backward.update(op.results)
            op = op.next_op

    # The function

    def finish(self) -> builtin.ModuleOp:
        output = self.traced.graph.output_node()
        flat = cast("Sequence[Any]", output.args[0])
        # For a buffer that is both changed in place and assigned, the assigned value counts.
        slots = zip(self.traced.outputs, flat, strict=True)
        kept = {slot: self.values[node] for slot, node in slots if isinstance(node, torch.fx.Node)}
        if self.num_draws:
            kept["buffer", STATE] = self._state_after()
        self._add_written_buffers(kept)
        results = list(kept.values())
        attributes: list[Attribute] = [
            builtin.DictionaryAttr(
                {"dist.kind": builtin.StringAttr(kind), "dist.name": builtin.StringAttr(name)}
            )
            for kind, name in kept
        ]
        self.block.add_op(func.ReturnOp(*results))
        types = [r.type for r in results]
        function = func.FuncOp(
            "step",
            builtin.FunctionType.from_lists([a.type for a in self.block.args], types),
            Region(self.block),
            arg_attrs=builtin.ArrayAttr(
                cast("list[builtin.DictionaryAttr]", self.argument_attributes)
            ),
            res_attrs=builtin.ArrayAttr(cast("list[builtin.DictionaryAttr]", attributes)),
        )
        return builtin.ModuleOp([function])

    def _add_written_buffers(self, kept: Mapping[tuple[OutputKind, str], SSAValue]) -> None:
        """Add an argument for each buffer that forward assigns and never reads, since every buffer
        that a program updates is one of its arguments."""
        read = {*self.traced.inputs, ("buffer", STATE)}
        for (kind, name), value in kept.items():
            if kind == "buffer" and (kind, name) not in read:
                self._add_argument(kind, name, tensor_type_of(value))


def _no_op(node: torch.fx.Node) -> str:
    """Explain why a call of something other than an op is refused, and what to do."""
    changed = next((str(arg) for arg in node.args if isinstance(arg, OpOverload)), "")
    if changed:
        return f"{changed} changes an argument in place; let the op return a new tensor."
    return (
        f"{node.target} runs code of its own, which no program has; write it with plain torch "
        "operators, or as a custom op (torch.library.custom_op)."
    )


def _result_types(node: torch.fx.Node) -> list[AnyTensor | None]:
    value = node.meta["val"]
    parts = cast("Sequence[Any]", value if isinstance(value, (tuple, list)) else (value,))
    for part in parts:
        if isinstance(part, torch.Tensor):
            element_of(part.dtype)
            if part.layout != torch.strided:
                raise CaptureError(refusal(site_of_node(node), part.layout, "makes"))
    return [tensor_type(p.shape, p.dtype) if isinstance(p, torch.Tensor) else None for p in parts]


@lru_cache(maxsize=4096)
def _location(stack_trace: str | None) -> Any:
    place = users_line(stack_trace)
    if place is None:
        return builtin.UnknownLoc()
    file, line = place
    return builtin.FileLineColLoc(
        builtin.StringAttr(file), builtin.IntAttr(line), builtin.IntAttr(1)
    )
