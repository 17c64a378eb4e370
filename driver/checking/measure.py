"""Running a step on one rank of a mesh: checked against eager, trained for a while, timed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardweave.driver.checking.check import (
    CheckResult,
    Expected,
    check_steps,
    eager_step,
    moved_steps,
    results_of,
    run_eager,
)
from shardweave.driver.models.mixture import dropped_choices
from shardweave.driver.models.models import Example, announce, build_example
from shardweave.driver.models.twin import twin_spec
from shardweave.driver.processes import world
from shardweave.driver.processes.launch import num_cores
from shardweave.driver.report.run import RunReport, print_report
from shardweave.driver.report.text import status
from shardweave.driver.step.compile import bind
from shardweave.driver.step.lowering import compile_program
from shardweave.driver.step.request import Request
from shardweave.driver.step.run_options import RunOptions
from shardweave.driver.training.training import Training, train, work_of
from shardweave.ir.capture.seeded import SeededRandom
from shardweave.ir.inspect.stats import stats
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import between_stages, num_ops_on_a_rank
from shardweave.passes.pipeline import parse_passes


def run_and_report(options: RunOptions) -> None:
    """Run, and on rank 0 say what came of it. Raises ValueError if a check failed."""
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
    """Run a step on this rank, and on rank 0 what it is compared with. Collective."""
    is_distributed = options.backend != "reference"
    device = torch.device("cpu")
    if is_distributed:
        device = world.local_device(options.mesh.num_devices)
        world.join(options.mesh, device)
    dtype = getattr(torch, options.dtype)
    if world.rank() == 0:
        announce(options.model, dtype)
    with status(f"compiling {options.model}", quiet=world.rank() != 0):
        example = build_example(options.model, dtype=dtype, seed=options.seed)
        request = _request(options, example)
        program, made = compile_program(request)
        step = bind(program, request, device)
    with status("running it", quiet=world.rank() != 0):
        loss, check, training, eager = _measure(options, step, example, device, program)
    notes = (*example.notes, *made.notes, *_dropped(step), *_notes_on_time(options, device))
    if check is not None and check.bound_of:
        notes += (f"the bound is {check.bound_of}",)
    return RunReport(
        options=options,
        plan=f"of {options.program}" if options.program else options.plan,
        making=made,
        device=device.type,
        num_local_ops=num_ops_on_a_rank(program),
        collectives=stats(program).collectives,
        between=between_stages(program),
        work=work_of(example.kwargs),
        loss=loss,
        check=check,
        training=training,
        eager_training=eager,
        peak_bytes=peak_bytes(device),
        notes=notes,
    )


def _request(options: RunOptions, example: Example) -> Request:
    """What to compile for an example."""
    return Request(
        model=example.module,
        args=(),
        kwargs=example.kwargs,
        mesh=options.mesh,
        plan=None if options.program else options.plan,
        passes=options.passes,
        sequence_parallel=options.sequence_parallel,
        backend=options.backend,
        validate=options.validate,
        prove=options.prove,
        validate_limit=options.validate_limit,
        twin=lambda: _twin(options),
        program=Program.load(options.program) if options.program else None,
        seed=options.seed,
    )


def _twin(options: RunOptions) -> tuple[str, Example]:
    """A small model of the same structure as that of the options, and its name."""
    splits = [getattr(one, "n", 1) for one in parse_passes(options.passes)]
    parts = math.prod([options.mesh.num_devices, *splits])
    dtype = getattr(torch, options.dtype)
    spec = twin_spec(options.model, parts)
    return spec, build_example(spec, dtype=dtype, seed=options.seed)


def _measure(
    options: RunOptions,
    step: nn.Module,
    example: Example,
    device: torch.device,
    program: Program,
) -> tuple[float, CheckResult | None, Training | None, Training | None]:
    """Run the step, checked if asked to, and train; then the eager model on rank 0 alone."""
    batch = {name: tensor.to(device) for name, tensor in example.kwargs.items()}
    batches = [batch, _next_batch(options, batch)] if options.check else [batch]
    found: list[Expected] = []
    loss = torch.tensor(math.nan)
    for inputs in batches:
        step.zero_grad(set_to_none=True)
        loss = step(**inputs)
        if options.check:
            found.append(results_of(step, loss))
    training = None
    if options.steps:
        training = train(
            lambda: step(**batch),
            step.parameters(),
            options.steps,
            stop_above_s=options.stop_above,
        )
    check = eager_training = None
    with _alone_on_rank_0() as is_mine:
        if is_mine:
            eager = example.module.to(device)
            if found:
                with SeededRandom(options.seed):
                    expected = [run_eager(eager, inputs) for inputs in batches]
                dtype = getattr(torch, options.dtype)
                moved = partial(_moved, options, batches)
                check = check_steps(found, expected, dtype, program, moved)
            if options.steps and options.eager:
                parameters = eager.parameters()
                eager_training = train(lambda: eager_step(eager, batch), parameters, options.steps)
    first_loss = found[0].loss if found else loss.detach().double().item()
    return first_loss, check, training, eager_training


def _moved(options: RunOptions, batches: Sequence[Mapping[str, Tensor]]) -> list[Expected]:
    """What eager computes where weights and inputs differ in their last digit."""
    dtype = getattr(torch, options.dtype)
    model = build_example(options.model, dtype=dtype, seed=options.seed).module
    with SeededRandom(options.seed):
        return moved_steps(model.to(next(iter(batches[0].values())).device), batches)


def _next_batch(options: RunOptions, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other inputs of the same shapes: those of the next seed, or what reversing the first gives.

    A factory may give the same inputs for every seed.
    """
    other = build_example(options.model, dtype=getattr(torch, options.dtype), seed=options.seed + 1)
    if all(torch.equal(other.kwargs[name].to(own.device), own) for name, own in batch.items()):
        return {name: own.flip(-1) if own.ndim else own for name, own in batch.items()}
    return {name: other.kwargs[name].to(own.device) for name, own in batch.items()}


def peak_bytes(device: torch.device) -> int:
    """The most memory that this rank had: of the GPU, or of the whole process; 0 where the system
    does not say it (Windows)."""
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
    """Whether this is rank 0, which has the machine's cores while the others wait for it."""
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
    """A note on tokens that found no slot at the experts of their choice."""
    counts = dropped_choices(step)
    if counts is None:
        return ()
    dropped, total = counts
    return (
        f"of {total:,} choices of experts {dropped:,} were dropped in the last step "
        f"({dropped / total:.1%}), for want of slots",
    )


def _notes_on_time(options: RunOptions, device: torch.device) -> tuple[str, ...]:
    if not options.steps or not options.eager:
        return ()
    if options.backend == "reference":
        return ("times of a virtual mesh say nothing about a real one: its ranks run in turn",)
    if device.type == "cuda":
        return ("eager was timed on rank 0's GPU while the other ranks waited",)
    return (
        f"eager was timed on rank 0, while the other ranks waited, with {num_cores()} threads; "
        f"in the step each rank had {torch.get_num_threads()}",
    )
