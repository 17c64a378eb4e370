"""The end of a search by elapsed time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Deadline:
    """The end of a search, so many seconds from now; 0: never."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s if limit_s else math.inf

    @property
    def is_past(self) -> bool:
        return time.monotonic() >= self._end_s

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Results of a function of the first item, and of those that begin in time."""
        for number, item in enumerate(items):
            if number and self.is_past:
                return
            yield function(item)
