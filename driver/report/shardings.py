"""Shardings as pictures: which devices hold which part of a tensor, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from itertools import product

import torch

from shardweave.backends.programs import sharding_held
from shardweave.backends.watch.agreement import ranges_of
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Sharding
from shardweave.ir.mesh.shards import take_shard
from shardweave.ir.program.blocks import Blocks, blocks_of
from shardweave.ir.program.program import Program, Slot

WIDTH, HEIGHT, FLAT_HEIGHT = 240, 120, 36
NUM_COLOURS = 8
_MAX_RUNS = 12
"""Most cells drawn along a dim; strided shards may have thousands."""

Run = tuple[int, int, frozenset[int]]
"""Indices `start` to `end` of a dim, and the devices that hold them."""


@dataclass(frozen=True)
class Picture:
    """A shape and sharding that several tensors have. names: their names, one for equal layers, as
    `h.*.attn.q`; empty if the page shows the tensor's name beside the picture."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    text: str
    sharding: Sharding


def pictures_of(program: Program) -> list[Picture]:
    """Group a program's arguments and results by shape and sharding, the most frequent first. A
    gradient is named only if its parameter is in another group."""
    blocks = blocks_of(program)
    groups: dict[tuple[tuple[int, ...], str], list[Slot]] = {}
    for slot in (*program.arguments, *program.results):
        shape = sharding_held(program, slot).global_shape(shape_of(slot.value))
        if shape:
            groups.setdefault((shape, _text(slot)), []).append(slot)
    pictures: list[Picture] = []
    for (shape, text), slots in sorted(groups.items(), key=lambda item: -len(item[1])):
        parameters = {slot.name for slot in slots if slot.kind == "param"}
        named = [s for s in slots if s.kind != "grad" or s.name not in parameters]
        names = tuple(dict.fromkeys(_short(slot, blocks) for slot in named))
        if names:
            pictures.append(Picture(names, shape, text, program.sharding_of_slot(slots[0])))
    return pictures


def _text(slot: Slot) -> str:
    given = slot.sharding_attr
    return "whole" if given is None else str(given).removeprefix("#dist.sharding")[1:-1]


def _short(slot: Slot, blocks: Blocks) -> str:
    """Name of a slot, with `*` for the index of its block."""
    block = blocks.of_layer(slot.name)
    name = slot.name
    if block is not None:
        path, _, _ = block.rpartition(".")
        name = f"{path}.*{name.removeprefix(block)}" if path else f"*{name.removeprefix(block)}"
    return name if slot.kind == "param" else f"{slot.kind} {name or '-'}"


@lru_cache(maxsize=4096)
def index_runs(dim: DimSharding, size: int, mesh: Mesh) -> list[Run]:
    """Split a dim into maximal runs of indices that the same devices hold, in index order."""
    axes = sorted({placement.axis for placement in dim})
    holders = torch.zeros(size, dtype=torch.int64)
    groups: dict[tuple[tuple[str, int], ...], set[int]] = {}
    for rank in range(mesh.num_devices):
        at = mesh.coordinates(rank)
        groups.setdefault(tuple((axis, at[axis]) for axis in axes), set()).add(rank)
    indices = torch.arange(size)
    for number, coordinates in enumerate(groups):
        holders[take_shard(indices, Sharding((dim,)), dict(coordinates))] = number
    ranks = [frozenset(group) for group in groups.values()]
    values, counts = torch.unique_consecutive(holders, return_counts=True)
    ends = counts.cumsum(0)
    return [
        (end - count, end, ranks[value])
        for value, count, end in zip(values.tolist(), counts.tolist(), ends.tolist(), strict=True)
    ]


def sharding_svg(picture: Picture, mesh: Mesh) -> str:
    """Draw a tensor as a rectangle of cells; each names the devices that hold that region. Of more
    than two dims, only two are drawn, sharded ones first."""
    sharding, shape = picture.sharding, picture.shape
    cut = [index for index, dim in enumerate(sharding.dims) if dim]
    shown = sorted([*cut, *(i for i in range(len(shape)) if i not in cut)][:2])
    rows = [(0, 1, frozenset(range(mesh.num_devices)))]
    if len(shown) == 2:
        rows = index_runs(sharding.dims[shown[0]], shape[shown[0]], mesh)
    columns = index_runs(sharding.dims[shown[-1]], shape[shown[-1]], mesh)
    height = HEIGHT if len(shown) == 2 else FLAT_HEIGHT
    cells = _cells(rows[:_MAX_RUNS], columns[:_MAX_RUNS], height)
    label = ": ".join([*picture.names[:1], picture.text])
    return (
        f'<svg class="sharding" role="img" aria-label="{escape(label, quote=True)}" '
        f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">{cells}</svg>'
        + _caption(picture, shown, len(rows), len(columns))
    )


def _cells(rows: Sequence[Run], columns: Sequence[Run], height: int) -> str:
    """Draw the cells, each as large as its share of the shown indices."""
    tall, wide = rows[-1][1], columns[-1][1]
    parts: list[str] = []
    for (top, bottom, of_row), (left, right, of_column) in product(rows, columns):
        ranks = sorted(of_row & of_column)
        x, y = left / wide * WIDTH, top / tall * height
        width, depth = (right - left) / wide * WIDTH, (bottom - top) / tall * height
        text = rank_ranges(ranks)
        place = f"[{top}:{bottom}, {left}:{right}]" if len(rows) > 1 else f"[{left}:{right}]"
        colour = f"c{ranks[0] % NUM_COLOURS}" if ranks else "none"
        parts.append(
            f"<g><title>{place} on {'device' if len(ranks) == 1 else 'devices'} {text}</title>"
            f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{depth:.1f}"/>'
        )
        if width > 7 * len(text) and depth > 14:
            parts.append(f'<text x="{x + width / 2:.1f}" y="{y + depth / 2:.1f}">{text}</text>')
        parts.append("</g>")
    return "".join(parts)


def _caption(picture: Picture, shown: Sequence[int], num_rows: int, num_columns: int) -> str:
    names = ", ".join(picture.names[:6]) + (", ..." if len(picture.names) > 6 else "")
    notes = []
    if len(picture.shape) > 2:
        notes.append(f"dims {' and '.join(map(str, shown))} drawn")
    if max(num_rows, num_columns) > _MAX_RUNS:
        notes.append(f"the first {_MAX_RUNS} of {max(num_rows, num_columns)} parts drawn")
    if picture.sharding.unreduced:
        over = ", ".join(picture.sharding.unreduced)
        notes.append(f"each device along {over} holds one term of a {picture.sharding.reduction}")
    size = " x ".join(map(str, picture.shape))
    said = f"<br><small>{escape('; '.join(notes))}</small>" if notes else ""
    title = f"<b>{escape(names)}</b><br>" if names else ""
    return f"<figcaption>{title}{size} <code>{escape(picture.text)}</code>{said}</figcaption>"


def rank_ranges(ranks: Sequence[int]) -> str:
    """Format sorted ranks as ranges: `0-3,8` of 0, 1, 2, 3, 8."""
    return ",".join(ranges_of(ranks))
