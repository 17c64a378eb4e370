"""Pages of the explorer for whole models, a U-Net and GPT-3's 96 layers, clicked through."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardweave.docs.explore.pictures import page_of
from shardweave.tests.browser import data_of, moment_of, needs_browser, played

page = cache(page_of)

CLICKS = r"""
await until(() => d.documentElement.dataset.ready);
const one = (selector) => d.querySelector(selector);
const all = (selector) => [...d.querySelectorAll(selector)];
const press = (key) => d.dispatchEvent(new w.KeyboardEvent("keydown", { key, bubbles: true }));
const layers = () => all(".layer").map((layer) => layer.dataset.name);
const found = { heads: [], layers: [], overflows: [] };
for (const button of all("#rail button")) {
  button.click();
  found.heads.push(one("main h2").firstChild.textContent);
  found.layers.push(layers().slice(1));
  if (d.documentElement.scrollWidth > w.innerWidth) found.overflows.push(found.heads.at(-1));
}
all("#rail button").find((b) => b.textContent.startsWith("insert-collectives")).click();
found.streams = all("main .row rect").length;
const box = one("#search");
box.value = "op:dist.all_reduce";
box.dispatchEvent(new w.Event("input"));
await until(() => all(".layer summary").every((s) => s.textContent.includes(" of ")));
const counts = all(".layer small:nth-of-type(2)").map((s) => s.textContent.split(" of ")[0]);
found.hits = counts.reduce((sum, count) => sum + Number(count.replace(",", "")), 0);
one(".op .after .v").click();
found.value = one("#value h2").textContent;
found.pictures = all("#value svg.sharding").length;
found.headings = all("#value h3").map((h) => h.textContent);
found.way = one("#value .way").textContent;
press("Escape");
box.value = "";
box.dispatchEvent(new w.Event("input"));
await until(() => !all(".layer summary").some((s) => s.textContent.includes(" of ")));
press("n");
found.changed = all(".op.here:not(.same)").length;
press("o");
found.open = all(".layer[open] .ops > *").length > 0 && all(".layer:not([open])").length === 0;
found.overflow = d.documentElement.scrollWidth > w.innerWidth;
return found;
"""


def names_of(moment: dict[str, Any]) -> list[str]:
    """The layers of a moment, equal ones as one."""
    sections = [part["sections"] for part in moment["parts"]]
    return [
        layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]}"
        for layers in (section["layers"] for rows in sections for section in rows)
    ]


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "gpt3"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_page_of_a_whole_model_is_clicked_through(
    tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    data = data_of(page(name))
    found = played(page(name), tmp_path, CLICKS, width=width, scheme=scheme)
    assert "error" not in found, found["error"]
    assert found["heads"] == [moment["name"] for moment in data["moments"]]
    shown: list[str] = []
    for moment, layers in zip(data["moments"], found["layers"], strict=True):
        shown = shown if moment.get("same") else names_of(moment)
        assert layers == shown
    moment = moment_of(data, "insert-collectives")
    rows = [data["words"][i] for s in moment["parts"][0]["sections"] for i in s["after"] if i >= 0]
    assert found["hits"] == sum(" = dist.all_reduce(" in row for row in rows) > 0
    assert found["streams"] > 100
    assert found["value"].startswith("%all_reduce")
    assert found["pictures"] == 1
    assert {"Shards on the mesh", "Producers", "Users"} < {*found["headings"]}
    assert "added by insert-collectives" in found["way"]
    assert found["changed"] == 1
    assert found["open"]
    assert (found["overflows"], found["overflow"]) == ([], False)


@pytest.mark.slow
def test_gpt3_has_its_equal_layers_as_one() -> None:
    moments = data_of(page("gpt3"))["moments"]
    assert names_of(moments[-1]).count("h.1 … h.95") == 1
