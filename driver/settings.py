"""Plain values that a model's modules hold, such as a dropout's probability, their hooks, and the
changes of both.

A program has in it what they were when it was captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

PLAIN = (bool, int, float, str)
_ABSENT = object()

HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
"""The dicts in which nn.Module keeps hooks, in words."""


class Settings:
    """The numbers, texts and truth values among the attributes of a model's modules, how many hooks
    these have, and which modules and `forward` of their own.

    Attributes that begin with an underscore, and the mode, are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forgotten: set[str] = set()
        self._look()

    def _look(self) -> None:
        """Take down all that there is, but for what is left out."""
        held: dict[str, tuple[dict[str, Any], str]] = {}
        hooks: dict[str, Mapping[int, Any]] = {}
        for path, module in self._model.named_modules():
            dot = f"{path}." if path else ""
            held |= {
                f"{dot}{name}": (vars(module), name)
                for name, value in vars(module).items()
                if isinstance(value, PLAIN) and name != "training" and not name.startswith("_")
            }
            held[f"{dot}forward"] = vars(module), "forward"
            held |= {f"{dot}{name}": (module._modules, name) for name in module._modules}
            hooks |= {
                f"the number of {words} of {path or 'the model'}": vars(module)[name]
                for name, words in HOOKS.items()
            }
        held = {place: at for place, at in held.items() if place not in self._forgotten}
        hooks = {place: at for place, at in hooks.items() if place not in self._forgotten}
        self._places = [*hooks, *held]
        self._hooks = list(hooks.values())
        self._attributes = list(held.values())
        self._values = self._now()

    def _now(self) -> list[Any]:
        values = [attributes.get(name, _ABSENT) for attributes, name in self._attributes]
        return [*map(len, self._hooks), *values]

    def changed(self) -> dict[str, str]:
        """What differs from what is known: `is 5, was 1`, by place such as `blocks.0.scale`.

        It is asked for at each call of a step: a look-up for each setting. Raises ValueError for a
        module with parameters or buffers that was put in, or replaced.
        """
        now = self._now()
        if now == self._values:
            return {}
        rows = zip(self._places, now, self._values, strict=True)
        changed = [(place, new, old) for place, new, old in rows if new != old]
        for place, new, old in changed:
            _check_without_parameters(place, new, old)
        return {place: f"is {_text(new)}, was {_text(old)}" for place, new, old in changed}

    def accept(self) -> None:
        """Take what was changed for known, with what modules that were put in hold."""
        self._look()

    def forget(self) -> None:
        """Leave what was changed out from now on."""
        rows = zip(self._places, self._now(), self._values, strict=True)
        self._forgotten |= {place for place, new, old in rows if new != old}
        self._look()


def _check_without_parameters(place: str, *modules: Any) -> None:
    for module in modules:
        if isinstance(module, nn.Module) and module.state_dict():
            raise ValueError(
                f"module '{place}' of the model was replaced after sw.compile; the step has the "
                "parameters and buffers of the model as it was. Compile the model anew."
            )


def _text(value: Any) -> str:
    """A setting in words."""
    if value is _ABSENT:
        return "the class's"
    return type(value).__name__ if isinstance(value, nn.Module) else repr(value)
