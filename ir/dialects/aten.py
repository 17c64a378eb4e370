"""The `aten` dialect: one op for each functional ATen overload, made from torch's schemas. An op of
another namespace, registered by `torch.library`, is made in the same way.

Tensor arguments are operands; other arguments are properties with the schema's names, left
out where they equal the schema's default. Arguments that restate the type of a result, and
those that say where and how memory is laid out, are not stored (see `aten_args`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from xdsl.ir import Attribute, Dialect, Operation, SSAValue
from xdsl.irdl import traits_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.by_identity import ByIdentity
from shardweave.ir.dialects.annotations import ANNOTATIONS, annotation_problem
from shardweave.ir.dialects.literals import Literal, to_attribute, to_python
from shardweave.ir.dialects.syntax import STRUCTURE, CallOp, Operands, flatten
from shardweave.ir.dialects.types import number_of_type
from shardweave.ir.library import grouped, philox, positional_attention
from shardweave.ir.library.pure_ops import NOT_PURE, is_pure, pure_ops
from shardweave.ir.torch_private import OpOverload, schema_of

NOT_STORED = frozenset({"device", "layout", "pin_memory", "memory_format", "generator"})
"""Arguments about placement and memory layout, which the backend decides."""


OWN_OPS = (philox.RANDOM, *positional_attention.OPS, *grouped.OPS)
"""Ops of this package, made like those of ATen from its own `torch.library` schemas."""

_ANNOTATIONS = frozenset(ANNOTATIONS)


@dataclass(frozen=True)
class Parameter:
    """One argument of a schema. type: torch's name of it, such as Optional[List[int]]."""

    name: str
    is_tensor: bool
    is_list: bool
    keyword_only: bool
    has_default: bool
    default: Any
    type: str


@dataclass(frozen=True)
class Signature:
    """The parameters of a torch schema, in order."""

    parameters: tuple[Parameter, ...]

    @property
    def tensors(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.is_tensor)

    def parameter(self, name: str) -> Parameter | None:
        return next((p for p in self.parameters if p.name == name), None)


_TENSOR_TYPES = {"Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]"}


@cache
def overload_named(name: str) -> OpOverload[..., Any]:
    """The torch overload for an op name, such as `aten.add.Tensor`, or `aten.sum` (the default)."""
    if name in OWN_OPS:
        return getattr(torch.ops.shardweave, name.removeprefix("dist.")).default
    namespace, packet, *overload = name.split(".")
    packets = getattr(torch.ops, namespace)
    return getattr(getattr(packets, packet), overload[0] if overload else "default")


def op_name(overload: OpOverload[..., Any]) -> str:
    return str(overload).removesuffix(".default")


@cache
def signature_of(name: str) -> Signature:
    """The parameters of an overload, such as `aten.add.Tensor`, by its schema."""
    parameters: list[Parameter] = []
    schema = schema_of(overload_named(name))  # pyright: ignore[reportPrivateUsage]
    for argument in schema.arguments:
        kind = str(argument.type)
        parameters.append(
            Parameter(
                argument.name,
                kind in _TENSOR_TYPES,
                kind.startswith("List"),
                argument.kwarg_only,
                argument.has_default_value(),
                argument.default_value,
                str(getattr(argument, "real_type", kind)),
            )
        )
    return Signature(tuple(parameters))


