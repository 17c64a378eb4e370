"""`shardweave explore` on a real captured model, clicked through in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from shardweave.driver.cli import main
from shardweave.driver.explore import Exploration, explore
from shardweave.ir.inspect.diff import structural_diff
from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.pipeline import run_passes
from shardweave.planners.cost.quantity import seconds_text
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.predict.predict import simulate_step
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests import zoo
from shardweave.tests.browser import data_of, moment_of, needs_browser, played
from shardweave.tests.real_step import MESH, MODEL, annotated, captured, local, save

CLUSTER = "oases-3090"
KINDS = ("same", "added", "removed", "moved", "changed")
Captured = pytest.CaptureFixture[str]


@cache
def explored() -> Exploration:
    plan = ApplyPlanPass.of(zoo.megatron(MODEL, str(MESH)))
    return explore(captured(), [plan, "preset:oases"], CLUSTER, mesh=MESH, title="a <b>step</b>")


def kinds_in(moment: dict[str, Any]) -> dict[str, int]:
    """How many rows of each kind there are, every layer counted."""
    found: dict[str, int] = {}
    for section in moment["parts"][0]["sections"]:
        for kind in section["kinds"]:
            found[KINDS[kind]] = found.get(KINDS[kind], 0) + len(section["layers"])
    return found


def test_page_has_a_moment_for_the_input_and_each_pass() -> None:
    names = [moment["name"] for moment in data_of(explored().html)["moments"]]
    assert names[:3] == ["input", "apply-plan", "split-batch"]
    assert names[-2:] == ["start-collectives", "overlap-communication"]


def test_moment_says_what_the_diff_of_its_program_says() -> None:
    data = data_of(explored().html)
    before = annotated()
    after = run_passes(before, "split-addmm")
    diff = structural_diff(before, after)
    kinds = kinds_in(moment_of(data, "split-addmm"))
    assert (kinds["added"], kinds["removed"]) == (diff.count("added"), diff.count("removed"))
    assert kinds["same"] + kinds["added"] == sum(1 for _ in after.ops)


def test_moment_says_what_the_simulation_says() -> None:
    found = simulate(local("preset:oases"), CLUSTER)
    moment = moment_of(data_of(explored().html), "overlap-communication")
    rail, amounts = dict(moment["rail"]), moment["amounts"]
    # Numbers are compared with those of the moment before, not texts, whose units differ.
    assert amounts["step"] == found.time_s
    assert amounts["exposed"] == found.exposed_communication_s
    assert rail["step"] == f"{found.time_s * 1e3:.2f} ms"
    assert rail["exposed"] == seconds_text(found.exposed_communication_s)


def test_page_asks_for_nothing_else() -> None:
    html = explored().html
    head = html.partition('id="data">')[0]
    assert re.findall(r"(?:src|href)=|@import|<link|https?://", head) == []
    assert "a &lt;b&gt;step&lt;/b&gt;" in head


def test_command_writes_the_page(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "explore.html"
    source = save(annotated(), tmp_path)
    options = ["--passes", "split-addmm", "--cluster", CLUSTER, "-o", str(out)]
    assert main(["explore", str(source), *options]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    assert len(data_of(out.read_text())["moments"]) == 2


CLICKS = r"""
await until(() => d.documentElement.dataset.ready);
const one = (selector) => d.querySelector(selector);
const all = (selector) => [...d.querySelectorAll(selector)];
const press = (key) => d.dispatchEvent(new w.KeyboardEvent("keydown", { key, bubbles: true }));
const current = () => one('#rail [aria-current=true] .name').textContent;
const moment = (name) => all("#rail button").find((b) => b.textContent.startsWith(name)).click();
const layer = (name) => all(".layer").find((l) => l.dataset.name === name);
const found = { moments: all("#rail li").length, first: current() };
found.streams = all("main .row rect").length;
press("k");
found.earlier = current();
moment("propagate-shardings");
layer("h.0 … h.1").querySelector("summary").click();
await until(() => layer("h.0 … h.1").querySelector(".op"));
found.added = layer("h.0 … h.1").querySelectorAll(".op.added").length;
const box = one("#search");
box.value = "layer:h.0 op:dist.reshard";
box.dispatchEvent(new w.Event("input"));
await until(() => all(".op").length && all(".op .after b").every((b) => b.textContent === "dist.reshard"));
found.hits = all(".op").length;
found.layers = all(".layer").map((l) => l.dataset.name);
one(".op .after .v").click();
found.value = one("#value h2").textContent;
found.why = one("#value").textContent.includes("a sum pending over tensor meets");
found.drawn = all("#value svg.sharding").length;
found.headings = all("#value h3").map((h) => h.textContent);
press("Escape");
found.closed = one("#value").hidden;
box.value = "";
box.dispatchEvent(new w.Event("input"));
await until(() => all(".layer").length > 4);
moment("rematerialize");
press("c");
found.changedLayers = all(".layer").map((l) => l.dataset.name);
press("n");
found.here = all(".op.here:not(.same)").length;
one(".op.here .after .v").click();
found.way = one("#value .way").textContent;
found.scroll = d.documentElement.scrollWidth;
found.width = w.innerWidth;
found.page = w.getComputedStyle(d.body).backgroundColor;
return found;
"""


@needs_browser
@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), pytest.param(400, "dark", marks=pytest.mark.slow)]
)
def test_page_is_clicked_through_in_a_browser(tmp_path: Path, width: int, scheme: str) -> None:
    found = played(explored().html, tmp_path, CLICKS, width=width, scheme=scheme)
    assert "error" not in found, found["error"]
    data = data_of(explored().html)
    assert found["moments"] == len(data["moments"])
    assert (found["first"], found["earlier"]) == ("overlap-communication", "start-collectives")
    assert found["streams"] > 50
    section = next(
        one
        for one in moment_of(data, "propagate-shardings")["parts"][0]["sections"]
        if one["layers"] == ["h.0", "h.1"]
    )
    assert found["added"] == section["kinds"].count(KINDS.index("added")) == found["hits"]
    assert found["layers"] == ["h.0 … h.1"]
    assert found["value"].startswith("%")
    assert found["why"]
    assert found["drawn"] == 1
    assert {"Shards on the mesh", "Reshards, and why", "Producers", "Users"} < {*found["headings"]}
    assert found["closed"]
    assert "h.0 … h.1" in found["changedLayers"]
    assert found["here"] == 1
    assert "cloned by rematerialize, to be computed again" in found["way"]
    assert "in the input" in found["way"]
    assert found["scroll"] <= found["width"]
    assert found["page"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 21, 27)"}[scheme]


def test_page_of_a_plan_says_what_the_plan_predicts(tmp_path: Path) -> None:
    """Of stages that the plan leaves to its mesh, and with the update."""
    plan = replace(zoo.megatron(MODEL, "data=2"), mesh={"pipeline": 2, "data": 2}, update="AdamW")
    predicted = simulate_step(captured(), CLUSTER, plan=plan)
    paths = [str(tmp_path / name) for name in ("step.mlir", "plan.json", "page.html")]
    captured().save(paths[0])
    plan.save(paths[1])
    main(["explore", paths[0], "--cluster", CLUSTER, "--plan", paths[1], "-o", paths[2]])
    plans = explore(captured(), {"a": plan}, CLUSTER, optimizer_multiplier=None)
    for html in (Path(paths[2]).read_text(), plans.html):
        amounts = data_of(html)["moments"][-1]["amounts"]
        assert (amounts["step"], amounts["memory"]) == (predicted.step_s, predicted.peak_bytes)


def staged(mesh: str = "stage=2,data=2", cluster: str = CLUSTER) -> Exploration:
    """The small GPT under a plan of two stages, whose backward passes are halved."""
    program = captured().clone()
    program.set_mesh(Mesh.parse(mesh))
    pipeline = Pipeline(balanced_stages(program, 2), 2, schedule="zero-bubble")
    plan = replace(plan_megatron(program, Mesh.parse(mesh)), pipeline=pipeline)
    return explore(captured(), plan_passes(plan), cluster, mesh=mesh)


def test_micro_batches_send_nothing_to_each_other_on_a_device_without_neighbours() -> None:
    moment = moment_of(data_of(staged("stage=2", "testbed:rate=250mbit").html), "cut-stages")
    assert len(moment["schedule"]) == 2


def test_page_of_stages_has_the_schedule_and_knows_where_ops_come_from() -> None:
    data = data_of(staged().html)
    words, moment = data["words"], moment_of(data, "cut-stages")
    assert moment["schedule"] == [
        ["F0", "F1", ".", "B0", "-", "B1", "-"],
        [".", "F0", "I0", "F1", "I1", "W0", "W1"],
    ]
    parts = {part["name"]: part for part in moment["parts"]}
    assert {"forward_0", "inputs_1", "weights_1"} <= set(parts)
    (layer,) = (one for one in parts["forward_0"]["sections"] if one["layers"] == ["h.0"])
    made = [words[text] for text, row in zip(layer["after"], layer["back"], strict=True) if row < 0]
    assert len(layer["back"]) > 30
    assert [line.partition("(")[0] for line in made] == ["dist.send"]


def test_command_shows_plans_beside_one_another(tmp_path: Path, capsys: Captured) -> None:
    source, out = save(captured(), tmp_path), tmp_path / "plans.html"
    options: list[str] = []
    for name, mesh in (("a.json", "data=2,tensor=2"), ("b.json", "data=4,tensor=1")):
        zoo.megatron(MODEL, mesh).save(tmp_path / name)
        options += ["--plan", str(tmp_path / name)]
    rest = ["--cluster", CLUSTER, "-o", str(out)]
    assert main(["explore", str(source), *options, *rest]) == 0
    moments = data_of(out.read_text())["moments"]
    assert [moment["name"] for moment in moments] == ["input", "a.json", "b.json"]
    assert dict(moments[2]["choices"])["mesh"] == "data=4,tensor=1"
    assert "tensor" in dict(moments[1]["rail"])
    assert "tensor" not in dict(moments[2]["rail"])
    assert main(["explore", str(source), *options, "--passes", "cse", *rest]) == 1
    assert "leave out --passes and --mesh" in capsys.readouterr().err


def test_notebook_shows_the_page_in_a_frame() -> None:
    shown = explored()._repr_html_()
    frame = re.search(r'srcdoc="([^"]*)"', shown)
    assert frame is not None
    assert unescape(frame[1]) == explored().html


def test_value_of_a_sub_batch_goes_back_to_the_one_that_was_copied() -> None:
    """Both copies of each op that is written out point to the same row of the moment before."""
    data = data_of(explored().html)
    words, moment = data["words"], moment_of(data, "unroll-time-axes")
    rows: dict[int, set[str]] = {}
    for section in moment["parts"][0]["sections"]:
        for text, row in zip(section["after"], section["back"], strict=True):
            copy = re.search(r"copy = \[(\d)", words[text]) if text >= 0 else None
            if copy is not None and row >= 0:
                rows.setdefault(row, set()).add(copy[1])
    assert len(rows) > 100
    assert all(copies == {"0", "1"} for copies in rows.values())


def test_memory_under_a_plan_has_the_state_of_adam(tmp_path: Path) -> None:
    source, plan = save(captured(), tmp_path), tmp_path / "plan.json"
    zoo.megatron(MODEL, str(MESH)).save(plan)
    peaks: list[str] = []
    for more in ([], ["--optimizer", "2"], ["--optimizer", "0"]):
        out = tmp_path / "explore.html"
        options = ["--plan", str(plan), "--cluster", CLUSTER, "-o", str(out)]
        assert main(["explore", str(source), *options, *more]) == 0
        numbers = data_of(out.read_text())["moments"][-1]["numbers"]
        peaks += [row[2] for row in numbers if row[0] == "simulated peak memory"]
    assert peaks[0] == peaks[1] != peaks[2]
