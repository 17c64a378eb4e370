"""The record of an op: all that the package knows about one ATen op (or an op of a third party).

Records stand in `ir.ops.records`, one file per family; `ir.ops.registry` finds the record of an op
and registers further ones. A fact that two parts of the package need is a field here, not a table
of op names in each part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of

View = Literal["reshape", "permute", "expand", "part", "pairs", "cast"]
Role = Literal["pointwise", "view", "move", "reduce", "matmul", "lookup gradient"]
Combination = Literal["sum", "max", "min"]
Zero = Literal["all", "any", "dividend", "choices", "filled", "constant"]
Derivation = Callable[[AtenOp], Any]


@dataclass(frozen=True)
class Product:
    """A sum of products of two operands.

    factors: the indices of the two operands.
    weight: the factor that is a layer's own parameter, if there is one.
    addend: an operand that is added once, so that shards of the contracted dim cannot each add it.
    plain: the op without the addition, into which this one is split where that dim is sharded.
    """

    factors: tuple[int, int]
    weight: int | None = None
    addend: int | None = None
    plain: str = ""


@dataclass(frozen=True)
class AttentionKind:
    """Fused attention.

    is_backward: Whether the op computes the gradients.
    global_name: For attention by positions, the op whose shards it computes.
    """

    is_backward: bool = False
    global_name: str = ""


@dataclass(frozen=True)
class Reduction:
    """A reduction over each row, or each column, of `numel` elements in rows of length `size`."""

    over: Literal["row", "column"]
    numel: int
    size: int


@dataclass(frozen=True, eq=False, kw_only=True)
class OpSpec:
    """The facts about one op. A field that is left out says that the op has no such property.

    Sharding:

    rule: The factor rule: a function from the op to its `Rule`, or the name of a family's function
        in `ir.sharding.rules`. Without `rule` and `notation` the op runs on replicated operands.
    notation: The rule as einsum-like text, `i k, k j -> i j`; a named rule may start from it.
    linear: Operands in which the op is jointly linear, so that unreduced sums in all of them pass
        through; a function where that depends on the op's arguments. Named rules of other
        families than pointwise ops find these operands themselves.
    scaled: Operands that the op multiplies by another, shard by shard if its result is wanted so.
    refuses_values: Its kernel for integers refuses some values of the last operand, such as 0.
    combine: The reduction that combines the results on shards of a reduced dim.
    zero: When the result is 0 along an index of a dim. `all`: all operands have the dim and are 0
        there. `any`: those operands that have the dim are 0 there. `dividend`: only operand 0 has
        the dim, and is 0 there. `choices`: operands 1 and 2 are 0 there. `filled`: operand 0 is 0
        there and the filled value is 0. `constant`: the constant is 0.
    has_indices: Integer operands, except operand 0, are indices.

    Meaning:

    view: How the only result shows the elements of operand 0. `reshape`: all, in their order.
        `permute`: all, in another order. `expand`: some repeated. `part`: some of them. `pairs`:
        complex numbers as their two parts, or back. `cast`: all, in another dtype and new memory.
    product: For matrix products and convolutions.
    grouped: For products of rows with their group's matrix (other operands are where groups start
        and end): whether results are rows, or gradients of the matrices.
    ragged: `begin`: the op takes a device's ragged rows out of all rows. `end`: it puts them back.
    is_lookup: Of operand 0 the op reads only the elements that it returns.
    resizes: The result is operand 0 with elements removed or added at the ends of dims.
    places: The result is zeros with operand 0 in one part: the gradient of a view `part`.
    overwrites: The result is operand 0 with other elements written, so that operand 0 may be memory
        that nobody has written.
    works_in_parts: A slice of the result is the op on slices of its operands.
    sign: For an elementwise sum of two tensors, the sign of the second.
    merge: The reduction that the op does of two values, element by element: of one operand, or of
        a value's several results, in the first and second half of the operands.
    neutral: The number which, as second operand, leaves the first as it is.
    counts: An integer operand is a count or a flag, not an index.
    attention: For fused attention, forward or backward.

    Calling:

    derived: Arguments that are not stored, because they follow from the op's types, by name.
    runs_as: The op to call instead, if the op itself could not be called on every shard.
    is_direct: `torch.<name>` takes the same arguments and calls the same overload.
    needs_contiguous: Kernels read strided operands wrongly, or refuse them.
    float32_on_gpu: Results that GPU kernels give in float32 for operands in half precision.

    In a generated kernel:

    role: The part that the op can have in a kernel; None if no kernel can hold it.
    fits: Whether a kernel can hold this op, by its arguments and shapes.
    reductions: The reductions that the op does; empty if a kernel cannot do them.
    mask: The operand that is a mask among operands of the result's dtype.
    operands_as: The dtype that operands are converted to first: the result's, one that is common
        to the operands, or bool.
    costly: A function that takes many instructions and registers.

    Cost:

    flops: Floating-point operations; products need no function.
    """

    name: str = field(kw_only=False)
    rule: str | Callable[[AtenOp], Any] = ""
    notation: str = ""
    linear: tuple[int, ...] | Callable[[AtenOp], tuple[int, ...]] = ()
    scaled: tuple[int, ...] = ()
    refuses_values: bool = False
    combine: Combination | None = None
    zero: Zero | None = None
    has_indices: bool = False
    view: View | None = None
    product: Product | None = None
    grouped: Literal["rows", "matrices"] | None = None
    ragged: Literal["begin", "end"] | None = None
    is_lookup: bool = False
    resizes: bool = False
    places: bool = False
    overwrites: bool = False
    works_in_parts: bool = False
    sign: Literal[1, -1] | None = None
    merge: Literal["sum", "max", "lse"] | None = None
    neutral: int | None = None
    counts: bool = False
    attention: AttentionKind | None = None
    derived: Mapping[str, Derivation] = field(default_factory=dict[str, Derivation])
    runs_as: str = ""
    is_direct: bool = False
    needs_contiguous: bool = False
    float32_on_gpu: tuple[int, ...] = ()
    role: Role | None = None
    fits: Callable[[AtenOp], bool] | None = None
    reductions: Callable[[AtenOp], tuple[Reduction, ...]] | None = None
    mask: int | None = None
    operands_as: Literal["result", "common", "bool"] = "result"
    costly: Literal["trigonometric", "error function"] | None = None
    flops: Callable[[AtenOp], int] | None = None

    def linear_in(self, op: AtenOp) -> tuple[int, ...]:
        """The operands in which an op with this record is linear."""
        return self.linear(op) if callable(self.linear) else self.linear

    @property
    def has_rule(self) -> bool:
        """True if the op has a factor rule."""
        return bool(self.rule or self.notation)

    @property
    def torch_function(self) -> str:
        """torch's own function, such as `torch.mm`, that emitted code calls; else an empty text."""
        return f"torch.{(self.runs_as or self.name).split('.')[1]}" if self.is_direct else ""

    @property
    def may_share(self) -> bool:
        """True if results share the memory of operand 0; for a reshape, if its strides allow it."""
        return self.view not in (None, "cast")

    @property
    def is_layout(self) -> bool:
        """True if the result has all elements of operand 0, so that a kernel only maps indices."""
        return self.view in ("reshape", "permute", "expand")

    @property
    def is_rearrangement(self) -> bool:
        """True if the result has each element of operand 0 once."""
        return self.view in ("reshape", "permute")

    @property
    def keeps_weight(self) -> bool:
        """True if the op keeps a weight's data: it only changes the weight's layout or dtype."""
        return self.is_layout or self.view == "cast"


def family(names: str, **facts: Any) -> tuple[OpSpec, ...]:
    """The records of several ATen ops with the same facts. names: op names without `aten.`."""
    return tuple(OpSpec(f"aten.{name}", **facts) for name in names.split())


def result_shape(op: AtenOp) -> list[int]:
    return list(shape_of(op.results[0]))


def result_dtype(op: AtenOp) -> Any:
    return dtype_of_value(op.results[0])
