"""The name of an op in messages."""

from __future__ import annotations

from xdsl.dialects import builtin
from xdsl.ir import Operation

from shardweave.ir.syntax import layer_of


def describe(op: Operation) -> str:
    """How messages name an op: its name, first result, layer, and line of the model's source."""
    layer = layer_of(op)
    result = op.results[0].name_hint if op.results else None
    value = f" (%{result})" if result else ""
    place = op.location
    source = (
        f" at {place.filename.data}:{place.line.data}"
        if isinstance(place, builtin.FileLineColLoc)
        else ""
    )
    return f"{op.name}{value}" + (f" in layer '{layer}'" if layer else "") + source
