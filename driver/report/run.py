"""Output of `shardweave run`: what was run, whether it equals eager, and how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from shardweave.driver.checking.check import CheckResult, relative_error
from shardweave.driver.report.text import plain_table
from shardweave.driver.step.lowering import Lowered
from shardweave.driver.step.run_options import RunOptions
from shardweave.driver.training.training import Training, Work
from shardweave.ir.program.program_stats import CollectiveStats
from shardweave.ir.program.staged import BetweenStages
from shardweave.planners.cost.quantity import bytes_text, counted, seconds_text
from shardweave.planners.plan.plan_parts import Predicted

CHECKED_STEPS = 3
"""Steps whose losses a check compares: rounding grows with every update after that."""

CHECKED = ("bound", "loss_error", "max_rel_grad_error", "worst_parameter", "num_parameters")
"""Fields of a `CheckResult` that the JSON report has unchanged."""


@dataclass(frozen=True)
class RunReport:
    """Results of `run`. Times are rank 0's, in seconds; collectives are counted on one rank."""

    options: RunOptions
    lowered: Lowered
    device: str
    num_local_ops: int
    collectives: tuple[CollectiveStats, ...]
    between: BetweenStages | None
    work: Work
    loss: float
    check: CheckResult | None
    training: Training | None
    eager_training: Training | None
    peak_bytes: int
    notes: tuple[str, ...]

    @property
    def predicted(self) -> Predicted | None:
        """The plan's prediction."""
        return self.lowered.plan.predicted if self.lowered.plan else None

    @property
    def mesh(self) -> str:
        return str(self.options.mesh) if self.options.mesh.axes else ""

    @property
    def problem(self) -> str | None:
        """Reason why the check failed; None if it passed, or if none was asked for."""
        if self.check is None:
            return None
        where = f"{self.options.model} on {self.mesh or 'one device'} is not equal to eager"
        check = self.check
        errors = {
            "the loss": check.loss_error,
            f"the gradient of '{check.worst_parameter}'": check.max_rel_grad_error,
            f"the buffer '{check.worst_buffer}'": check.buffer_error,
            f"the loss of the first {CHECKED_STEPS} steps": self._training_error(),
        }
        for what, error in errors.items():
            if not error <= check.bound:
                return f"{where}: relative error of {what} is {error:.3g}, bound {check.bound:.3g}."
        return None

    def _training_error(self) -> float:
        if self.training is None or self.eager_training is None:
            return 0.0
        pairs = zip(self.training.losses, self.eager_training.losses, strict=True)
        return max(relative_error(*pair) for pair in list(pairs)[:CHECKED_STEPS])

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data. What was not asked for is None."""
        options, check = self.options, self.check
        training, eager = self.training, self.eager_training
        predicted, compiled = self.predicted, options.compiled
        return {
            "model": options.model,
            "mesh": self.mesh,
            "plan": options.plan,
            "sequence_parallel": compiled.sequence_parallel,
            "dtype": options.dtype,
            "backend": compiled.backend,
            "device": self.device,
            "seed": options.seed,
            "num_ops": self.lowered.num_captured_ops,
            "num_local_ops": self.num_local_ops,
            "capture_s": self.lowered.capture_s,
            "passes_s": self.lowered.lowering_s,
            "collectives": collective_rows(self.collectives),
            "between_stages": None if self.between is None else asdict(self.between),
            "loss": self.loss,
            "eager_loss": check.eager_loss if check else eager.losses[0] if eager else None,
            "equal": None if check is None else self.problem is None,
            **{name: getattr(check, name) if check else None for name in CHECKED},
            "buffer_error": check.buffer_error if check else None,
            "small_gradients": list(check.at_floor) if check else None,
            "step_s": training.step_s if training else None,
            "step_times_s": list(training.times_s) if training else None,
            "eager_step_s": eager.step_s if eager else None,
            "peak_bytes": self.peak_bytes,
            "predicted_step_s": predicted.time_s if predicted else None,
            "predicted_peak_bytes": predicted.peak_bytes if predicted else None,
            "losses": list(training.losses) if training else None,
            "eager_losses": list(eager.losses) if eager else None,
            "work_per_step": {"count": self.work.count, "unit": self.work.unit},
            "notes": list(self.notes),
        }


def collective_rows(collectives: Sequence[CollectiveStats]) -> list[dict[str, Any]]:
    """Count and bytes of one rank's collectives by kind and axes, over all phases."""
    rows: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for c in collectives:
        start = {"kind": c.kind, "axes": list(c.axes), "count": 0, "bytes": 0}
        row = rows.setdefault((c.kind, c.axes), start)
        row["count"] += c.count
        row["bytes"] += c.bytes
    return list(rows.values())


