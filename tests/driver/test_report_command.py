"""`shardweave report` on a real captured model, looked at in a real browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import matplotlib.image
import pytest

from shardweave.driver.cli import main
from shardweave.driver.report.shardings import Picture, index_runs, rank_ranges, sharding_svg
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.pipeline import run_passes
from shardweave.planners.cost.memory import memory_over_time
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests import zoo
from shardweave.tests.browser import browse, needs_browser
from shardweave.tests.real_step import MESH, MODEL, PROPAGATION, annotated, captured, local, save

Captured = pytest.CaptureFixture[str]

CLUSTER = "oases-3090"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a scheduled program with its plan, which has a word that HTML would misread."""
    folder = tmp_path_factory.mktemp("report")
    plan = json.loads(zoo.megatron(MODEL, str(MESH)).to_json())
    plan["notes"] = ["why <b>this</b> & not that"]
    plan["candidates"] = [
        {"name": "this", "predicted": {"time_s": 0.5}, "reason": "chosen"},
        {"name": "that", "predicted": {"time_s": 0.75}, "reason": "250 ms slower"},
    ]
    (folder / "plan.json").write_text(json.dumps(plan))
    path = save(local("preset:oases"), folder)
    out = folder / "report.html"
    options = ["--cluster", CLUSTER, "--plan", str(folder / "plan.json"), "-o", str(out)]
    assert main(["report", str(path), *options, "--optimizer", "2"]) == 0
    return out


def test_page_says_what_the_simulation_and_the_plan_say(page: Path) -> None:
    html = page.read_text()
    program = local("preset:oases")
    found = simulate(program, CLUSTER, optimizer_multiplier=2)
    assert f"{found.time_s * 1e3:.2f} ms" in html
    assert f"<b>{sum(1 for _ in program.ops):,}</b>" in html
    for title in ("Streams over time", "Memory over time", "Layers", "Shardings", "Plan"):
        assert f"<h2>{title}</h2>" in html
    assert "h.0 .. h.1 (2 equal)" in html
    assert "why &lt;b&gt;this&lt;/b&gt; &amp; not that" in html
    assert "h.*.mlp.fc_in.weight" in html
    assert '<td>that</td><td class="n">750.00 ms</td>' in html
    assert "<td>250 ms slower</td>" in html


def test_page_of_a_propagated_program_says_why_data_moves(tmp_path: Path) -> None:
    source, out = save(local(PROPAGATION), tmp_path), tmp_path / "report.html"
    assert main(["report", str(source), "--cluster", CLUSTER, "-o", str(out)]) == 0
    html = out.read_text()
    assert "<h2>Reshards</h2>" in html
    row = ("h.0 .. h.1 (2 equal)", "forward", "%mm", '[{"data"}, {}], unreduced = ["tensor"]')
    row = (*row, '[{"data"}, {}]', "a sum pending over tensor meets aten.add.Tensor")
    assert "".join(f"<td>{escape(cell)}</td>" for cell in row) in html
    assert "<td>all_reduce</td><td>tensor</td>" in html


def test_page_of_a_captured_program_and_a_plan_says_why_data_moves(tmp_path: Path) -> None:
    source, out = save(captured(), tmp_path), tmp_path / "report.html"
    zoo.megatron(MODEL, str(MESH)).save(tmp_path / "plan.json")
    options = ["--cluster", CLUSTER, "--plan", str(tmp_path / "plan.json"), "-o", str(out)]
    assert main(["report", str(source), *options]) == 0
    assert "<td>a sum pending over tensor meets aten.add.Tensor</td>" in out.read_text()


@pytest.mark.parametrize("has_stages", [True, False])
def test_page_of_a_plan_with_stages_has_a_track_for_each(tmp_path: Path, has_stages: bool) -> None:
    source, out = save(captured(), tmp_path), tmp_path / "report.html"
    plan = zoo.megatron(MODEL, "stage=2,data=2")
    if has_stages:
        stages = balanced_stages(captured(), 2)
        plan = replace(plan, pipeline=Pipeline(stages, 2, schedule="zero-bubble"))
    plan.save(tmp_path / "plan.json")
    options = ["--cluster", CLUSTER, "--plan", str(tmp_path / "plan.json"), "-o", str(out)]
    assert main(["report", str(source), *options]) == 0
    html = out.read_text()
    for title in ("Stages over time", "Schedule", "Stages", "Memory of each stage", "Reshards"):
        assert f"<h2>{title}</h2>" in html
    assert "<span>stage 00</span>" in html
    assert "<span>stage 01</span>" in html
    assert ("W1" if has_stages else "B1 -") in html


def test_page_asks_for_nothing_else(page: Path) -> None:
    html = page.read_text()
    assert re.findall(r"(?:src|href)=|@import|<script|<link|https?://", html) == []
    assert re.findall(r"url\(([^)]*)\)", html) == ["#hatch"]


