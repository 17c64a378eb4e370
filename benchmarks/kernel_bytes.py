"""Bytes that one layer's kernels move: as captured, fused here, and as Inductor fuses the layer.

A layer's bytes are the difference between steps of two layers and of one, forward and backward,
each kernel's inputs and outputs counted once. Inductor's count is its scheduler's own, after
fusion, for this machine's CPU, where it leaves matrix products to the library and fuses by the
rules of its C++ code; on a GPU its fusion may differ. Needs a C++ compiler for Inductor.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shardweave.driver.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.passes.pipeline import run_passes

MODELS = {
    "gpt": "gpt:layers={layers},hidden=256,heads=4,vocab=64,seq=128,batch=4",
    "llama": (
        "hf:llama:num_hidden_layers={layers},hidden_size=256,num_attention_heads=4,"
        "num_key_value_heads=4,intermediate_size=512,vocab_size=64,batch=4,seq=128"
    ),
}
PASSES = {
    "op by op": "cse,dce",
    "fused, library products": "cse,dce,fuse-kernels{matmul=false}",
    "fused": "cse,dce,fuse-kernels",
}


def own_bytes(spec: str, passes: str) -> int:
    """Bytes of a step after these passes."""
    example = build_example(spec, dtype=torch.float32)
    program = run_passes(capture(example.module, kwargs=example.kwargs), passes)
    return sum(program.stats().moved_bytes.values())


def inductor_bytes(spec: str) -> int:
    """Bytes of a step as Inductor compiles it, over all its graphs."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    counted: list[int] = []
    codegen = GraphLowering.codegen

    def counting(graph: Any) -> Any:
        result = codegen(graph)
        counted.append(int(graph.count_bytes()[0]))
        return result

    example = build_example(spec, dtype=torch.float32)
    torch.compiler.reset()
    GraphLowering.codegen = counting  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with config.patch(force_disable_caches=True, compile_threads=1):
            output: Any = torch.compile(example.module)(**example.kwargs)
            loss = output if isinstance(output, torch.Tensor) else output[0]
            loss.backward()
    finally:
        GraphLowering.codegen = codegen
    return sum(counted)


def layer_bytes(kind: str) -> dict[str, int]:
    """Bytes of one layer by method."""
    one, two = (MODELS[kind].format(layers=layers) for layers in (1, 2))
    found = {
        name: own_bytes(two, passes) - own_bytes(one, passes) for name, passes in PASSES.items()
    }
    return found | {"Inductor": inductor_bytes(two) - inductor_bytes(one)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one model")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    kinds = list(MODELS)[: 1 if options.quick else None]
    rows = {kind: layer_bytes(kind) for kind in kinds}
    table = Table("layer", "method", box=None, pad_edge=False)
    table.add_column("MiB", justify="right")
    table.add_column("of Inductor's", justify="right")
    for kind, found in rows.items():
        for name, count in found.items():
            table.add_row(kind, name, f"{count / 2**20:.1f}", f"{count / found['Inductor']:.2f}")
    Console(width=80).print(table)
    if options.json:
        result = {"torch": torch.__version__, "bytes_per_layer": rows}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
