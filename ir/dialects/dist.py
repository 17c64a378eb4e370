"""The `dist` dialect: collectives over named mesh axes, and what a rank knows of itself.

Shapes are those of one rank. Shards are block-cyclic over the axes: `block` is the length of
their blocks (`placement.block_of`), the whole local dim unless a shard is strided.
Traffic is what one rank sends with ring algorithms, P being the product of the axes' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from xdsl.dialects.builtin import (
    ArrayAttr,
    IntegerAttr,
    StringAttr,
    TensorType,
    i64,
)
from xdsl.ir import Attribute, Dialect, SSAValue
from xdsl.irdl import (
    AtLeast,
    AttrSetConstraint,
    BaseAttr,
    MessageConstraint,
    RangeOf,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.dialects.aten import OWN_OPS, aten_class
from shardweave.ir.dialects.attributes import MeshAttr, PhaseAttr, ShardingAttr
from shardweave.ir.dialects.literals import Literal, to_attribute
from shardweave.ir.dialects.syntax import DefinedOp
from shardweave.ir.dialects.types import (
    TENSOR,
    dtype_of_value,
    num_elements,
    shape_of,
    tensor_type_of,
)
from shardweave.ir.mesh.mesh import Mesh

TENSORS = RangeOf(TENSOR).of_length(AtLeast(1))
AXES = MessageConstraint(
    ArrayAttr.constr(RangeOf(BaseAttr(StringAttr)).of_length(AtLeast(1))),
    'a list such as ["tensor"]',
)
NUMBER = MessageConstraint(IntegerAttr.constr(i64), "a whole number")
REDUCTION = MessageConstraint(
    AttrSetConstraint(frozenset({StringAttr("sum"), StringAttr("max")})), '"sum" or "max"'
)
WORDS = MessageConstraint(StringAttr, "a string")


class DistOp(DefinedOp):
    """Base of the ops of the dialect."""

    traits = traits_def(Pure())

    @property
    def axes(self) -> tuple[str, ...]:
        return ()

    def problem_on(self, mesh: Mesh) -> str | None:
        """Why the op's types do not fit the mesh; None if they do."""
        unknown = [axis for axis in self.axes if axis not in mesh.names]
        if unknown:
            return f"axes {unknown} are not in the mesh {mesh}"
        if len(set(self.axes)) != len(self.axes):
            return f"axes {list(self.axes)} name an axis twice; name each once"
        expected = self.expected_shapes(mesh)
        found = [shape_of(result) for result in self.results]
        if found != expected:
            return f"result shapes are {found}, expected {expected}; correct the types"
        return self._problem_of_elements()

    def _problem_of_elements(self) -> str | None:
        for operand, result in zip(self.operands, self.results, strict=False):
            found, expected = (tensor_type_of(v).element_type for v in (result, operand))
            if found != expected:
                return f"a result has elements {found}, expected {expected}; correct its type"
        return None

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        """Result shapes that follow from the operands."""
        ranks = mesh.sizes(self.axes)
        return [self.expected_shape(shape_of(operand), ranks) for operand in self.operands]

    def expected_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """The shape of the result that an operand of this shape has on each of `ranks` ranks."""
        del ranks
        return shape

    @staticmethod
    def sent(elements: int, ranks: int) -> float:
        """Elements that one of `ranks` ranks sends, if its operands have `elements`."""
        del elements, ranks
        return 0.0

    def sent_elements(self, mesh: Mesh) -> float:
        """Elements that one rank sends over the network."""
        elements = sum(num_elements(value) for value in self.operands)
        return self.sent(elements, mesh.sizes(self.axes))


class OverAxesOp(DistOp):
    """Base of the ops that the ranks of some mesh axes take part in together."""

    axes_attr = prop_def(AXES, prop_name="axes")

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple([axis.data for axis in self.axes_attr.data])


class AlongDimOp(OverAxesOp):
    """Base of the ops that cut `dim` over the axes, or join it, in blocks of `block`."""

    dim_attr = prop_def(NUMBER, prop_name="dim")
    block_attr = prop_def(NUMBER, prop_name="block")

    @property
    def dim(self) -> int:
        return self.dim_attr.value.data

    @property
    def block(self) -> int:
        return self.block_attr.value.data

    def verify_(self) -> None:
        rank = len(shape_of(self.operands[0]))
        for name in ("dim", "from_dim"):
            dim = self.properties.get(name)
            if isinstance(dim, IntegerAttr) and not 0 <= dim.value.data < rank:
                raise VerifyException(f"{name} must be in [0, {rank})")

    def expected_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        return (*shape[: self.dim], shape[self.dim] // ranks, *shape[self.dim + 1 :])


def _joined(shape: tuple[int, ...], dim: int, ranks: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :])


