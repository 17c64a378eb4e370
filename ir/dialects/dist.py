"""The `dist` dialect: collectives over named mesh axes, messages, and a rank's own shard index.

Shapes are those of one rank. Shards are block-cyclic over the axes: `block` is the length of
their blocks (`placement.block_of`), the whole local dim unless a shard is strided.
Traffic is what one rank sends with ring algorithms, P being the product of the axes' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from xdsl.dialects.builtin import StringAttr, TensorType, i64
from xdsl.ir import Attribute, Dialect, SSAValue
from xdsl.irdl import (
    AtLeast,
    AttrSetConstraint,
    MessageConstraint,
    RangeOf,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    var_operand_def,
    var_result_def,
)

from shardweave.ir.dialects.aten import OWN_OPS, aten_class
from shardweave.ir.dialects.attributes import MeshAttr, PhaseAttr, ShardingAttr
from shardweave.ir.dialects.dist_base import (
    NUMBER,
    WORDS,
    AlongDimOp,
    CollectiveOp,
    DistOp,
    OverAxesOp,
    StartedOp,
    number_property,
    word_property,
)
from shardweave.ir.dialects.dist_ring import HaloAddOp, HaloOp, RingJoinOp, RingSliceOp, ShiftOp
from shardweave.ir.dialects.dist_rows import AddRowsOp, FetchRowsOp
from shardweave.ir.dialects.literals import Literal, to_attribute
from shardweave.ir.dialects.types import TENSOR, dtype_of_value, num_elements
from shardweave.ir.mesh.effect import Effect
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Reduction

TENSORS = RangeOf(TENSOR).of_length(AtLeast(1))
REDUCTION = MessageConstraint(
    AttrSetConstraint(frozenset({StringAttr("sum"), StringAttr("max")})), '"sum" or "max"'
)


KINDS: dict[str, type[CollectiveOp]] = {}
"""The collectives by kind: those of this file, and those that users register."""

STARTS: dict[type[DistOp], type[DistOp]] = {}
"""The asynchronous form of each collective: defined alike, under the name `dist.start_*`."""


@irdl_op_definition
class ReshardOp(DistOp):
    """Change the sharding of a value; `why` gives the reason.

    Only in global programs: shapes are global, and kept. The result's sharding is the op's
    `sharding`; `insert-collectives` lowers the op to collectives and slices.
    """

    name = "dist.reshard"
    value = operand_def(TENSOR)
    why_attr = prop_def(WORDS, prop_name="why")
    why = word_property("why")
    resharded = result_def(TENSOR)

    @property
    def effect(self) -> Effect:
        return Effect()


@irdl_op_definition
class AllReduceOp(CollectiveOp):
    """Give every rank of `axes` the sum (or, with op = "max", the maximum) over all ranks.

    Takes any number of operands, reduced in one message. Shapes are kept.
    Traffic: 2 (P - 1) / P of the operands' bytes.
    """

    name = "dist.all_reduce"
    terms = var_operand_def(TENSORS)
    op_attr = opt_prop_def(REDUCTION, prop_name="op")
    totals = var_result_def(TENSORS)
    ROUNDS: ClassVar[int] = 2

    @property
    def reduction(self) -> str:
        return "sum" if self.op_attr is None else self.op_attr.data

    @property
    def effect(self) -> Effect:
        return Effect(reduces=cast(Reduction, self.reduction))


@irdl_op_definition
class ReduceScatterOp(AlongDimOp, CollectiveOp):
    """Sum over `axes` and leave each rank its shard of `dim`.

    Shapes: .. x nd x ..  ->  .. x nd/P x ... Traffic: (P - 1) / P of the operand's bytes.
    """

    name = "dist.reduce_scatter"
    terms = var_operand_def(TENSORS)
    shards = var_result_def(TENSORS)

    @property
    def effect(self) -> Effect:
        return Effect(reduces="sum", shards=self.blocks)


@irdl_op_definition
class AllGatherOp(AlongDimOp, CollectiveOp):
    """Give every rank of `axes` the concatenation of all shards along `dim`.

    Shapes: .. x nd x ..  ->  .. x P nd x ... Traffic: (P - 1) times the shard's bytes.
    """

    name = "dist.all_gather"
    shards = var_operand_def(TENSORS)
    gathered = var_result_def(TENSORS)

    @property
    def effect(self) -> Effect:
        return Effect(gathers=self.blocks)

    @classmethod
    def sent(cls, elements: int, ranks: int) -> float:
        return float(elements * (ranks - 1))


@irdl_op_definition
class AllToAllOp(AlongDimOp, CollectiveOp):
    """Gather `from_dim` over `axes` while `dim` is split over them.

    Shapes: .. x nd x .. x nf x ..  ->  .. x nd/P x .. x P nf x ...
    Traffic: (P - 1) / P of the operand's bytes.
    """

    name = "dist.all_to_all"
    shard = operand_def(TENSOR)
    from_dim_attr = prop_def(NUMBER, prop_name="from_dim")
    from_dim = number_property("from_dim")
    from_block_attr = prop_def(NUMBER, prop_name="from_block")
    from_block = number_property("from_block")
    moved = result_def(TENSOR)
    ALL_PAIRS: ClassVar[bool] = True

    @property
    def effect(self) -> Effect:
        return Effect(gathers=(self.from_dim, self.from_block), shards=self.blocks)


@irdl_op_definition
class SliceOp(AlongDimOp):
    """Keep this rank's shard of a value that is replicated over `axes`. No traffic."""

    name = "dist.slice"
    value = operand_def(TENSOR)
    shard = result_def(TENSOR)


