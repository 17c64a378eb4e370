"""Names by which a plan can pin the result of one op: `h.0:add.Tensor:1`, `h.0:mm:backward.3`.

A layer's name alone stands for all its outputs. The two additions of a transformer layer's
residual stream are outputs of the same layer, so that a plan that treats them differently names
the op as well: layer, ATen name, and which of those in the layer's forward pass, from 0, or in
its backward pass, `backward.0`.
"""

from __future__ import annotations

from collections import Counter

from xdsl.ir import Operation

from shardweave.ir.annotations import layer_of, phase_of
from shardweave.ir.program import Program

OP_MARK = ":"
"""No name of a module has it."""


def named_ops(program: Program) -> dict[str, Operation]:
    """The ops with one result, by name."""
    counts: Counter[str] = Counter()
    found: dict[str, Operation] = {}
    for op in program.ops:
        phase = phase_of(op)
        if phase not in ("forward", "backward") or len(op.results) != 1:
            continue
        kind = OP_MARK.join((layer_of(op), op.name.removeprefix("aten."), ""))
        kind += "" if phase == "forward" else "backward."
        found[f"{kind}{counts[kind]}"] = op
        counts[kind] += 1
    return found
