"""The ranks that a collective joins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """The ranks that a collective over some axes joins with this one.

    ranks: their global ranks by position along the axes, the first axis slowest.
    order: for each position the rank within `process_group`, which torch sorts by global rank.
    position: this rank's.
    """

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    order: tuple[int, ...]
    position: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def is_sorted(self) -> bool:
        return self.order == tuple(range(self.size))

    def by_position(self, by_group_rank: Tensor) -> list[Tensor]:
        """Entries of dim 0, which stand by rank within the process group, by position."""
        return [by_group_rank[rank] for rank in self.order]

    def by_group_rank(self, by_position: Tensor) -> Tensor:
        """Inverse of `by_position`, as one tensor."""
        if self.is_sorted:
            return by_position
        return by_position[[self.order.index(rank) for rank in range(self.size)]]
