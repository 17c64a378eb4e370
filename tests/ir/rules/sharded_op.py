"""One op on a mesh: cut as a choice of factors says, run on all ranks, compared with torch.

An `Instance` is an op with the tensors that it is called on and those that torch returns. A
`Cut` gives mesh axes to factors of its rule. `check_cut` fails unless the op was really cut so
and gave what torch gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from shardweave.backends.emit.calls import FUNCTIONS
from shardweave.backends.reference.reference import run_reference
from shardweave.ir.dialects.annotations import ANNOTATIONS, properties_without, set_wanted_attrs
from shardweave.ir.dialects.aten import (
    NOT_STORED,
    OWN_OPS,
    AtenOp,
    create,
    overload_named,
    signature_of,
)
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.dist import AllReduceOp, DistOp, ShardIndexOp, SliceOp
from shardweave.ir.dialects.dist_ring import NeighboursOp
from shardweave.ir.dialects.types import shape_of, shape_of_type, tensor_type
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import (
    DimSharding,
    Sharding,
    contiguous,
)
from shardweave.ir.ops.infer import infer_types
from shardweave.ir.ops.registry import spec_named
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.ragged import ragged_values
from shardweave.ir.sharding.rules import Rule, rule_of
from shardweave.passes.pipeline import PassError, PassPipeline

PARTITION = PassPipeline("propagate-shardings,insert-collectives")

NO_CPU_KERNEL = {"aten._fused_rms_norm_backward"}


@dataclass(frozen=True)
class Sample:
    """A call of an ATen op with all arguments of its schema, those that restate shapes too."""

    op: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])


def sample(op: str, *arguments: Any, **keywords: Any) -> Sample:
    """`sample("mm", x, y)` calls `aten.mm(x, y)`."""
    return Sample(op if op in OWN_OPS else f"aten.{op}", arguments, keywords)


@dataclass(frozen=True, eq=False)
class Instance:
    """An op, the tensors of its flat operands, and what torch returns for them."""

    op: AtenOp
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @property
    def rule(self) -> Rule:
        return rule_of(self.op)

    @property
    def is_ragged(self) -> bool:
        """Whether it takes or gives rows of a device's own experts, which are put into no other
        shards."""
        return bool(ragged_values([self.op]))

    def clone(self, operands: Sequence[SSAValue]) -> AtenOp:
        """The op, without annotations, on other operands."""
        kept = properties_without(self.op, *ANNOTATIONS)
        return type(self.op).create(
            operands=operands, result_types=list(self.op.result_types), properties=kept
        )


@cache
def kernel_of(op: str) -> Callable[..., Any]:
    """What runs an op on the CPU; one op has a kernel on GPUs only, but a decomposition."""
    overload = overload_named(op)
    return get_decompositions([overload])[overload] if op in NO_CPU_KERNEL else overload


def instance_of(given: Sample) -> Instance:
    """The op of a sample; torch is called with the sample's arguments as they stand."""
    returned = kernel_of(given.op)(*given.arguments, **given.keywords)
    parts = returned if isinstance(returned, tuple | list) else (returned,)
    results = tuple(part for part in parts if part is not None)
    block, tensors = Block(), list[Tensor]()

    def argument(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [argument(item) for item in value]
        if value is None:
            return None
        tensors.append(value)
        return block.insert_arg(_type(value), len(block.args))

    operands, values = list[Any](), dict[str, Any]()
    parameters = signature_of(given.op).parameters
    bound = dict(zip((p.name for p in parameters), given.arguments, strict=False))
    bound.update(given.keywords)
    derived = spec_named(given.op).derived
    for parameter in parameters:
        if parameter.is_tensor:
            operands.append(argument(bound.get(parameter.name)))
        elif parameter.name in bound and parameter.name not in {*derived, *NOT_STORED}:
            values[parameter.name] = bound[parameter.name]
    op = create(given.op, operands, [_type(result) for result in results], values)
    op.verify_()
    types = infer_types(op)
    assert not isinstance(types, str), f"{given.op}: {types}"
    assert [shape_of_type(type_) for type_ in types] == [tuple(r.shape) for r in results]
    # Dtypes as torch infers them: torch 2.11 infers another than its attention kernel gives.
    op = create(given.op, operands, list(types), values)
    return Instance(op, tuple(tensors), results)


def _type(tensor: Tensor) -> Any:
    return tensor_type(tensor.shape, tensor.dtype)


@dataclass(frozen=True)
class Cut:
    """The placements of each factor, and the axes over which the linear operands are sums."""

    factors: tuple[DimSharding, ...]
    carried: tuple[str, ...] = ()

    def operand_shardings(self, rule: Rule) -> list[Sharding]:
        return [
            Sharding(rule.dims_of(dims, self.factors), self.carried if i in rule.linear else ())
            for i, dims in enumerate(rule.operands)
        ]

    def result_shardings(self, rule: Rule, mesh: Mesh) -> list[Sharding]:
        """What the results must be: unreduced over what they lack and over what is carried."""
        found: list[Sharding] = []
        for dims in rule.results:
            lost, placed = rule.lost(dims, self.factors), rule.dims_of(dims, self.factors)
            kept = {p.axis for cut in placed for p in cut}
            axes = {p.axis for f in lost for p in self.factors[f]} - kept | set(self.carried)
            kinds = {rule.factors[f].reduction for f in lost}
            pending = tuple(axis for axis in mesh.names if axis in axes)
            found.append(Sharding(placed, pending, "max" if kinds == {"max"} else "sum"))
        return found

    def is_possible(self, rule: Rule) -> bool:
        """Whether the rule allows the cut."""
        kinds = [
            {rule.factors[f].reduction for f in rule.lost(dims, self.factors)} | self._carry_kind
            for dims in rule.results
        ]
        can_cut = all(map(rule.can_cut, range(len(self.factors)), self.factors))
        return can_cut and all(None not in kind and len(kind) < 2 for kind in kinds)

    @property
    def _carry_kind(self) -> set[str]:
        return {"sum"} if self.carried else set()


def program_of(
    instance: Instance,
    mesh: Mesh,
    operands: Sequence[Sharding],
    results: Sequence[Sharding],
    *,
    annotated: bool = True,
    gathered: bool = True,
) -> Program:
    """A global program of the op alone.

    A pending operand is the sum over dim 0 of an argument that holds one term for each device
    of its axes. Each result is returned as it is and, if `gathered`, as `whole I`, replicated.
    `annotated`: whether the op itself is told the shardings of its results.
    """
    block = Block()
    values: list[SSAValue] = []
    given: list[ShardingAttr] = []
    for tensor, sharding in zip(instance.operands, operands, strict=True):
        value, attribute = _argument(block, tensor, sharding, mesh)
        values.append(value)
        given.append(attribute)
    op = instance.clone(values)
    shapes = [shape_of(result) for result in op.results]
    if annotated:
        set_wishes(op, results, shapes)
    block.add_op(op)
    kept = [ShardingAttr.of(s, shape) for s, shape in zip(results, shapes, strict=True)]
    names = [str(number) for number in range(len(shapes))]
    returned = list(op.results)
    if gathered:
        kept += [ShardingAttr.of(Sharding.replicated(len(shape)), shape) for shape in shapes]
        names += [f"whole {name}" for name in names]
        returned *= 2
    block.add_op(func.ReturnOp(*returned))
    inputs = builtin.ArrayAttr(_slot("input", str(i), s) for i, s in enumerate(given))
    outputs = builtin.ArrayAttr(map(_slot, ["output"] * len(names), names, kept))
    types = [result.type for result in returned]
    signature = builtin.FunctionType.from_lists([a.type for a in block.args], types)
    step = func.FuncOp("step", signature, Region(block), arg_attrs=inputs, res_attrs=outputs)
    program = Program(builtin.ModuleOp([step]))
    program.set_mesh(mesh)
    return program


def set_wishes(
    op: AtenOp, shardings: Sequence[Sharding], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Ask for the shardings of an op's results."""
    pairs = zip(shardings, shapes, strict=True)
    set_wanted_attrs(op, [ShardingAttr.of(sharding, shape) for sharding, shape in pairs])


def _slot(kind: str, name: str, sharding: ShardingAttr) -> builtin.DictionaryAttr:
    text = {"dist.kind": builtin.StringAttr(kind), "dist.name": builtin.StringAttr(name)}
    attributes: dict[str, Attribute] = {**text, "dist.sharding": sharding}
    return builtin.DictionaryAttr(attributes)


def _argument(
    block: Block, tensor: Tensor, sharding: Sharding, mesh: Mesh
) -> tuple[SSAValue, ShardingAttr]:
    shape = tuple(tensor.shape)
    if not sharding.unreduced:
        argument = block.insert_arg(_type(tensor), len(block.args))
        return argument, ShardingAttr.of(sharding, shape)
    count = mesh.sizes(sharding.unreduced)
    type_ = tensor_type((count, *shape), tensor.dtype)
    argument = block.insert_arg(type_, len(block.args))
    total = create("aten.sum.dim_IntList", [argument], [_type(tensor)], {"dim": [0]})
    set_wishes(total, [sharding], [shape])
    block.add_op(total)
    terms = Sharding((contiguous(sharding.unreduced, count, mesh), *sharding.dims))
    return total.results[0], ShardingAttr.of(terms, (count, *shape))


def terms_of(tensor: Tensor, count: int) -> Tensor:
    """Random tensors, stacked in dim 0, that add up to a tensor: exactly, if that has few digits."""
    if tensor.dtype.is_floating_point or tensor.is_complex():
        rest = torch.randint(-512, 512, (count - 1, *tensor.shape)).to(tensor.dtype) / 256
    else:
        rest = torch.randint(-9, 9, (count - 1, *tensor.shape), dtype=tensor.dtype)
    return torch.cat([rest, (tensor - rest.sum(0, dtype=tensor.dtype)).unsqueeze(0)])


def values_for(
    instance: Instance, operands: Sequence[Sharding], mesh: Mesh
) -> dict[tuple[str, str], Tensor]:
    """The arguments of `program_of`."""
    found: dict[tuple[str, str], Tensor] = {}
    for index, (tensor, sharding) in enumerate(zip(instance.operands, operands, strict=True)):
        pending = sharding.unreduced
        value = terms_of(tensor, mesh.sizes(pending)) if pending else tensor
        found["input", str(index)] = value
    return found


def check_cut(instance: Instance, mesh: Mesh, cut: Cut) -> None:
    """Cut the op, assert that it was cut as asked without a message, run it and compare."""
    operands = cut.operand_shardings(instance.rule)
    results = cut.result_shardings(instance.rule, mesh)
    program = program_of(instance, mesh, operands, results, gathered=not instance.is_ragged)
    local = PARTITION.run(program)
    where = f"{instance.op.name} cut as {cut} on {mesh}"
    for slot, expected in zip(local.results, results, strict=False):
        shape = tuple(instance.results[int(slot.name)].shape)
        assert shape_of(slot.value) == expected.local_shape(shape), f"{where}: {local}"
        joins = instance.rule.localize is not None
        messages = [op.name for op in _sources(slot.value) if _is_message(op, joins=joins)]
        assert messages == [], f"{where}: {local}"
    compare(instance, local, values_for(instance, operands, mesh), where)


def check_equal(
    instance: Instance, mesh: Mesh, operands: Sequence[Sharding], results: Sequence[Sharding]
) -> None:
    """Whatever the shardings of operands and results: the op gives what torch gives, or, of rows of
    a device's own experts, is refused."""
    program = program_of(instance, mesh, operands, results, annotated=False)
    try:
        local = PARTITION.run(program)
    except PassError as error:
        if instance.is_ragged and "computes for its own experts" in str(error):
            return  # refused, as it should be
        raise
    where = f"{instance.op.name} from {operands} to {results} on {mesh}"
    compare(instance, local, values_for(instance, operands, mesh), where)


def compare(
    instance: Instance, local: Program, values: Mapping[tuple[str, str], Tensor], where: str
) -> None:
    """Run a local program on all ranks and compare its results with torch's."""
    found = _run(local, values)
    is_exact = all(tensor.dtype != torch.float32 for tensor in instance.operands)
    rtol, atol = (1e-9, 1e-10) if is_exact else (1e-5, 1e-5)
    for (_, name), result in found.items():
        expected = instance.results[int(name.removeprefix("whole "))]
        if torch.equal(result, expected):
            continue
        torch.testing.assert_close(
            result,
            expected,
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text, name=name: f"{where}, result {name}: {text}",
        )


def _run(local: Program, values: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    with patch.dict(FUNCTIONS, {name: kernel_of(name) for name in NO_CPU_KERNEL}):
        return run_reference(local, values)


def _sources(value: SSAValue) -> Iterator[Operation]:
    """The ops that a value depends on."""
    found: dict[Operation, None] = {}
    waiting = [value.owner]
    while waiting:
        owner = waiting.pop()
        if isinstance(owner, Operation) and owner not in found:
            found[owner] = None
            waiting += [operand.owner for operand in owner.operands]
    yield from found


def _is_message(op: Operation, *, joins: bool) -> bool:
    """Whether an op moves data, or takes shards of data that it should have been given in them.
    Local forms send halos, and (joins) sums of statistics."""
    if isinstance(op, SliceOp):
        return _reads_argument(op.operands[0])
    own = (ShardIndexOp, NeighboursOp, *([AllReduceOp] if joins else []))
    return isinstance(op, DistOp) and not isinstance(op, own)


def _reads_argument(value: SSAValue) -> bool:
    owner = value.owner
    return not isinstance(owner, Operation) or any(map(_reads_argument, owner.operands))
