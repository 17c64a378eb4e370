"""explore: what a pipeline does to a program, pass by pass, as one page for a browser."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from shardweave.driver.plans import Passes
from shardweave.driver.report.explorer.page import explorer_page
from shardweave.driver.report.explorer.recorder import Recorder
from shardweave.ir.program import Program
from shardweave.ir.verify.program import check
from shardweave.passes.observers import Observer, Observers
from shardweave.passes.pipeline import MeshLike, PassPipeline, as_mesh
from shardweave.planners.call import ClusterLike
from shardweave.planners.cost.presets import find_cluster

FRAME_HEIGHT = 760
"""Pixels of the page in a notebook."""


@dataclass(frozen=True)
class Exploration:
    """A pipeline as a page: in a notebook it shows itself; `save` writes it.

    program: what the passes made. html: the page, which needs no other file.
    """

    program: Program
    html: str = field(repr=False)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that the notebook's style and its own stay apart."""
        return (
            f'<iframe srcdoc="{escape(self.html, quote=True)}" title="pass explorer" '
            f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'
        )


def explore(
    program: Program,
    passes: Passes,
    cluster: ClusterLike,
    *,
    mesh: MeshLike | None = None,
    title: str = "shardweave",
    optimizer_multiplier: float = 0.0,
    observer: Observer | None = None,
) -> Exploration:
    """Run passes over a copy of a program, and show what each did to it.

    cluster: for the times, of those moments at which the program is one device's: a Cluster, a
    preset's name or a YAML file. mesh: by default the program's own. optimizer_multiplier: bytes of
    optimizer state per byte of parameters (2 for Adam). observer: sees each pass too.

    Raises ValueError for a program that is not well formed, PassError if a pass fails, ClusterError
    for a mesh that the cluster has no devices for.
    """
    check(program)
    recorder = Recorder(find_cluster(cluster), optimizer_multiplier=optimizer_multiplier)
    watch = recorder if observer is None else Observers((observer, recorder))
    pipeline = PassPipeline([passes] if isinstance(passes, str) else passes)
    on = None if mesh is None else as_mesh(mesh)
    result = pipeline.run(program, mesh=on, observer=watch)
    if not recorder.moments:
        recorder.note("input", result, summary="The program as it is; no passes were given.")
    return Exploration(result, explorer_page(recorder.moments, recorder.words, title=title))
