"""What `shardweave plan` says: a plan in lines, candidates and comparisons as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table

from shardweave.driver.report.text import plain_table
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.program.program import Program
from shardweave.passes.messages.bucket_collectives import ALONE_BYTES
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import bytes_text, counted, memory_text, seconds_text
from shardweave.planners.lowering.plan_passes import DEFAULT_SCHEDULE
from shardweave.planners.megatron.sequence_cut import SEQUENCE
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, Predicted
from shardweave.planners.predict.throughput import Throughput

WIDTH, WIDEST = 120, 1000


def print_candidates(rows: Sequence[Candidate], out: TextIO) -> None:
    """Say which plans were the best, why each lost, and their time and memory by part."""
    for number, one in enumerate(rows, start=1):
        print(f"{number}  {one.name}" + (f": {one.reason}" if one.reason else ""), file=out)
    # Tables that are cut to a terminal's width lose their numbers, and heads their names.
    for table in (_time_table(rows), _memory_table(rows)):
        wide = Console(width=WIDEST).measure(table).maximum
        Console(file=out, width=max(WIDTH, Console().width, wide)).print(table)


def _time_table(rows: Sequence[Candidate]) -> Table:
    axes = _names(one.predicted.communication_s for one in rows)
    updates = ["update"] if any(one.predicted.update_s for one in rows) else []
    table = plain_table([""], ["step", "compute", *axes, "exposed", "bubble", *updates], ["source"])
    for number, one in enumerate(rows, start=1):
        found = one.predicted
        parts = [found.compute_s, *(found.communication_s.get(axis, 0.0) for axis in axes)]
        cells = [found.time_s, *parts, found.exposed_s, found.bubble_s]
        cells += [found.update_s] if updates else []
        table.add_row(str(number), *map(_seconds, cells), found.source)
    return table


def _memory_table(rows: Sequence[Candidate]) -> Table:
    kinds = _names(one.predicted.memory_bytes for one in rows)
    table = plain_table([""], ["memory", *kinds], ["of"])
    for number, one in enumerate(rows, start=1):
        found = one.predicted
        cells = [found.peak_bytes, *(found.memory_bytes.get(kind, 0.0) for kind in kinds)]
        table.add_row(str(number), *map(bytes_text, cells), bytes_text(found.capacity_bytes))
    return table


def comparison_table(names: Sequence[str], plans: Sequence[Plan]) -> Table:
    """Plans side by side: what they choose, and what they are predicted to take."""
    table = plain_table(["", *names], [])
    for what, text_of in _CHOICES.items():
        table.add_row(what, *map(text_of, plans))
    found = [one.predicted for one in plans]
    for what, text_of in _outcomes([one for one in found if one]).items():
        table.add_row(what, *(text_of(one) if one else "?" for one in found))
    return table


def choices_of(plan: Plan) -> list[tuple[str, str]]:
    return [(what, text_of(plan)) for what, text_of in _CHOICES.items()]


_CHOICES: dict[str, Callable[[Plan], str]] = {
    "mesh": lambda plan: _mesh(plan),
    "sharded parameters": lambda plan: str(len(plan.parameters)),
    "sub-batches": lambda plan: str(plan.batch_split),
    "loss chunks": lambda plan: str(plan.loss_chunks),
    "load of experts": lambda plan: f"{plan.expert_load:g}",
    "recompute": lambda plan: recomputation_text(plan),
    "activations": lambda plan: ", ".join(_cut_activations(plan)) or "whole",
    "schedule": lambda plan: plan.schedule or DEFAULT_SCHEDULE,
    "messages joined": lambda plan: f"below {bytes_text(plan.alone_bytes or ALONE_BYTES)}",
    "ZeRO": lambda plan: str(plan.zero),
    "precision": lambda plan: plan.precision or "the program's",
    "update": lambda plan: plan.update or "not predicted",
    "stages": lambda plan: str(plan.num_stages),
    "micro-batches": lambda plan: str(plan.pipeline.micro_batches if plan.pipeline else 1),
    "order of micro-batches": lambda plan: _order(plan),
}


def _outcomes(found: Sequence[Predicted]) -> dict[str, Callable[[Predicted], str]]:
    """The rows of what plans are predicted to take."""
    rows: dict[str, Callable[[Predicted], str]] = {
        "step": lambda one: _seconds(one.time_s),
        "source": lambda one: one.source,
        "compute": lambda one: _seconds(one.compute_s),
    }
    for axis in _names(one.communication_s for one in found):
        rows[f"communication: {axis}"] = lambda one, axis=axis: _seconds(
            one.communication_s.get(axis, 0.0)
        )
    rows["exposed"] = lambda one: _seconds(one.exposed_s)
    rows["bubble"] = lambda one: _seconds(one.bubble_s)
    if any(one.update_s for one in found):
        rows["update"] = lambda one: _seconds(one.update_s)
    for kind in _names(one.memory_bytes for one in found):
        rows[f"memory: {kind}"] = lambda one, kind=kind: bytes_text(one.memory_bytes.get(kind, 0.0))
    return rows | {"memory": lambda one: bytes_text(one.peak_bytes)}


def recomputation_text(plan: Plan) -> str:
    """The policy, and in which blocks: `layer in h.0, h.1 and 4 more`."""
    if not plan.recompute_in:
        return plan.recompute
    shown, more = plan.recompute_in[:3], len(plan.recompute_in[3:])
    rest = f" and {more} more" if more else ""
    return f"{plan.recompute} in {', '.join(shown)}{rest}"


def print_plan(plan: Plan, out: TextIO) -> None:
    """Say what a plan chooses, what it takes, and why."""
    words = [_sharded(plan), *_cut_activations(plan)]
    words += [f"{plan.batch_split} sub-batches"] if plan.batch_split > 1 else []
    words += [f"loss in {plan.loss_chunks} chunks"] if plan.loss_chunks > 1 else []
    words += [f"load of experts {plan.expert_load:g}"] if plan.expert_load != 1 else []
    words += [f"ZeRO stage {plan.zero}"] if plan.zero else []
    words += [f"recompute {recomputation_text(plan)}"] if plan.recompute != "none" else []
    words += [f"schedule {plan.schedule}"] if plan.schedule else []
    words += [f"precision {plan.precision}"] if plan.precision else []
    words += [f"update by {plan.update}"] if plan.update else []
    print(f"{plan.planner} on mesh {_mesh(plan)}: {', '.join(words)}", file=out)
    if plan.pipeline is not None:
        devices = plan.pipeline.devices or ("",) * plan.num_stages
        for index, (stage, device) in enumerate(zip(plan.pipeline.stages, devices, strict=True)):
            where = f" on {device}" if device else ""
            ends = " .. ".join(dict.fromkeys((stage[0], stage[-1])))
            shown = "all layers" if stage == ("*",) else ends
            print(f"stage {index}{where}: {shown}", file=out)
        order = f", in the order {plan.pipeline.schedule}" if plan.num_stages > 1 else ""
        print(f"micro-batches of a step: {plan.pipeline.micro_batches}{order}", file=out)
    if plan.predicted is not None:
        _print_predicted(plan.predicted, out)
    for reason in plan.reasons:
        print(f"why: {reason}", file=out)
    for note in plan.notes:
        print(f"note: {note}", file=out)


def print_throughput(
    program: Program, cluster: str, plan: Plan, predicted: Predicted, out: TextIO
) -> None:
    """Say what a step of a captured program under a plan does in a second, if it has a batch."""
    found = Throughput.of(program, find_cluster(cluster), plan, predicted)
    if found is not None:
        print(f"throughput: {found}", file=out)


def _sharded(plan: Plan) -> str:
    if plan.parameters:
        return f"{counted(len(plan.parameters), 'parameter')} sharded"
    is_replicated = plan.num_stages == 1 and not plan.zero
    return "every parameter replicated" if is_replicated else "no parameter cut"


def _cut_activations(plan: Plan) -> list[str]:
    """That outputs of layers are cut, and where all of these are along their sequence."""
    dims = [ShardingAttr.parse_text(text).dims.data for text in plan.activations.values()]
    if not dims:
        return []
    if all(len(one) > SEQUENCE and one[SEQUENCE].data for one in dims):
        return ["sequence parallel"]
    return [f"{counted(len(dims), 'activation')} sharded"]


def _print_predicted(found: Predicted, out: TextIO) -> None:
    update = f", update {_seconds(found.update_s)}" if found.update_s else ""
    print(
        f"{found.source} step {_seconds(found.time_s)}: compute {_seconds(found.compute_s)}, "
        f"exposed communication {_seconds(found.exposed_s)}, bubble {_seconds(found.bubble_s)}"
        f"{update}; memory {memory_text(found.peak_bytes, found.capacity_bytes)}",
        file=out,
    )


def _names(tables: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _order(plan: Plan) -> str:
    return plan.pipeline.schedule if plan.pipeline and plan.is_pipeline else "none"


def _mesh(plan: Plan) -> str:
    return ",".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "one device"


def _seconds(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "0"
