"""The record of each op, and further records that third parties register."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeGuard

import torch
from xdsl.ir import Operation

from shardweave.ir.dialects.aten import AtenOp, overload_named
from shardweave.ir.dialects.types import num_elements, shape_of
from shardweave.ir.library.pure_ops import is_custom, pure_ops
from shardweave.ir.ops import records
from shardweave.ir.ops.spec import OpSpec

_UNKNOWN = OpSpec("")

_RECORDS: dict[str, OpSpec] = {}

_TAGGED: dict[str, OpSpec] = {}
"""Records made from torch's tags, by op name, for ops without a written record."""


def register_op(spec: OpSpec, *, replace: bool = False) -> OpSpec:
    """Make the record of an op known; returns it. Programs made from now on use it.

    Args:
        spec: The record. Its `rule` is a function, or its `notation` says the rule.
        replace: Whether to replace a record that the op has already.

    Raises ValueError for an op that has a record, unless `replace` is set.
    """
    if spec.name in _RECORDS and not replace:
        raise ValueError(
            f"{spec.name} has a record already; pass replace=True to replace it, "
            f"for instance by dataclasses.replace(spec_named({spec.name!r}), ..)."
        )
    _RECORDS[spec.name] = spec
    torch_functions.cache_clear()
    return spec


@cache
def torch_functions() -> frozenset[str]:
    """Names of torch's functions, such as `torch.mm`, that emitted code calls, not overloads."""
    return frozenset(filter(None, (spec.torch_function for spec in specs())))


for _family in iter_modules(records.__path__, f"{records.__name__}."):
    for _spec in import_module(_family.name).SPECS:
        register_op(_spec)


def spec_of(op: Operation) -> OpSpec:
    """The record of an op; for an op without one, a record without any property."""
    return spec_named(op.name)


def spec_named(name: str) -> OpSpec:
    """The record of an op name such as `aten.add.Tensor`; an empty record if it has none."""
    return _RECORDS.get(name) or _TAGGED.get(name) or _by_tag(name)


def _by_tag(name: str) -> OpSpec:
    is_others = is_custom(name)
    if not is_others and name not in pure_ops():
        return _UNKNOWN
    tags = overload_named(name).tags
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    if is_pointwise or is_others:
        rule = "pointwise" if is_pointwise else ""
        _TAGGED[name] = OpSpec(name, rule=rule, refuses_values=True, needs_contiguous=is_others)
    return _TAGGED.setdefault(name, _UNKNOWN)


def specs() -> Iterator[OpSpec]:
    """All records."""
    return iter(tuple(_RECORDS.values()))


@cache
def adding(name: str) -> str | None:
    """Name of the op that adds the product `name` to its first operand; None if there is none."""
    products = ((spec.name, spec.product) for spec in specs())
    return next((own for own, product in products if product and product.plain == name), None)


def weight_of(op: Operation) -> int | None:
    """The index of a product's operand that can be a layer's weight; None for other ops."""
    product = spec_of(op).product
    return None if product is None else product.weight


def is_attention(op: Operation) -> TypeGuard[AtenOp]:
    """True if an op is fused attention, forward or backward."""
    return spec_of(op).attention is not None


def is_positional(op: Operation) -> TypeGuard[AtenOp]:
    """True if an op is fused attention on tokens at given positions: a shard of an attention."""
    attention = spec_of(op).attention
    return attention is not None and bool(attention.global_name)


def global_name(op: Operation) -> str:
    """Name of the op that computes in a global program what an op computes on shards. It differs
    from the op's own name only for attention by positions."""
    attention = spec_of(op).attention
    return attention.global_name or op.name if attention is not None else op.name


def first_of_attention(op: Operation) -> int:
    """The index of the queries among an attention's operands; keys and values follow."""
    attention = spec_of(op).attention
    return int(attention is not None and attention.is_backward)


def gives_zero(op: AtenOp, zeros: Mapping[int, bool]) -> bool:
    """True if an op's result is 0 at an index of a dim, given the operands that are 0 there. zeros:
    for each operand that has the dim, whether it is 0 there."""
    match spec_of(op).zero:
        case "all":
            return len(zeros) == len(op.operands) and all(zeros.values())
        case "any":
            return bool(zeros) and all(zeros.values())
        case "dividend":
            return zeros == {0: True}
        case "choices":
            return zeros.get(1, False) and zeros.get(2, False)
        case "filled":
            return op.value("value") == 0 and zeros.get(0, False)
        case "constant":
            return op.value("fill_value") == 0
        case None:
            return False


def is_random(op: Operation) -> TypeGuard[AtenOp]:
    """True if each call of an op draws new random numbers, as torch's own table says."""
    return isinstance(op, AtenOp) and _is_random(op.name)


@cache
def _is_random(name: str) -> bool:
    return torch.Tag.nondeterministic_seeded in overload_named(name).tags


def flops_of(op: Operation) -> int:
    """Count multiplications and additions of matrix products, convolutions, attention; else 0."""
    if not isinstance(op, AtenOp):
        return 0
    spec = spec_of(op)
    if spec.flops is not None:
        return spec.flops(op)
    if spec.product is None:
        return 0
    # 2 m n k: the result's elements times twice what each sums over.
    left = shape_of(op.operands[spec.product.factors[0]])
    return 2 * num_elements(op.results[0]) * left[-1]
