"""The `dist` dialect: collectives over named mesh axes, and what a rank knows of itself.

Shapes are those of one rank. Shards are block-cyclic over the axes: `block` is the length of
their blocks (`placement.block_of`), the whole local dim unless a shard is strided.
Traffic is what one rank sends with ring algorithms, P being the product of the axes' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xdsl.dialects import builtin
from xdsl.ir import Attribute, Dialect, SSAValue
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.attributes import MeshAttr, PhaseAttr, ShardingAttr
from shardweave.ir.literals import to_attribute, to_python
from shardweave.ir.mesh import Mesh
from shardweave.ir.syntax import ANNOTATIONS, CallOp
from shardweave.ir.types import shape_of, tensor_type_of


class DistOp(CallOp):
    """Base of the ops of the dialect; `arguments` names what each must and may carry."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def argument(self, name: str) -> object:
        attribute = self.properties.get(name)
        return None if attribute is None else to_python(attribute)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the op joins."""
        return tuple(cast("list[str]", self.argument("axes") or []))

    def integer(self, name: str) -> int:
        return cast(int, self.argument(name))

    def verify_(self) -> None:
        given = {name for name in self.properties if name not in ANNOTATIONS}
        missing = [name for name in self.required if name not in given]
        unknown = given - set(self.required) - set(self.optional)
        if missing or unknown:
            raise VerifyException(
                f"{self.name}: missing {missing}, unknown {sorted(unknown)}; "
                f"it takes {', '.join((*self.required, *self.optional))}"
            )
        axes = self.argument("axes")
        if "axes" in self.required and not _is_list_of_words(axes):
            raise VerifyException(f'{self.name}: axes must be a list such as ["tensor"]')
        for name in ("dim", "block", "from_dim", "from_block"):
            if name in given and type(self.argument(name)) is not int:
                raise VerifyException(f"{self.name}: {name} must be a whole number")
        if self.argument("op") not in (None, "sum", "max"):
            raise VerifyException(f'{self.name}: op must be "sum" or "max"')
        if "dim" in given:
            rank = len(shape_of(self.operands[0])) if self.operands else 0
            if not 0 <= self.integer("dim") < rank:
                raise VerifyException(f"{self.name}: dim must be in [0, {rank})")

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
        del mesh
        return [shape_of(operand) for operand in self.operands]

    def sent_elements(self, mesh: Mesh) -> float:
        """Elements that one rank sends over the network."""
        del mesh
        return 0.0


def _is_list_of_words(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, str) for item in cast("list[object]", value))


def _local_elements(values: Sequence[SSAValue]) -> int:
    total = 0
    for value in values:
        count = 1
        for size in shape_of(value):
            count *= size
        total += count
    return total


def _scaled(shape: tuple[int, ...], dim: int, factor: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * factor, *shape[dim + 1 :])


def _divided(shape: tuple[int, ...], dim: int, divisor: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // divisor, *shape[dim + 1 :])


class AllReduceOp(DistOp):
    """Give every rank of `axes` the sum (or, with op = "max", the maximum) over all ranks.

    Takes any number of operands, reduced in one message. Shapes are kept.
    Traffic: 2 (P - 1) / P of the operands' bytes.
    """

    name = "dist.all_reduce"
    required = ("axes",)
    optional = ("op",)

    @property
    def reduction(self) -> str:
        return cast("str | None", self.argument("op")) or "sum"

    def sent_elements(self, mesh: Mesh) -> float:
        size = mesh.sizes(self.axes)
        return 2 * _local_elements(self.operands) * (size - 1) / size


class ReduceScatterOp(DistOp):
    """Sum over `axes` and leave each rank its shard of `dim`.

    Shapes: .. x nd x ..  ->  .. x nd/P x ... Traffic: (P - 1) / P of the operand's bytes.
    """

    name = "dist.reduce_scatter"
    required = ("axes", "dim", "block")

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        size = mesh.sizes(self.axes)
        return [_divided(shape_of(v), self.integer("dim"), size) for v in self.operands]

    def sent_elements(self, mesh: Mesh) -> float:
        size = mesh.sizes(self.axes)
        return _local_elements(self.operands) * (size - 1) / size


class AllGatherOp(DistOp):
    """Give every rank of `axes` the concatenation of all shards along `dim`.

    Shapes: .. x nd x ..  ->  .. x P nd x ... Traffic: (P - 1) times the shard's bytes.
    """

    name = "dist.all_gather"
    required = ("axes", "dim", "block")

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        size = mesh.sizes(self.axes)
        return [_scaled(shape_of(v), self.integer("dim"), size) for v in self.operands]

    def sent_elements(self, mesh: Mesh) -> float:
        return float(_local_elements(self.operands) * (mesh.sizes(self.axes) - 1))


class AllToAllOp(DistOp):
    """Gather `from_dim` over `axes` while `dim` is split over them.

    Shapes: .. x nd x .. x nf x ..  ->  .. x nd/P x .. x P nf x ...
    Traffic: (P - 1) / P of the operand's bytes.
    """

    name = "dist.all_to_all"
    required = ("axes", "dim", "block", "from_dim", "from_block")

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        size = mesh.sizes(self.axes)
        shape = _divided(shape_of(self.operands[0]), self.integer("dim"), size)
        return [_scaled(shape, self.integer("from_dim"), size)]

    def sent_elements(self, mesh: Mesh) -> float:
        size = mesh.sizes(self.axes)
        return _local_elements(self.operands) * (size - 1) / size


class SliceOp(DistOp):
    """Keep this rank's shard of a value that every rank of `axes` holds whole. No traffic."""

    name = "dist.slice"
    required = ("axes", "dim", "block")

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        size = mesh.sizes(self.axes)
        return [_divided(shape_of(self.operands[0]), self.integer("dim"), size)]


