"""Audit emitted source: it may call pure ATen ops, the runtime's collectives and given kernels.

A program's text may come from anywhere, and the source emitted from it is executed. So every module
is checked before it runs: a name or string in the text that became code is refused here.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

import torch

from shardweave.backends.emit.calls import CUSTOM, TRANSPOSE
from shardweave.ir.library.pure_ops import is_custom, pure_ops
from shardweave.ir.ops.registry import torch_functions

_STRUCTURE = (
    ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.Delete, ast.Return,
    ast.Expr, ast.Constant, ast.Name, ast.Load, ast.Store, ast.Del, ast.Tuple, ast.List, ast.Dict,
    ast.Subscript, ast.Attribute, ast.Call, ast.keyword, ast.UnaryOp, ast.USub, ast.BinOp, ast.Add,
    ast.Sub, ast.Yield,
)  # fmt: skip


_TAKEN = "given.pop"
"""Call by which a stage function takes, and can then free, an argument."""


KNOWN = ("aten", "kernels", "rt", "torch")
"""Names through which a step reaches the outside; no variable may have one of them."""


class SourceError(ValueError):
    """Raised for emitted source with code that a step may not contain; names it and its line."""


def audit(source: str, header: str, functions: Collection[str]) -> ast.Module:
    """Parse `source`. Raises SourceError unless it consists of the header and one function, whose
    code may only contain what a step needs. header: the expected lines between docstring and
    function. functions: imported names that the step may call. Takes time linear in the source."""
    tree = ast.parse(source)
    body = tree.body
    statements = ast.parse(header).body
    if [*map(ast.dump, body[1:-1])] != [*map(ast.dump, statements)] or not (
        _is_text(body[0]) and isinstance(body[-1], ast.FunctionDef)
    ):
        raise SourceError("emitted source must be its header and `step`, and nothing else.")
    for node in ast.walk(body[-1]):
        if not isinstance(node, _STRUCTURE):
            raise _error(node, f"is a {type(node).__name__}")
        if isinstance(node, ast.Call):
            _check_callee(node, functions)
        elif isinstance(node, ast.Attribute) and not _is_of_torch(node):
            _check_attribute(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in {*KNOWN, *functions}:
                raise _error(node, f"assigns {node.id}")
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _check_callee(node: ast.Call, functions: Collection[str]) -> None:
    callee = _dotted(node.func)
    is_method = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    allowed = (
        callee in pure_ops()
        or callee.removesuffix(".default") in pure_ops()
        or callee in functions
        or callee in torch_functions()
        or callee == TRANSPOSE
        or _is_of_custom_op(callee)
        or (isinstance(node.func, ast.Subscript) and _is_kernel(node.func))
        or (is_method and callee.startswith("rt.") and "_" != callee[3])
        or (is_method and callee.endswith(".contiguous"))
        or callee == _TAKEN
    )
    if not allowed:
        raise _error(node, f"calls {callee}")


def _dotted(node: ast.expr) -> str:
    """Return an expression as text; for dotted names much faster than `ast.unparse`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ast.unparse(node)


def _is_of_custom_op(callee: str) -> bool:
    name = callee.removeprefix(CUSTOM).removesuffix(".default")
    return callee.startswith(CUSTOM) and is_custom(name)


def _is_kernel(node: ast.Subscript) -> bool:
    is_number = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int)
    return is_number and isinstance(node.value, ast.Name) and node.value.id == "kernels"


def _is_of_torch(node: ast.Attribute) -> bool:
    """True if an attribute is a dtype of torch, or a torch function that calls an op."""
    if not (isinstance(node.value, ast.Name) and node.value.id == "torch"):
        return False
    is_dtype = isinstance(getattr(torch, node.attr, None), torch.dtype)
    name = f"torch.{node.attr}"
    return is_dtype or name in torch_functions() or name == TRANSPOSE


def _check_attribute(node: ast.Attribute) -> None:
    """Raise SourceError unless an attribute is of `aten`, the runtime, or another known callee."""
    root = node.value
    while isinstance(root, ast.Attribute):
        root = root.value
    is_known = isinstance(root, ast.Name) and (
        root.id in ("aten", "rt")
        or node.attr == "contiguous"
        or _dotted(node) == _TAKEN
        or f"{_dotted(node)}.".startswith(CUSTOM)
    )
    if not is_known or node.attr.startswith("__"):
        raise _error(node, f"reads {ast.unparse(node)}")


def _error(node: ast.AST, what: str) -> SourceError:
    line = getattr(node, "lineno", 0)
    return SourceError(f"line {line} of emitted source {what}, which no step does.")
