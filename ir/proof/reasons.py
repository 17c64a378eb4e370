"""Local computations, and why they give what they do: what a certificate says of each op."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import Attribute, Operation

from shardweave.ir.dialects.annotations import arguments_of
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.proof.held import Coordinates, Cuts, Relation, Shape, Value
from shardweave.ir.proof.local_forms import OpForm
from shardweave.ir.proof.ops import kind_of

Key = tuple[str, frozenset[tuple[str, Attribute]], tuple[Value, ...], tuple[tuple[Shape, str], ...]]
"""A local computation: equal keys give equal values on every rank."""


@dataclass(frozen=True)
class Reason:
    """Why a local computation gives what it does, for a certificate: an op of the global program
    (None: a sum) on parts, cut so; or a local form of it, of whose results the op's own are these
    (None: a step of the form). wholes: of attention on a part of its keys, what it is on all. ops:
    what it is computed by as well, which stand in no program."""

    form: OpForm | None
    parts: tuple[Relation, ...]
    cuts: Cuts
    at: Coordinates = ()
    written: tuple[int | None, ...] | None = None
    wholes: tuple[Value, ...] | None = None
    ops: tuple[Operation, ...] = ()


def key_of(op: Operation, operands: tuple[Value, ...]) -> Key:
    """What an op computes of its operands' relations."""
    types = tuple([(shape_of(result), kind_of(result)) for result in op.results])
    return op.name, arguments_of(op), operands, types
