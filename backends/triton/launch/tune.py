"""Choose the configuration of a kernel by measuring, once for each device and shape."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from shardweave.backends.triton.source.region import Region
from shardweave.backends.triton.source.source import Config, Kernel

VARIABLE = "SHARDWEAVE_CACHE"


def cache_folder() -> Path:
    """Return the folder in SHARDWEAVE_CACHE; by default `shardweave` in the user's cache folder."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardweave"


def write_file(path: Path, text: str) -> None:
    """Write a file atomically: other processes see the old file, the new one, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


_ENOUGH_PROGRAMS = 8192
"""Limit on the programs of a kernel that sums columns: four times those an H100 runs at once (132
SMs x 16 programs of 4 warps). More programs would leave more partial sums to write and read."""


def power_of_2(count: int) -> int:
    """Return the least power of 2 that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def configs_of(region: Region, *, in_parts: bool) -> list[Config]:
    """List configurations to tune over, the default first. in_parts: whether rows are read block by
    block. A configuration's `programs` limits the instances that share the rows of a column sum."""
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
    configs = [base, {"BLOCK_R": 1, "num_warps": warps}, {"BLOCK_R": 1, "num_warps": warps * 2},
             {"BLOCK_R": min(rows, 2 * tall), "num_warps": min(16, warps * 2)}]  # fmt: skip
    if space.reduces_columns:
        configs = [{**config, "programs": 256} for config in configs]
    unique = {tuple(config.items()): config for config in configs}
    return list(unique.values())


logger = logging.getLogger(__name__)

ATEN: Config = {"aten": 1}
"""The choice of ATen in place of the kernel: the region's ops, one by one, were faster."""


Runner = Callable[[Config], Callable[[], object]]
"""Maps a configuration to a function that runs the kernel with it (the ops for `ATEN`)."""


@dataclass(frozen=True)
class Choice:
    """The configuration to use. failures: the configurations that did not run, with reasons."""

    config: Config
    failures: tuple[str, ...] = ()


def choose_config(kernel: Kernel, device_name: str, runner: Runner) -> Choice:
    """Return the fastest configuration on this device, from the disk cache or measured now."""
    path = entry_path(kernel, device_name)
    known = read_choice(path, kernel)
    if known is not None:
        return Choice(known)
    best = fastest_config(kernel, runner)
    record_choice(path, kernel, best.config)
    return best


def fastest_config(kernel: Kernel, runner: Runner) -> Choice:
    """Measure all configurations and return the fastest. Raises RuntimeError if all fail."""
    from triton.testing import do_bench

    times: list[tuple[float, int, Config]] = []
    failures: list[str] = []
    for number, config in enumerate((*kernel.configs, ATEN)):
        try:
            seconds = cast(Any, do_bench)(runner(config), warmup=5, rep=20)
        except Exception as error:  # noqa: BLE001
            # Compilers and drivers raise what they like, and one candidate must not end the step.
            words = next(iter(str(error).strip().splitlines()), "")
            name = "ATen" if config == ATEN else str(config)
            failures.append(f"{name}: {type(error).__name__} {words}".strip())
            logger.warning("%s with %s", kernel.name, failures[-1])
            continue
        times.append((seconds, number, config))
    if not times:
        raise RuntimeError(f"{kernel.name}: every configuration failed: {'; '.join(failures)}.")
    return Choice(min(times)[2], tuple(failures))


def entry_path(kernel: Kernel, device_name: str) -> Path:
    """Return the path of the cache entry for a kernel on a device."""
    facts = kernel.key, kernel.pointers, kernel.sizes, kernel.fixed
    what = json.dumps([*facts, torch.__version__, version("triton")], sort_keys=True)
    word = "".join(c if c.isalnum() else "_" for c in device_name)
    name = f"{kernel.name}_{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"
    return cache_folder() / "tuned" / word / name


def read_choice(path: Path, kernel: Kernel) -> Config | None:
    """Read a cache entry; None if there is none, or its configuration is not the kernel's."""
    try:
        choice = json.loads(path.read_text())["config"]
    except (OSError, ValueError, KeyError, TypeError):  # a corrupt entry is no entry
        return None
    return choice if choice in (*kernel.configs, ATEN) else None


def record_choice(path: Path, kernel: Kernel, config: Config) -> None:
    """Write the fastest config of a kernel to its cache entry, for `read_choice`."""
    entry = {"kernel": kernel.name, "sizes": kernel.sizes, "config": config}
    write_file(path, json.dumps(entry, indent=1))