class BroadcastOp(DistOp):
    """Give every rank of `axes` the value of the rank at coordinate 0. Shapes are kept."""

    name = "dist.broadcast"
    required = ("axes",)

    def sent_elements(self, mesh: Mesh) -> float:
        return float(_local_elements(self.operands))


class ShardIndexOp(DistOp):
    """This rank's position among the ranks of `axes` (the first axis slowest): a scalar i64."""

    name = "dist.shard_index"
    required = ("axes",)

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        return [()]


class ReshardOp(DistOp):
    """Give a value other shards; `why` says for what. Only in global programs.

    The shards that it gives are its `sharding`. Shapes are kept: they are those of the whole value.
    `insert-collectives` lowers it to the collectives and slices that bring it there.
    """

    name = "dist.reshard"
    required = ("why",)

    @property
    def why(self) -> str:
        return cast(str, self.argument("why"))


COLLECTIVES = (AllReduceOp, ReduceScatterOp, AllGatherOp, AllToAllOp, BroadcastOp)
"""The ops that communicate."""


class StartAllReduceOp(AllReduceOp):
    """Start an all_reduce. Its results are in flight: only one `dist.wait` may read them."""

    name = "dist.start_all_reduce"


class StartReduceScatterOp(ReduceScatterOp):
    """Start a reduce_scatter. Its result is in flight: only one `dist.wait` may read it."""

    name = "dist.start_reduce_scatter"


class StartAllGatherOp(AllGatherOp):
    """Start an all_gather. Its result is in flight: only one `dist.wait` may read it."""

    name = "dist.start_all_gather"


class StartAllToAllOp(AllToAllOp):
    """Start an all_to_all. Its result is in flight: only one `dist.wait` may read it."""

    name = "dist.start_all_to_all"


class WaitOp(DistOp):
    """Wait for all results of one started collective. Results: the same values, arrived."""

    name = "dist.wait"


STARTS: dict[type[DistOp], type[DistOp]] = {
    AllReduceOp: StartAllReduceOp,
    ReduceScatterOp: StartReduceScatterOp,
    AllGatherOp: StartAllGatherOp,
    AllToAllOp: StartAllToAllOp,
}
"""The asynchronous form of each collective that has one."""

STARTED = tuple(STARTS.values())


def create(
    kind: type[DistOp],
    operands: Sequence[SSAValue],
    result_types: Sequence[Attribute],
    **arguments: object,
) -> DistOp:
    """Build an op; arguments are Python values (`axes=("tensor",), dim=0, block=4`)."""
    properties = {
        name: to_attribute(cast("list[str] | int | str", value))
        for name, value in arguments.items()
    }
    return kind.create(operands=operands, result_types=result_types, properties=properties)


def sent_bytes(op: DistOp, mesh: Mesh) -> float:
    """Bytes that one rank sends for a collective (ring algorithms)."""
    type_ = tensor_type_of(op.operands[0])
    element = cast("builtin.FixedBitwidthType", type_.element_type)
    return op.sent_elements(mesh) * element.size


def dist_dialect() -> Dialect:
    """The dialect: its ops and attributes."""
    return Dialect(
        "dist",
        [*COLLECTIVES, *STARTED, WaitOp, SliceOp, ShardIndexOp, ReshardOp],
        [MeshAttr, ShardingAttr, PhaseAttr],
    )
