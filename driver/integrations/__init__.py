"""Training frameworks that drive a compiled model: a line for each, and their own code runs.

`sw.integrations.transformers`, `.accelerate`, `.lightning` and `.torchtitan` are imported when they
are first used, and the frameworks with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("accelerate", "lightning", "torchtitan", "transformers"):
        raise AttributeError(f"shardweave.integrations has no '{name}'")
    return import_module(f"{__name__}.{name}")
