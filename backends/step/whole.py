"""What a step returns in shards, whole."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from shardweave.ir.torch_private import pytree


def full_tensor(outputs: Any) -> Any:
    """What a step returned with every DTensor gathered, on every rank; other tensors as they are.

    outputs: a tensor, or tuples, lists and dicts of them, such as logits to compare with labels. On
    the virtual mesh, and where nothing is cut, outputs are plain tensors already. Collective.
    """
    return pytree.tree_map_only(DTensor, lambda output: output.full_tensor(), outputs)
