"""Entry point of plain `xdsl-opt`: our dialects and passes.

Found through the `xdsl.universe` entry point, so that `xdsl-opt step.mlir` reads our programs.
"""

from __future__ import annotations

from functools import partial

from xdsl.passes import ModulePass
from xdsl.transforms import get_all_passes
from xdsl.universe import Universe

from shardweave.ir.dialects.aten import aten_dialect
from shardweave.ir.dialects.dist import dist_dialect
from shardweave.ir.dialects.kernel import kernel_dialect
from shardweave.passes.registry import PASSES, find_pass

PREFIX = "shardweave-"


def name_in_xdsl(name: str) -> str:
    """Name of a pass in `xdsl-opt`: with a prefix if xDSL has a pass of that name, as `cse`."""
    return PREFIX + name if name in get_all_passes() else name


def _load(name: str) -> type[ModulePass]:
    base = find_pass(name)
    renamed = name_in_xdsl(name)
    if renamed == name:
        return base
    # A pass is built from a spec of its own name only.
    return type(base.__name__, (base,), {"name": renamed, "__doc__": base.__doc__})


SHARDWEAVE_UNIVERSE = Universe(
    all_dialects={"aten": aten_dialect, "dist": dist_dialect, "kernel": kernel_dialect},
    all_passes={name_in_xdsl(name): partial(_load, name) for name in PASSES},
)
