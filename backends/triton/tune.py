"""Choosing the configuration of a kernel by measuring, once for each device and shape."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from shardweave.backends.triton.cache import cache_folder, write_file
from shardweave.backends.triton.source import Config, Kernel

logger = logging.getLogger(__name__)

ATEN: Config = {"aten": 1}
"""The choice not to use the kernel: the region's ops, one after another, took less time."""


def choose(kernel: Kernel, device: torch.device, run: Callable[[Config], object]) -> Config:
    """The fastest configuration on this device, from the cache on disk or measured now.

    run: runs the kernel with a configuration (or the ops, for `ATEN`), on the inputs at hand.
    """
    path = entry_path(kernel, torch.cuda.get_device_name(device))
    known = read_choice(path, kernel)
    if known is not None:
        return known
    best = measure(kernel, run)
    record_choice(path, kernel, best)
    return best


def measure(kernel: Kernel, run: Callable[[Config], object]) -> Config:
    """The configuration that takes the least time; those that do not fit the device are skipped."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    times: list[tuple[float, int, Config]] = []
    for number, config in enumerate((*kernel.configs, ATEN)):
        try:
            seconds = cast(Any, do_bench)(lambda config=config: run(config), warmup=5, rep=20)
        except OutOfResources as error:
            logger.info("%s with %s: %s", kernel.name, config, error)
            continue
        times.append((seconds, number, config))
    return min(times)[2]


def entry_path(kernel: Kernel, device_name: str) -> Path:
    """Where the choice for a kernel on a device is kept."""
    what = json.dumps(
        [kernel.key, kernel.pointers, kernel.sizes, kernel.fixed, torch.__version__],
        sort_keys=True,
    )
    word = "".join(c if c.isalnum() else "_" for c in device_name)
    name = f"{kernel.name}_{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"
    return cache_folder() / "tuned" / word / name


def read_choice(path: Path, kernel: Kernel) -> Config | None:
    """The choice in a file; None if there is none, or none that this kernel knows."""
    try:
        found = json.loads(path.read_text())["config"]
    except (OSError, ValueError, KeyError, TypeError):  # a corrupt entry is no entry
        return None
    return found if found in (*kernel.configs, ATEN) else None


def record_choice(path: Path, kernel: Kernel, config: Config) -> None:
    entry = {"kernel": kernel.name, "sizes": kernel.sizes, "config": config}
    write_file(path, json.dumps(entry, indent=1))
