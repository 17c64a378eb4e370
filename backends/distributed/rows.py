"""Reads of a sharded table's rows by index, and sums into them, by messages between ranks.

All ranks have `routes` (the result of `dist.row_routes`), from which each computes the sizes of all
messages. Rows are sent in the order of their indices, and at most once to a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardweave.backends.distributed.in_flight import Group, InFlight
from shardweave.ir.dialects.dist_rows import check_routes


def start_fetch(
    table: Tensor, numbers: Tensor, routes: Tensor, group: Group, position: int
) -> InFlight:
    """Start fetching rows by index. table: this rank's shard. position: this rank's in `group`."""
    check_routes(numbers, routes[position])
    asked, counts = _counted(routes, group, position)
    sent = table.index_select(0, asked.nonzero()[:, 1])
    received = _start_exchange(sent, counts[0], counts[1], group)
    places = _places(routes[position], numbers)
    return InFlight(received.work, lambda: received.arrive().index_select(0, places))


def start_add(
    rows: Tensor, numbers: Tensor, routes: Tensor, group: Group, position: int
) -> InFlight:
    """Start adding all ranks' rows, by index, into a table of zeros; gives this rank's shard."""
    check_routes(numbers, routes[position], rows)
    asked, counts = _counted(routes, group, position)
    sent = rows.new_zeros((sum(counts[1]), *rows.shape[1:]))
    sent.index_add_(0, _places(routes[position], numbers), rows)
    received = _start_exchange(sent, counts[1], counts[0], group)
    places = asked.nonzero()[:, 1]
    table = rows.new_zeros((asked.shape[1], *rows.shape[1:]))
    return InFlight(received.work, lambda: table.index_add_(0, places, received.arrive()))


def _counted(routes: Tensor, group: Group, position: int) -> tuple[Tensor, list[list[int]]]:
    """Return masks of this rank's rows that each rank needs, and [counts to send, to receive]."""
    size = routes.shape[1] // group.size
    asked = routes[:, position * size : (position + 1) * size]
    needed = routes[position].view(group.size, size)
    return asked, torch.stack([asked.sum(1), needed.sum(1)]).tolist()


def _places(needed: Tensor, numbers: Tensor) -> Tensor:
    """Map row indices to positions among the rows that this rank needs, sorted by index."""
    return (needed.cumsum(0) - 1)[numbers]


def _start_exchange(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group
) -> InFlight:
    """Start an all-to-all of rows. sent, received: numbers of rows by position of the peer."""
    # torch sorts the ranks of a process group by global rank.
    positions = [group.order.index(rank) for rank in range(group.size)]
    counts, given = [received[at] for at in positions], x.new_empty((sum(received), *x.shape[1:]))
    if not group.is_sorted:
        parts = x.split(list(sent))
        x = torch.cat([parts[at] for at in positions])
    sizes = [sent[at] for at in positions]
    work = dist.all_to_all_single(given, x, counts, sizes, group=group.process_group, async_op=True)

    def arrive(kept: Tensor = x) -> Tensor:
        del kept
        parts = given.split(counts)
        return given if group.is_sorted else torch.cat([parts[rank] for rank in group.order])

    return InFlight(work, arrive)
