"""Output of `shardweave plan`: a plan in lines, candidates and comparisons as tables and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table

from shardweave.driver.report.text import plain_table
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.program.program import Program
from shardweave.passes.messages.bucket_collectives import ALONE_BYTES
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import GIB, bytes_text, counted, memory_text, seconds_text
from shardweave.planners.lowering.plan_passes import DEFAULT_SCHEDULE
from shardweave.planners.megatron.input_cuts import SEQUENCE
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, Predicted
from shardweave.planners.predict.predict import time_parts
from shardweave.planners.predict.throughput import Throughput
from shardweave.planners.simulate.timeline import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, WIDEST = 120, 1000


def print_candidates(rows: Sequence[Candidate], out: TextIO) -> None:
    """Print the best plans, why each lost to the first, and their time and memory by part."""
    for number, row in enumerate(rows, start=1):
        print(f"{number}  {row.name}" + (f": {row.reason}" if row.reason else ""), file=out)
    # Tables that are cut to a terminal's width lose their numbers, and heads their names.
    for table in (_time_table(rows), _memory_table(rows)):
        wide = Console(width=WIDEST).measure(table).maximum
        Console(file=out, width=max(WIDTH, Console().width, wide)).print(table)


def _time_table(rows: Sequence[Candidate]) -> Table:
    axes = _names(c.predicted.communication_s for c in rows)
    updates = ["update"] if any(c.predicted.update_s for c in rows) else []
    table = plain_table([""], ["step", "compute", *axes, "exposed", "bubble", *updates], ["source"])
    for number, row in enumerate(rows, start=1):
        p = row.predicted
        parts = [p.compute_s, *(p.communication_s.get(axis, 0.0) for axis in axes)]
        cells = [p.time_s, *parts, p.exposed_s, p.bubble_s]
        cells += [p.update_s] if updates else []
        table.add_row(str(number), *map(_seconds, cells), p.source)
    return table


def _memory_table(rows: Sequence[Candidate]) -> Table:
    kinds = _names(c.predicted.memory_bytes for c in rows)
    table = plain_table([""], ["memory", *kinds], ["of"])
    for number, row in enumerate(rows, start=1):
        p = row.predicted
        cells = [p.peak_bytes, *(p.memory_bytes.get(kind, 0.0) for kind in kinds)]
        table.add_row(str(number), *map(bytes_text, cells), bytes_text(p.capacity_bytes))
    return table


def plot_candidates(rows: Sequence[Candidate], path: str | Path) -> None:
    """Draw bars of each plan's milliseconds and GiB to a file; ValueError without matplotlib."""
    if not rows:
        raise ValueError("no plan has a predicted step time to draw; plan for a cluster.")
    figure = new_figure(13, 1.8 + 0.5 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row.name for row in rows]
    _bars(left, names, [time_parts(row.predicted) for row in rows], 1e3)
    left.set_xlabel("time of a step (ms)")
    right.set_xlabel("memory of a device (GiB)")
    for size in {row.predicted.capacity_bytes for row in rows} - {0.0}:
        right.axvline(size / GIB, color="black", linestyle="--", label="the device has")
    _bars(right, names, [row.predicted.memory_bytes for row in rows], 1 / GIB)
    left.invert_yaxis()
    figure.savefig(path, dpi=120)


def _bars(
    axes: Axes, names: Sequence[str], rows: Sequence[Mapping[str, float]], scale: float
) -> None:
    offsets = [0.0] * len(rows)
    for part in dict.fromkeys(part for row in rows for part in row):
        widths = [scale * row.get(part, 0.0) for row in rows]
        axes.barh(range(len(rows)), widths, left=offsets, label=part)
        offsets = [sum(pair) for pair in zip(offsets, widths, strict=True)]
    axes.set_yticks(range(len(rows)), names)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4, fontsize="small")


