"""A GPU measured as a device type: peaks, efficiencies, bandwidths, and the host's share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardweave.backends.emit.calls import FUNCTIONS
from shardweave.ir.ops.records.attention import FLASH, FLASH_BACKWARD

Call = Callable[[], object]

IN_GRAPH = 8
"""Calls in one graph, so that its start is a small part of the time."""

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the square products measured in bfloat16."""

LARGE = 8192
"""Rows and columns of the product that gives a dtype's peak."""

SEQUENCES = (512, 2048, 8192)
COPIED_BYTES = 2**28
ISSUED = 500


def is_on_gpu() -> bool:
    """True if tensors are made on a GPU by default, as `profile_worker` has it."""
    return torch.get_default_device().type == "cuda"


def device_s(call: Call) -> float:
    """Median seconds of a call on the GPU, without the host's: a graph of some calls is replayed.
    Calls that no graph can hold, such as those that wait for a result, are timed as they run."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(IN_GRAPH):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return statistics.median(_elapsed_s(call) for _ in range(IN_GRAPH))
    return statistics.median(_elapsed_s(graph.replay) for _ in range(5)) / IN_GRAPH


def _elapsed_s(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def issue_s() -> float:
    """Mean host seconds to issue an op, over ops of a transformer block."""
    x, weight = torch.randn(64, 64), torch.randn(64, 64)
    calls: list[Call] = [
        partial(torch.mm, x, weight),
        partial(torch.add, x, weight),
        partial(torch.nn.functional.gelu, x),
        partial(torch.native_layer_norm, x, [64], weight[0], weight[1], 1e-5),
    ]
    for call in calls:
        call()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for number in range(ISSUED):
        calls[number % len(calls)]()
    issued_s = time.perf_counter() - start_s
    torch.cuda.synchronize()
    return issued_s / ISSUED


def measure_gpu() -> dict[str, Any]:
    """Measure the current GPU, which is the default device: the fields of a `DeviceType`."""
    overhead_s = device_s(partial(torch.neg, torch.ones(())))
    flops = _peaks(overhead_s)
    square_s = {n: device_s(_product(n, n, n, torch.bfloat16)) for n in SIZES}
    flops["bfloat16"] = max(2.0 * n**3 / _busy_s(s, overhead_s) for n, s in square_s.items())
    large = torch.randn(COPIED_BYTES // 2, dtype=torch.bfloat16)
    moved_s = _busy_s(device_s(partial(torch.neg, large)), overhead_s)
    n = SIZES[-2]
    return {
        "name": torch.cuda.get_device_name(),
        "flops": flops,
        "memory_bytes": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        "memory_bandwidth_bytes_s": 2 * large.nbytes / moved_s,
        "overhead_s": overhead_s,
        "issue_s": issue_s(),
        "efficiency": [
            _point(2.0 * n**3, s, overhead_s, flops["bfloat16"]) for n, s in square_s.items()
        ],
        "unaligned_slowdown": max(
            1.0, device_s(_product(n, n - 1, n - 1, torch.bfloat16)) / square_s[n]
        ),
        "attention_efficiency": _attention(overhead_s, flops["bfloat16"]),
        "host_bandwidth_bytes_s": _host_bandwidth(),
    }


def _busy_s(seconds: float, overhead_s: float) -> float:
    """Subtract the overhead from an op's seconds; at least a tenth of them remains."""
    return max(seconds - overhead_s, 0.1 * seconds)


def _point(work: float, seconds: float, overhead_s: float, peak: float) -> tuple[float, float]:
    return work, min(1.0, work / _busy_s(seconds, overhead_s) / peak)


def _product(m: int, k: int, n: int, dtype: torch.dtype) -> Call:
    left, right = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    return partial(torch.mm, left, right, out=torch.empty(m, n, dtype=dtype))


def _peaks(overhead_s: float) -> dict[str, float]:
    """FLOP/s of a large product in each dtype but bfloat16."""
    before = torch.get_float32_matmul_precision()
    precisions = {"tfloat32": "high", "float32": "highest"}
    peaks: dict[str, float] = {}
    try:
        for name in ("float16", "tfloat32", "float32", "float64"):
            torch.set_float32_matmul_precision(precisions.get(name, before))
            dtype = getattr(torch, name.replace("tfloat", "float"))
            seconds = device_s(_product(LARGE, LARGE, LARGE, dtype))
            peaks[name] = 2.0 * LARGE**3 / _busy_s(seconds, overhead_s)
    finally:
        torch.set_float32_matmul_precision(before)
    return peaks


def _attention(overhead_s: float, peak: float) -> list[tuple[float, float]]:
    """(FLOPs, share of the peak) of causal attention, forward and backward together."""
    points: list[tuple[float, float]] = []
    for length in SEQUENCES:
        q, k, v = (torch.randn(4, 16, length, 128, dtype=torch.bfloat16) for _ in range(3))
        forward = partial(FUNCTIONS[FLASH], q, k, v, 0.0, True)
        out, logsumexp = forward()
        saved = (out, q, k, v, out, logsumexp, 0.0, True)
        seconds = device_s(forward) + device_s(partial(FUNCTIONS[FLASH_BACKWARD], *saved))
        work = 2.0 * q.numel() * length  # two products of the forward pass, five of the backward
        _, share = _point(3.5 * work, seconds, 2 * overhead_s, peak)
        points.append((work, share))
    return points


def _host_bandwidth() -> float:
    """Bytes per second between the GPU and pinned memory, in the slower direction."""
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8)
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    copies = (partial(host.copy_, here, non_blocking=True), partial(here.copy_, host))
    return min(
        COPIED_BYTES / statistics.median(_elapsed_s(copy) for _ in range(3)) for copy in copies
    )
