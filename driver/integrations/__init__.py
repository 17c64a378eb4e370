"""Adapters by which training frameworks train a compiled model with their own code.

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
