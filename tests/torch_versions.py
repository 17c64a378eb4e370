"""What older torches do not do, so that tests cannot ask for it."""

from __future__ import annotations

import pytest
import torch

from shardweave.ir.torch_private import missing_for_copies


def new_torch(reason: str, since: tuple[int, int] = (2, 13)) -> pytest.MarkDecorator:
    """Marks what needs a newer torch than the oldest that is supported, and says why."""
    is_old = torch.__version__ < since  # pyright: ignore[reportOperatorIssue]
    version = ".".join(map(str, since))
    return pytest.mark.skipif(is_old, reason=f"before torch {version} {reason}")


def copied_blocks() -> pytest.MarkDecorator:
    """Marks what needs a torch in which blocks are copied."""
    missing = missing_for_copies()
    return pytest.mark.skipif(bool(missing), reason=f"torch has no {missing}: no block is copied")
