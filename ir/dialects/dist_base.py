"""Base classes of the ops of the `dist` dialect, which hold all facts about each op.

A collective defines its `effect` on a value, and how much it sends; see `register_collective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from torch import Tensor
from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, StringAttr, i64
from xdsl.irdl import AtLeast, BaseAttr, MessageConstraint, RangeOf, prop_def, traits_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.dialects.literals import to_python
from shardweave.ir.dialects.syntax import DefinedOp
from shardweave.ir.dialects.types import num_elements, shape_of, tensor_type_of
from shardweave.ir.mesh.effect import Blocks, Effect
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding

AXES = MessageConstraint(
    ArrayAttr.constr(RangeOf(BaseAttr(StringAttr)).of_length(AtLeast(1))),
    'a list such as ["tensor"]',
)
NUMBER = MessageConstraint(IntegerAttr.constr(i64), "a whole number")
WORDS = MessageConstraint(StringAttr, "a string")


def number_property(name: str) -> int:
    """Make the accessor of an op's property `name`, a whole number, for the op's class."""
    return cast("int", property(lambda op: to_python(op.properties[name])))


def word_property(name: str) -> str:
    """Make the accessor of an op's property `name`, a string, for the op's class."""
    return cast("str", property(lambda op: to_python(op.properties[name])))


class DistOp(DefinedOp):
    """Base of the ops of the dialect."""

    traits = traits_def(Pure())

    @property
    def axes(self) -> tuple[str, ...]:
        return ()

    def problem_on(self, mesh: Mesh) -> str | None:
        """Explain why the op's types do not fit the mesh; None if they do."""
        unknown = [axis for axis in self.axes if axis not in mesh.names]
        if unknown:
            return f"axes {unknown} are not in the mesh {mesh}"
        if len(set(self.axes)) != len(self.axes):
            return f"axes {list(self.axes)} name an axis twice; name each once"
        expected = self.expected_shapes(mesh)
        shapes = [shape_of(result) for result in self.results]
        if shapes != expected:
            return f"result shapes are {shapes}, expected {expected}; correct the types"
        return self._problem_of_elements()

    def _problem_of_elements(self) -> str | None:
        for operand, result in zip(self.operands, self.results, strict=False):
            actual, expected = (tensor_type_of(v).element_type for v in (result, operand))
            if actual != expected:
                return f"a result has elements {actual}, expected {expected}; correct its type"
        return None

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        """The result shapes that the operands' shapes imply; for an op without operands, its
        own."""
        if not self.operands:
            return [shape_of(result) for result in self.results]
        ranks = mesh.sizes(self.axes)
        return [self.expected_shape(shape_of(operand), ranks) for operand in self.operands]

    @classmethod
    def kind(cls) -> str:
        """The op's name without `dist.` and `start_`, such as `all_reduce`."""
        return cls.name.removeprefix("dist.").removeprefix("start_")

    @property
    def effect(self) -> Effect | None:
        """The effect on each operand (reduce, gather, shard); None if the op has another."""
        return None

    @property
    def is_reduction(self) -> bool:
        """True if the op reduces, and does nothing else."""
        effect = self.effect
        return effect is not None and effect == Effect(effect.reduces) != Effect()

    @property
    def is_gather(self) -> bool:
        """True if the op gathers a dim, and does nothing else."""
        effect = self.effect
        return effect is not None and effect == Effect(gathers=effect.gathers) != Effect()

    def after(self, sharding: Sharding, mesh: Mesh) -> Sharding:
        """The result's sharding, given the operand's. ValueError if the op cannot take this."""
        if self.effect is None:
            raise ValueError(_no_effect(self, "after"))
        return self.effect.sharding_after(sharding, self.axes, mesh)

    def expected_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """The local shape of a result, given the operand's, `shape`, and the number of ranks."""
        return shape if self.effect is None else self.effect.shape_after(shape, ranks)

    def on_shards(self, members: Sequence[Tensor]) -> list[Tensor]:
        """Compute each rank's result. members: the operands of the ranks in one group, in order."""
        if self.effect is None:
            raise ValueError(_no_effect(self, "on_shards"))
        return self.effect.on_shards(members)

    @classmethod
    def sent(cls, elements: int, ranks: int) -> float:
        """Elements that one of `ranks` ranks sends, if its operands have `elements`."""
        del elements, ranks
        return 0.0

    def sent_elements(self, mesh: Mesh) -> float:
        """Elements that one rank sends over the network."""
        elements = sum(num_elements(value) for value in self.operands)
        return self.sent(elements, mesh.sizes(self.axes))


