"""How long a structural diff takes on large programs, with one planted change and with many.

    python benchmarks/ir_diff.py --ops 10000 50000

A program of many equal layers is made as text. It is compared with itself plus one op (one
hunk), and with itself with an op put into every layer. Times are processor seconds of the best of
three runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from shardweave.ir.diff import structural_diff
from shardweave.ir.program import Program

OPS_PER_LAYER = 20


def layered_program(num_ops: int, *, added_every: int | None = None) -> Program:
    """About `num_ops` ops in layers; every so many layers there is one op more."""
    lines: list[str] = []
    arguments = ['%x: tensor<8x8xf32> {dist.kind = "input", dist.name = "x"}']
    value = "%x"
    for layer in range(num_ops // OPS_PER_LAYER):
        weight = f"%h.{layer}.w"
        arguments.append(
            f'{weight}: tensor<8x8xf32> {{dist.kind = "param", dist.name = "h.{layer}.w"}}'
        )
        note = f'{{layer = "h.{layer}", phase = forward}} : tensor<8x8xf32>'
        for index in range(OPS_PER_LAYER):
            new = f"%v{layer}x{index}"
            call = (f"aten.mm({value}, {weight})", f"aten.tanh({value})")[index % 2]
            lines.append(f"{new} = {call} {note}")
            value = new
        if added_every and layer % added_every == added_every // 2:
            lines.append(f"%n{layer} = aten.neg({value}) {note}")
            value = f"%n{layer}"
    body = "\n".join(lines)
    return Program.parse(
        f"builtin.module {{\nfunc.func @step({', '.join(arguments)}) -> (tensor<8x8xf32> "
        f'{{dist.kind = "output", dist.name = "0"}}) {{\n{body}\n'
        f"func.return {value} : tensor<8x8xf32>\n}}\n}}\n"
    )


def measure_diff(num_ops: int, *, runs: int = 3) -> dict[str, float]:
    """Seconds of a diff with one new op, and with one new op in each layer."""
    layers = num_ops // OPS_PER_LAYER
    before = layered_program(num_ops)
    found: dict[str, float] = {"ops": num_ops}
    for name, every, hunks in (("one_s", layers, 1), ("each_layer_s", 1, layers)):
        after = layered_program(num_ops, added_every=every)
        times: list[float] = []
        for _ in range(runs):
            start_s = time.process_time()
            diff = structural_diff(before, after)
            times.append(time.process_time() - start_s)
            assert diff.num_hunks == diff.count("added") == len(diff.changes) == hunks
        found[name] = min(times)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, nargs="+", default=[10_000, 50_000])
    for num_ops in parser.parse_args(arguments).ops:
        print(json.dumps(measure_diff(num_ops)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