@irdl_op_definition
class ReshardOp(DistOp):
    """Give a value other shards: `why` says for what.

    Only in global programs: shapes are those of the whole value, and kept. The shards that it
    gives are its `sharding`; `insert-collectives` lowers it to what brings the value there.
    """

    name = "dist.reshard"
    value = operand_def(TENSOR)
    why_attr = prop_def(WORDS, prop_name="why")
    resharded = result_def(TENSOR)

    @property
    def why(self) -> str:
        return self.why_attr.data


@irdl_op_definition
class AllReduceOp(OverAxesOp):
    """Give every rank of `axes` the sum (or, with op = "max", the maximum) over all ranks.

    Takes any number of operands, reduced in one message. Shapes are kept.
    Traffic: 2 (P - 1) / P of the operands' bytes.
    """

    name = "dist.all_reduce"
    terms = var_operand_def(TENSORS)
    op_attr = opt_prop_def(REDUCTION, prop_name="op")
    totals = var_result_def(TENSORS)

    @property
    def reduction(self) -> str:
        return "sum" if self.op_attr is None else self.op_attr.data

    @staticmethod
    def sent(elements: int, ranks: int) -> float:
        return 2 * elements * (ranks - 1) / ranks


@irdl_op_definition
class ReduceScatterOp(AlongDimOp):
    """Sum over `axes` and leave each rank its shard of `dim`.

    Shapes: .. x nd x ..  ->  .. x nd/P x ... Traffic: (P - 1) / P of the operand's bytes.
    """

    name = "dist.reduce_scatter"
    terms = var_operand_def(TENSORS)
    shards = var_result_def(TENSORS)

    @staticmethod
    def sent(elements: int, ranks: int) -> float:
        return elements * (ranks - 1) / ranks


@irdl_op_definition
class AllGatherOp(AlongDimOp):
    """Give every rank of `axes` the concatenation of all shards along `dim`.

    Shapes: .. x nd x ..  ->  .. x P nd x ... Traffic: (P - 1) times the shard's bytes.
    """

    name = "dist.all_gather"
    shards = var_operand_def(TENSORS)
    gathered = var_result_def(TENSORS)

    def expected_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        return _joined(shape, self.dim, ranks)

    @staticmethod
    def sent(elements: int, ranks: int) -> float:
        return float(elements * (ranks - 1))


@irdl_op_definition
class AllToAllOp(AlongDimOp):
    """Gather `from_dim` over `axes` while `dim` is split over them.

    Shapes: .. x nd x .. x nf x ..  ->  .. x nd/P x .. x P nf x ...
    Traffic: (P - 1) / P of the operand's bytes.
    """

    name = "dist.all_to_all"
    shard = operand_def(TENSOR)
    from_dim_attr = prop_def(NUMBER, prop_name="from_dim")
    from_block_attr = prop_def(NUMBER, prop_name="from_block")
    moved = result_def(TENSOR)

    @property
    def from_dim(self) -> int:
        return self.from_dim_attr.value.data

    @property
    def from_block(self) -> int:
        return self.from_block_attr.value.data

    def expected_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        return _joined(super().expected_shape(shape, ranks), self.from_dim, ranks)

    @staticmethod
    def sent(elements: int, ranks: int) -> float:
        return elements * (ranks - 1) / ranks


@irdl_op_definition
class SliceOp(AlongDimOp):
    """Keep this rank's shard of a value that every rank of `axes` holds whole. No traffic."""

    name = "dist.slice"
    value = operand_def(TENSOR)
    shard = result_def(TENSOR)


@irdl_op_definition
class BroadcastOp(OverAxesOp):
    """Give every rank of `axes` the value of the rank at coordinate 0. Shapes are kept."""

    name = "dist.broadcast"
    values = var_operand_def(TENSORS)
    copies = var_result_def(TENSORS)

    @staticmethod
    def sent(elements: int, ranks: int) -> float:
        return float(elements)


@irdl_op_definition
class ShardIndexOp(OverAxesOp):
    """This rank's position among the ranks of `axes` (the first axis slowest): a scalar i64."""

    name = "dist.shard_index"
    index = result_def(TensorType(i64, ()))

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        return [()]


