# pyright: basic
"""`torch.sgn` of real numbers as `torch.sign`, which is the same, and has a gradient to trace.

That of sgn is a kind of zero that torch makes outside of what it traces.
"""

from __future__ import annotations

import torch

_PLAIN = {torch.sgn: torch.sign, "sgn": "sign"}


def replace_signs(exported: torch.fx.GraphModule) -> None:
    """Put sign in place of each sgn of real numbers."""
    for node in exported.graph.nodes:
        if node.target in _PLAIN and not node.meta["example_value"].is_complex():
            node.target = _PLAIN[node.target]
    exported.recompile()
