"""Linear maps of a program, their parameters, and dims that an expand repeats."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, contiguous
from shardweave.ir.ops.registry import spec_of, weight_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import arguments_behind
from shardweave.ir.sharding.rules import Rule, rule_of


def repeated_dims(ops: Iterable[AtenOp]) -> dict[SSAValue, set[int]]:
    """Find the dims of ops' results along which all elements are equal because of an expand."""
    repeated: dict[SSAValue, set[int]] = {}
    for op in ops:
        expands = spec_of(op).view == "expand"
        if not expands and repeated.keys().isdisjoint(op.operands):
            continue
        rule = rule_of(op)
        repeats: dict[int, bool] = {}
        for value, dims in zip(op.operands, rule.operands, strict=True):
            for dim, names in enumerate(dims):
                here = dim in repeated.get(value, ())
                repeats |= {name: here and repeats.get(name, True) for name in names}
        for result, dims in zip(op.results, rule.results, strict=True):
            alike = {
                dim
                for dim, names in enumerate(dims)
                if names and all(repeats.get(name, expands) for name in names)
            }
            if alike:
                repeated[result] = alike
    return repeated


Cut = tuple[DimSharding, ...]
"""Sharding of a value by dim; only one of the dims has a placement."""


@dataclass(frozen=True)
class LinearMap:
    """A linear map or convolution of the forward pass whose weight is a parameter.

    weight: index of the weight among the operands. views: the ops from `op` back to the parameter.
    contracted, produced: the factors of the input features (k) and output features (n) in its rule.
    """

    op: AtenOp
    weight: int
    parameter: SSAValue
    views: tuple[AtenOp, ...]
    contracted: int
    produced: int

    @property
    def rule(self) -> Rule:
        return rule_of(self.op)

    def factors_in(self, cut: Cut) -> Sequence[DimSharding] | None:
        """Shardings of the rule's factors if the parameter has sharding `cut`; None if
        impossible."""
        carried: Cut | None = cut
        for view in reversed(self.views):
            rule = rule_of(view)
            kept = rule.operands[_kept_operand(view) or 0]
            carried = carried and rule.carry(kept, rule.results[0], carried)
        return carried and self.rule.factors_of(self.rule.operands[self.weight], carried)

    def is_contracted_in(self, cut: Cut) -> bool:
        """True if sharding `cut` of the parameter shards the input features (k)."""
        factors = self.factors_in(cut)
        return bool(factors and factors[self.contracted])

    def cut(self, factor: int, axis: str, size: int) -> Cut | None:
        """Shard the parameter along factor k or n contiguously; None if this is uneven."""
        extent = self.rule.factors[factor].size
        if extent % size or size == 1:
            return None
        cuts = self.rule.one_cut(factor, Placement(axis, size, extent // size))
        return back_through(self.views, self.rule.dims_of(self.rule.operands[self.weight], cuts))


def linear_maps(program: Program) -> Iterator[LinearMap]:
    """Yield the linear maps and convolutions of the forward pass, in program order."""
    parameters = {slot.value for slot in program.arguments if slot.kind == "param"}
    for op in program.ops:
        weight = weight_of(op)
        if not isinstance(op, AtenOp) or weight is None or phase_of(op) != "forward":
            continue
        read = parameter_of(op.operands[weight], parameters)
        factors = _sides(rule_of(op), weight)
        if read is not None and factors is not None:
            yield LinearMap(op, weight, read[0], tuple(read[1]), *factors)


def _sides(rule: Rule, weight: int) -> tuple[int, int] | None:
    """Find the factors (k, n) of a linear map's rule; None if it lacks one of them."""
    produced = {factor for names in rule.results[0] for factor in names}
    activation = {factor for names in rule.operands[weight - 1] for factor in names}
    of_weight = [factor for names in rule.operands[weight] for factor in names]
    contracted = [f for f in of_weight if f in activation and f not in produced]
    outputs = [f for f in of_weight if f in produced and f not in activation]
    return (contracted[0], outputs[0]) if contracted and outputs else None


def parameter_of(
    value: SSAValue, parameters: Collection[SSAValue]
) -> tuple[SSAValue, list[AtenOp]] | None:
    """Trace a value back to a parameter through views, slices and float8 casts; None if that fails.
    Also returns the ops on the way, the last first."""
    views: list[AtenOp] = []
    while isinstance(op := value.owner, AtenOp) and (index := _kept_operand(op)) is not None:
        views.append(op)
        value = op.operands[index]
    return (value, views) if value in parameters else None


def _kept_operand(op: AtenOp) -> int | None:
    """Index of the operand that an op views, or of a pointwise op's only full-size one."""
    spec = spec_of(op)
    if spec.keeps_weight or op.name == "aten.slice.Tensor":
        return 0
    if spec.rule != "pointwise":
        return None
    shape = shape_of(op.results[0])
    whole = [index for index, value in enumerate(op.operands) if shape_of(value) == shape]
    return whole[0] if len(whole) == 1 else None


def back_through(views: Sequence[AtenOp], cut: Cut) -> Cut | None:
    """Carry a view's sharding back to its parameter; None if one of `views` cannot keep it."""
    for view in views:
        rule = rule_of(view)
        carried = rule.carry(rule.results[0], rule.operands[_kept_operand(view) or 0], cut)
        if carried is None or not any(carried):
            return None
        cut = carried
    return cut


def stored_cut(cut: Cut, shape: tuple[int, ...], mesh: Mesh) -> Cut:
    """Sharding in which to store a parameter that is read in `cut`: the same if a DTensor can hold
    it, else plain shards over the same axes (four heads and three cannot be held)."""
    if Sharding(cut).is_chunked(shape):
        return cut
    pairs = zip(cut, shape, strict=True)
    return tuple(contiguous([p.axis for p in dim], size, mesh) for dim, size in pairs)


def input_embeddings(program: Program) -> Iterator[tuple[AtenOp, SSAValue]]:
    """Yield the forward embedding ops whose indices come from inputs, with their parameters."""
    inputs = {slot.value for slot in program.arguments if slot.kind == "input"}
    parameters = {slot.value for slot in program.arguments if slot.kind == "param"}
    for op in program.ops:
        if isinstance(op, AtenOp) and op.name == "aten.embedding" and phase_of(op) == "forward":
            table = parameter_of(op.operands[0], parameters)
            if table is not None and not inputs.isdisjoint(arguments_behind(op.operands[1])):
                yield op, table[0]
