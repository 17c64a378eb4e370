"""Calls that have no exact sharded form yet, with what to do instead."""

from __future__ import annotations

from shardweave.ir.capture.canonical.base import Call, CanonicalError, Result, form

_RANDOM = (
    "aten.native_dropout", "aten.bernoulli", "aten.bernoulli.p", "aten.rand", "aten.randn",
    "aten.rand_like", "aten.randn_like", "aten.randint", "aten.randint_like", "aten.randperm",
    "aten.normal_functional", "aten.uniform", "aten.multinomial", "aten.rrelu_with_noise",
    "aten.rrelu_with_noise_functional", "aten._fused_dropout",
)  # fmt: skip


@form(*_RANDOM)
def random(call: Call) -> Result:
    raise CanonicalError(
        f"{call.name} draws random numbers, which would differ from device to device; set the "
        "module's dropout probability to 0 (or call .eval() on it) and draw noise outside the "
        "model, passing it as an input."
    )


@form("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique_dim")
def data_dependent(call: Call) -> Result:
    raise CanonicalError(
        f"{call.name} gives a result whose shape or value steers the program by the data; "
        "write the model with masks of fixed shape instead."
    )
