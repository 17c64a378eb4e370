"""Random regions in Triton's interpreter; run by test_triton_interpreter.py.

`python interpreted_regions.py FIRST COUNT` runs the regions of these seeds, and prints those that
differ.
"""

from __future__ import annotations

import sys
import warnings

from shardweave.backends.triton.launch.launch import FusedCall
from shardweave.ir.dialects.kernel import fuse
from shardweave.ir.ops.registry import specs
from shardweave.tests.backends import interpreter as _  # noqa: F401
from shardweave.tests.backends.random_regions import RandomRegion
from shardweave.tests.backends.region_ops import random_region
from shardweave.tests.backends.region_results import problem
from shardweave.tests.ir_text import step

OPS = frozenset(spec.name for spec in specs() if spec.role)
"""All that a kernel may hold."""

ENOUGH = 500
"""Kernels among which each op should be."""

NUM_PERTURBED = 8
"""Runs of the reference with moved values. A result of random sign at zero crossings has the same one
in all of them, and seems sure, once in 128."""


def check(region: RandomRegion) -> tuple[bool, str | None]:
    """Whether a kernel computes a region, and what is wrong with what it gives."""
    if not region.outputs:
        return False, None
    program = step(region.text)
    ops = list(program.ops)
    fused = fuse(ops, program.return_op, list(range(len(ops))))
    call = FusedCall(fused)
    if call.region is None:
        return False, None
    tensors = {value.name: value.own for value in region.inputs}
    given = [tensors[str(operand.name_hint)] for operand in fused.operands]
    found = call(*given)
    if not call.kernels:
        return False, None
    others = [region.perturbed(seed) for seed in range(NUM_PERTURBED)]
    by_name = {value.name: value for value in region.outputs}
    for result, tensor in zip(fused.results, found, strict=True):
        name = str(result.name_hint)
        wrong = problem(tensor, by_name[name], [other[name] for other in others])
        if wrong is not None:
            return True, wrong
    return True, None


def main() -> int:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    num_kernels, wrong = 0, 0
    seen: set[str] = set()
    seed = first
    while num_kernels < count:
        region = random_region(seed)
        try:
            is_kernel, said = check(region)
        except Exception as error:  # noqa: BLE001  a crash is a difference too
            is_kernel, said = True, f"{type(error).__name__}: {error} {error.__cause__}"
        num_kernels += is_kernel
        seen |= {step.name for step in region.steps if is_kernel}
        if said is not None:
            wrong += 1
            print(f"--- seed {seed}: {said}\n{region.text}", flush=True)
        seed += 1
    print(f"{num_kernels} kernels of {seed - first} regions and {len(seen)} ops, {wrong} wrong")
    unseen = sorted(OPS - seen) if count >= ENOUGH else []
    if unseen:
        print(f"no kernel had {', '.join(unseen)}")
    return 1 if wrong or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
