"""Generated kernels one by one: time and GB/s beside eager, Inductor and hand-written Triton.

Each case is a function of tensors; it is captured, fused into one region, and that region's
kernel is measured. Bytes are the region's inputs and outputs, each once, and are set against the
measured bandwidth of a plain copy. `--quick` takes small sizes. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import gpu_timing

from shardweave.backends.triton.launch.launch import FusedCall
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.program.traffic import bytes_moved
from shardweave.passes.pipeline import run_passes

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """A computation. shapes: of its operands, given rows and columns."""

    name: str
    run: Callable[..., Any]
    shapes: Callable[[int, int], Sequence[tuple[int, ...]]]
    by_hand: Callable[..., Any] | None = None
    is_memory_bound: bool = True


def add_gelu(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + torch.nn.functional.gelu(x + bias, approximate="tanh")


def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * x


def add_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Any:
    total = x + y
    return total, *aten.native_layer_norm(total, [total.shape[-1]], weight, bias, 1e-5)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return aten.native_layer_norm(x.neg().neg(), [x.shape[-1]], weight, bias, 1e-5)[0]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)
    return (wide * scale).to(x.dtype) * weight


def softmax(x: Tensor) -> Tensor:
    shifted = x.float() - x.float().amax(-1, keepdim=True)
    power = shifted.exp()
    return (power / power.sum(-1, keepdim=True)).to(x.dtype)


def bias_gradient(grad: Tensor, x: Tensor) -> Any:
    inner = aten.gelu_backward(grad, x, approximate="tanh")
    return inner, inner.sum(0)


def matmul_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    product = aten.addmm(bias, x, weight)
    return product, torch.nn.functional.gelu(product, approximate="tanh")


def cases() -> list[Case]:
    import tutorial_kernels

    return [
        Case("bias, gelu, residual", add_gelu, lambda r, c: [(r, c), (c,), (r, c)]),
        Case("silu and gate", silu_gate, lambda r, c: [(r, c), (r, c)]),
        Case("residual, layer norm", add_layer_norm, lambda r, c: [(r, c), (r, c), (c,), (c,)]),
        Case(
            "layer norm", layer_norm, lambda r, c: [(r, c), (c,), (c,)], tutorial_kernels.layer_norm
        ),
        Case("RMS norm", rms_norm, lambda r, c: [(r, c), (c,)]),
        Case("softmax", softmax, lambda r, c: [(r, c)], tutorial_kernels.softmax),
        Case("gelu backward, bias gradient", bias_gradient, lambda r, c: [(r, c), (r, c)]),
        Case(
            "matmul, bias, gelu", matmul_gelu, lambda r, c: [(r, c), (c, 4 * c), (4 * c,)],
            is_memory_bound=False,
        ),
    ]  # fmt: skip


class _Function(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Tensor) -> Any:
        return self.run(*args)


def fused_call(run: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[FusedCall, int]:
    """The kernel of a function, and the bytes that it moves. Raises ValueError unless it is one."""
    program = capture(_Function(run), [t.cpu() for t in tensors], train=False)
    program = run_passes(program, "cse,dce,fuse-kernels")
    found = [op for op in program.ops if isinstance(op, FusedOp)]
    if len(found) != 1 or len(list(program.ops)) != 1:
        raise ValueError(f"the case makes {[op.name for op in program.ops]}, expected one region.")
    _KEPT.append(program)
    return FusedCall(found[0], tensors[0].device), bytes_moved(found[0])


_KEPT: list[object] = []


def measure(case: Case, rows: int, columns: int, bandwidth: float) -> dict[str, Any]:
    """One row of the table."""
    shapes = case.shapes(rows, columns)
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    call, moved = fused_call(case.run, tensors)
    order = [tensors[_position(op)] for op in call.op.operands]
    compiled = torch.compile(case.run)
    times = {
        "shardweave": gpu_timing.seconds_of(lambda: call(*order)),
        "eager": gpu_timing.seconds_of(lambda: case.run(*tensors)),
        "inductor": gpu_timing.seconds_of(lambda: compiled(*tensors)),
    }
    by_hand = case.by_hand
    if by_hand is not None:
        times["by hand"] = gpu_timing.seconds_of(lambda: by_hand(*tensors))
    return {
        "case": case.name,
        "shape": [rows, columns],
        "bytes": moved,
        "seconds": times,
        "of_copy": moved / times["shardweave"] / bandwidth if case.is_memory_bound else None,
        "config": call.kernels[0][1],
        "family": call.kernels[0][0].family,
    }


def _position(value: Any) -> int:
    """Which argument of the function a value is."""
    return int(value.index)


def main() -> int:
    options = parse_options()
    console = Console(width=120)
    reason = gpu_timing.why_not()
    sizes = [(4096, 1024)] if options.quick else [(8192, 1024), (16384, 4096)]
    if reason is not None:
        shapes = ", ".join(f"{rows}x{columns}" for rows, columns in sizes)
        print(
            f"skipped: {reason}; would time {len(cases())} kernels in bfloat16 at {shapes} beside "
            "eager, Inductor and Triton by hand, as microseconds and shares of a copy's bandwidth"
        )
        return 0
    bandwidth = gpu_timing.copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for case in cases():
            rows.append(measure(case, *size, bandwidth))
            if options.json:
                result = {**gpu_timing.machine(), "copy_bytes_per_s": bandwidth, "rows": rows}
                Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    show(rows, bandwidth, console)
    return 0


def show(rows: list[dict[str, Any]], bandwidth: float, console: Console) -> None:
    """One line for each case and size."""
    table = Table("case", "shape", box=None, pad_edge=False)
    for column in ("MiB", "us", "of copy", "eager us", "inductor us", "by hand us"):
        table.add_column(column, justify="right")
    for row in rows:
        times = {name: f"{seconds * 1e6:.1f}" for name, seconds in row["seconds"].items()}
        share = "" if row["of_copy"] is None else f"{row['of_copy']:.0%}"
        table.add_row(
            row["case"], "x".join(map(str, row["shape"])), f"{row['bytes'] / 2**20:.0f}",
            times["shardweave"], share, times["eager"], times["inductor"], times.get("by hand", ""),
        )  # fmt: skip
    console.print(table)
    console.print(f"bfloat16; a plain copy moves {bandwidth / 1e9:.0f} GB/s")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small size")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
