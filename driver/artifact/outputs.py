"""Outputs of a model as JSON: structure, names of tensors, and classes that exist already."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any

from shardweave.driver.artifact.artifact import ArtifactError
from shardweave.ir.capture.outputs import OutputLeaf, Outputs
from shardweave.ir.torch_private import pytree


def outputs_to_json(outputs: Outputs | None) -> Any:
    """Convert outputs to JSON data. Raises ArtifactError for outputs that JSON cannot hold."""
    if outputs is None:
        return None
    return {"template": _encoded(outputs.template), "kinds": [*map(_name_of, outputs.kinds)]}


def outputs_from_json(stored: Any, homes: Sequence[str]) -> Outputs | None:
    """Inverse of `outputs_to_json`. ArtifactError for a class that no imported module defines.
    homes: more modules to search, for classes whose module has another name in this process."""
    if stored is None:
        return None
    kinds = (_class_of(name, is_dataclass, homes) for name in stored["kinds"])
    return Outputs(_decoded(stored["template"], homes), tuple(kinds))


def _encoded(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, OutputLeaf):
        return {"tensor": value.name, "differentiable": value.is_differentiable}
    if isinstance(value, bool | int | float | str | None):
        return {"constant": value}
    if kind in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        if _is_json(context):
            items = [*map(_encoded, children)]
            return {"class": _name_of(kind), "context": context, "items": items}
    elif _is_namedtuple(kind):
        return {"class": _name_of(kind), "items": [*map(_encoded, value)]}
    raise ArtifactError(
        f"the model returns a {kind.__name__}, which an artifact cannot hold; return tensors and "
        "numbers in lists, tuples, dicts and dataclasses."
    )


def _decoded(stored: Any, homes: Sequence[str]) -> Any:
    if "tensor" in stored:
        return OutputLeaf(stored["tensor"], stored["differentiable"])
    if "constant" in stored:
        return stored["constant"]
    items = [_decoded(item, homes) for item in stored["items"]]
    if "context" not in stored:
        return _class_of(stored["class"], _is_namedtuple, homes)(*items)
    known = {_name_of(kind): node for kind, node in pytree.SUPPORTED_NODES.items()}
    if stored["class"] not in known:
        raise _undefined(stored["class"])
    return known[stored["class"]].unflatten_fn(items, stored["context"])


def _name_of(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str, fits: Callable[[type], bool], homes: Sequence[str]) -> Any:
    """Find a class by name in modules already imported; a file never causes an import."""
    module, _, path = name.partition(":")
    for home in (module, *homes):
        owner: Any = sys.modules.get(home)
        for part in path.split("."):
            owner = getattr(owner, part, None)
        if isinstance(owner, type) and fits(owner):
            return owner
    raise _undefined(name)


def _undefined(name: str) -> ArtifactError:
    return ArtifactError(
        f"the artifact's model returns a {name.rpartition(':')[2]}, which this process has not "
        f"defined; import {name.partition(':')[0]} first."
    )


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), Iterable)


def _is_json(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except TypeError:
        return False
