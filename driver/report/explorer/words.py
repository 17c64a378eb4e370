"""Texts of a page, each written once: what stands for a text elsewhere is its number."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Words:
    """Numbers for texts, in the order in which they are first met."""

    _numbers: dict[str, int] = field(default_factory=dict[str, int])

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        """By number, the text."""
        return list(self._numbers)
