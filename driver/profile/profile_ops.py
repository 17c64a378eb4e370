"""Times of ops on this rank while all ranks are busy: by name and size, and those of a program."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from xdsl.ir import Operation, SSAValue

from shardweave.backends.emit.calls import prepared
from shardweave.backends.programs import last_uses
from shardweave.driver.profile.profile_gpu import Call, device_s, is_on_gpu
from shardweave.ir.dialects.aten import AtenOp, overload_named
from shardweave.ir.dialects.dist import DistOp, RecvOp, SendOp, ShardIndexOp, SliceOp, WaitOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.shards import take_blocks
from shardweave.ir.ops.records.attention import FLASH, FLASH_BACKWARD
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of
from shardweave.planners.cost.model import DEFAULT_OP, kind_of, signature_text

SECONDS = 0.04
"""Seconds for which one op of one size is repeated."""

ELEMENTS = (2**12, 2**15, 2**18, 2**21)
PRODUCTS = (
    (32, 32, 32),
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 512, 1024),
    (1024, 1024, 2048),
)
"""m, k, n of products of m x k and k x n matrices."""

SEQUENCES = (32, 128, 256)
DTYPES = ("float64", "bfloat16", "float16")

Points = list[tuple[float, float]]


def median_s(call: Call, seconds: float = SECONDS) -> float:
    """Median seconds of a call, repeated for a while on all ranks at once. Collective."""
    call()
    if dist.is_initialized():
        dist.barrier()
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def measure_ops() -> dict[str, Points]:
    """Measure ops: by name, a curve of (work, seconds), as in `DeviceType.op_times`. Collective."""
    points: dict[str, Points] = {}
    for name, flops, args in _arithmetic():
        call = partial(overload_named(name), *args)
        points.setdefault(name, []).append((flops, median_s(call)))
    for elements in ELEMENTS:
        for name, args in _elementwise(elements):
            call = partial(overload_named(name), *args)
            points.setdefault(name, []).append((_bytes(args) + _bytes(call()), median_s(call)))
        turned = torch.randn(elements // 64, 64).t()
        copied = 2.0 * turned.nbytes
        points.setdefault("aten.view", []).append((copied, median_s(partial(turned.reshape, -1))))
    return points | {DEFAULT_OP: points["aten.add.Tensor"]}


def measure_peaks(float32: float) -> dict[str, float]:
    """Measure FLOP/s by dtype: `float32` times a ratio from one matrix product each. Collective."""
    reference_s = median_s(_product(torch.float32))
    peaks = {"float32": float32}
    for name in DTYPES:
        seconds = median_s(_product(getattr(torch, name)), SECONDS / 2)
        peaks[name] = float32 * reference_s / seconds
    return peaks


def _product(dtype: torch.dtype) -> Call:
    return partial(torch.mm, *(torch.randn(256, 256, dtype=dtype) for _ in range(2)))


def _arithmetic() -> Iterator[tuple[str, float, Sequence[Any]]]:
    """Yield (op, FLOPs, arguments) of products, attention and convolutions in float32."""
    for m, k, n in PRODUCTS:
        left, right, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
        yield "aten.mm", 2.0 * m * k * n, (left, right)
        yield "aten.addmm", 2.0 * m * k * n, (bias, left, right)
    for size in SEQUENCES:
        batch = torch.randn(16, size, 64)
        yield "aten.bmm", 2.0 * batch.numel() * size, (batch, batch.transpose(1, 2))
        q = torch.randn(4, 4, size, 64)
        flops = 2.0 * q.numel() * size
        out, logsumexp = overload_named(FLASH)(q, q, q, 0.0, True)
        yield FLASH, 2 * flops, (q, q, q, 0.0, True)
        yield FLASH_BACKWARD, 5 * flops, (out, q, q, q, out, logsumexp, 0.0, True)
        x, w = torch.randn(4, 32, size // 4, size // 4), torch.randn(32, 32, 3, 3)
        flops = 2.0 * x.numel() * 32 * 9
        sizes = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        mask = [True, True, False]
        yield "aten.convolution", flops, (x, w, None, *sizes)
        yield "aten.convolution_backward", 2 * flops, (x, x, w, None, *sizes, mask)


def _bytes(value: object) -> float:
    if isinstance(value, Tensor):
        return float(value.nbytes)
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    return 0.0


def _elementwise(elements: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield (op, arguments) of ops in float32 that cost their reads and writes."""
    rows = torch.randn(elements // 64, 64)
    weight = torch.ones(64)
    out, mean, rstd = torch.ops.aten.native_layer_norm(rows, [64], weight, weight, 1e-5)
    mask = [True, True, True]
    yield "aten.add.Tensor", (rows, rows)
    yield "aten.mul.Tensor", (rows, rows)
    yield "aten.gelu", (rows,)
    yield "aten.gelu_backward", (rows, rows)
    yield "aten.relu", (rows,)
    yield "aten.threshold_backward", (rows, rows, 0)
    yield "aten.silu", (rows,)
    yield "aten.tanh", (rows,)
    yield "aten.clone", (rows,)
    yield "aten.sum.dim_IntList", (rows, [0])
    yield "aten.native_layer_norm", (rows, [64], weight, weight, 1e-5)
    yield "aten.native_layer_norm_backward", (out, rows, [64], mean, rstd, weight, weight, mask)
    yield "aten._softmax", (rows, 1, False)
    yield "aten._softmax_backward_data", (rows, rows, 1, torch.float32)
    yield "aten._log_softmax", (rows, 1, False)
    yield "aten._log_softmax_backward_data", (rows, rows, 1, torch.float32)


# The ops of a program, as they run in it


def measure_program(program: Program, seconds: float) -> dict[str, list[float]]:
    """Measure the seconds of each op by signature, in rounds for about `seconds`. Collective.

    The program, or each function of its stages, runs as on a rank, on random numbers; collectives
    and messages give the right shapes and move nothing. The time to free memory counts to the op
    after which it is freed. On a GPU each distinct op is measured once, by `device_s`.
    """
    times: dict[str, list[float]] = {}
    parts = [(part, last_uses(part)) for part in parts_of(program)]
    compute = [op for part, _ in parts for op in part.ops if kind_of(op) == "compute"]
    names = {op: signature_text(op) for op in compute}
    on_gpu = is_on_gpu()
    for part, dying in parts:
        _round(part, names, dying, times if on_gpu else {}, on_gpu)
    if on_gpu:
        return times
    end_s = time.perf_counter() + seconds
    done = torch.zeros(1)
    while not done:
        if dist.is_initialized():
            dist.barrier()
        for part, dying in parts:
            _round(part, names, dying, times)
        done.fill_(time.perf_counter() >= end_s)
        if dist.is_initialized():  # all ranks stop after the same round
            dist.all_reduce(done, dist.ReduceOp.MAX)
    return times


def _round(
    program: Program,
    names: Mapping[Operation, str],
    dying: Mapping[Operation, list[SSAValue]],
    times: dict[str, list[float]],
    on_gpu: bool = False,
) -> None:
    environment = {slot.value: _made_up(slot.value) for slot in program.arguments}
    for op in program.ops:
        call = _call(op, environment)
        if on_gpu and op in names and names[op] not in times:
            times[names[op]] = [device_s(call)]
        start_s = time.perf_counter()
        results = call()
        environment.update(zip(op.results, results, strict=True))
        del results
        for value in dying.get(op, ()):
            del environment[value]
        elapsed_s = time.perf_counter() - start_s
        if op in names and not on_gpu:
            times.setdefault(names[op], []).append(elapsed_s)


def _made_up(value: SSAValue) -> Tensor:
    shape, dtype = shape_of(value), dtype_of_value(value)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype) * 0.02
    return torch.zeros(shape, dtype=dtype)


def _call(op: Operation, environment: Mapping[SSAValue, Tensor]) -> Callable[[], Sequence[Tensor]]:
    if isinstance(op, DistOp):
        return lambda: _stand_in(op, [environment[value] for value in op.operands])
    if not isinstance(op, AtenOp):
        raise ValueError(f"'{op.name}' cannot be measured; lower it first.")
    return prepared(op, environment.__getitem__)


def _stand_in(op: DistOp, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors of the shapes of a `dist` op's results, without communication."""
    if isinstance(op, WaitOp):
        return operands
    if isinstance(op, ShardIndexOp):
        return [torch.zeros((), dtype=torch.int64)]
    if isinstance(op, SliceOp):
        dim, block = op.dim, op.block
        size = operands[0].shape[dim] // shape_of(op.results[0])[dim]
        return [take_blocks(operands[0], dim, size, block, 0)]
    if isinstance(op, SendOp):
        return []
    if isinstance(op, RecvOp):
        return [_made_up(value) for value in op.results]
    shapes = [shape_of(value) for value in op.results]
    return [
        operand.clone() if tuple(operand.shape) == shape else operand.new_zeros(shape)
        for operand, shape in zip(operands, shapes, strict=True)
    ]
