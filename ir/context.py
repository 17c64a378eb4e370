"""The xDSL context with the dialects of a program."""

from __future__ import annotations

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin
from xdsl.dialects.func import Func

from shardweave.ir.aten import aten_dialect
from shardweave.ir.dist import dist_dialect
from shardweave.ir.kernel import kernel_dialect


def make_context() -> Context:
    """A context that knows builtin, func, aten, dist and kernel."""
    context = Context()
    context.load_dialect(Builtin)
    context.load_dialect(Func)
    context.register_dialect("aten", aten_dialect)
    context.register_dialect("dist", dist_dialect)
    context.register_dialect("kernel", kernel_dialect)
    return context
