"""Configurations to choose of, for kernels that reduce rows or columns."""

from __future__ import annotations

from shardweave.backends.triton.source.region import Region
from shardweave.backends.triton.source.source import Config

_ENOUGH_PROGRAMS = 8192
"""Of a kernel that sums columns: four times what an H100 runs at once (132 SMs, 16 of 4 warps on
each). More would share the rows among more parts, which are written and read again."""


def power_of_2(count: int) -> int:
    """The least power of 2 that is not less."""
    return 1 << max(0, count - 1).bit_length()


def configs_of(region: Region, *, in_parts: bool) -> list[Config]:
    """What to try; the first is the default. programs: that share the rows of column sums."""
    space = region.space
    columns, rows = power_of_2(space.columns), power_of_2(space.rows)
    live = len(region.inputs) + len(region.stored)
    if in_parts and space.reduces_columns:
        blocks = ((32, 128, 8), (64, 64, 8), (32, 256, 16))
        return [
            {"BLOCK_R": t, "BLOCK_C": c, "num_warps": w, "programs": -(-space.rows // t)}
            for t, c, w in blocks
        ]
    if in_parts:
        return [
            {"BLOCK_R": 1, "BLOCK_C": block, "num_warps": warps}
            for block, warps in ((2048, 8), (1024, 4), (4096, 16))
        ]
    if space.holds_columns:
        return [
            {"BLOCK_R": rows, "BLOCK_C": min(wide, columns), "num_warps": warps, "programs": 1}
            for wide, warps in ((256, 4), (128, 4), (512, 8))
        ]
    if not space.reduces_rows:
        wide = min(64, columns)
        shares = -(-_ENOUGH_PROGRAMS // -(-space.columns // wide))
        return [
            {"BLOCK_R": min(tall, rows), "BLOCK_C": min(wide * w, columns), "num_warps": warps,
             "programs": min(programs, shares)}
            for tall, w, warps, programs in ((16, 1, 4, 64), (32, 1, 4, 64), (16, 2, 8, 32),
                                             (8, 2, 4, 128))
        ]  # fmt: skip
    budget = 4096 if live <= 8 else 2048
    warps = 4 if columns <= 2048 else 8 if columns <= 4096 else 16
    tall = max(1, min(rows, budget // columns, 16))
    base: Config = {"BLOCK_R": tall, "num_warps": warps}
    found = [base, {"BLOCK_R": 1, "num_warps": warps}, {"BLOCK_R": 1, "num_warps": warps * 2},
             {"BLOCK_R": min(rows, 2 * tall), "num_warps": min(16, warps * 2)}]  # fmt: skip
    if space.reduces_columns:
        found = [{**config, "programs": 256} for config in found]
    unique = {tuple(config.items()): config for config in found}
    return list(unique.values())
