"""Functions whose arguments are the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from shardweave.ir.suggest import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def taking(given: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Return a decorator that turns a function of one dataclass into a function of its fields."""

    def decorated(function: Callable[..., R]) -> Callable[P, R]:
        own = inspect.signature(function)
        signature = inspect.signature(given).replace(return_annotation=own.return_annotation)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            known = signature.parameters
            for name in kwargs:
                if name not in known:
                    raise TypeError(
                        f"{function.__name__}() has no argument '{name}'; "
                        f"{did_you_mean(name, known)}it takes {', '.join(known)}."
                    )
            return function(given(*args, **kwargs))

        called.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return called

    return decorated
