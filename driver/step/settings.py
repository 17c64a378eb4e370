"""Settings of a model, such as a dropout's probability: plain attributes of its modules and of the
objects that these hold, and hooks; and the changes of both.

A program contains their values at its capture. Other things that code reads (globals, closures,
files) are not tracked: after a change of those, `step.recompile()` captures the model anew.
"""

from __future__ import annotations

import argparse
import enum
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.utils.hooks import RemovableHandle

from shardweave.backends.step.compiled_module import as_written
from shardweave.ir.capture.observed.constant_numbers import is_read_as_number
from shardweave.ir.capture.outputs import LossChoice
from shardweave.ir.torch_private import version_of

HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
"""The dicts in which nn.Module keeps hooks, in words."""


class Hooks(tuple[int, ...]):
    """Ids that torch gave to the hooks in one dict; a hook that replaces another has a new id."""

    def __repr__(self) -> str:
        return str(len(self))


NO_HOOKS = Hooks()


class NumbersRead(tuple[int, ...]):
    """Id and version of a tensor whose values programs contain as constants."""

    def __repr__(self) -> str:
        return "a tensor"


EACH = 16
"""Interval, in calls, of looking for hooks that were put into torch's dicts directly."""


class Absent:
    """Placeholder for an attribute that does not exist."""


ABSENT = Absent()

OTHER = object()
"""Placeholder for a value that is not plain."""

VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic, enum.Enum)
_BY_IDENTITY = (torch.dtype, torch.device, type, partial, types.FunctionType, types.MethodType)
_BY_IDENTITY += (types.BuiltinFunctionType, nn.Module, Absent)
SIMPLE = (*VALUES, *_BY_IDENTITY)
"""Types whose values never change in place, or whose changes in place do not matter."""

MAX_ITEMS = 256
"""Most items of a collection that is compared; larger ones would take too long at each call."""

DEPTH = 3
"""Depth to which plain objects, such as a config in a config, are looked into."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}

Held = tuple[Mapping[str, Any], str]
"""The dict of an object or a class, and a name in it."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The settings at one time.

    places: names of the settings, hooks first. hooks, values: in the order of `places`. `hooks` is
    the same list object as in the last snapshot if no hook was registered since.
    """

    places: tuple[str, ...]
    hooks: list[Hooks]
    values: list[Any]

    def is_same(self, other: Snapshot) -> bool:
        """True if no setting has changed between two snapshots. Fast."""
        if self.places is not other.places or self.values != other.values:
            return False
        return self.hooks is other.hooks or self.hooks == other.hooks

    def by_place(self) -> dict[str, Any]:
        return dict(zip(self.places, [*self.hooks, *self.values], strict=True))


class Settings:
    """Finds a model's settings: plain attributes of its modules, their hooks, and the modules
    themselves; also those of a loss that is a module.

    Training mode is left out, since it is a property of each call.
    """

    def __init__(self, model: nn.Module, loss: LossChoice = None) -> None:
        self._model = model
        self._loss = loss
        self.look()

    def look(self) -> None:
        """Search for settings again, since modules or attributes may have been added."""
        with as_written(self._model):
            held = _attributes_of(self._model)
        if isinstance(self._loss, nn.Module):
            held |= _attributes_of(self._loss, "loss")
        hooks: dict[str, Mapping[int, Any]] = {
            f"the number of {words} of all modules": getattr(all_modules, f"_global{name}")
            for name, words in HOOKS.items()
        }
        parameters: dict[str, tuple[Mapping[str, Any], str]] = {}
        for path, module in self._model.named_modules():
            dot = f"{path}." if path else ""
            held |= {f"{dot}{name}": (module._modules, name) for name in module._modules}
            hooks |= {
                f"the number of {words} of {path or 'the model'}": vars(module)[name]
                for name, words in HOOKS.items()
            }
            for name in module._parameters:
                parameters[f"{dot}{name}"] = module._parameters, name
        self._hook_dicts = list(hooks.values())
        self._parameters = list(parameters.values())
        self._look_for_hooks()
        self._num_calls = 0
        simple = {place for place, (at, name) in held.items() if isinstance(at.get(name), SIMPLE)}
        places = [at for place, at in held.items() if place in simple]
        self._simple = [(at.get, name) for at, name in places]
        self._others = [at for place, at in held.items() if place not in simple]
        self._places = (
            *hooks,
            *(f"the number of gradient hooks of {path}" for path in parameters),
            "torch.get_default_dtype()",
            *(place for place in held if place in simple),
            *(place for place in held if place not in simple),
        )

    def now(self) -> Snapshot:
        """Take a snapshot. Runs at each call: takes one look-up for each setting."""
        self._num_calls += 1
        if self._hooks_may_differ():
            self._look_for_hooks()
        values: list[Any] = [torch.get_default_dtype()]
        values += [get(name, ABSENT) for get, name in self._simple]
        values += [plain(holder.get(name, ABSENT)) for holder, name in self._others]
        return Snapshot(self._places, self._hooks, values)

    def _hooks_may_differ(self) -> bool:
        """True if hooks may have changed. Registering a hook takes torch's next handle id, so while
        that stays and there were no hooks, there are none. Looking into hundreds of dicts took 2%
        of a step with hidden size 32."""
        is_new = self._num_handles != RemovableHandle.next_id
        return is_new or self._has_hooks or not self._num_calls % EACH

    def _look_for_hooks(self) -> None:
        """Read the hooks of modules, then the hooks of parameters' gradients."""
        self._num_handles = RemovableHandle.next_id
        hooks_now = [Hooks(hooks) if hooks else NO_HOOKS for hooks in self._hook_dicts]
        for holder, name in self._parameters:
            hooks = getattr(holder.get(name), "_backward_hooks", None)
            hooks_now.append(Hooks(hooks) if hooks else NO_HOOKS)
        self._hooks = hooks_now
        self._has_hooks = any(hooks_now)


