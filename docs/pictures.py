"""The pictures in docs/pictures: what commands of the pages show, drawn by headless Chromium.

    python docs/pictures.py [NAME ...]

The plan that is explained is that of docs/planning.md, a search of a minute or two.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path

from PIL import Image, ImageChops

from shardweave.driver.cli import main as shardweave
from shardweave.driver.report.html import STYLE
from shardweave.driver.report.shardings import Picture, sharding_svg
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.tests.browser import picture_of, save_picture

FOLDER = Path(__file__).parent / "pictures"
MESH = "data=2,tensor=2"
SHAPE = (1024, 256)
SHARDINGS = {
    "whole on each device": "[{}, {}]",
    "rows over tensor": '[{"tensor"}, {}]',
    "rows over data, columns over tensor": '[{"data"}, {"tensor"}]',
    "rows over both axes": '[{"data", "tensor"}, {}]',
}
"""Of a weight of that shape, by what they mean."""

MODEL = "gpt:layers=4,hidden=256,heads=4,vocab=1024,seq=128,batch=8"
PLANNED = "gpt:layers=2,hidden=2048,heads=16,vocab=50304,seq=1024,batch=32"
Drawn = dict[str, Image.Image]
"""Pictures by the names of their files."""

WIDTH = 1000
TERMINAL_COLUMNS = 118
MARGIN = 12


def draw_shards(folder: Path) -> Drawn:
    """A weight's shards under four shardings."""
    mesh = Mesh.parse(MESH)
    figures = [
        sharding_svg(
            Picture((said,), SHAPE, text, ShardingAttr.parse_text(text).on(SHAPE, mesh)), mesh
        )
        for said, text in SHARDINGS.items()
    ]
    cells = "".join(f'<figure style="margin: 0">{figure}</figure>' for figure in figures)
    layout = "display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem 2rem; width: 37rem"
    return {"shards": drawn(f'<style>{STYLE}</style><div style="{layout}">{cells}</div>', folder)}


def draw_report(folder: Path) -> Drawn:
    """The first screen of the report of a scheduled step."""
    page = folder / "report.html"
    run("capture", MODEL, "-o", "step.mlir")
    run("plan", "step.mlir", "--planner", "megatron", "--mesh", MESH, "-o", "plan.json")
    passes = 'apply-plan{file="plan.json"},preset:oases'
    run("opt", "step.mlir", "--passes", passes, "-o", "local.mlir")
    cluster = ("--cluster", "oases-3090", "--optimizer", "2")
    run("report", "local.mlir", *cluster, "--plan", "plan.json", "-o", page.name)
    return {"report": picture_of(page.as_uri(), folder, (WIDTH, 1095), "light")}


def draw_simulation(folder: Path) -> Drawn:
    """`shardweave simulate --plot` of the same step as one rank runs it by default."""
    run("capture", MODEL, "-o", "step.mlir")
    run(
        "opt",
        "step.mlir",
        "--mesh",
        MESH,
        "--passes",
        "plan-megatron,preset:default",
        "-o",
        "l.mlir",
    )
    run("simulate", "l.mlir", "--cluster", "oases-3090", "--plot", "plot.png")
    return {"simulation": Image.open(folder / "plot.png").convert("RGB")}


def draw_plan(folder: Path) -> Drawn:
    """What `shardweave plan --explain` prints, as in a terminal, and what `--plot` draws."""
    options = ("--dtype", "bfloat16", "--cluster", "perlmutter:nodes=2", "--explain")
    said = run("plan", PLANNED, *options, "--plot", "candidates.png", "-o", "plan.json")
    text = f'<pre style="font: 12px/1.35 DejaVu Sans Mono, monospace">{escape(said)}</pre>'
    plot = Image.open(folder / "candidates.png").convert("RGB")
    return {"explained": drawn(text, folder), "candidates": plot}


def run(*arguments: str) -> str:
    """What a command prints. Raises RuntimeError if it fails."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = shardweave(arguments)
    if code:
        raise RuntimeError(f"shardweave {' '.join(arguments)} failed:\n{output.getvalue()}")
    return output.getvalue()


def drawn(body: str, folder: Path) -> Image.Image:
    """A piece of HTML on white, cut to what is on it and a margin."""
    page = folder / "page.html"
    page.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body>{body}</body>')
    whole = picture_of(page.as_uri(), folder, (1400, 1600), "light")
    box = ImageChops.difference(whole, Image.new("RGB", whole.size, "white")).getbbox()
    assert box is not None
    left, top, right, bottom = box
    return whole.crop(
        (max(left - MARGIN, 0), max(top - MARGIN, 0), right + MARGIN, bottom + MARGIN)
    )


DRAWN: dict[str, Callable[[Path], Drawn]] = {
    "shards": draw_shards,
    "report": draw_report,
    "simulation": draw_simulation,
    "plan": draw_plan,
}
"""By name, what draws one or more pictures in a folder of its own."""


def main() -> None:
    """Make the named pictures, or all."""
    os.environ["COLUMNS"] = str(TERMINAL_COLUMNS)
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or DRAWN:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for stem, picture in DRAWN[name](Path(folder)).items():
                save_picture(picture, FOLDER / f"{stem}.png")


if __name__ == "__main__":
    main()
