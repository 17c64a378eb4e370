"""Timing on one GPU: the median of runs, peak memory, and the bandwidth of a plain copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COPY_BYTES = 256 << 20


def seconds_of(run: Callable[[], Any], *, repeats_ms: int = 100) -> float:
    """Median seconds of a call on the GPU, with its caches cold, as Triton's own bench does."""
    from triton.testing import do_bench

    found: Any = do_bench(run, warmup=25, rep=repeats_ms, return_mode="median")
    return float(found) / 1e3


def copy_bandwidth() -> float:
    """Bytes per second that a copy of 256 MiB reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source))


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that torch held during a call, over what it held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def loss_of(output: Any) -> Tensor:
    """The loss that a model returns: alone, first of a tuple, or as `.loss`."""
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.loss


def why_not() -> str | None:
    """Why nothing can be measured here; None if it can."""
    return None if torch.cuda.is_available() else "no GPU"


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    import triton

    name = torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}
