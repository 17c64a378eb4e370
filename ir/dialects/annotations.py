"""Annotations of an op beside its arguments: layer, phase, origin, copy, sharding, wanted.

Any op may carry them. They are properties, as xDSL's rewriter drops discardable attributes. All
reading and writing of them goes through the functions of this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TypeAlias, cast

from xdsl.dialects.builtin import ArrayAttr, FileLineColLoc, IntegerAttr, StringAttr
from xdsl.ir import Attribute, Operation, OpResult, SSAValue

from shardweave.ir.dialects.attributes import PhaseAttr, ShardingAttr
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.mesh.placement import Sharding

ANNOTATIONS = ("layer", "phase", "origin", "copy", "sharding", "wanted")
"""The properties, in the order in which they are printed."""

_NAMES = frozenset(ANNOTATIONS)

_SHOWN = 4
"""Most names of layers in a line of a message."""

Copy: TypeAlias = tuple[int, ...]
"""A sub-batch: its coordinate on the time axes."""


def layer_of(op: Operation) -> str:
    """The qualified name of the module an op belongs to; '' for the root."""
    layer = op.properties.get("layer")
    return layer.data if isinstance(layer, StringAttr) else ""


def set_layer(op: Operation, layer: str) -> None:
    op.properties["layer"] = to_attribute(layer)


def common_path(layers: Iterable[str]) -> str:
    """The longest module path that is a prefix of all `layers`."""
    columns = zip(*(layer.split(".") for layer in layers), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))


def joined_layers(op: Operation) -> list[str]:
    """Distinct layers of an op, without '': of a dist op with several producers, theirs."""
    makers = [value.owner for value in op.operands if isinstance(value.owner, Operation)]
    is_joined = op.name.startswith("dist.") and len(set(makers)) > 1
    layers = dict.fromkeys(map(layer_of, makers if is_joined else [op]))
    return [layer for layer in layers if layer]


def shortened(layers: Sequence[str]) -> list[str]:
    """Shorten a list of layers to at most four entries: the first two, "N more", and the last."""
    if len(layers) <= _SHOWN:
        return list(layers)
    return [*layers[:2], f"{len(layers) - 3} more", layers[-1]]


def phase_of(op: Operation) -> str:
    """forward, recompute, backward or optimizer."""
    phase = op.properties.get("phase")
    return phase.phase.data if isinstance(phase, PhaseAttr) else "forward"


def set_phase(op: Operation, phase: str) -> None:
    op.properties["phase"] = PhaseAttr.of(phase)


def follow_makers(op: Operation) -> None:
    """Set an op's phase from forward to backward if it reads a result of a later phase."""
    makers = (value.owner for value in op.operands if isinstance(value.owner, Operation))
    if phase_of(op) == "forward" and any(phase_of(maker) != "forward" for maker in makers):
        set_phase(op, "backward")


def origin_of(op: Operation) -> str | None:
    """Name of the value that a recomputed op computes again; None for other ops."""
    origin = op.properties.get("origin")
    return origin.data if isinstance(origin, StringAttr) else None


def set_origin(op: Operation, origin: str) -> None:
    """Note the name of the value that this op recomputes."""
    op.properties["origin"] = to_attribute(origin)


def copy_of(op: Operation) -> Copy | None:
    """The sub-batch coordinates of an op; None for an op that all sub-batches share."""
    copy = op.properties.get("copy")
    if copy is None:
        return None
    return tuple([index.value.data for index in cast("ArrayAttr[IntegerAttr]", copy)])


def set_copy(op: Operation, copy: Copy) -> None:
    op.properties["copy"] = to_attribute(copy)


def sharding_attrs_of(op: Operation) -> Sequence[ShardingAttr] | None:
    """The sharding attributes of an op's results; None without any. `shardings_of` decodes them."""
    return _list_of(op, "sharding")