class AtenOp(CallOp):
    """Base of the ops of the dialect. `signature` is the schema."""

    traits = traits_def(Pure())

    @property
    def signature(self) -> Signature:
        return signature_of(self.name)

    def tensor(self, name: str) -> SSAValue | None | list[SSAValue | None]:
        """Operand (or list of operands) for a tensor argument of the schema; None if absent."""
        given = self.structured_operands
        for index, parameter in enumerate(self.signature.tensors):
            if parameter.name == name:
                return given[index] if index < len(given) else None
        raise KeyError(f"{self.name} has no tensor argument '{name}'")

    def value(self, name: str) -> Any:
        """The Python value of an argument that is no tensor; the schema's default if not stored."""
        attribute = self.properties.get(name)
        if attribute is not None:
            return to_python(attribute)
        parameter = self.signature.parameter(name)
        if parameter is None or not parameter.has_default:
            raise KeyError(f"{self.name} has no value for '{name}'")
        return parameter.default

    def verify_(self) -> None:
        is_known = self.name in OWN_OPS or is_pure(self.name)
        problem = annotation_problem(self) if is_known else f"{self.name} {NOT_PURE}"
        if problem is not None:
            raise VerifyException(problem)
        given, wanted = self.structured_operands, self.signature.tensors
        if len(given) > len(wanted):
            raise VerifyException(
                f"{self.name} takes at most {len(wanted)} tensor arguments, found {len(given)}"
            )
        for parameter, operand in zip_longest(wanted, given):
            _check_operand(self.name, parameter, operand)
        for name, attribute in self.properties.items():
            if name in ANNOTATIONS or name == STRUCTURE:
                continue
            parameter = self.signature.parameter(name)
            if parameter is None or parameter.is_tensor or name in NOT_STORED:
                raise VerifyException(f"{self.name} takes no property '{name}'; remove it")
            try:
                to_python(attribute)
            except ValueError as error:
                raise VerifyException(f"{self.name}: {name} cannot be {attribute}") from error
        if self.name in ("aten.slice.Tensor", "aten.slice_backward") and "start" in self.properties:
            _check_start(self.name, self.value("start"))
        if not self.results:
            raise VerifyException(f"{self.name} has no result; give its type after ':'")


def maker(value: SSAValue, *names: str) -> AtenOp | None:
    """The ATen op that computes a value, if its name is one of `names`; else None."""
    op = value.owner
    return op if isinstance(op, AtenOp) and op.name in names else None


def _check_start(name: str, start: object) -> None:
    """Refuse a negative start: the end of a slice is derived from its start and result type."""
    if start is not None and not (type(start) is int and start >= 0):
        raise VerifyException(
            f"{name}: start is {start}, expected an index >= 0; count the index of the first "
            "element from the front"
        )


def _check_operand(
    name: str, parameter: Parameter, operand: SSAValue | None | list[SSAValue | None]
) -> None:
    optional = parameter.has_default or parameter.type.startswith("Optional")
    if operand is None and not optional and not parameter.is_list:
        raise VerifyException(f"{name} is missing its tensor argument '{parameter.name}'")
    if operand is not None and isinstance(operand, list) != parameter.is_list:
        wanted = "a list [..]" if parameter.is_list else "one tensor"
        raise VerifyException(f"{name} expects {wanted} for '{parameter.name}'")


OpKey = tuple[str, tuple[int, ...], tuple[int, ...], frozenset[tuple[str, Attribute]]]


_keys = ByIdentity[OpKey]()
"""Keys of ops, by types and arguments."""


def key_of_op(op: Operation) -> OpKey:
    """A key that is equal for ops of any layer with equal name, types and arguments."""
    arguments = [item for item in op.properties.items() if item[0] not in _ANNOTATIONS]
    types = [value.type for value in (*op.operands, *op.results)]
    near = op.name, len(op.results), *map(id, types), *[(name, id(a)) for name, a in arguments]
    known = _keys.find(near)
    if known is not None:
        return known
    operands, results = (tuple(map(number_of_type, values)) for values in (op.operands, op.results))
    return _keys.keep(near, (op.name, operands, results, frozenset(arguments)), (types, arguments))


@cache
def aten_class(name: str) -> type[AtenOp]:
    """The op class of a name such as `aten.add.Tensor`. Its schema is read at first use."""
    return type(name.replace(".", "_"), (AtenOp,), {"name": name})


def create(
    name: str,
    operands: Operands,
    result_types: list[Attribute],
    values: Mapping[str, Literal] = {},
    annotations: Mapping[str, Attribute] = {},
) -> AtenOp:
    """Build an op. `operands` follow the tensor arguments of the schema, in order.

    `values` holds the other arguments by name; those that equal the schema's default are not
    stored, so that equal ops are equal as data.
    """
    flat, structure = flatten(operands)
    signature = signature_of(name)
    properties: dict[str, Attribute] = {}
    for key, value in values.items():
        parameter = signature.parameter(key)
        if parameter is None:
            raise ValueError(f"{name} has no argument '{key}'.")
        default = parameter.default
        if not (parameter.has_default and type(default) is type(value) and default == value):
            properties[key] = to_attribute(value)
    if structure is not None:
        properties[STRUCTURE] = structure
    properties.update(annotations)
    return aten_class(name).create(operands=flat, result_types=result_types, properties=properties)


@cache
def aten_dialect() -> Dialect:
    return Dialect("aten", [aten_class(name) for name in sorted(pure_ops())])
