"""Plain values where Python code reads them: attributes, those of classes, globals, closures."""

from __future__ import annotations

import argparse
import enum
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn


class Absent:
    """In place of a value: there is none."""


ABSENT = Absent()

OTHER = object()
"""In place of a value that is not plain."""

VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic, enum.Enum)
_BY_IDENTITY = (torch.dtype, torch.device, type, partial, types.FunctionType, types.MethodType)
_BY_IDENTITY += (types.BuiltinFunctionType, nn.Module, Absent)
SIMPLE = (*VALUES, *_BY_IDENTITY)
"""Kinds of values that never change in place, or of which that does not matter."""

MAX_ITEMS = 256
"""Lists, tuples, sets and dicts of more items are not compared: it would be done at each call."""

DEPTH = 3
"""How deep plain objects, such as a config in a config, are looked into."""


class Holder(Protocol):
    """Where a value is looked up: the dict of an object or of globals, a class, a cell."""

    def get(self, key: str, default: Any = None, /) -> Any: ...


Held = tuple[Holder, str]


def plain(value: Any) -> Any:
    """What stays equal while nothing of a value changes; OTHER if that cannot be said of it.

    Of plain objects it is which one it is: their attributes are settings of their own.
    """
    if isinstance(value, SIMPLE):
        return value
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS:
        return type(value).__name__, *map(plain, value)
    if isinstance(value, dict) and len(value) <= MAX_ITEMS:
        return "dict", *((key, plain(item)) for key, item in value.items())
    if isinstance(value, set | frozenset) and len(value) <= MAX_ITEMS:
        return "set", frozenset(map(plain, value))
    return ("object", id(value)) if _is_plain_object(value) else OTHER


def _is_large(value: Any) -> bool:
    """Whether it is or holds a container of too many items."""
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return False
    items = value.values() if isinstance(value, dict) else value
    return len(value) > MAX_ITEMS or any(map(_is_large, items))


def _is_plain_object(value: Any) -> bool:
    """Whether it is one of a user's or a package's class, such as a config, or a namespace."""
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return True
    if isinstance(value, torch.Tensor) or _is_of_libraries(type(value).__module__):
        return False
    return hasattr(value, "__dict__")


def _objects(value: Any) -> Iterator[tuple[str, Any]]:
    """The plain objects that a value is or holds, with the keys to each."""
    if _is_plain_object(value):
        yield "", value
    elif isinstance(value, list | tuple | dict) and len(value) <= MAX_ITEMS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if not isinstance(item, SIMPLE):
                for inside, one in _objects(item):
                    yield f"[{key!r}]{inside}", one


def _is_of_libraries(module: str) -> bool:
    """Whether a module is of Python or a package without settings that a model may read."""
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in ("torch", "numpy")