@irdl_op_definition
class ShardIndexOp(OverAxesOp):
    """This rank's row-major index on `axes` (the first axis varies slowest), as a scalar i64."""

    name = "dist.shard_index"
    index = result_def(TensorType(i64, ()))

    def on_shards(self, members: Sequence[Tensor]) -> list[Tensor]:
        return [torch.tensor(index) for index in range(len(members))]


@irdl_op_definition
class WaitOp(DistOp):
    """Wait for a started collective. Results: the collective's results, now complete."""

    name = "dist.wait"
    in_flight = var_operand_def(TENSORS)
    arrived = var_result_def(TENSORS)

    @property
    def effect(self) -> Effect:
        return Effect()


class HostCopyOp(DistOp):
    """Base of the copies between device and host memory. Shape and sharding stay. No traffic."""

    value = operand_def(TENSOR)
    copied = result_def(TENSOR)

    @property
    def effect(self) -> Effect:
        return Effect()

    def on_shards(self, members: Sequence[Tensor]) -> list[Tensor]:
        return [member.clone(memory_format=torch.contiguous_format) for member in members]


@irdl_op_definition
class ToHostOp(HostCopyOp):
    """Copy a value to the memory of the host, where only `dist.to_device` reads it."""

    name = "dist.to_host"


@irdl_op_definition
class ToDeviceOp(HostCopyOp):
    """Copy a value back from the memory of the host."""

    name = "dist.to_device"


def is_on_host(value: SSAValue) -> bool:
    """True if a value is the result of a copy to the host, complete or in flight."""
    op = value.owner
    if isinstance(op, WaitOp):
        op = op.operands[0].owner
    return isinstance(op, ToHostOp)


def is_copied_back(value: SSAValue) -> bool:
    """True if some op copies a value on the host back to the device."""
    return any(isinstance(use.operation, ToDeviceOp) for use in value.uses)


@irdl_op_definition
class SendOp(DistOp):
    """Send a value to the rank with the same mesh coordinates in another stage. Traffic: its bytes.

    Only in stage functions. `to`: the receiving stage. `name`: identifies the message among all
    messages of one micro-batch between two stages; `dist.recv` receives it.
    """

    name = "dist.send"
    value = operand_def(TENSOR)
    to_attr = prop_def(NUMBER, prop_name="to")
    to = number_property("to")
    message_attr = prop_def(WORDS, prop_name="name")
    message = word_property("name")

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        return []

    def sent_elements(self, mesh: Mesh) -> float:
        return float(num_elements(self.operands[0]))


