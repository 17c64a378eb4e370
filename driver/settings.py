"""Plain values that a model's modules hold, such as a dropout's probability, and their changes.

A program has in it what they were when it was captured.
"""

from __future__ import annotations

from typing import Any

from torch import nn

PLAIN = (bool, int, float, str)
_ABSENT = object()


class Settings:
    """The numbers, texts and truth values among the attributes of a model's modules.

    Those that begin with an underscore, and the mode, are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        held = {
            f"{path}.{name}".lstrip("."): (vars(module), name)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, PLAIN) and name != "training" and not name.startswith("_")
        }
        self._places = list(held)
        self._attributes: list[tuple[dict[str, Any], str]] = list(held.values())
        self._values = self._now()

    def _now(self) -> list[Any]:
        return [attributes.get(name, _ABSENT) for attributes, name in self._attributes]

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
        rows = zip(self._now(), self._values, strict=True)
        kept = [index for index, (new, old) in enumerate(rows) if new == old]
        self._places = [self._places[index] for index in kept]
        self._attributes = [self._attributes[index] for index in kept]
        self._values = [self._values[index] for index in kept]
