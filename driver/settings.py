"""Plain values that a model's modules hold, such as a dropout's probability, their hooks, and the
changes of both.

A program has in it what they were when it was captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
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
    """The numbers, texts and truth values among the attributes of a model's modules, and how many
    hooks they have.

    Attributes that begin with an underscore, and the mode, are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        held = {
            f"{path}.{name}".lstrip("."): (vars(module), name)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, PLAIN) and name != "training" and not name.startswith("_")
        }
        hooks = {
            f"the number of {words} of {path or 'the model'}": vars(module)[name]
            for path, module in model.named_modules()
            for name, words in HOOKS.items()
        }
        self._places = [*hooks, *held]
        self._hooks: list[Mapping[int, Any]] = list(hooks.values())
        self._attributes: list[tuple[dict[str, Any], str]] = list(held.values())
        self._values = self._now()

    def _now(self) -> list[Any]:
        values = [attributes.get(name, _ABSENT) for attributes, name in self._attributes]
        return [*map(len, self._hooks), *values]

    def changed(self) -> dict[str, str]:
        """What differs from what is known: `is 5, was 1`, by place such as `blocks.0.scale`.

        It is asked for at each call of a step: a look-up for each setting.
        """
        now = self._now()
        if now == self._values:
            return {}
        rows = zip(self._places, now, self._values, strict=True)
        return {place: f"is {new!r}, was {old!r}" for place, new, old in rows if new != old}

    def accept(self) -> None:
        """Take what was changed for known."""
        self._values = self._now()

    def forget(self) -> None:
        """Leave what was changed out from now on."""
        kept = [new == old for new, old in zip(self._now(), self._values, strict=True)]
        num_hooks = len(self._hooks)
        self._hooks = list(compress(self._hooks, kept[:num_hooks]))
        self._attributes = list(compress(self._attributes, kept[num_hooks:]))
        self._places = list(compress(self._places, kept))
        self._values = list(compress(self._values, kept))
