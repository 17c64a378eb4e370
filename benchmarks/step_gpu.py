"""A training step on one GPU: eager, torch.compile, and shardweave on each of its backends.

Blocks of GPT-2-medium and of a 1B Llama, in bfloat16: seconds of forward and backward, and the
most memory that torch held, beside what is predicted for `--cluster`. `--quick` takes one
model of two layers. Needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import gpu_timing

import shardweave as sw
from shardweave.driver.models.models import Example, build_example
from shardweave.driver.step.compile import compile

MODELS = {
    "GPT-2-medium blocks": "gpt:layers={layers},hidden=1024,heads=16,vocab=50304,seq={seq},batch=8",
    "Llama-1B blocks": (
        "hf:llama:num_hidden_layers={layers},hidden_size=2048,num_attention_heads=32,"
        "num_key_value_heads=8,intermediate_size=8192,vocab_size=32000,batch=4,seq={seq}"
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "shardweave, ATen": {},
    "shardweave, Inductor": {"backend": "inductor"},
    "shardweave, Inductor, CUDA graph": {"backend": "inductor", "cuda_graph": True},
    "shardweave, Triton": {"backend": "triton"},
    "shardweave, Triton, CUDA graph": {"backend": "triton", "cuda_graph": True},
    "shardweave, Triton, generated products": {
        "backend": "triton",
        "passes": "recompute-producers,fuse-kernels",
    },
}
METHODS = ("eager", "torch.compile", "torch.compile, CUDA graph", *OPTIONS)

Run = Callable[[], Any]


def made(method: str, example: Example) -> tuple[Run, Any]:
    """What runs one step, and the module that holds its gradients."""
    batch = {name: value.cuda() for name, value in example.kwargs.items()}
    if method not in OPTIONS:
        module = example.module.cuda()
        mode = "reduce-overhead" if method.endswith("graph") else "default"
        run = torch.compile(module, mode=mode) if method != "eager" else module
        return lambda: gpu_timing.loss_of(run(**batch)).backward(), module
    step = compile(
        example.module,
        kwargs=example.kwargs,
        device="cuda",
        only_loss=True,
        backward="in_call",
        **OPTIONS[method],
    )
    return lambda: step(**batch), step


def measure(method: str, spec: str, cluster: str) -> dict[str, Any]:
    """Seconds and peak bytes of a step with one method; of the one by ATen also those predicted."""
    # What the method before held goes first.
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    run, module = made(method, build_example(spec, dtype=torch.bfloat16))

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        run()

    for _ in range(3):
        step()
    seconds = gpu_timing.seconds_of(step, repeats_ms=1000)
    module.zero_grad()
    before = torch.cuda.memory_allocated()
    row = {"method": method, "seconds": seconds, "peak_bytes": before + gpu_timing.peak_bytes(step)}
    if method != "shardweave, ATen":
        return row
    predicted = sw.simulate(module.program, cluster, optimizer_multiplier=0.0)
    return row | {"predicted_s": predicted.time_s, "predicted_bytes": predicted.peak_bytes}


def main() -> int:
    options = parse_options()
    reason = gpu_timing.why_not()
    layers, seq = (2, 256) if options.quick else (8, 1024)
    if reason is not None:
        print(
            f"skipped: {reason}; would time steps of {' and '.join(MODELS)} ({layers} layers, "
            f"{seq} tokens, bfloat16) with {', '.join(METHODS)}, and their peak memory"
        )
        return 0
    rows: list[dict[str, Any]] = []
    for name, spec in list(MODELS.items())[: 1 if options.quick else None]:
        for method in METHODS:
            given = spec.format(layers=layers, seq=seq)
            rows.append({"model": name, **measure(method, given, options.cluster)})
            if options.json:
                result = {**gpu_timing.machine(), "layers": layers, "seq": seq, "rows": rows}
                Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    show(rows)
    return 0


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("model", "method", box=None, pad_edge=False)
    for column in ("ms per step", "predicted", "peak GiB", "predicted"):
        table.add_column(column, justify="right")
    for row in rows:
        seconds = [f"{1e3 * row[k]:.2f}" if k in row else "" for k in ("seconds", "predicted_s")]
        peaks = [
            f"{row[k] / 2**30:.2f}" if k in row else "" for k in ("peak_bytes", "predicted_bytes")
        ]
        table.add_row(row["model"], row["method"], *seconds, *peaks)
    Console(width=110).print(table)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one model of two layers")
    parser.add_argument("--cluster", default="h100-pod", help="what predictions are for")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
