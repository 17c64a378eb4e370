"""Places in the user's code, for errors that name the module and the line."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from traceback import FrameSummary
from typing import Any

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_CHILD = re.compile(r"(?:\.__dict__\['_modules'\]|\._modules)\[['\"]([^'\"]*)['\"]\]")
_NOWHERE = ("", 0)
_GLOBAL = re.compile(r"^G\['(?:__import_)?(\w+)'\]\.?")
TORCH = os.path.dirname(torch.__file__) + os.sep
_TRACING = (
    os.path.join(TORCH, "_dynamo", ""),
    os.path.join(TORCH, "fx", ""),
    os.path.join(TORCH, "nn", "modules", "module.py"),  # which calls forward
    os.path.join(os.path.dirname(__file__), ""),
)


class CaptureError(ValueError):
    """Raised if the model cannot be captured; the message says which part and what to change."""


@dataclass(frozen=True)
class Site:
    """A line of the user's code, and the path of the module whose forward ran it."""

    module: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = f"module '{self.module}'" if self.module else "the model"
        if not self.file:
            return where
        text = linecache.getline(self.file, self.line).strip()
        code = f": `{text}`" if text else ""
        return f"{where} ({os.path.basename(self.file)}:{self.line}{code})"


def site_of_node(node: torch.fx.Node) -> Site:
    """Return the source line of a traced call; for a backward call, the forward call's line."""
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    file, line = users_line(meta.get("stack_trace")) or _NOWHERE
    return Site(module_path(stack) or "", file, line)


def site_of_frames(module: str, frames: Iterable[FrameSummary]) -> Site:
    """Return the site of the innermost stack frame in user code. module: the site's module."""
    places = [(frame.filename, frame.lineno or 0) for frame in frames]
    return Site(module, *(_innermost(places) or _NOWHERE))


def is_torchs_own(file: str) -> bool:
    """True if a file belongs to torch, except the parts of torch that trace a model."""
    return file.startswith(TORCH) and not file.startswith(_TRACING) and os.path.isfile(file)


def users_line(stack_trace: str | None) -> tuple[str, int] | None:
    """File and line of the innermost frame in user code, else in torch; None without frames."""
    places = [(file, int(line)) for file, line in _FRAME.findall(stack_trace or "")]
    return _innermost(places)


def _innermost(places: list[tuple[str, int]]) -> tuple[str, int] | None:
    of_models = [place for place in places if not place[0].startswith(_TRACING)]
    own = [place for place in of_models if not place[0].startswith(TORCH)]
    return (own or of_models or [None])[-1]


def module_path(stack: Mapping[str, tuple[str, Any]] | None) -> str | None:
    """The qualified name of the innermost module of an fx module stack; None without one."""
    return qualified(list(stack.values())[-1][0]) if stack else None


@lru_cache(maxsize=4096)
def qualified(source: str) -> str:
    """Turn dynamo's name of a module, or of its attribute, into the qualified name in the model."""
    path = (
        _CHILD.sub(r".\1", _GLOBAL.sub("", source))
        .removeprefix("L['self']")
        .removeprefix("self")
        .lstrip(".")
    )
    path = path.removeprefix("_export_root").lstrip(".")
    return path.removeprefix("model").lstrip(".")