@irdl_op_definition
class RecvOp(DistOp):
    """Receive the value that stage `source` sends as `name`, from the rank with the same mesh
    coordinates, in the sender's sharding."""

    name = "dist.recv"
    from_attr = prop_def(NUMBER, prop_name="source")
    source = number_property("source")
    message_attr = prop_def(WORDS, prop_name="name")
    message = word_property("name")
    value = result_def(TENSOR)


@irdl_op_definition
class RunOp(DistOp):
    """Run a function of a stage, on one micro-batch or once in a step. Only in a staged step.

    `at`: the coordinate, on the stage axis, of the ranks that run it. Functions pass values to each
    other by the kinds and names of their slots; the op's results are results of the step.
    """

    name = "dist.run"
    function_attr = prop_def(WORDS, prop_name="function")
    function = word_property("function")
    at_attr = prop_def(NUMBER, prop_name="at")
    at = number_property("at")
    micro_batch_attr = opt_prop_def(NUMBER, prop_name="micro_batch")
    made = var_result_def(RangeOf(TENSOR))

    @property
    def micro_batch(self) -> int | None:
        return None if self.micro_batch_attr is None else self.micro_batch_attr.value.data


_Op = TypeVar("_Op", bound=DistOp)


def create_dist(
    kind: type[_Op],
    operands: Sequence[SSAValue],
    result_types: Sequence[Attribute],
    **arguments: Literal,
) -> _Op:
    """Build an op; arguments are Python values (`axes=("tensor",), dim=0, block=4`)."""
    properties = {name: to_attribute(value) for name, value in arguments.items()}
    return kind.create(operands=operands, result_types=result_types, properties=properties)


def sent_bytes(op: DistOp, mesh: Mesh) -> float:
    """Bytes that one rank sends for a collective with ring algorithms."""
    return op.sent_elements(mesh) * dtype_of_value(op.operands[0]).itemsize


def _started(kind: type[DistOp]) -> type[DistOp]:
    """The asynchronous form of an op."""
    make = cast("Any", type)  # of whose bases the type checker knows one alone
    return make(f"Start{kind.__name__}", (kind, StartedOp), {"name": f"dist.start_{kind.kind()}"})


HOST_COPIES: dict[type[DistOp], type[DistOp]] = {
    kind: _started(kind) for kind in (ToHostOp, ToDeviceOp)
}
"""The asynchronous form of each copy between device and host."""


def dist_dialect() -> Dialect:
    """The dialect of sharded programs: collectives (registered ones too), messages, runs of
    stages."""
    return Dialect(
        "dist",
        [
            *STARTS,
            *STARTS.values(),
            *HOST_COPIES,
            *HOST_COPIES.values(),
            WaitOp,
            SliceOp,
            ShardIndexOp,
            RingSliceOp,
            RingJoinOp,
            ReshardOp,
            SendOp,
            RecvOp,
            RunOp,
            *map(aten_class, OWN_OPS),
        ],
        [MeshAttr, ShardingAttr, PhaseAttr],
    )


_Collective = TypeVar("_Collective", bound=CollectiveOp)


def register_collective(kind: type[_Collective]) -> type[_Collective]:
    """Register a collective class and its asynchronous form, so that programs can contain both.

    Use it as a decorator above `irdl_op_definition`. Raises ValueError if the name is taken or is
    not `dist.<kind>`.
    """
    dialect, _, name = kind.name.partition(".")
    if dialect != "dist" or not name.isidentifier() or name.startswith("start_"):
        raise ValueError(f"a collective's name is 'dist.<kind>', found '{kind.name}'; rename it.")
    if kind.name in {op.name for op in dist_dialect().operations}:
        raise ValueError(f"there is an op '{kind.name}' already; choose another name.")
    KINDS[name] = kind
    STARTS[kind] = _started(kind)
    return kind


for _kind in (
    AllReduceOp, ReduceScatterOp, AllGatherOp, AllToAllOp, ShiftOp, HaloOp, HaloAddOp, FetchRowsOp,
    AddRowsOp,
):  # fmt: skip
    register_collective(_kind)
