"""`shardweave explore` on a real captured model, clicked through in a real browser."""

from __future__ import annotations

import base64
import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardweave.driver.cli import main
from shardweave.driver.explore import Exploration, explore
from shardweave.ir.inspect.diff import structural_diff
from shardweave.passes.apply_plan import ApplyPlanPass
from shardweave.passes.pipeline import run_passes
from shardweave.planners.cost.simulate import simulate
from shardweave.tests import zoo
from shardweave.tests.real_step import MESH, MODEL, annotated, captured, local, save

CLUSTER = "oases-3090"
KINDS = ("same", "added", "removed", "moved", "changed")
Captured = pytest.CaptureFixture[str]


@cache
def explored() -> Exploration:
    plan = ApplyPlanPass.of(zoo.megatron(MODEL, str(MESH)))
    return explore(captured(), [plan, "preset:oases"], CLUSTER, mesh=MESH, title="a <b>step</b>")


def data_of(html: str) -> dict[str, Any]:
    """The data that a page holds, unpacked as a browser unpacks it."""
    packed = re.search(r'id="data">([^<]*)<', html)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def moment_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(moment for moment in data["moments"] if moment["name"] == name)


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
    rail = dict(moment_of(data_of(explored().html), "overlap-communication")["rail"])
    assert rail["step"] == f"{found.time_s * 1e3:.2f} ms"
    assert rail["exposed"] == f"{found.exposed_communication_s * 1e3:.2f} ms"


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
