"""Steps on one GPU beside eager on it: every backend, captured graphs, copies to the host, NCCL.

`python benchmarks/gpu_exact.py [--only NAME] [--json FILE] [--quick]`: each row says how far the
loss and the gradients are from eager's in float64, beside how far eager itself is in that dtype.
Peak memory and time stand beside what `sw.simulate` predicts. Exits 1 if a row is worse than three
times eager. Needs a GPU.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

import gpu_timing
from gpu_timing import loss_of
from rank_processes import free_port

import shardweave as sw
from shardweave.backends.distributed import in_flight
from shardweave.driver.models.models import Example, build_example

GPT = "gpt:layers=2,hidden=128,heads=4,vocab=512,seq=64,batch=4"
MODELS = {
    "GPT": GPT,
    "Llama": "hf:llama:tiny",
    "BERT": "hf:bert:tiny",
    "T5": "hf:t5:tiny",
    "U-Net": "unet:channels=32,size=32",
    "CNN": "cnn:depth=18,channels=16",
    "Mixtral": "hf:mixtral:tiny",
}
BACKENDS: dict[str, dict[str, Any]] = {
    "ATen": {},
    "Triton": {"backend": "triton"},
    "Inductor": {"backend": "inductor"},
    "ATen, CUDA graph": {"cuda_graph": True, "backward": "in_call"},
    "Triton, CUDA graph": {"backend": "triton", "cuda_graph": True, "backward": "in_call"},
    "Inductor, CUDA graph": {"backend": "inductor", "cuda_graph": True, "backward": "in_call"},
}
PLAIN = ("ATen", "Triton", "Inductor")
"""Names of the backends without graphs, with which those of the others begin."""

LARGE_GPT = "gpt:layers=8,hidden=1024,heads=16,vocab=1024,seq=1024,batch=8"
QUICK = ("GPT", "Mixtral")
DTYPES = (torch.float32, torch.bfloat16)
LEAST = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-3}
"""Errors below these are no finding, however exact eager is."""

TIMES_EAGER = 3.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """name: of the row. run: makes the rest of the row."""

    name: str
    run: Callable[[], Row]


def on_gpu(batch: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The batch there, its floating-point tensors in `dtype`."""
    return {
        name: value.to("cuda", dtype if value.is_floating_point() else None)
        for name, value in batch.items()
    }


def eager_results(example: Example, dtype: torch.dtype) -> dict[str, Tensor]:
    """Loss and gradients of eager on the GPU, in float64, by name."""
    module = copy.deepcopy(example.module).to("cuda", dtype)
    loss = loss_of(module(**on_gpu(example.kwargs, dtype)))
    loss.backward()
    return results_of(module, loss)


