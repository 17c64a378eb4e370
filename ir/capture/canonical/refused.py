"""Calls that have no exact sharded form yet, with what to do instead."""

from __future__ import annotations

from shardweave.ir.capture.canonical.base import Call, CanonicalError, Result, form


@form("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique_dim")
def _data_dependent(call: Call) -> Result:
    raise CanonicalError(
        f"{call.name} gives a result whose shape or value steers the program by the data; "
        "write the model with masks of fixed shape instead."
    )
