"""What older torches do not do, so that tests cannot ask for it."""

from __future__ import annotations

import pytest
import torch

from shardweave.ir.torch_private import missing_for_copies

IS_OLD = not torch.__version__ >= (2, 13)  # pyright: ignore[reportOperatorIssue]


def new_torch(reason: str) -> pytest.MarkDecorator:
    """Marks what needs torch 2.13, and says why."""
    return pytest.mark.skipif(IS_OLD, reason=f"before torch 2.13 {reason}")


def copied_blocks() -> pytest.MarkDecorator:
    """Marks what needs a torch in which blocks are copied."""
    missing = missing_for_copies()
    return pytest.mark.skipif(bool(missing), reason=f"torch has no {missing}: no block is copied")
