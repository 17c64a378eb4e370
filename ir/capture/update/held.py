# pyright: basic
# What optimizers hold is of any type.
"""Find and replace objects within optimizers and states: in lists, dicts and own objects."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_NOT_OWN = {*sys.stdlib_module_names, "torch", "shardweave"}
"""Packages whose objects are not searched."""


def instances_in(value: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """List the instances of `kinds` in a value and in containers within it, in order."""
    instances: list[Any] = []

    def look(x: Any) -> Any:
        if isinstance(x, kinds):
            instances.append(x)
        return x

    mapped(value, look)
    return instances


def mapped(
    value: Any,
    change: Callable[[Any], Any],
    copies: list[tuple[Any, Any]] | None = None,
    known: dict[int, Any] | None = None,
) -> Any:
    """Replace objects in a nested value by `change`; return a copy, or the value if nothing
    changes.

    copies: list to which (object, copy) is appended for each copied object. known: the replacements
    of objects by id, for the recursion only.
    """
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    new = change(value)
    if new is not value or isinstance(value, Tensor):
        return new
    again = partial(mapped, change=change, copies=copies, known=known)
    if isinstance(value, dict):
        return _dict(value, again)
    if isinstance(value, list | tuple | deque):
        return _sequence(value, again)
    if isinstance(value, set | frozenset):
        new = {again(x) for x in value}
        return value if new == value else type(value)(new)
    if not _is_own(value):
        return value
    made = known[id(value)] = object.__new__(type(value))
    attributes = again(vars(value))
    if attributes is vars(value):
        known[id(value)] = value
        return value
    vars(made).update(attributes)
    if copies is not None:
        copies.append((value, made))
    return made


def _dict(items: dict[Any, Any], again: Callable[[Any], Any]) -> dict[Any, Any]:
    new = {again(key): again(x) for key, x in items.items()}
    if all(k is j and x is y for (k, x), (j, y) in zip(new.items(), items.items())):  # noqa: B905 - equal lengths
        return items
    return with_entries(items, new)


def with_entries(items: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the class and settings of `items` with the entries `new`."""
    made = copy.copy(items)
    made.clear()
    made.update(new)
    return made


def _sequence(items: Any, again: Callable[[Any], Any]) -> Any:
    parts = [again(x) for x in items]
    if all(x is y for x, y in zip(parts, items, strict=True)):
        return items
    if isinstance(items, tuple):
        return type(items)(*parts) if hasattr(items, "_fields") else tuple(parts)
    made = copy.copy(items)
    made.clear()
    made.extend(parts)
    return made


def _is_own(value: Any) -> bool:
    """True if a value's class is a user's own, or from a package outside `_NOT_OWN`."""
    if isinstance(value, type | ModuleType | nn.Module):
        return False
    if type(value).__new__ is not object.__new__:  # such as an enum's
        return False
    has_dict = isinstance(getattr(value, "__dict__", None), dict)
    return has_dict and type(value).__module__.partition(".")[0] not in _NOT_OWN
