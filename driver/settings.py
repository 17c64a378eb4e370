"""Plain values that a model's modules hold, such as a dropout's probability, and their changes.

A program has in it what they were when it was captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

PLAIN = (bool, int, float, str)
_ABSENT = object()


@dataclass
class _Setting:
    """One attribute of one module. place: as from the model, `blocks.0.scale`."""

    place: str
    attributes: dict[str, Any]
    name: str
    value: Any

    @property
    def now(self) -> Any:
        return self.attributes.get(self.name, _ABSENT)


@dataclass
class Settings:
    """The numbers, texts and truth values among the attributes of a model's modules.

    Those that begin with an underscore, and the mode, are left out.
    """

    _all: list[_Setting] = field(default_factory=list[_Setting])

    @staticmethod
    def of(model: nn.Module) -> Settings:
        """The settings of a model as they are now."""
        return Settings([
            _Setting(f"{path}.{name}".lstrip("."), vars(module), name, value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, PLAIN) and name != "training" and not name.startswith("_")
        ])  # fmt: skip

    def changed(self) -> dict[str, str]:
        """What differs from what is known: `is 5, was 1`, by place. Linear in the settings."""
        return {
            one.place: f"is {one.now!r}, was {one.value!r}"
            for one in self._all
            if one.now is not one.value and one.now != one.value
        }

    def accept(self, places: Iterable[str]) -> None:
        """Take the settings at some places for known as they are now."""
        for one in self._at(places):
            one.value = one.now

    def forget(self, places: Iterable[str]) -> None:
        """Leave the settings at some places out from now on."""
        gone = {id(one) for one in self._at(places)}
        self._all = [one for one in self._all if id(one) not in gone]

    def _at(self, places: Iterable[str]) -> list[_Setting]:
        wanted = set(places)
        return [one for one in self._all if one.place in wanted]
