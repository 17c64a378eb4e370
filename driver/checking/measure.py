"""Running a step on one rank of a mesh: checked against eager, trained for a while, timed."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.driver.checking.check import (
    CheckResult,
    EagerOptions,
    Expected,
    check_steps,
    eager_step,
    moved_steps,
    results_of,
    run_eager,
    scalar_loss,
)
from shardweave.driver.models.mixture import dropped_choices
from shardweave.driver.models.models import Example, announce, build_example
from shardweave.driver.models.twin import twin_spec
from shardweave.driver.processes import world
from shardweave.driver.processes.launch import num_cores
from shardweave.driver.report.run import RunReport, print_report
from shardweave.driver.report.text import status
from shardweave.driver.step.compile import compile
from shardweave.driver.step.precision import (
    AUTOCAST,
    PARAMETERS,
    copy_of_model,
    in_precision,
    inputs_in_precision,
)
from shardweave.driver.step.programs import CompiledPrograms
from shardweave.driver.step.request import CompileOptions
from shardweave.driver.step.run_options import RunOptions
from shardweave.driver.training.training import Training, tokens_or_samples, train
from shardweave.ir.capture.seeded import SeededRandom
from shardweave.ir.inspect.stats import stats
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import between_stages, num_ops_on_a_rank
from shardweave.passes.notes import PlanNote
from shardweave.passes.pipeline import parse_passes


def run_and_report(options: RunOptions) -> None:
    """Run a step and print its report on rank 0. Raises ValueError if a check failed."""
    report = run(options)
    if world.rank() == 0:
        print_report(report)
        if options.json:
            Path(options.json).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
            print(f"wrote {options.json}")
    world.leave()
    if report.problem is not None:
        raise ValueError(report.problem)


def run(options: RunOptions) -> RunReport:
    """Run a step on this rank, and on rank 0 the eager model to compare with. Collective."""
    dtype = getattr(torch, options.dtype)
    if world.rank() == 0:
        announce(options.model, dtype)
    with status(f"compiling {options.model}", quiet=world.rank() != 0):
        example = build_example(options.model, dtype=dtype, seed=options.seed)
        step = compiled(options, example)
    program, device = step.program, step.backend.device
    with status("running it", quiet=world.rank() != 0):
        loss, check, training, eager = _measure(options, step, example, program)
    notes = (
        *example.notes,
        *step.programs.notes,
        *_dropped(step),
        *_notes_on_time(options, device),
    )
    if check is not None and check.bound_of:
        notes += (f"the bound is {check.bound_of}",)
    assert isinstance(step.programs, CompiledPrograms)
    return RunReport(
        options=options,
        lowered=step.programs.lowered,
        device=device.type,
        num_local_ops=num_ops_on_a_rank(program),
        collectives=stats(program).collectives,
        between=between_stages(program),
        work=tokens_or_samples(example.kwargs),
        loss=loss,
        check=check,
        training=training,
        eager_training=eager,
        peak_bytes=peak_bytes(device),
        notes=notes,
    )


def compiled(options: RunOptions, example: Example) -> CompiledModule:
    """Compile an example's model with `sw.compile`. Collective."""
    given: dict[str, Any] = {
        option.name: getattr(options.compiled, option.name) for option in fields(CompileOptions)
    }
    given["twin"] = lambda: _twin(options)
    if options.compiled.has_processes and options.compiled.device is None:
        given["device"] = world.local_device(options.mesh.num_devices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanNote)  # the report has them
        model = copy_of_model(example.module)  # the other is run in eager
        return compile(model, kwargs=example.kwargs, **given)


def _twin(options: RunOptions) -> tuple[str, Example]:
    """A small model with the structure of the options' model, and its name."""
    splits = [getattr(x, "n", 1) for x in parse_passes(str(options.compiled.passes or ""))]
    parts = math.prod([options.mesh.num_devices, *splits])
    dtype = getattr(torch, options.dtype)
    spec = twin_spec(options.model, parts)
    return spec, build_example(spec, dtype=dtype, seed=options.seed)


