"""Parameters of tests of which some are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """The values of one test that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_where(is_slow: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Values of one parameter, of which those are slow that `is_slow` says."""
    return [slow(one) if is_slow(one) else one for one in values]
