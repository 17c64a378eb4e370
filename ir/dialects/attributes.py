"""Attributes of the `dist` dialect: meshes, shardings, phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Self, cast

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr
from xdsl.ir import Attribute, ParametrizedAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from shardweave.ir.by_identity import ByIdentity
from shardweave.ir.mesh.mesh import Axis, AxisKind, Mesh
from shardweave.ir.mesh.placement import (
    Placement,
    Sharding,
    contiguous,
    is_even,
    is_plain,
    of_length,
    ordered,
)
from shardweave.ir.strings import TextParser

_WRITTEN_KINDS: tuple[AxisKind, ...] = ("time", "stage")
"""The kinds of mesh axes that are written before their names; `space` is not written."""

PHASES = ("forward", "recompute", "backward", "optimizer")


@irdl_attr_definition
class PhaseAttr(ParametrizedAttribute):
    """The part of the training step that an op belongs to."""

    name = "dist.phase"
    phase: StringAttr

    @staticmethod
    @lru_cache
    def of(phase: str) -> PhaseAttr:
        return PhaseAttr(StringAttr(phase))

    def verify(self) -> None:
        if self.phase.data not in PHASES:
            raise ValueError(f"phase '{self.phase.data}' is unknown; use one of {PHASES}")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return (StringAttr(parser.parse_identifier()),)

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string(f"<{self.phase.data}>")


@irdl_attr_definition
class MeshAttr(ParametrizedAttribute):
    """The device mesh: `#dist.mesh<[stage "stage" = 2, "data" = 2, time "batch" = 2]>`."""

    name = "dist.mesh"
    axis_names: ArrayAttr[StringAttr]
    axis_sizes: ArrayAttr[IntAttr]
    axis_kinds: ArrayAttr[StringAttr]

    @staticmethod
    def of(mesh: Mesh) -> MeshAttr:
        return MeshAttr(
            ArrayAttr(StringAttr(axis.name) for axis in mesh.axes),
            ArrayAttr(IntAttr(axis.size) for axis in mesh.axes),
            ArrayAttr(StringAttr(axis.kind) for axis in mesh.axes),
        )

    @property
    def mesh(self) -> Mesh:
        return _mesh_of(self)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        axes: list[Axis] = []

        def axis() -> None:
            kind: AxisKind = "space"
            for word in _WRITTEN_KINDS:
                if parser.parse_optional_keyword(word):
                    kind = word
            name = parser.parse_str_literal()
            parser.parse_punctuation("=")
            size = parser.parse_integer(allow_boolean=False, allow_negative=False)
            try:
                axes.append(Axis(name, size, kind))
                Mesh(axes)
            except ValueError as error:
                parser.raise_error(str(error))

        with parser.in_angle_brackets():
            parser.parse_comma_separated_list(parser.Delimiter.SQUARE, axis)
        return MeshAttr.of(Mesh(axes)).parameters

    def print_parameters(self, printer: Printer) -> None:
        axes = [
            f'{f"{axis.kind} " if axis.kind in _WRITTEN_KINDS else ""}"{axis.name}" = {axis.size}'
            for axis in self.mesh.axes
        ]
        printer.print_string(f"<[{', '.join(axes)}]>")


@lru_cache
def _mesh_of(attr: MeshAttr) -> Mesh:
    columns = zip(attr.axis_names, attr.axis_sizes, attr.axis_kinds, strict=True)
    return Mesh(
        Axis(name.data, size.data, cast("AxisKind", kind.data)) for name, size, kind in columns
    )


@irdl_attr_definition
class ShardingAttr(ParametrizedAttribute):
    """A sharding, read like Shardy's: `#dist.sharding<[{"data"}, {}], unreduced = ["tensor"]>`.

    Axes of a dim are ordered major to minor. An axis whose stride differs from plain nested shards
    is written with its stride, `{"tensor":16}`: the device at coordinate c holds the
    indices i with (i // 16) % size == c. `max_unreduced` names axes over which each device
    holds one term of a maximum. An unevenly sharded dim is written with its global size,
    `{"tensor"} of 7`, as the types of a local program have only the shard's size, 4.
    """

    name = "dist.sharding"
    dims: ArrayAttr[ArrayAttr[StringAttr]]
    strides: ArrayAttr[ArrayAttr[IntAttr]]
    lengths: ArrayAttr[IntAttr]
    unreduced: ArrayAttr[StringAttr]
    reduction: StringAttr

    @staticmethod
    @lru_cache(maxsize=16384)
    def of(sharding: Sharding, shape: tuple[int, ...]) -> ShardingAttr:
        """The attribute for the sharding of a value of global `shape`. Stride 0 stands for a
        contiguous shard, length 0 for an evenly sharded dim."""
        pairs = list(zip(sharding.dims, shape, strict=True))
        names = [[StringAttr(p.axis) for p in dim] for dim in sharding.dims]
        strides = [
            [IntAttr(0 if is_plain(dim, size) else p.stride) for p in dim] for dim, size in pairs
        ]
        return ShardingAttr(
            ArrayAttr(ArrayAttr(dim) for dim in names),
            ArrayAttr(ArrayAttr(dim) for dim in strides),
            ArrayAttr(IntAttr(0 if is_even(dim, size) else size) for dim, size in pairs),
            ArrayAttr(StringAttr(axis) for axis in sharding.unreduced),
            StringAttr(sharding.reduction),
        )

    @property
    def of_any_size(self) -> ShardingAttr:
        """This attribute without the sizes of unevenly sharded dims."""
        lengths = ArrayAttr(IntAttr(0) for _ in self.lengths)
        return ShardingAttr(self.dims, self.strides, lengths, self.unreduced, self.reduction)

    def on(self, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
        """The sharding of a value of global `shape`. Raises ValueError if it does not fit."""
        return _kept(_on, self, shape, mesh)

    def on_local(self, local: tuple[int, ...], mesh: Mesh) -> Sharding:
        """The sharding of a value whose shard on one rank has the shape `local`."""
        return _kept(_on_local, self, local, mesh)

    def verify(self) -> None:
        if self.reduction.data not in ("sum", "max"):
            raise ValueError(f"reduction '{self.reduction.data}' is unknown; use sum or max")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        def axis() -> tuple[StringAttr, IntAttr]:
            name = StringAttr(parser.parse_str_literal())
            if parser.parse_optional_punctuation(":") is None:
                return name, IntAttr(0)
            return name, IntAttr(parser.parse_integer(allow_boolean=False, allow_negative=False))

        def dim() -> tuple[list[tuple[StringAttr, IntAttr]], IntAttr]:
            axes = parser.parse_comma_separated_list(parser.Delimiter.BRACES, axis)
            if parser.parse_optional_keyword("of") is None:
                return axes, IntAttr(0)
            return axes, IntAttr(parser.parse_integer(allow_boolean=False, allow_negative=False))

        unreduced: list[StringAttr] = []
        reduction = "sum"
        with parser.in_angle_brackets():
            dims = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, dim)
            if parser.parse_optional_punctuation(",") is not None:
                word = parser.parse_identifier()
                if word not in ("unreduced", "max_unreduced"):
                    parser.raise_error(f"found '{word}', expected unreduced or max_unreduced")
                reduction = "sum" if word == "unreduced" else "max"
                parser.parse_punctuation("=")
                unreduced = parser.parse_comma_separated_list(
                    parser.Delimiter.SQUARE, lambda: StringAttr(parser.parse_str_literal())
                )
        return (
            ArrayAttr(ArrayAttr(name for name, _ in axes) for axes, _ in dims),
            ArrayAttr(ArrayAttr(stride for _, stride in axes) for axes, _ in dims),
            ArrayAttr(length for _, length in dims),
            ArrayAttr(unreduced),
            StringAttr(reduction),
        )

    def print_parameters(self, printer: Printer) -> None:
        dims = [
            ", ".join(
                f'"{name.data}"' + (f":{stride.data}" if stride.data else "")
                for name, stride in zip(names, strides, strict=True)
            )
            for names, strides in zip(self.dims, self.strides, strict=True)
        ]
        text = ", ".join(
            f"{{{dim}}}" + (f" of {length.data}" if length.data else "")
            for dim, length in zip(dims, self.lengths, strict=True)
        )
        tail = ""
        if self.unreduced.data:
            word = "unreduced" if self.reduction.data == "sum" else "max_unreduced"
            tail = f", {word} = [" + ", ".join(f'"{a.data}"' for a in self.unreduced) + "]"
        printer.print_string(f"<[{text}]{tail}>")

    @classmethod
    def parse_text(cls, text: str) -> Self:
        """Read `[{"data"}, {}]`, as between the angle brackets. Raises xDSL's ParseError."""
        return cls.new(cls.parse_parameters(TextParser(Context(), f"<{text}>")))


_Read = Callable[[ShardingAttr, tuple[int, ...], Mesh], Sharding]

_read = ByIdentity[Sharding]()
"""Shardings decoded so far, by function, attribute, shape and mesh."""


def _kept(read: _Read, attr: ShardingAttr, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
    key = read, id(attr), shape, id(mesh)
    known = _read.find(key)
    return known if known is not None else _read.keep(key, read(attr, shape, mesh), (attr, mesh))


def _on_local(attr: ShardingAttr, local: tuple[int, ...], mesh: Mesh) -> Sharding:
    if len(attr.dims) != len(local):
        return _on(attr, local, mesh)
    shape = [
        length.data or size * mesh.sizes([a for axis in names for a in mesh.parts(axis.data)])
        for names, length, size in zip(attr.dims, attr.lengths, local, strict=True)
    ]
    sharding = _on(attr, tuple(shape), mesh)
    if sharding.local_shape(shape) != local:
        raise ValueError(
            f"sharding {attr} gives shards of shape {sharding.local_shape(shape)} for a value of "
            f"global shape {tuple(shape)}, but the shard here has shape {local}; correct the "
            "sharding or the type."
        )
    return sharding


@lru_cache(maxsize=16384)
def _on(attr: ShardingAttr, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
    if len(attr.dims) != len(shape):
        raise ValueError(
            f"sharding {attr} has {len(attr.dims)} dims, but the value has shape {shape}; give "
            "one {...} per dim."
        )
    dims: list[tuple[Placement, ...]] = []
    cuts = zip(attr.dims, attr.strides, attr.lengths, shape, strict=True)
    for names, strides, length, size in cuts:
        axes = [part for name in names for part in mesh.parts(name.data)]
        if length.data not in (0, size):
            raise ValueError(
                f"sharding {attr} says that a dim has size {length.data}, but the value has "
                f"shape {shape}; write the dim's size, or leave it out."
            )
        if not any(stride.data for stride in strides):
            dims.append(contiguous(axes, size, mesh))
        elif all(stride.data for stride in strides):
            placements: list[Placement] = []
            for name, stride in zip(names, strides, strict=True):
                parts = mesh.parts(name.data)
                for at, part in enumerate(parts, start=1):
                    inner = stride.data * mesh.sizes(parts[at:])
                    placements.append(Placement(part, mesh.size(part), inner))
            dims.append(of_length(ordered(p for p in placements if p.size > 1), size))
        else:
            raise ValueError(
                f"sharding {attr} gives a stride to some axes of a dim but not to others; give a "
                "stride to each axis, or to none for contiguous nested shards."
            )
    pending = [part for axis in attr.unreduced for part in mesh.parts(axis.data)]
    wide = [axis for axis in pending if mesh.size(axis) > 1]
    unreduced = tuple(sorted(wide, key=mesh.names.index))
    reduction = "max" if unreduced and attr.reduction.data == "max" else "sum"
    sharding = Sharding(tuple(dims), unreduced, reduction)
    problem = sharding.problem(shape, mesh)
    if problem is not None:
        raise ValueError(f"sharding {attr} does not fit a value of shape {shape}: {problem}.")
    return sharding
