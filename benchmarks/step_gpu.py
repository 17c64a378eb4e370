"""A training step on one GPU: eager, torch.compile, and shardweave with and without its kernels.

Blocks of GPT-2-medium and of a 1B Llama, in bfloat16: seconds of forward and backward, and the
most memory that torch held. `--quick` takes few layers and short sequences. Needs a GPU.
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

from shardweave.driver.models.models import Example, build_example
from shardweave.driver.step.compile import compile

MODELS = {
    "GPT-2-medium blocks": "gpt:layers={layers},hidden=1024,heads=16,vocab=50304,seq={seq},batch=8",
    "Llama-1B blocks": (
        "hf:llama:num_hidden_layers={layers},hidden_size=2048,num_attention_heads=32,"
        "num_key_value_heads=8,intermediate_size=8192,vocab_size=32000,batch=4,seq={seq}"
    ),
}
METHODS = ("eager", "torch.compile", "shardweave", "shardweave, generated products",
           "shardweave, CUDA graph", "shardweave, no kernels")  # fmt: skip

Run = Callable[[], Any]


def made(method: str, example: Example) -> tuple[Run, Any]:
    """What runs one step, and the module that holds its gradients."""
    batch = {name: value.cuda() for name, value in example.kwargs.items()}
    if not method.startswith("shardweave"):
        module = example.module.cuda()
        run = torch.compile(module) if method == "torch.compile" else module
        return lambda: _loss(run(**batch)).backward(), module
    generated = method.endswith("products")
    step = compile(
        example.module,
        kwargs=example.kwargs,
        device="cuda",
        backend="distributed" if method.endswith("no kernels") else "triton",
        passes="recompute-producers,fuse-kernels" if generated else (),
        cuda_graph=method.endswith("graph"),
        only_loss=True,
        backward="in_call",
    )
    return lambda: step(**batch), step


def _loss(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.loss


def measure(method: str, spec: str) -> dict[str, Any]:
    """Seconds and peak bytes of a step with one method."""
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
    return {
        "method": method,
        "seconds": gpu_timing.seconds_of(step, repeats_ms=1000),
        "peak_bytes": gpu_timing.peak_bytes(step),
    }


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
    rows = [
        {"model": name, **measure(method, spec.format(layers=layers, seq=seq))}
        for name, spec in MODELS.items()
        for method in METHODS
    ]
    table = Table("model", "method", box=None, pad_edge=False)
    for column in ("ms per step", "peak GiB"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{row['seconds'] * 1e3:.2f}", f"{row['peak_bytes'] / 2**30:.2f}")
        table.add_row(row["model"], row["method"], *numbers)
    Console(width=100).print(table)
    if options.json:
        result = {**gpu_timing.machine(), "layers": layers, "seq": seq, "rows": rows}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers, short sequences")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
