"""Rules of layer, group and RMS normalisation, forward and backward."""

from __future__ import annotations

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.base import Notation, Rule, rule
from shardweave.ir.sharding.rules.dims import dividing


def _normalized_rank(op: AtenOp) -> int:
    derive = spec_of(op).derived.get("normalized_shape")
    return len(derive(op) if derive else op.value("normalized_shape"))


@rule
def layer_norm(op: AtenOp) -> Rule:
    """`... k, k, k -> ... k, ... ., ... .` with k, the normalized dims, whole."""
    kept, ones = "..." + " ." * _normalized_rank(op), "." + " ." * (_normalized_rank(op) - 1)
    operands = [kept, *[ones] * (len(op.operands) - 1)]
    return Notation(op, f"{', '.join(operands)} -> {', '.join([kept] * len(op.results))}").rule()


@rule
def layer_norm_backward(op: AtenOp) -> Rule:
    """`... k, ... k, ... ., ... ., k, k -> ... k, k, k`: leading dims reduce in the last two."""
    kept, ones = "..." + " ." * _normalized_rank(op), "." + " ." * (_normalized_rank(op) - 1)
    taken = [name for name in ("weight", "bias") if op.signature.parameter(name) is not None]
    num_parameters = sum(op.tensor(name) is not None for name in taken)
    operands = [kept] * (len(op.operands) - num_parameters) + [ones] * num_parameters
    results = [kept, ones, ones]
    wanted = [dims for dims, given in zip(results, op.value("output_mask"), strict=False) if given]
    return Notation(op, f"{', '.join(operands)} -> {', '.join(wanted)}").rule()


@rule
def group_norm(op: AtenOp) -> Rule:
    """`n (g c) ., (g c), (g c) -> n (g c) ., n g, n g` with c, the channels of a group, whole."""
    value = "n (g c)" + " ." * (len(shape_of(op.operands[0])) - 2)
    operands = [value, *["(g c)"] * (len(op.operands) - 1)]
    return _grouped(op, operands, [value, "n g", "n g"])


@rule
def group_norm_backward(op: AtenOp) -> Rule:
    """`n (g c) ., n (g c) ., n g, n g, (g c) -> n (g c) ., (g c), (g c)`: n reduces."""
    value = "n (g c)" + " ." * (len(shape_of(op.operands[0])) - 2)
    operands = [value, value, "n g", "n g", *["(g c)"] * (len(op.operands) - 4)]
    results = zip([value, "(g c)", "(g c)"], op.value("output_mask"), strict=True)
    return _grouped(op, operands, [dims for dims, wanted in results if wanted])


def _grouped(op: AtenOp, operands: list[str], results: list[str]) -> Rule:
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    # Every text starts with `n (g c)`, so g is factor 1.
    return Notation(op, text, {"g": op.value("group")}).rule(
        whole=["c"], localize=dividing("group", 1)
    )