def comparison_table(names: Sequence[str], plans: Sequence[Plan]) -> Table:
    """Make a table of plans side by side: their choices, and their predicted time and memory."""
    table = plain_table(["", *names], [])
    for what, text_of in _CHOICES.items():
        table.add_row(what, *map(text_of, plans))
    predictions = [plan.predicted for plan in plans]
    for what, text_of in _outcomes([p for p in predictions if p]).items():
        table.add_row(what, *(text_of(p) if p else "?" for p in predictions))
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
    "offload": lambda plan: plan.offload,
    "decomposed products": lambda plan: ", ".join(plan.decompose) or "none",
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


def _outcomes(predictions: Sequence[Predicted]) -> dict[str, Callable[[Predicted], str]]:
    rows: dict[str, Callable[[Predicted], str]] = {
        "step": lambda p: _seconds(p.time_s),
        "source": lambda p: p.source,
        "compute": lambda p: _seconds(p.compute_s),
    }
    for axis in _names(p.communication_s for p in predictions):
        rows[f"communication: {axis}"] = lambda p, axis=axis: _seconds(
            p.communication_s.get(axis, 0.0)
        )
    rows["exposed"] = lambda p: _seconds(p.exposed_s)
    rows["bubble"] = lambda p: _seconds(p.bubble_s)
    if any(p.update_s for p in predictions):
        rows["update"] = lambda p: _seconds(p.update_s)
    for kind in _names(p.memory_bytes for p in predictions):
        rows[f"memory: {kind}"] = lambda p, kind=kind: bytes_text(p.memory_bytes.get(kind, 0.0))
    return rows | {"memory": lambda p: bytes_text(p.peak_bytes)}


def recomputation_text(plan: Plan) -> str:
    """Describe the recomputation policy and its blocks: `layer in h.0, h.1 and 4 more`."""
    if not plan.recompute_in:
        return plan.recompute
    shown, more = plan.recompute_in[:3], len(plan.recompute_in[3:])
    rest = f" and {more} more" if more else ""
    return f"{plan.recompute} in {', '.join(shown)}{rest}"


def print_plan(plan: Plan, out: TextIO) -> None:
    """Print a plan's choices, its prediction, reasons and notes."""
    words = [_sharded(plan), *_cut_activations(plan)]
    words += [f"{plan.batch_split} sub-batches"] if plan.batch_split > 1 else []
    words += [f"loss in {plan.loss_chunks} chunks"] if plan.loss_chunks > 1 else []
    words += [f"load of experts {plan.expert_load:g}"] if plan.expert_load != 1 else []
    words += [f"ZeRO stage {plan.zero}"] if plan.zero else []
    words += [f"recompute {recomputation_text(plan)}"] if plan.recompute != "none" else []
    words += [f"offload {plan.offload}"] if plan.offload != "none" else []
    words += [f"decomposed products in {', '.join(plan.decompose)}"] if plan.decompose else []
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
    """Print the predicted throughput of a captured program under a plan, if it has a batch."""
    throughput = Throughput.of(program, find_cluster(cluster), plan, predicted)
    if throughput is not None:
        print(f"throughput: {throughput}", file=out)


def _sharded(plan: Plan) -> str:
    if plan.parameters:
        return f"{counted(len(plan.parameters), 'parameter')} sharded"
    is_replicated = plan.num_stages == 1 and not plan.zero
    return "every parameter replicated" if is_replicated else "no parameter cut"


def _cut_activations(plan: Plan) -> list[str]:
    """Describe the plan's sharded activations; "sequence parallel" if all are along dim 1."""
    dims = [ShardingAttr.parse_text(text).dims.data for text in plan.activations.values()]
    if not dims:
        return []
    if all(len(dim) > SEQUENCE and dim[SEQUENCE].data for dim in dims):
        return ["sequence parallel"]
    return [f"{counted(len(dims), 'activation')} sharded"]


def _print_predicted(p: Predicted, out: TextIO) -> None:
    update = f", update {_seconds(p.update_s)}" if p.update_s else ""
    print(
        f"{p.source} step {_seconds(p.time_s)}: compute {_seconds(p.compute_s)}, "
        f"exposed communication {_seconds(p.exposed_s)}, bubble {_seconds(p.bubble_s)}"
        f"{update}; memory {memory_text(p.peak_bytes, p.capacity_bytes)}",
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
