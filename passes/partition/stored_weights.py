"""Bookkeeping of parameters that are stored in finer shards than their uses read.

Such a parameter (`dist.used`) is gathered before its first use and freed after the last use of the
forward pass, so that it is not kept gathered; the backward pass gathers it again, with phase
recompute. Views of it are recomputed where they are read. A cast to a narrower dtype is done on the
shards, so that fewer bytes are gathered.
"""

from __future__ import annotations

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.flow import Flow


class StoredWeights:
    """The parameters stored in finer shards than ops read, their views, and which are gathered now.

    stored: these parameters, and their casts to narrower dtypes, with their shardings as stored.
    """

    def __init__(self, flow: Flow) -> None:
        self.stored: dict[SSAValue, Sharding] = {
            value: sharding
            for value, sharding in flow.stored.items()
            if sharding != flow.sharding(value)
        }
        self._views: dict[SSAValue, AtenOp] = {}
        self._ready: set[SSAValue] = set()
        self._made: set[SSAValue] = set()

    def is_view(self, op: AtenOp) -> bool:
        """True if an op is a view or cast of a stored weight; notes it, so that it can be
        repeated."""
        if not spec_of(op).keeps_weight or len(op.operands) != 1:
            return False
        (value,), (result,) = op.operands, op.results
        if value not in self.stored and value not in self._views:
            return False
        if op.name == "aten._to_copy" and value in self.stored and _narrows(value, result):
            self.stored[result] = self.stored[value]
        self._views[result] = op
        return True

    def lacks(self, value: SSAValue) -> bool:
        """True if a value is a weight, or its view, to gather now; marks it as gathered."""
        if value in self._ready or (value not in self.stored and value not in self._views):
            return False
        self._ready.add(value)
        return True

    def is_made_again(self, value: SSAValue) -> bool:
        """True if a weight has been gathered before, and freed."""
        return value in self._made

    def free(self) -> set[SSAValue]:
        """Mark all gathered weights as freed; returns them."""
        freed, self._ready = self._ready, set()
        self._made |= freed
        return freed


def _narrows(value: SSAValue, result: SSAValue) -> bool:
    return dtype_of_value(result).itemsize <= dtype_of_value(value).itemsize
