"""What a model's code reads besides tensors, such as a dropout's probability, the hooks of its
modules and parameters, and the changes of both.

A program has in it what they were when it was captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.utils.hooks import RemovableHandle

from shardweave.backends.step.compiled_module import as_written
from shardweave.driver.step.model.plain_values import ABSENT, SIMPLE, Finder, plain
from shardweave.ir.capture.outputs import LossChoice

HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
"""The dicts in which nn.Module keeps hooks, in words."""


class Hooks(tuple[int, ...]):
    """Hooks by the number that torch gives each: one in the place of another has its own."""

    def __repr__(self) -> str:
        return str(len(self))


NO_HOOKS = Hooks()


EACH = 16
"""In each of so many calls hooks are looked for that were written into torch's dicts themselves."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Settings at one time.

    places: their names, in one order, of hooks first. hooks, values: of each. They are the same
    list while no hook was registered.
    """

    places: tuple[str, ...]
    hooks: list[Hooks]
    values: list[Any]

    def is_same(self, other: Snapshot) -> bool:
        """Whether nothing has changed, told by one comparison."""
        if self.places is not other.places or self.values != other.values:
            return False
        return self.hooks is other.hooks or self.hooks == other.hooks

    def by_place(self) -> dict[str, Any]:
        return dict(zip(self.places, [*self.hooks, *self.values], strict=True))


class Settings:
    """The plain values among the attributes of a model's modules, and among the globals and
    closures that their code and that of `loss` name; their hooks, and which modules there are.

    The mode is left out: a call has one.
    """

    def __init__(self, model: nn.Module, loss: LossChoice = None) -> None:
        self._model = model
        self._loss = loss
        self.look()

    def look(self) -> None:
        """Find out anew where settings are: a module or an attribute may have been put in."""
        finder = Finder()
        with as_written(self._model):
            finder.add_modules(self._model)
        if isinstance(self._loss, nn.Module):
            finder.add_modules(self._loss, "loss")
        else:
            finder.add_function(self._loss)
        hooks: dict[str, Mapping[int, Any]] = {
            f"the number of {words} of all modules": getattr(all_modules, f"_global{name}")
            for name, words in HOOKS.items()
        }
        parameters: dict[str, tuple[Mapping[str, Any], str]] = {}
        held = finder.held
        self._beyond = finder.beyond()
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
        found = [at for place, at in held.items() if place in simple]
        self._simple = [(at.get, name) for at, name in found]
        self._others = [at for place, at in held.items() if place not in simple]
        self._places = (
            *hooks,
            *(f"the number of gradient hooks of {path}" for path in parameters),
            "torch.get_default_dtype()",
            *(place for place in held if place in simple),
            *(place for place in held if place not in simple),
        )

    @property
    def beyond(self) -> list[str]:
        """Notes on what code reads whose changes are not seen."""
        return self._beyond

    def now(self) -> Snapshot:
        """The settings as they are. It is asked for at each call: a look-up for each of them."""
        self._num_calls += 1
        if self._hooks_may_differ():
            self._look_for_hooks()
        values: list[Any] = [torch.get_default_dtype()]
        values += [get(name, ABSENT) for get, name in self._simple]
        values += [plain(holder.get(name, ABSENT)) for holder, name in self._others]
        return Snapshot(self._places, self._hooks, values)

    def _hooks_may_differ(self) -> bool:
        """Whether hooks have to be looked for. What registers one makes a handle with a number of
        its own, so that there are none while no handle was made since there were none: hundreds of
        dicts that nothing else in a step touches took 2% of one of hidden 32."""
        is_new = self._num_handles != RemovableHandle.next_id
        return is_new or self._has_hooks or not self._num_calls % EACH

    def _look_for_hooks(self) -> None:
        """Those of modules, and then those of parameters' gradients."""
        self._num_handles = RemovableHandle.next_id
        found = [Hooks(hooks) if hooks else NO_HOOKS for hooks in self._hook_dicts]
        for holder, name in self._parameters:
            hooks = getattr(holder.get(name), "_backward_hooks", None)
            found.append(Hooks(hooks) if hooks else NO_HOOKS)
        self._hooks = found
        self._has_hooks = any(found)


def changes(before: Snapshot, now: Snapshot) -> dict[str, str]:
    """What differs: `is 5, was 1`, by place such as `blocks.0.scale`.

    What is there at one time alone is of a module that was put in or taken out, which is told by
    its own place. Raises ValueError for a module with parameters or buffers among these.
    """
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
                f"module '{place}' of the model was replaced after sw.compile; its programs work "
                "on the parameters and buffers that were there. Replace it before sw.compile."
            )


def _words(new: Any, old: Any) -> str:
    texts = _text(new), _text(old)
    return "is another" if texts[0] == texts[1] else f"is {texts[0]}, was {texts[1]}"


def _text(value: Any) -> str:
    """A setting in words."""
    if value is ABSENT:
        return "the class's"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return repr(value)