def results_of(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    gradients = {
        name: parameter.grad.detach().double().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.detach().double().clone()} | gradients


def distance(results: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative distance, by norm, of a result; infinite if the names differ."""
    if results.keys() != wanted.keys():
        return float("inf")
    whole = torch.stack([value.norm() for value in wanted.values()]).max()
    worst = [
        float((results[name] - value).norm() / torch.maximum(value.norm(), 1e-3 * whole))
        for name, value in wanted.items()
    ]
    return max(worst)


def step_row(spec: str, dtype: torch.dtype, options: dict[str, Any]) -> Row:
    """Calls of a compiled step beside eager."""
    example = build_example(spec, dtype=dtype)
    wanted = eager_results(example, torch.float64)
    of_eager = distance(eager_results(example, dtype), wanted)
    batch = on_gpu(example.kwargs)
    step = sw.compile(example.module, kwargs=example.kwargs, device="cuda", **options)
    results: dict[str, Tensor] = {}
    for _ in range(3):  # the first call captures a graph; each must give the same
        step.zero_grad()
        loss = loss_of(step(**batch))
        if options.get("backward") != "in_call":
            loss.backward()
        results = results_of(step, loss)
    return judged(distance(results, wanted), of_eager, dtype)


def dropout_row(options: dict[str, Any]) -> Row:
    """A step with dropout on the GPU beside the same step on the CPU, in float64."""
    rows: list[dict[str, Tensor]] = []
    for device, given in (("cpu", {}), ("cuda", options)):
        example = build_example(f"{GPT},dropout=0.2", dtype=torch.float64)
        step = sw.compile(example.module, kwargs=example.kwargs, device=device, seed=1, **given)
        loss = loss_of(step(**{name: value.to(device) for name, value in example.kwargs.items()}))
        loss.backward()
        rows.append({name: value.cpu() for name, value in results_of(step, loss).items()})
    return judged(distance(rows[1], rows[0]), 0.0, torch.float64)


def judged(own: float, of_eager: float, dtype: torch.dtype) -> Row:
    allowed = max(TIMES_EAGER * of_eager, LEAST[dtype])
    return {"error": own, "eager_error": of_eager, "ok": own <= allowed}


def training_row(optimizer: Callable[..., Any], options: dict[str, Any]) -> Row:
    """Three steps of a loop in float64: parameters beside eager's."""
    example = build_example(GPT, dtype=torch.float64)
    eager = copy.deepcopy(example.module).cuda()
    example.module.cuda()
    batch = on_gpu(example.kwargs)
    own = optimizer(example.module.parameters())
    step = sw.compile(
        example.module, kwargs=batch, device="cuda", optimizers=[own], **options
    )  # fmt: skip
    for module, used in ((eager, optimizer(eager.parameters())), (step, own)):
        for _ in range(3):
            used.zero_grad()
            loss_of(module(**batch)).backward()
            used.step()
    trained, wanted = (
        {name: p.detach().double() for name, p in module.named_parameters()}
        for module in (step, eager)
    )
    return judged(distance(trained, wanted), 1e-10, torch.float64)


def offload_row() -> Row:
    """Gradients of a step with its activations on the host, beside a step that keeps them."""
    kept, again, offloaded = (_offloading(passes) for passes in ("", "", "offload-activations"))
    results = [row.pop("results") for row in (kept, again, offloaded)]
    of_eager = distance(results[1], results[0])
    row = judged(distance(results[2], results[0]), of_eager, torch.float64)
    return row | {"rows": {"kept": kept, "offloaded": offloaded}}


def _offloading(passes: str) -> Row:
    example = build_example(LARGE_GPT, dtype=torch.bfloat16)
    step = sw.compile(
        example.module, kwargs=example.kwargs, device="cuda", passes=passes or (), only_loss=True,
        backward="in_call",
    )  # fmt: skip
    run = partial(step, **on_gpu(example.kwargs))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        results = results_of(step, run())
    finally:
        torch.use_deterministic_algorithms(False)
    results = {name: value.cpu() for name, value in results.items()}
    return {"results": results, "seconds": gpu_timing.seconds_of(run, repeats_ms=300)} | memory(
        step, run
    )


def memory(step: Any, run: Callable[[], Any]) -> Row:
    """Peak bytes of a step without gradients from before, beside the prediction."""
    step.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    peak = before + gpu_timing.peak_bytes(run)
    predicted = sw.simulate(step.program, "h100-pod", optimizer_multiplier=0.0)
    return {"peak_bytes": peak, "predicted_bytes": predicted.peak_bytes}


def nccl_row() -> Row:
    """Each collective of the backend over a group of this one process, through NCCL."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1,
        device_id=torch.device("cuda", 0),
    )  # fmt: skip
    try:
        wrong = [name for name, is_equal in collectives() if not is_equal]
    finally:
        dist.destroy_process_group()
    return {"error": float(len(wrong)), "eager_error": 0.0, "ok": not wrong, "wrong": wrong}


def collectives() -> Iterator[tuple[str, bool]]:
    """(name, whether its result is the operand) of collectives among one rank."""
    world = dist.group.WORLD
    assert world is not None
    group = in_flight.Group(world, (0,), (0,))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = torch.randn(8, 6, device="cuda").mul(100).to(dtype)
        cases: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(in_flight.start_all_reduce, x, group),
            "all_reduce of maxima": partial(in_flight.start_all_reduce, x, group, "max"),
            "all_gather": partial(in_flight.start_all_gather, x, group, 0, 8),
            "all_gather, columns": partial(in_flight.start_all_gather, x, group, 1, 3),
            "reduce_scatter": partial(in_flight.start_reduce_scatter, x, group, 0, 8),
            "reduce_scatter, columns": partial(in_flight.start_reduce_scatter, x, group, 1, 3),
        }
        for name, start in cases.items():
            yield f"{name}, {dtype}", bool((start().wait() == x).all())
        several = in_flight.start_all_reduces([x, x + 1], group, "sum")
        yield (
            f"all_reduces, {dtype}",
            all(bool((flight.wait() == x + number).all()) for number, flight in enumerate(several)),
        )
        kept = x.clone()
        in_flight.all_reduce_in_place([kept], group)
        yield f"all_reduce in place, {dtype}", bool((kept == x).all())


def two_processes_row() -> Row:
    """Two processes on this one GPU, joined by gloo: a sharded step beside eager."""
    import torch.multiprocessing as mp

    port = free_port()
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, port, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        end_s = time.monotonic() + 100
        for process in ranks:
            process.join(max(1.0, end_s - time.monotonic()))
        if any(process.exitcode for process in ranks) or queue.empty():
            raise RuntimeError(f"exit codes {[process.exitcode for process in ranks]}")
        errors = queue.get()
    finally:
        for process in ranks:
            process.kill()
    worst = max(errors.values())
    return judged(worst, 1e-10, torch.float64) | {"rows": errors}


def _rank(rank: int, port: int, queue: Any) -> None:
    faulthandler.enable()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )  # fmt: skip
    torch.cuda.set_device(0)
    errors: dict[str, float] = {}
    for name, options in {
        "data=2": {"mesh": "data=2"},
        "data=2, ZeRO 3": {"mesh": "data=2", "zero": 3},
        "tensor=2": {"mesh": "tensor=2"},
        "tensor=2, Triton": {"mesh": "tensor=2", "backend": "triton"},
        "tensor=2, Inductor": {"mesh": "tensor=2", "backend": "inductor"},
    }.items():
        example = build_example(GPT, dtype=torch.float64)
        wanted = eager_results(example, torch.float64)
        step = sw.compile(
            example.module, kwargs=example.kwargs, device="cuda:0", batch="global", **options
        )
        loss = loss_of(step(**on_gpu(example.kwargs)))
        loss.backward()
        results = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in results_of(step, loss).items()
        }
        errors[name] = distance(results, wanted)
        print(f"rank {rank}: {name}: {errors[name]:.1e}", file=sys.stderr, flush=True)
    if rank == 0:
        queue.put(errors)
    dist.barrier()
    dist.destroy_process_group()


def checks(quick: bool) -> Iterator[Check]:
    yield Check("NCCL, one device", nccl_row)
    for model, spec in MODELS.items():
        if quick and model not in QUICK:
            continue
        for backend, options in BACKENDS.items():
            for dtype in DTYPES:
                name = f"{model}, {backend}, {str(dtype).removeprefix('torch.')}"
                yield Check(name, partial(step_row, spec, dtype, options))
    for backend in PLAIN:
        yield Check(f"dropout, {backend}", partial(dropout_row, BACKENDS[backend]))
    adam = partial(torch.optim.AdamW, lr=1e-2)
    for backend in PLAIN:
        yield Check(f"training, AdamW, {backend}", partial(training_row, adam, BACKENDS[backend]))
    yield Check("training, fused AdamW", partial(training_row, partial(adam, fused=True), {}))
    sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    yield Check("training, SGD", partial(training_row, sgd, {}))
    yield Check("two processes on one GPU", two_processes_row)
    yield Check("offload-activations", offload_row)


def measured(check: Check) -> Row:
    """The row of a check; an error's last lines if it fails."""
    start_s = time.monotonic()
    try:
        row = check.run()
    except Exception as error:  # noqa: BLE001  the row says it
        row = {"ok": False, "failed": f"{type(error).__name__}: {error}"[:600]}
        row["traceback"] = traceback.format_exc()[-3000:]
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    return {"check": check.name, "took_s": time.monotonic() - start_s} | row


def main() -> int:
    options = parse_options()
    reason = gpu_timing.why_not()
    chosen = [c for c in checks(options.quick) if c.name.startswith(options.only)]
    if reason is not None:
        print(f"skipped: {reason}; would check {len(chosen)} steps and collectives beside eager")
        return 0
    end_s = time.monotonic() + options.seconds
    torch.backends.cudnn.allow_tf32 = False  # float32 is compared as such
    rows: list[Row] = []
    for check in chosen:
        if time.monotonic() > end_s:
            rows.append({"check": check.name, "ok": None, "failed": "no time was left"})
            continue
        rows.append(measured(check))
        print(line_of(rows[-1]), file=sys.stderr, flush=True)
        if options.json:
            result = {**gpu_timing.machine(), "rows": rows}
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    show(rows)
    return int(any(row["ok"] is False for row in rows))


def line_of(row: Row) -> str:
    said = row.get("failed") or f"{row['error']:.1e} beside eager's {row['eager_error']:.1e}"
    return f"{row['check']}: {state_of(row)}, {said}"


def state_of(row: Row) -> str:
    if row["ok"] is None:
        return row.get("state", "not run")
    return "ok" if row["ok"] else "FAILED"


def show(rows: list[Row]) -> None:
    """A line for each check. A row that did not run may have a `state`."""
    table = Table("check", "", "error", "eager's", box=None, pad_edge=False)
    for row in rows:
        numbers = [f"{row[key]:.1e}" if key in row else "" for key in ("error", "eager_error")]
        table.add_row(row["check"], state_of(row), *numbers)
    Console(width=110).print(table)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models")
    parser.add_argument("--only", default="", metavar="TEXT", help="the rows whose name begins so")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no row after that")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
