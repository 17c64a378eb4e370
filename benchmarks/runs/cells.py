"""The cells of a row, each read by its column or refused with what to write there."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RECOMPUTED = ("none", "full", "selective")
OTHER_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("no", "false", "off", "0"), "none"),
    **dict.fromkeys(("yes", "true", "on", "1", "layer", "block", "uniform"), "full"),
    **dict.fromkeys(("op", "minimal", "save_"), "selective"),
}
"""What rows also say of recomputation; the last of torchtitan and of MaxText."""

FLASH_WORDS = (
    "flash",
    "fused",
    "sdpa",
    "cudnn",
    "transformer engine",
    "triton",
    "xformers",
    "splash",
)
STORED_WORDS = ("unfused", "eager", "standard", "naive", "local", "stored")
"""Of attention: whether it is a kernel that stores no scores."""

TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")


class RowError(ValueError):
    """What is wrong with a row."""


@dataclass(frozen=True)
class Cells:
    """Cells by column; a column that the file lacks is empty."""

    cells: Mapping[str, str]

    def text(self, column: str, default: str = "") -> str:
        return self.cells.get(column, "") or default

    def word(self, column: str, words: Sequence[str], default: str) -> str:
        """A cell in lower case that begins with one of some words."""
        found = self.text(column, default).lower()
        if not found.startswith(tuple(words)):
            raise self._error(column, f"write one of {', '.join(words)}")
        return found

    def one_of(self, column: str, words: Sequence[str], default: str) -> str:
        """The word of some that a cell begins with, whatever it says behind it."""
        found = self.word(column, words, default)
        return next(word for word in words if found.startswith(word))

    def recomputation(self) -> str:
        """A word of `RECOMPUTED`, and what the cell says behind it."""
        said = self.text("recompute").lower()
        other = next((word for word in OTHER_WORDS if said.startswith(word)), "")
        if said.startswith(RECOMPUTED) or not other:
            return self.word("recompute", RECOMPUTED, "none")
        return OTHER_WORDS[other]

    def is_fused(self, default: bool) -> bool:
        """Whether attention is one kernel; the default where the cell says nothing of it."""
        said = self.text("attention").lower()
        if any(word in said for word in STORED_WORDS):
            return False
        return default or any(word in said for word in FLASH_WORDS)

    def flash(self, default: int) -> int:
        """Which FlashAttention, where the cell says its number (`flash-2`, `FA3`)."""
        said = re.search(r"(?:flash|fa)[a-z_ -]*([123])\b", self.text("attention").lower())
        return default if said is None else int(said[1])

    def count(self, column: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; without a default the cell must say it."""
        if not self.text(column) and default is not None:
            return default
        found = self._number(column, f"a whole number of {least} or more")
        if found != int(found) or found < least:
            raise self._error(column, f"write a whole number of {least} or more")
        return int(found)

    def measured(self, column: str) -> float:
        """A number above 0; 0 of an empty cell."""
        if not self.text(column):
            return 0.0
        found = self._number(column, "what was measured")
        if found <= 0:
            raise self._error(column, "write what was measured, or leave it empty")
        return found

    def is_true(self, column: str, default: bool = False) -> bool:
        found = self.text(column, str(default)).lower()
        if found not in TRUE and found not in FALSE:
            raise self._error(column, f"write one of {', '.join((*TRUE, *FALSE))}")
        return found in TRUE

    def _number(self, column: str, what: str) -> float:
        try:
            found = float(self.text(column))
        except ValueError:
            raise self._error(column, f"write {what}") from None
        if not math.isfinite(found):
            raise self._error(column, f"write {what}, or leave it empty where nothing is known")
        return found

    def _error(self, column: str, advice: str) -> RowError:
        return RowError(f"column '{column}' is '{self.text(column)}'; {advice}")