COLLECTIVES = (AllReduceOp, ReduceScatterOp, AllGatherOp, AllToAllOp, BroadcastOp)
"""The ops that communicate."""


@irdl_op_definition
class WaitOp(DistOp):
    """Wait for all results of one started collective. Results: the same values, arrived."""

    name = "dist.wait"
    in_flight = var_operand_def(TENSORS)
    arrived = var_result_def(TENSORS)


@irdl_op_definition
class SendOp(DistOp):
    """Send a value to the same rank of another stage. Traffic: the value's bytes.

    Only in the functions of stages. `to`: the stage; `name`: tells the messages between two stages
    of one micro-batch apart. The rank of equal coordinates there receives it (`dist.recv`).
    """

    name = "dist.send"
    value = operand_def(TENSOR)
    to_attr = prop_def(NUMBER, prop_name="to")
    message_attr = prop_def(WORDS, prop_name="name")

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        return []

    def sent_elements(self, mesh: Mesh) -> float:
        return float(num_elements(self.operands[0]))

    @property
    def to(self) -> int:
        return self.to_attr.value.data

    @property
    def message(self) -> str:
        return self.message_attr.data


@irdl_op_definition
class RecvOp(DistOp):
    """Receive what the same rank of another stage sends under a name, in the same shards."""

    name = "dist.recv"
    from_attr = prop_def(NUMBER, prop_name="source")
    message_attr = prop_def(WORDS, prop_name="name")
    value = result_def(TENSOR)

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        return [shape_of(self.results[0])]

    @property
    def source(self) -> int:
        return self.from_attr.value.data

    @property
    def message(self) -> str:
        return self.message_attr.data


@irdl_op_definition
class RunOp(DistOp):
    """Run a function of a stage, on one micro-batch or once in a step. Only in a staged step.

    `at`: the coordinate on the stage axis of the ranks that do so. Values go from function to
    function by the kinds and names of arguments and results; results here are those of the step.
    """

    name = "dist.run"
    function_attr = prop_def(WORDS, prop_name="function")
    at_attr = prop_def(NUMBER, prop_name="at")
    micro_batch_attr = opt_prop_def(NUMBER, prop_name="micro_batch")
    made = var_result_def(RangeOf(TENSOR))

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        return [shape_of(result) for result in self.results]

    @property
    def function(self) -> str:
        return self.function_attr.data

    @property
    def at(self) -> int:
        return self.at_attr.value.data

    @property
    def micro_batch(self) -> int | None:
        return None if self.micro_batch_attr is None else self.micro_batch_attr.value.data


def _start_of(kind: type[DistOp]) -> type[DistOp]:
    name = kind.name.replace("dist.", "dist.start_")
    return type(f"Start{kind.__name__}", (kind,), {"name": name})


STARTS: dict[type[DistOp], type[DistOp]] = {
    kind: _start_of(kind) for kind in (AllReduceOp, ReduceScatterOp, AllGatherOp, AllToAllOp)
}
"""The asynchronous form of each collective that has one: defined alike, under the name
`dist.start_*`. Its results are in flight: only one `dist.wait` may read them."""

STARTED = tuple(STARTS.values())


_Op = TypeVar("_Op", bound=DistOp)


def create(
    kind: type[_Op],
    operands: Sequence[SSAValue],
    result_types: Sequence[Attribute],
    **arguments: Literal,
) -> _Op:
    """Build an op; arguments are Python values (`axes=("tensor",), dim=0, block=4`)."""
    properties = {name: to_attribute(value) for name, value in arguments.items()}
    return kind.create(operands=operands, result_types=result_types, properties=properties)


def sent_bytes(op: DistOp, mesh: Mesh) -> float:
    """Bytes that one rank sends for a collective (ring algorithms)."""
    return op.sent_elements(mesh) * dtype_of_value(op.operands[0]).itemsize


def dist_dialect() -> Dialect:
    """The dialect of sharded programs: collectives, messages, runs of stages, ops of our own."""
    return Dialect(
        "dist",
        [
            *COLLECTIVES,
            *STARTED,
            WaitOp,
            SliceOp,
            ShardIndexOp,
            ReshardOp,
            SendOp,
            RecvOp,
            RunOp,
            *map(aten_class, OWN_OPS),
        ],
        [MeshAttr, ShardingAttr, PhaseAttr],
    )