def print_report(report: RunReport) -> None:
    """Print what was run, and the results."""
    options, lowered = report.options, report.lowered
    where = f"mesh {report.mesh}" if report.mesh else "one device"
    count = options.mesh.num_devices
    how = f"{count} processes" if count > 1 else "this process"
    if not options.compiled.has_processes:
        how = f"{count} virtual ranks in this process"
    sequence = ", sequence-parallel" if options.compiled.sequence_parallel else ""
    print(f"{options.model} on {where}: {how}, {report.device}, {options.dtype}")
    made = f"plan {options.plan}{sequence} made {report.num_local_ops} ops per rank in "
    if options.compiled.artifact is None:
        captured = f"captured {lowered.num_captured_ops} ops in {seconds_text(lowered.capture_s)}"
        made = f"{captured}; {made}"
    print(f"{made}{seconds_text(lowered.lowering_s)}")
    _print_between(report.between)
    _print_collectives(report.collectives, is_staged=report.between is not None)
    _print_check(report)
    _print_training(report)
    _print_predicted(report)
    for note in report.notes:
        print(f"note: {note}")


def _print_between(between: BetweenStages | None) -> None:
    if between is not None:
        print(
            f"{counted(between.stages, 'stage')}, {counted(between.micro_batches, 'micro-batch')}: "
            f"{counted(between.messages, 'message')} of {bytes_text(between.bytes)} in all between "
            "stages"
        )


def _print_collectives(collectives: Sequence[CollectiveStats], *, is_staged: bool) -> None:
    if not collectives:
        print("no collectives within stages" if is_staged else "no collectives")
        return
    table = plain_table(["collective", "axes", "phase"], ["count", "bytes"])
    for c in collectives:
        axes = ", ".join(c.axes)
        table.add_row(c.kind, axes, c.phase, str(c.count), bytes_text(c.bytes))
    Console().print(table)


def _print_check(report: RunReport) -> None:
    check = report.check
    if check is None:
        print(f"loss {report.loss:.6f}")
        return
    print(
        f"loss {check.loss:.6f}, eager {check.eager_loss:.6f}, "
        f"relative error {check.loss_error:.1e}"
    )
    print(
        f"gradients of {check.num_parameters} parameters: largest relative error "
        f"{check.max_rel_grad_error:.1e} (in {check.worst_parameter}), bound {check.bound:.3g}"
    )
    if check.at_floor:
        names = ", ".join(check.at_floor[:3]) + (", ..." if len(check.at_floor) > 3 else "")
        print(
            f"{len(check.at_floor)} gradients have a norm below {check.floor:.1e}, to which their "
            f"errors are relative instead: {names}"
        )
    if check.worst_buffer is not None:
        print(f"buffers: largest relative error {check.buffer_error:.1e} (in {check.worst_buffer})")
    steps = f"{check.num_steps} steps with other inputs each"
    print(f"equal to eager, in {steps}" if report.problem is None else "NOT equal to eager")


def _print_training(report: RunReport) -> None:
    if report.training is None:
        return
    for name, training in (("sharded", report.training), ("eager", report.eager_training)):
        if training is None:
            continue
        rate = report.work.count / training.step_s
        first, last = training.losses[0], training.losses[-1]
        print(
            f"{name:8} {len(training.losses)} steps of AdamW: loss {first:.6f} -> {last:.6f}, "
            f"{seconds_text(training.step_s)} per step, {rate:,.0f} {report.work.unit}/s"
        )


def _print_predicted(report: RunReport) -> None:
    """Print the plan's prediction beside the measurement, and what each includes."""
    predicted, training = report.predicted, report.training
    if predicted is None or training is None:
        return
    update = f"with {seconds_text(predicted.update_s)} for" if predicted.update_s else "without"
    print(
        f"the plan predicts {seconds_text(predicted.time_s)} per step ({predicted.source}, "
        f"{update} the optimizer's update); measured {seconds_text(training.step_s)}, with it"
    )
    if not predicted.memory_bytes:
        return
    eager = ", with the eager model" if report.check or report.eager_training else ""
    whole = "all tensors on its GPU" if report.device == "cuda" else "the whole process"
    print(
        f"the plan predicts {bytes_text(predicted.peak_bytes)} of memory on the fullest device "
        f"({', '.join(predicted.memory_bytes)}); measured {bytes_text(report.peak_bytes)} on rank "
        f"0 ({whole}{eager})"
    )
