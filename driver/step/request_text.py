"""A request as text, for ranks to compare, since rank 0 compiles for all, and for artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardweave.backends.watch.agreement import without_addresses
from shardweave.driver.step.request import CompileOptions, Request
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import print_module
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.plan.plan import Plan
from shardweave.planners.registry import PLANNERS

OF_A_RANK = ("device", "timeout", "twin", "optimizers")
"""Options that may differ between ranks."""


def describe_request(request: Request) -> str:
    """Format the options of a checked request, one a line, without a description of the model."""
    names = [option.name for option in fields(CompileOptions) if option.name not in OF_A_RANK]
    lines = [
        f"{name}: {line}" if name == "plan" else line
        for name in names
        for line in option_text(name, getattr(request, name)).splitlines()
    ]
    return without_addresses("\n".join(lines))


def option_text(name: str, value: Any) -> str:
    """Format an option; files by their content, since ranks may have them under other paths."""
    if name == "plan":
        return _plan(value)
    if isinstance(value, Program):
        return print_module(value.module)
    if name == "mesh" and value is None:
        value = "the plan's"
    elif name == "cluster" and value is not None:
        value = find_cluster(value)
    elif name == "loss" and callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        value = f"{named.__module__}.{named.__qualname__}"
    elif name == "loss":
        value = repr(value)
    return f"{name}={value!s}"


def _plan(plan: Any) -> str:
    if isinstance(plan, Plan):
        return plan.to_json()
    if isinstance(plan, Mapping):
        return "\n".join(f"{name}: {value}" for name, value in plan.items())
    if plan is not None and plan not in PLANNERS and Path(plan).is_file():
        return Path(plan).read_text()
    return str(plan)
