"""Measured rates of matrix products and messages, to choose between sending and computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist

_SIZE = 512
_MESSAGE_BYTES = 1 << 22
_LATENCY_S = 50e-6
"""Latency of a message. Every rank computes an update itself if that takes less."""


def is_worth_sending(
    flops: int, result_bytes: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """True if ranks should split replicated updates and send results, instead of each computing
    all. Collective. Each of P ranks then saves (P-1)/P of the compute time, and receives (P-1)/P of
    the results."""
    flops_per_s, bytes_per_s = _rates(dtype, device)
    return flops / flops_per_s > max(result_bytes / bytes_per_s, _LATENCY_S)


@cache
def _rates(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Measure on rank 0 the FLOP/s of a product, and the bytes/s of an all-to-all. Collective."""
    x = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    size = dist.get_world_size()
    message = message[: _MESSAGE_BYTES // size * size]
    received = torch.empty_like(message)
    product_s = _seconds(lambda: torch.mm(x, x), device)
    exchange_s = _seconds(lambda: dist.all_to_all_single(received, message), device)
    measured = torch.tensor([product_s, exchange_s], dtype=torch.float64, device=device)
    dist.broadcast(measured, src=0)
    product_s, exchange_s = measured.tolist()
    return 2 * _SIZE**3 / product_s, message.numel() * (size - 1) / size / exchange_s


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the shortest of three runs after a warm-up."""
    seconds: list[float] = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