class Finder:
    """Finds where plain values are that code may read: `held`, by a name for people."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self._seen: set[int] = set()
        self._read: set[str] = set()
        """What code looks up by name."""
        self._beyond: dict[str, tuple[str, str]] = {}
        """By place the name and how much it is, of what is not looked into."""
        self._methods: defaultdict[str, list[Any]] = defaultdict(list)
        """Functions of the classes of modules, which code may call, by name."""

    def beyond(self) -> list[str]:
        """Notes on what code names of which changes are not seen."""
        return [
            f"'{place}' {how}: a change of it after sw.compile is not seen; make it smaller, put "
            "it in a buffer, or compile anew after it"
            for place, (name, how) in self._beyond.items()
            if name in self._read
        ]

    def _is_new(self, value: Any) -> bool:
        is_new = id(value) not in self._seen
        self._seen.add(id(value))
        return is_new

    def add_modules(self, root: nn.Module, name: str = "") -> None:
        """The attributes of a module and of those in it, and what their code reads."""
        modules = [(path, m) for path, m in root.named_modules(prefix=name) if self._is_new(m)]
        for path, module in modules:
            self._add_module(module, f"{path}." if path else "")
        for _, module in modules:
            self.add_function(module.forward)

    def _add_module(self, module: nn.Module, dot: str) -> None:
        for kind in type(module).__mro__:
            if kind is nn.Module or kind.__module__.startswith("torch."):
                break
            self._add_class(kind, vars(module), dot)
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                self._add(f"{dot}{name}", value, (vars(module), name))
        self.held[f"{dot}forward"] = vars(module), "forward"

    def _add_class(self, kind: type, attributes: Holder, dot: str) -> None:
        """What a module has of a class, and the functions that it may call."""
        if self._add_values(kind, attributes, dot):
            for name, value in vars(kind).items():
                self._methods[name].append(value.fget if isinstance(value, property) else value)

    def _add_values(self, kind: type, attributes: Holder, dot: str) -> bool:
        """What an object has of a class, which is its own once it is set there; whether the class
        is new."""
        names = [
            name
            for name, value in vars(kind).items()
            if isinstance(value, (*VALUES, list, tuple, dict)) and not name.startswith("__")
        ]
        self.held.update({f"{dot}{name}": (attributes, name) for name in names})
        is_new = self._is_new(kind)
        for name in names if is_new else ():
            self._add(f"{kind.__qualname__}.{name}", vars(kind)[name], (_Class(kind), name))
        return is_new

    def _add(self, place: str, value: Any, at: Held, depth: int = DEPTH) -> None:
        """A value, and the attributes of objects such as a config, or several in a list."""
        if isinstance(value, SIMPLE):
            self.held[place] = at
            return
        if _is_large(value):
            self._beyond[place] = at[1], f"holds more than {MAX_ITEMS} items"
        if plain(value) is OTHER:
            return
        self.held[place] = at
        for inside, one in _objects(value):
            if not depth:
                self._beyond[place] = at[1], f"is deeper than {DEPTH} objects"
            elif self._is_new(one):
                for kind in type(one).__mro__:
                    if not _is_of_libraries(kind.__module__):
                        self._add_values(kind, vars(one), f"{place}{inside}.")
                for name, item in vars(one).items():
                    self._add(f"{place}{inside}.{name}", item, (vars(one), name), depth - 1)

    def add_function(self, function: Any) -> None:
        """The globals and closure variables that its code names, and that of functions that it
        names; but none of torch's."""
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or not self._is_new(function):
            return
        if _is_of_libraries(function.__module__ or ""):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        named: dict[str, Held] = {name: (_Cell(cell), name) for name, cell in cells}
        for name in _names(function.__code__):
            self._read.add(name)
            if name in function.__globals__:
                named.setdefault(name, (function.__globals__, name))
            for method in tuple(self._methods[name]):
                self.add_function(method)
        for name, at in named.items():
            self._add_named(name, at, function)

    def _add_named(self, name: str, at: Held, function: types.FunctionType) -> None:
        value = at[0].get(name, ABSENT)
        if isinstance(value, nn.Module):
            self.add_modules(value, name)
        elif isinstance(value, types.FunctionType | types.MethodType):
            self.add_function(value)
        elif isinstance(value, types.ModuleType):
            self._add_of_module(value, name, function)
        elif not isinstance(value, type):
            self._add(f"{name} of {function.__qualname__}", value, at)

    def _add_of_module(
        self, module: types.ModuleType, name: str, function: types.FunctionType
    ) -> None:
        """What a function reads of a module of Python, such as one that holds constants."""
        if _is_of_libraries(module.__name__):
            return
        for inner in _names(function.__code__):
            if not isinstance(vars(module).get(inner, module), types.ModuleType):
                self._add_named(f"{name}.{inner}", (vars(module), inner), function)


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}


class _Class:
    """The attributes of a class."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def get(self, key: str, default: Any = None, /) -> Any:
        return vars(self._kind).get(key, default)


class _Cell:
    """A variable of the function around another one."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, key: str, default: Any = None, /) -> Any:
        del key
        try:
            return self._cell.cell_contents
        except ValueError:  # it is not set yet
            return default


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code looks up, that of functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