def test_memory_over_time_has_the_peak_that_the_simulation_gives() -> None:
    program = local("preset:oases")
    found = simulate(program, CLUSTER, optimizer_multiplier=2)
    series = memory_over_time(program, found.memory.parts["optimizer"])
    assert len(series) == sum(1 for _ in program.ops) + 1 == len(found.op_end_s) + 1
    assert max(sum(parts.values()) for parts in series) == found.peak_bytes
    assert list(found.op_end_s) == sorted(found.op_end_s)
    assert found.op_end_s[-1] <= found.time_s


def test_global_program_is_partitioned_by_the_plan(tmp_path: Path, capsys: Captured) -> None:
    path, plan, out = save(captured(), tmp_path), tmp_path / "plan.json", tmp_path / "r.html"
    zoo.megatron(MODEL, str(MESH)).save(plan)
    options = ["--cluster", CLUSTER, "--plan", str(plan), "-o", str(out)]
    assert main(["report", str(path), *options]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    assert "all_reduce" in out.read_text()


@pytest.mark.parametrize("passes", ["preset:partition", PROPAGATION])
def test_plan_that_a_sharded_program_does_not_follow_is_refused(
    passes: str, tmp_path: Path, capsys: Captured
) -> None:
    path, file, out = save(local(passes), tmp_path), tmp_path / "plan.json", tmp_path / "r.html"
    own = zoo.megatron(MODEL, str(MESH))
    options = ["report", str(path), "--cluster", CLUSTER, "--plan", str(file), "-o", str(out)]
    whole = {"*": "[{}, {}]"}
    for plan, said in (
        (
            zoo.megatron(MODEL, "data=4"),
            "is partitioned for mesh data=2,tensor=2, but the plan is for",
        ),
        (
            replace(own, parameters={"x": "[{}]"}),
            "names parameter 'x', which this program does not",
        ),
        (replace(own, parameters=whole), "but the plan says [{}, {}]; give"),
    ):
        plan.save(file)
        assert main(options) == 1
        assert said in capsys.readouterr().err
    own.save(file)
    assert main(options) == 0


def test_program_on_one_device_has_a_page_too(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    path = save(captured(), tmp_path)
    assert main(["report", str(path), "--cluster", CLUSTER, "-o", str(out)]) == 0
    assert "One device holds everything." in out.read_text()
    assert "No collectives." in out.read_text()


def test_program_that_is_not_partitioned_needs_a_plan(tmp_path: Path, capsys: Captured) -> None:
    path = save(annotated(), tmp_path)
    assert main(["report", str(path), "--cluster", CLUSTER, "-o", str(tmp_path / "r.html")]) == 1
    assert "the program is not partitioned for its mesh" in capsys.readouterr().err


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_draws_the_page_without_complaint(page: Path, width: int, scheme: str) -> None:
    """What is drawn has the scheme's colours, fits the width, and shows streams and shardings."""
    probe = page.parent / f"probe-{scheme}-{width}.html"
    # A frame, since a browser's own window may refuse to be narrow.
    inner = escape(page.read_text(), quote=True)
    probe.write_text(
        f'<!DOCTYPE html><body><iframe id="f" width="{width}" height="900" srcdoc="{inner}"></iframe>'
        "<script>f.onload = () => { const d = f.contentDocument, w = f.contentWindow;"
        "const over = [...d.querySelectorAll('svg, .tile, p, h2')].filter(e =>"
        " e.getBoundingClientRect().right > w.innerWidth + 1).length;"
        "document.body.dataset.found = JSON.stringify({"
        " scroll: d.documentElement.scrollWidth, width: w.innerWidth, over,"
        " page: w.getComputedStyle(d.body).backgroundColor,"
        " bars: [...d.querySelectorAll('.row rect')].filter(e => e.getBoundingClientRect().width > 0)"
        ".length, pictures: d.querySelectorAll('svg.sharding').length,"
        " fill: w.getComputedStyle(d.querySelector('rect.forward')).fill }) }</script>"
    )
    setting = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    dom, said = browse(probe, setting, "--window-size=1400,1000", "--dump-dom")
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found is not None
    drawn = json.loads(found[1].replace("&quot;", '"'))
    assert drawn["scroll"] <= drawn["width"]
    assert drawn["over"] == 0
    assert drawn["page"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 21, 27)"}[scheme]
    assert drawn["fill"] == "rgb(76, 120, 168)"
    assert drawn["bars"] > 50
    assert drawn["pictures"] >= 8
    assert [line for line in said.splitlines() if "CONSOLE" in line] == []


@needs_browser
def test_picture_of_the_page_shows_phases_in_their_colours(page: Path) -> None:
    shot = page.parent / "shot.png"
    browse(page, "--window-size=1280,2400", f"--screenshot={shot}")
    pixels = (matplotlib.image.imread(shot)[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] == 1280
    for colour in ((76, 120, 168), (245, 133, 24), (158, 202, 233), (242, 165, 65)):
        assert ((pixels == colour).all(axis=-1)).sum() > 200, colour


def test_cells_name_the_devices_that_hold_them() -> None:
    mesh = Mesh(data=2, tensor=2)
    sharding = ShardingAttr.parse_text('[{"tensor"}, {"data"}]').on((8, 6), mesh)
    assert index_runs(sharding.dims[0], 8, mesh) == [
        (0, 4, frozenset({0, 2})),
        (4, 8, frozenset({1, 3})),
    ]
    picture = Picture(("w",), (8, 6), '[{"tensor"}, {"data"}]', sharding)
    svg = sharding_svg(picture, mesh)
    cells = re.findall(r'<rect class="c\d" x="([\d.]+)" y="([\d.]+)" \S+ height="([\d.]+)"', svg)
    height = float(re.findall(r'viewBox="0 0 \d+ (\d+)"', svg)[0])
    assert {(y, depth) for _, y, depth in cells} == {
        ("0.0", f"{height / 2:.1f}"), (f"{height / 2:.1f}", f"{height / 2:.1f}")
    }  # fmt: skip
    titles = re.findall(r"<title>(.*?)</title>", svg)
    assert titles == [
        "[0:4, 0:3] on device 0",
        "[0:4, 3:6] on device 2",
        "[4:8, 0:3] on device 1",
        "[4:8, 3:6] on device 3",
    ]


def test_strided_shards_are_drawn_where_they_lie() -> None:
    mesh = Mesh(tensor=2)
    sharding = ShardingAttr.parse_text('[{"tensor":2}]').on((12,), mesh)
    starts = [
        (start, end, min(ranks)) for start, end, ranks in index_runs(sharding.dims[0], 12, mesh)
    ]
    assert starts == [(0, 2, 0), (2, 4, 1), (4, 6, 0), (6, 8, 1), (8, 10, 0), (10, 12, 1)]


def test_whole_tensor_is_one_cell_of_all_devices() -> None:
    mesh = Mesh(data=4)
    sharding = ShardingAttr.parse_text("[{}, {}]").on((4, 4), mesh)
    svg = sharding_svg(Picture(("w",), (4, 4), "[{}, {}]", sharding), mesh)
    assert re.findall(r"<title>(.*?)</title>", svg) == ["[0:4] on devices 0-3"]


def test_ranks_are_written_as_ranges() -> None:
    assert rank_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


@pytest.mark.parametrize("precision", ["", "bf16-mixed"])
def test_memory_under_a_plan_is_that_of_simulating_it(
    precision: str, tmp_path: Path, capsys: Captured
) -> None:
    source, plan, out = save(captured(), tmp_path), tmp_path / "plan.json", tmp_path / "r.html"
    replace(zoo.megatron(MODEL, str(MESH)), precision=precision).save(plan)
    options = [str(source), "--cluster", CLUSTER, "--plan", str(plan)]
    assert main(["simulate", *options]) == 0
    peak = capsys.readouterr().out.splitlines()[-1]
    # Parameters of the program's 64 bits leave nothing of mixed precision's 16 bytes for Adam.
    assert ("optimizer" in peak) is (not precision)
    assert main(["report", *options, "-o", str(out)]) == 0
    assert peak in capsys.readouterr().out
    assert main(["report", *options, "-o", str(out), "--optimizer", "0"]) == 0
    assert "optimizer" not in capsys.readouterr().out


def test_schedule_of_the_plan_has_its_name(tmp_path: Path, capsys: Captured) -> None:
    source, out = save(captured(), tmp_path), tmp_path / "report.html"
    pipeline = Pipeline(balanced_stages(captured(), 2), 2, schedule="zero-bubble")
    plan = replace(zoo.megatron(MODEL, "stage=2,data=2"), pipeline=pipeline)
    plan.save(tmp_path / "plan.json")
    options = ["--cluster", CLUSTER, "--plan", str(tmp_path / "plan.json"), "-o", str(out)]
    assert main(["report", str(source), *options]) == 0
    assert "2 stages, 2 micro-batches, zero-bubble;" in capsys.readouterr().out


def test_program_that_every_device_is_taken_to_run_whole_is_noted(
    tmp_path: Path, capsys: Captured
) -> None:
    source, out = save(captured(), tmp_path), tmp_path / "report.html"
    assert main(["report", str(source), "--cluster", CLUSTER, "-o", str(out)]) == 0
    assert "note: the program is global, so that one device" in capsys.readouterr().err
    mesh = "stage=2,data=2"
    plan = ApplyPlanPass.of(zoo.megatron(MODEL, mesh))
    uncut = run_passes(captured(), [plan, "preset:partition"], mesh=mesh)
    source = save(uncut, tmp_path, "uncut.mlir")
    for command in (["report", str(source), "-o", str(out)], ["simulate", str(source)]):
        assert main([*command, "--cluster", CLUSTER]) == 0
        assert "has 2 stages, and the program is not cut into them" in capsys.readouterr().err
    assert main(["diff", str(source), str(source), "--cluster", CLUSTER]) == 0
    assert capsys.readouterr().err.count("is not cut into them") == 1
