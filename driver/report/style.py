"""The style of the report's page: no outside fonts or files, light and dark, narrow and wide."""

from __future__ import annotations

from shardweave.planners.cost.memory import PARTS
from shardweave.planners.simulate.timeline import PHASE_COLOURS

_PART_COLOURS = dict(
    zip(
        PARTS,
        ("#4c78a8", "#9d755d", "#e45756", "#bab0ac", "#72b7b2", "#f2a541", "#b279a2"),
        strict=True,
    )
)
_DEVICE_COLOURS = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#e4a5a0", "#9d755d", "#c7b042",
)  # fmt: skip

_BASE = """
:root { color-scheme: light dark; --text: #1d2330; --soft: #5c6473; --page: #ffffff;
  --card: #f4f6f9; --line: #d9dee6; --stripe: rgba(255,255,255,.55); --mark: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #9aa3b2; --page: #12151b;
  --card: #1c212a; --line: #333b48; --stripe: rgba(0,0,0,.45); --mark: #fb923c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: .3rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; padding-bottom: .2rem;
  border-bottom: 1px solid var(--line); }
p { margin: .4rem 0; } .soft, small, figcaption { color: var(--soft); }
.warn { color: var(--mark); font-weight: 600; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .85em;
  overflow-wrap: anywhere; }
.tiles { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.tile { background: var(--card); border-radius: .4rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.2rem; } .tile span { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { display: block; } .row { display: flex; align-items: center; margin: 2px 0; }
.row > span { flex: 0 0 5.5rem; font-size: .8rem; overflow-wrap: anywhere; padding-right: .5rem; }
.row > svg, .area > svg { flex: 1 1 0; width: 100%; min-width: 0; background: var(--card); }
.axis { display: flex; justify-content: space-between; margin-left: 5.5rem; font-size: .72rem;
  color: var(--soft); }
.area { display: flex; } .area > span { flex: 0 0 5.5rem; font-size: .8rem; color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .82rem;
  margin-left: 5.5rem; } .legend i { display: inline-block; width: .8em; height: .8em;
  margin-right: .35em; border-radius: 2px; background: currentColor; }
.defs { position: absolute; } .stripe { fill: var(--stripe); } rect.hatch { fill: url(#hatch); }
i.hatch { background: repeating-linear-gradient(45deg, var(--stripe) 0 2px, #888 2px 6px); }
.pictures { display: grid; gap: 1.4rem; margin-top: 1.2rem;
  grid-template-columns: repeat(auto-fill, minmax(15.5rem, 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-size: .8rem; margin-top: .3rem;
  overflow-wrap: anywhere; } figcaption b { color: var(--text); }
.sharding { max-width: 100%; height: auto; } .sharding rect { stroke: var(--page);
  stroke-width: 1.5; } .sharding text { text-anchor: middle; dominant-baseline: central;
  font-size: 12px; fill: #10131a; }
ul { padding-left: 1.2rem; margin: .3rem 0; } details > summary { cursor: pointer; }
@media (max-width: 500px) { .row > span, .area > span { flex-basis: 3.6rem; font-size: .7rem; }
  .axis, .legend { margin-left: 3.6rem; } .axis { font-size: .62rem; } }
"""


def _colours() -> str:
    """One rule for each phase, part of memory and device, for bars and for legends."""
    rules = [
        f"rect.{name}, polygon.{name} {{ fill: {colour}; }} "
        f".legend i.{name} {{ background: {colour}; }}"
        for name, colour in {**PHASE_COLOURS, **_PART_COLOURS}.items()
    ]
    phases = " ".join(f"--{phase}: {colour};" for phase, colour in PHASE_COLOURS.items())
    rules.append(f":root {{ {phases} }}")
    rules += [f"rect.c{number} {{ fill: {c}; }}" for number, c in enumerate(_DEVICE_COLOURS)]
    return "\n".join(rules)


STYLE = f"{_BASE}{_colours()}\n"