def _attributes_of(root: nn.Module, prefix: str = "") -> dict[str, Held]:
    """Find the plain attributes of a module, its submodules, their classes, and objects such as a
    config. Returns the dict and key that hold each, by a readable name."""
    held: dict[str, Held] = {}
    seen: set[int] = set()

    def add(dot: str, owner: Any, depth: int) -> None:
        own = vars(owner)
        for kind in type(owner).__mro__:
            for name, value in () if _is_of_libraries(kind) else vars(kind).items():
                if isinstance(value, (*VALUES, list, tuple, dict)) and not name.startswith("__"):
                    held[f"{kind.__qualname__}.{name}"] = vars(kind), name
                    held[f"{dot}{name}"] = own, name
        for name, value in own.items():
            if name in _OF_EVERY_MODULE or plain(value) is OTHER:
                continue
            held[f"{dot}{name}"] = own, name
            for key, inner in _objects(value) if depth else ():
                if id(inner) not in seen:
                    seen.add(id(inner))
                    add(f"{dot}{name}{key}.", inner, depth - 1)

    for path, module in root.named_modules(prefix=prefix):
        dot = f"{path}." if path else ""
        held[f"{dot}forward"] = vars(module), "forward"
        add(dot, module, DEPTH)
    return held


def plain(value: Any) -> Any:
    """Make a key that stays equal while `value` does not change; OTHER if that is impossible. A
    plain object is reduced to its id: its attributes are settings of their own."""
    if isinstance(value, SIMPLE):
        return value
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS:
        return type(value).__name__, *map(plain, value)
    if isinstance(value, dict) and len(value) <= MAX_ITEMS:
        return "dict", *((key, plain(item)) for key, item in value.items())
    if isinstance(value, set | frozenset) and len(value) <= MAX_ITEMS:
        return "set", frozenset(map(plain, value))
    if isinstance(value, torch.Tensor) and is_read_as_number(value):
        return NumbersRead((id(value), version_of(value)))
    return ("object", id(value)) if _is_plain_object(value) else OTHER


def _objects(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (keys, object) for each plain object that `value` is or contains."""
    if _is_plain_object(value):
        yield "", value
    elif isinstance(value, list | tuple | dict) and len(value) <= MAX_ITEMS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            for inside, inner in _objects(item):
                yield f"[{key!r}]{inside}", inner


def _is_plain_object(value: Any) -> bool:
    """True if `value` is an object with attributes, such as a config or a namespace."""
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return True
    is_other = isinstance(value, (*SIMPLE, torch.Tensor)) or _is_of_libraries(type(value))
    return not is_other and hasattr(value, "__dict__")


def _is_of_libraries(kind: type) -> bool:
    """True if a class is from the standard library, torch or numpy, which hold no settings."""
    package = kind.__module__.partition(".")[0]
    return package in sys.stdlib_module_names or package in ("torch", "numpy")


def changes(before: Snapshot, now: Snapshot) -> dict[str, str]:
    """Describe each setting that changed, such as `is 5, was 1`, by place such as
    `blocks.0.scale`. Settings in only one snapshot are left out: the change of their
    module is reported at its own place. Raises ValueError if a replaced module has a state."""
    old = before.by_place()
    changed: dict[str, str] = {}
    for place, new in now.by_place().items():
        if place in old and old[place] != new:
            _check_without_parameters(place, new, old[place])
            changed[place] = _words(new, old[place])
    return changed


def _check_without_parameters(place: str, *modules: Any) -> None:
    for module in modules:
        if isinstance(module, nn.Module) and module.state_dict():
            raise ValueError(
                f"module '{place}' of the model was replaced after sw.compile, but the compiled "
                "step still uses the old module's parameters and buffers. Replace it before "
                "sw.compile."
            )


def _words(new: Any, old: Any) -> str:
    texts = _text(new), _text(old)
    return "is another" if texts[0] == texts[1] else f"is {texts[0]}, was {texts[1]}"


def _text(value: Any) -> str:
    if value is ABSENT:
        return "the class's"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return repr(value)