def _measure(
    options: RunOptions, step: CompiledModule, example: Example, program: Program
) -> tuple[float, CheckResult | None, Training | None, Training | None]:
    """Run the step, check it if asked to, and train; then train the eager model on rank 0."""
    device = step.backend.device
    batch = {name: tensor.to(device) for name, tensor in example.kwargs.items()}
    batches = [batch, _next_batch(options, batch)] if options.check else [batch]
    results: list[Expected] = []
    loss = torch.tensor(math.nan)
    for inputs in batches:
        step.zero_grad(set_to_none=True)
        loss = _run(step, inputs, options)
        if options.check:
            results.append(results_of(step, loss))
    training = None
    if options.steps:
        training = train(
            lambda: _run(step, batch, options),
            step.parameters(),
            options.steps,
            stop_above_s=options.stop_above,
        )
    check = eager_training = None
    with _alone_on_rank_0() as is_mine:
        if is_mine:
            eager, how = _eager(options, example.module, device)
            inputs = [inputs_in_precision(b, options.compiled.precision) for b in batches]
            if results:
                with SeededRandom(options.seed):
                    expected = [run_eager(eager, given, how) for given in inputs]
                moved = partial(_moved, options, inputs, device)
                check = check_steps(results, expected, _dtype(options), program, moved)
            if options.steps and options.eager:
                eager_training = train(
                    lambda: eager_step(eager, inputs[0], how), eager.parameters(), options.steps
                )
    first_loss = results[0].loss if results else loss.detach().double().item()
    return first_loss, check, training, eager_training


def _run(step: CompiledModule, batch: Mapping[str, Tensor], options: RunOptions) -> Tensor:
    loss = _loss(step(**batch), options)
    loss.backward()
    return loss


def _loss(output: object, options: RunOptions) -> Tensor:
    """Pick the loss from a step's output, which may be the loss itself."""
    if isinstance(output, Tensor) and not output.ndim:
        return output
    return scalar_loss(output, options.compiled.loss)


def _eager(
    options: RunOptions, model: nn.Module, device: torch.device
) -> tuple[nn.Module, EagerOptions]:
    """Return the eager model to compare with, in the step's precision, and its options."""
    precision = options.compiled.precision
    how = EagerOptions(options.compiled.loss, AUTOCAST.get(precision))
    return in_precision(model, precision).to(device), how


def _dtype(options: RunOptions) -> torch.dtype:
    return PARAMETERS.get(options.compiled.precision, getattr(torch, options.dtype))


def _moved(
    options: RunOptions, batches: Sequence[Mapping[str, Tensor]], device: torch.device
) -> list[Expected]:
    """Return eager results for weights and inputs changed in their last digit."""
    dtype = getattr(torch, options.dtype)
    model = build_example(options.model, dtype=dtype, seed=options.seed).module
    eager, how = _eager(options, model, device)
    with SeededRandom(options.seed):
        return moved_steps(eager, batches, how)


def _next_batch(options: RunOptions, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other inputs of the same shapes: made with the next seed, or the first ones reversed."""
    other = build_example(options.model, dtype=getattr(torch, options.dtype), seed=options.seed + 1)
    if all(torch.equal(other.kwargs[name].to(own.device), own) for name, own in batch.items()):
        return {name: own.flip(-1) if own.ndim else own for name, own in batch.items()}
    return {name: other.kwargs[name].to(own.device) for name, own in batch.items()}


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this rank in bytes: of the GPU, or of the whole process on a CPU; 0 if the
    system does not report it (Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@contextmanager
def _alone_on_rank_0() -> Iterator[bool]:
    """Yield whether this is rank 0, which uses all cores while the other ranks wait for it."""
    threads = torch.get_num_threads()
    is_mine = world.rank() == 0
    if is_mine:
        torch.set_num_threads(num_cores())
    try:
        yield is_mine
    finally:
        torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.barrier()


def _dropped(step: nn.Module) -> tuple[str, ...]:
    """Note how many choices of experts were dropped for lack of slots; () without a capacity."""
    counts = dropped_choices(step)
    if counts is None:
        return ()
    dropped, total = counts
    return (
        f"of {total:,} choices of experts {dropped:,} were dropped in the last step "
        f"({dropped / total:.1%}), for lack of slots",
    )


def _notes_on_time(options: RunOptions, device: torch.device) -> tuple[str, ...]:
    if not options.steps or not options.eager:
        return ()
    if not options.compiled.has_processes:
        return ("times of a virtual mesh say nothing about a real one: its ranks run in turn",)
    if device.type == "cuda":
        return ("eager was timed on rank 0's GPU while the other ranks waited",)
    return (
        f"eager was timed on rank 0, while the other ranks waited, with {num_cores()} threads; "
        f"in the step each rank had {torch.get_num_threads()}",
    )
