"""The table of op facts: what an op is by its name, its sharding rule apart.

Whatever asks whether an op is a view, a product, a lookup or random asks here. Whether a reshape
shares memory or copies depends on the strides of what it reads, and is asked of `storage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeGuard

import torch
from xdsl.ir import Operation

from shardweave.ir.dialects.aten import AtenOp, overload_named

View = Literal["reshape", "permute", "expand", "part", "pairs", "cast"]


@dataclass(frozen=True)
class Product:
    """A sum of products of two operands.

    factors: their indices. weight: the one that a layer has of its own, if any. addend: what is
    added once, so that shards of the contracted dim cannot each add it. plain: the op that it is
    split into, before an addition, where that dim is cut.
    """

    factors: tuple[int, int]
    weight: int | None = None
    addend: int | None = None
    plain: str = ""


@dataclass(frozen=True)
class OpFacts:
    """What is known of an op.

    view: how the only result shows the elements of operand 0. reshape: all of them in their order.
    permute: all of them in another order. expand: some of them repeated. part: some of them.
    pairs: all of them, a complex number as its two parts or the other way. cast: all of them, in
    another type and so in memory of its own.
    product: of matrix products and convolutions. is_lookup: it reads of operand 0 only what it
    returns. is_addition: of two tensors, element by element.
    """

    view: View | None = None
    product: Product | None = None
    is_lookup: bool = False
    is_addition: bool = False

    @property
    def may_share(self) -> bool:
        """Whether results share the memory of operand 0; of a reshape, if its strides allow it."""
        return self.view not in (None, "cast")

    @property
    def is_layout(self) -> bool:
        """Whether the result has all elements of operand 0: an index map, to a kernel."""
        return self.view in ("reshape", "permute", "expand")

    @property
    def is_rearrangement(self) -> bool:
        """Whether the result has each element of operand 0 once."""
        return self.view in ("reshape", "permute")

    @property
    def keeps_weight(self) -> bool:
        """Whether the result is as good as the weight that it is made from."""
        return self.is_layout or self.view == "cast"


LOOKUP_GRADIENT = "aten.embedding_dense_backward"
"""It adds up rows where their indices are equal."""

_NOTHING = OpFacts()

_TABLE: dict[str, OpFacts] = {
    "aten.view": OpFacts("reshape"),
    "aten.permute": OpFacts("permute"),
    "aten.expand": OpFacts("expand"),
    "aten.slice.Tensor": OpFacts("part"),
    "aten.select.int": OpFacts("part"),
    "aten.view_as_complex": OpFacts("pairs"),
    "aten.view_as_real": OpFacts("pairs"),
    "aten._to_copy": OpFacts("cast"),
    "aten.mm": OpFacts(product=Product((0, 1), weight=1)),
    "aten.addmm": OpFacts(product=Product((1, 2), weight=2, addend=0, plain="aten.mm")),
    "aten.bmm": OpFacts(product=Product((0, 1), weight=1)),
    "aten.baddbmm": OpFacts(product=Product((1, 2), addend=0)),
    "aten.convolution": OpFacts(product=Product((0, 1), weight=1)),
    "aten.embedding": OpFacts(is_lookup=True),
    "aten.gather": OpFacts(is_lookup=True),
    "aten.index.Tensor": OpFacts(is_lookup=True),
    "aten.index_select": OpFacts(is_lookup=True),
    "aten.add.Tensor": OpFacts(is_addition=True),
    "aten.sub.Tensor": OpFacts(is_addition=True),
}


def facts_of(op: Operation) -> OpFacts:
    """The facts of an op; those of an op that the table lacks are all no."""
    return _TABLE.get(op.name, _NOTHING)


def weight_of(op: Operation) -> int | None:
    """The operand of a product that is the weight of a layer, if it can have one."""
    product = facts_of(op).product
    return None if product is None else product.weight


def is_random(op: Operation) -> TypeGuard[AtenOp]:
    """Whether each call of an op draws new random numbers, as torch's own table says."""
    return isinstance(op, AtenOp) and _is_random(op.name)


@cache
def _is_random(name: str) -> bool:
    return torch.Tag.nondeterministic_seeded in overload_named(name).tags