def sharding_attrs_of_value(value: SSAValue) -> list[ShardingAttr] | None:
    """A value's sharding attribute, in a list; None for an argument or if its op has no
    shardings."""
    if not isinstance(value, OpResult):
        return None
    shardings = sharding_attrs_of(value.op)
    return None if shardings is None else [shardings[value.index]]


def wanted_attrs_of(op: Operation) -> Sequence[ShardingAttr] | None:
    """The sharding attributes that a plan asks of an op's results; None if free (`wishes_of`)."""
    return _list_of(op, "wanted")


def _list_of(op: Operation, name: str) -> Sequence[ShardingAttr] | None:
    shardings = op.properties.get(name)
    return None if shardings is None else cast("ArrayAttr[ShardingAttr]", shardings).data


def set_sharding_attrs(op: Operation, shardings: Sequence[ShardingAttr] | None) -> None:
    """Set the sharding of each result; None removes the annotation."""
    _set_list(op, "sharding", shardings)


def set_wanted_attrs(op: Operation, shardings: Sequence[ShardingAttr] | None) -> None:
    """Set the sharding attributes that a plan asks of an op's results; None removes them."""
    _set_list(op, "wanted", shardings)


def _set_list(op: Operation, name: str, shardings: Sequence[ShardingAttr] | None) -> None:
    if shardings is None:
        op.properties.pop(name, None)
    else:
        op.properties[name] = ArrayAttr(shardings)


def set_shardings(
    op: Operation, shardings: Sequence[Sharding], shapes: Sequence[tuple[int, ...]]
) -> None:
    pairs = zip(shardings, shapes, strict=True)
    set_sharding_attrs(op, [ShardingAttr.of(sharding, shape) for sharding, shape in pairs])


def annotate(op: Operation, source: Operation) -> None:
    """Copy layer, phase, origin, copy and location, but no sharding, from op `source` to `op`."""
    for name in ANNOTATIONS[:4]:
        if name in source.properties and name not in op.properties:
            op.properties[name] = source.properties[name]
    op.location = source.location


def properties_without(op: Operation, *names: str) -> dict[str, Attribute]:
    return {name: value for name, value in op.properties.items() if name not in names}


def arguments_of(op: Operation, *annotations: str) -> frozenset[tuple[str, Attribute]]:
    """Properties by which ops are compared: all but annotations, plus those in `annotations`."""
    ignored = _NAMES.difference(annotations) if annotations else _NAMES
    return frozenset([item for item in op.properties.items() if item[0] not in ignored])


def annotation_problem(op: Operation) -> str | None:
    """Describe the first malformed annotation of an op; None if there is none."""
    for name, kind in (("layer", StringAttr), ("phase", PhaseAttr), ("origin", StringAttr)):
        value = op.properties.get(name)
        if value is not None and not isinstance(value, kind):
            return f"{name} is {value}, expected a {'phase' if name == 'phase' else 'string'}"
    copy = op.properties.get("copy")
    if copy is not None and not _is_list(copy, IntegerAttr):
        return f"copy is {copy}, expected a list of whole numbers"
    for name in ("sharding", "wanted"):
        value = op.properties.get(name)
        if value is not None and not _is_list(value, ShardingAttr, len(op.results)):
            return f"{name} must list one #dist.sharding for each result"
    return None


def _is_list(attribute: Attribute, kind: type[Attribute], length: int | None = None) -> bool:
    if not isinstance(attribute, ArrayAttr):
        return False
    items = cast("ArrayAttr[Attribute]", attribute).data
    return length in (None, len(items)) and all(isinstance(item, kind) for item in items)


def describe(op: Operation) -> str:
    """Name an op in messages: its op name, first result, layers, and line in the model's source."""
    layers = shortened([f"'{layer}'" for layer in joined_layers(op)])
    result = op.results[0].name_hint if op.results else None
    value = f" (%{result})" if result else ""
    place = op.location
    is_known = isinstance(place, FileLineColLoc)
    source = f" at {place.filename.data}:{place.line.data}" if is_known else ""
    where = f" in layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}" if layers else ""
    return f"{op.name}{value}{where}{source}"