def _no_effect(op: DistOp, method: str) -> str:
    return f"'{op.name}' does not say what it does; define its `effect`, or `{method}`."


class OverAxesOp(DistOp):
    """Base of the ops that act over the ranks of the mesh axes `axes`.

    JOINS_OPERANDS: whether each result depends on all operands (`over_members`) instead of one.
    """

    JOINS_OPERANDS: ClassVar[bool] = False

    axes_attr = prop_def(AXES, prop_name="axes")

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple([axis.data for axis in self.axes_attr.data])

    def over_members(self, members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Compute the result of each rank of one group. members: the operands of each rank."""
        raise NotImplementedError


class CollectiveOp(OverAxesOp):
    """Base of the ops that communicate. `register_collective` makes a subclass known.

    A subclass defines `name` (under `dist.`), its operands and results, and `effect`; also `sent`,
    if a rank does not keep its share of the operands and send the rest. A subclass that does not
    reduce, gather or shard defines `after`, `expected_shape` and `on_shards` in place of `effect`;
    its programs then cannot be proved, and have no time axes.

    ALL_PAIRS: whether each rank sends to all others, instead of along a ring. ROUNDS: number of
    times that each byte goes around the ring.
    """

    ALL_PAIRS: ClassVar[bool] = False
    ROUNDS: ClassVar[int] = 1

    @classmethod
    def sent(cls, elements: int, ranks: int) -> float:
        return cls.ROUNDS * elements * (ranks - 1) / ranks

    @classmethod
    def steps(cls, ranks: int) -> int:
        """Number of messages that one of `ranks` ranks sends one after another."""
        return cls.ROUNDS * (ranks - 1)

    @staticmethod
    def on_group(*arguments: Any, **named: Any) -> Any:
        """Run the collective in one process: `on_group(x, group, ..)`, with the op's arguments by
        name.

        x: the operand. group: a `backends.distributed.in_flight.Group` of several ranks. Returns an
        `InFlight` if the collective is started and completes at the wait, else its result. Only
        registered collectives define it: the runtime has methods for the others.
        """
        raise NotImplementedError

    @classmethod
    def runs_itself(cls) -> bool:
        """True if the class defines `on_group`."""
        return cls.on_group is not CollectiveOp.on_group


class StartedOp(DistOp):
    """Base of the asynchronous forms `dist.start_*`. Only one `dist.wait` may read the results."""


class AlongDimOp(OverAxesOp):
    """Base of the ops that shard `dim` over the axes, or gather it, in blocks of `block`."""

    dim_attr = prop_def(NUMBER, prop_name="dim")
    dim = number_property("dim")
    block_attr = prop_def(NUMBER, prop_name="block")
    block = number_property("block")

    def verify_(self) -> None:
        rank = len(shape_of(self.operands[0]))
        for name in ("dim", "from_dim"):
            dim = self.properties.get(name)
            if isinstance(dim, IntegerAttr) and not 0 <= dim.value.data < rank:
                raise VerifyException(f"{name} must be in [0, {rank})")

    @property
    def blocks(self) -> Blocks:
        return self.dim, self.block

    @property
    def effect(self) -> Effect:
        return Effect(shards=self.blocks)
