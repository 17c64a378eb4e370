# pyright: reportMissingImports=false
# The package is an extra of the benchmark alone.
"""Importing torchvision beside a torch that it was not compiled for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch


def import_torchvision() -> Any:
    """`torchvision.models`, also where its compiled operators do not load.

    Our cases use none of them. When it is imported, it registers the operators' shapes.
    """
    register = torch.library.register_fake

    def registered(name: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **kwargs)

    with mock.patch.object(torch.library, "register_fake", registered):
        import torchvision.models
    return torchvision.models
