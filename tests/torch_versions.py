"""What the oldest torch that is supported does not do, so that tests cannot ask for it."""

from __future__ import annotations

import pytest
import torch

IS_OLD = not torch.__version__ >= (2, 13)  # pyright: ignore[reportOperatorIssue]


def new_torch(reason: str) -> pytest.MarkDecorator:
    """Marks what needs torch 2.13, and says why."""
    return pytest.mark.skipif(IS_OLD, reason=f"before torch 2.13 {reason}")
