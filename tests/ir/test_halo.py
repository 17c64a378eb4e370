"""Shards that overlap: `dist.halo` and its transpose, `dist.halo_add`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor
from xdsl.ir import Block

import shardweave as sw
from shardweave.backends.distributed.runtime import Runtime
from shardweave.ir.dialects.dist import HaloAddOp, HaloOp, create_dist, sent_bytes
from shardweave.ir.dialects.dist_ring import NeighboursOp
from shardweave.ir.dialects.types import tensor_type
from shardweave.ir.mesh.mesh import Mesh
from shardweave.tests.ir_text import step
from shardweave.tests.spawn import run_ranks

HALO: dict[str, Any] = {"dim": 1, "before": 2, "after": 1}
ROW = 3 * 8
"""Bytes of one index of `dim`."""


def halo_op(adds: bool, **arguments: Any) -> NeighboursOp:
    """The op on shards of 3 x 4, or of 3 x 7 with their halos, over `space`."""
    kinds = (HaloOp, HaloAddOp) if not adds else (HaloAddOp, HaloOp)
    sizes = (7, 4) if adds else (4, 7)
    given, made = (tensor_type((3, size), torch.float64) for size in sizes)
    value = Block(arg_types=[given]).args[0]
    return create_dist(kinds[0], [value], [made], axes=["space"], **{**HALO, **arguments})


def shards_of(adds: bool, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    shape = (3, 7 if adds else 4)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(ranks)]


@pytest.mark.parametrize(("edge", "fill"), [("", 0.0), ("lowest", float("-inf")), ("repeat", None)])
def test_halo_holds_the_neighbours_nearest_indices(edge: str, fill: float | None) -> None:
    shards = shards_of(False, 3)
    whole = torch.cat(shards, 1)
    ends = [
        whole[:, at].expand(3, n) if fill is None else torch.full((3, n), fill, dtype=whole.dtype)
        for at, n in ((slice(0, 1), 2), (slice(-1, None), 1))
    ]
    padded = torch.cat([ends[0], whole, ends[1]], 1)
    made = halo_op(False, **({"edge": edge} if edge else {})).on_shards(shards)
    assert all(torch.equal(x, padded[:, 4 * i : 4 * i + 7]) for i, x in enumerate(made))


@pytest.mark.parametrize("edge", ["", "repeat"])
def test_adding_is_the_transpose_of_a_halo(edge: str) -> None:
    arguments = {"edge": edge} if edge else {}
    shards, wide = shards_of(False, 3), shards_of(True, 3)
    widened = halo_op(False, **arguments).on_shards(shards)
    added = halo_op(True, **arguments).on_shards(wide)
    pairs = [zip(widened, wide, strict=True), zip(shards, added, strict=True)]
    first, second = (sum((a * b).sum() for a, b in pair) for pair in pairs)
    torch.testing.assert_close(first, second)


def test_one_rank_sends_what_its_neighbours_lack() -> None:
    assert [sent_bytes(halo_op(True), Mesh(space=n)) for n in (1, 2, 4)] == [0, 2 * ROW, 3 * ROW]


def test_halo_is_read_verified_printed_and_started() -> None:
    text = """
        input %x : tensor<3x4xf64> [{}, {"space"}]
        %wide = dist.halo(%x, axes = ["space"], dim = 1, before = 2, after = 1, edge = "repeat") : tensor<3x7xf64>
        %y = dist.halo_add(%wide, axes = ["space"], dim = 1, before = 2, after = 1) : tensor<3x4xf64>
        output %y [{}, {"space"}]
    """
    program = step(text, "space=2", local=True)
    assert sw.verify(program) == []
    assert sw.Program.parse(str(program)) == program
    started = sw.run_passes(program, "start-collectives")
    assert sw.verify(started) == []
    assert "dist.start_halo_add" in str(started)
    for old, new, problem in (
        ("before = 2", "before = 5", "shards of 4 along dim 1 cannot overlap by 5 and 1"),
        ("dim = 1", "dim = 2", "dim must be in [0, 2)"),
        ('"repeat"', '"mean"', '"lowest" or "repeat"'),
    ):
        wrong = step(text.replace(old, new, 1), "space=2", local=True)
        assert problem in " ".join(sw.verify(wrong))


def exchange() -> list[tuple[float, float]]:
    """Of `dist.halo` and `dist.halo_add` over two axes, the minor one first in the mesh: largest
    difference from the reference, and rows that this rank sent."""
    runtime, axes = Runtime(Mesh(minor=2, major=2)), ["major", "minor"]
    group = runtime.group(axes)
    assert group is not None
    position, real = group.ranks.index(runtime.rank), torch_dist.all_to_all_single
    results: list[tuple[float, float]] = []
    for adds in (False, True):
        shards, sent = shards_of(adds, 4), list[int]()

        def counted(
            out: Tensor, x: Tensor, *args: Any, sent: list[int] = sent, **named: Any
        ) -> Any:
            sent.append(x.nbytes)
            return real(out, x, *args, **named)

        with patch.object(torch_dist, "all_to_all_single", counted):
            run = runtime.halo_add if adds else runtime.halo
            made = run(shards[position], axes, **HALO, edge="repeat")
        wanted = halo_op(adds, edge="repeat").on_shards(shards)[position]
        results.append(((made - wanted).abs().max().item(), sum(sent) / ROW))
    return results


def test_processes_send_the_halo_and_no_more() -> None:
    by_rank = run_ranks(exchange, 4)
    by_position = [by_rank[rank] for rank in (0, 2, 1, 3)]
    # The first rank along the axes has no previous one, and the last no next one.
    for index, sent in enumerate([(2, 3, 3, 1), (1, 3, 3, 2)]):
        assert [made[index] for made in by_position] == [(0.0, rows) for rows in sent]
