"""explore: what a pipeline does to a program, pass by pass, as one page for a browser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import cast

from shardweave.driver.report.explorer.page import explorer_page
from shardweave.driver.report.explorer.recorder import Recorder
from shardweave.driver.report.plan import choices_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.passes.observers import Observer, Observers
from shardweave.passes.pipeline import MeshLike, PassPipeline, as_mesh
from shardweave.planners.call import ClusterLike
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.partition import Passes, partition
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_plan

FRAME_HEIGHT = 760
"""Pixels of the page in a notebook."""


@dataclass(frozen=True)
class Exploration:
    """A pipeline as a page, which a notebook displays, and which `save` writes to a file.

    program: the result of the passes. html: the page, which needs no other file.
    """

    program: Program
    html: str = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the page, one HTML file that needs no other."""
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style and the notebook's do not mix."""
        return (
            f'<iframe srcdoc="{escape(self.html, quote=True)}" title="pass explorer" '
            f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'
        )


def explore(
    program: Program,
    passes: Passes | Mapping[str, Plan],
    cluster: ClusterLike,
    *,
    mesh: MeshLike | None = None,
    title: str = "shardweave",
    optimizer_multiplier: float | None = 0.0,
    precision: str = "",
    update: str = "",
    observer: Observer | None = None,
) -> Exploration:
    """Run passes over a copy of a program, and show what each did to it.

    Args:
        passes: Passes, or plans by the names to show on the page. For plans, the page compares the
            program of each device under each plan with that under the plan before.
        cluster: For simulated times of programs of one device: a Cluster, a preset's name or a
            YAML file.
        mesh: By default the program's own.
        title: Of the page.
        optimizer_multiplier: Bytes of optimizer state per byte of parameters (2 for Adam); None:
            Adam's in `precision`.
        precision, update: As in `Plan`; if plans are given, their own are used.
        observer: Is called for each pass, too.

    Raises ValueError for a program that is not well formed, for no plans or a plan that does not
    fit, PassError if a pass fails, ClusterError for a mesh that the cluster has no devices for.
    """
    check(program)
    recorder = Recorder(
        find_cluster(cluster),
        optimizer_multiplier=optimizer_multiplier,
        precision=precision,
        update=update,
    )
    if isinstance(passes, Mapping):
        plans = cast("Mapping[str, Plan]", passes)
        result = _explored_plans(program, plans, recorder)
        return Exploration(result, explorer_page(recorder.moments, recorder.words, title=title))
    watch = recorder if observer is None else Observers((observer, recorder))
    pipeline = PassPipeline([passes] if isinstance(passes, str) else passes)
    on = None if mesh is None else as_mesh(mesh)
    result = pipeline.run(program, mesh=on, observer=watch)
    if not recorder.moments:
        recorder.note("input", result, summary="The program as it is; no passes were given.")
    return Exploration(result, explorer_page(recorder.moments, recorder.words, title=title))


def _explored_plans(program: Program, plans: Mapping[str, Plan], recorder: Recorder) -> Program:
    """Record each device's program under each plan; returns the program of the last plan."""
    if not plans:
        raise ValueError("there are no plans to show; give one or more.")
    if program.is_local:
        raise ValueError(
            "the program is a local one, already partitioned for one rank; give the captured "
            "global program, which any plan can partition."
        )
    recorder.note("input", program, summary="The program that the plans are for.")
    local = program
    for name, plan in plans.items():
        check_plan(plan, program)
        recorder.precision, recorder.update = plan.precision, plan.update
        mesh = Mesh(**plan.mesh)
        local = partition(program, mesh, with_pipeline(plan, program, mesh))
        said = " ".join(f"{reason}." for reason in plan.reasons)
        recorder.note(name, local, summary=said, choices=choices_of(plan))
    return local
