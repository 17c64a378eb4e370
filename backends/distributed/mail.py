"""Messages between stages: each rank exchanges them with its counterparts in other stages.

The schedule tells both ranks the order of the messages between them. Therefore receives are posted
ahead of their use, and most sends are not waited for until the end of a step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardweave.ir.program.staged import RECEIVES_AHEAD

Address = tuple[int, int, str, int | None]
"""The stages that a message goes from and to, its name, and its micro-batch."""


@dataclass(frozen=True)
class ExpectedMessage:
    """A message to be received. shape, dtype: its tensor's. seen: as in `ComingMessage`."""

    address: Address
    shape: tuple[int, ...]
    dtype: torch.dtype
    seen: int = 0


@dataclass(eq=False)
class _Inbox:
    """Messages from one other rank. expected: not posted yet, in order. posted: by address, the
    handle, buffer and `seen` of each posted receive."""

    rank: int
    expected: deque[ExpectedMessage]
    posted: dict[Address, tuple[Any, Tensor, int]]


class Mail:
    """Sends and receives the messages of one rank in one step.

    inbox: by sending rank, its messages in order. groups: process groups by (sender, receiver);
    other pairs use the default group. NCCL runs all messages between two ranks in one group on one
    stream, in order: with both directions in it, two ranks that both wait to receive would hang.
    Within one direction both ranks have the same order.
    """

    def __init__(
        self,
        rank: int,
        inbox: dict[int, Sequence[ExpectedMessage]],
        device: torch.device,
        groups: Mapping[tuple[int, int], Any] = MappingProxyType({}),
    ) -> None:
        self.rank = rank
        self.device = device
        self._groups = groups
        self._expected = inbox
        self._inbox: dict[int, _Inbox] = {}
        self._here: dict[Address, Tensor] = {}
        self._sent: dict[int, deque[tuple[Any, Tensor]]] = {}
        self._arrived: Counter[int] = Counter()

    def open(self) -> None:
        """Begin a step: post the first receives."""
        for rank, expected in self._expected.items():
            self._inbox[rank] = _Inbox(rank, deque(expected), {})
            self._post(self._inbox[rank])

    def _group(self, source: int, goal: int) -> Any:
        return self._groups.get((source, goal))

    def _post(self, inbox: _Inbox) -> None:
        while inbox.expected and len(inbox.posted) < RECEIVES_AHEAD:
            self._post_one(inbox)

    def send(self, x: Tensor, rank: int, address: Address) -> None:
        """Send a tensor, which must not change before the end of the step."""
        if rank == self.rank:
            self._here[address] = x
            return
        x = x.contiguous()
        group = self._group(self.rank, rank)
        work = dist.isend(x, dst=rank, group=group) if x.numel() else None
        self._sent.setdefault(rank, deque()).append((work, x))

    def receive(self, rank: int, address: Address) -> Tensor:
        """Wait for a tensor. Raises RuntimeError, naming the message, if the sender is gone."""
        if rank == self.rank:
            return self._here.pop(address)
        inbox = self._inbox[rank]
        while address not in inbox.posted:  # messages are read far out of order
            self._post_one(inbox)
        work, buffer, seen = inbox.posted.pop(address)
        self._post(inbox)
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {self.rank} {_waiting(rank, address)}: {error}"
                ) from error
        self._forget(rank, seen)
        return buffer

    def _forget(self, rank: int, count: int) -> None:
        """Free the first `count` messages to a rank, which it has received, if not freed yet. Gloo
        does not say that a message has left until it is waited for."""
        for _ in range(count - self._arrived[rank]):
            work, _ = self._sent[rank].popleft()
            if work is not None:
                work.wait()
        self._arrived[rank] = max(count, self._arrived[rank])

    def _post_one(self, inbox: _Inbox) -> None:
        message = inbox.expected.popleft()
        buffer = torch.empty(message.shape, dtype=message.dtype, device=self.device)
        group = self._group(inbox.rank, self.rank)
        work = dist.irecv(buffer, src=inbox.rank, group=group) if buffer.numel() else None
        inbox.posted[message.address] = work, buffer, message.seen

    def close(self) -> None:
        """End a step: wait until all sends are complete."""
        for rank, sent in self._sent.items():
            self._forget(rank, self._arrived[rank] + len(sent))


def _waiting(rank: int, address: Address) -> str:
    source, goal, name, number = address
    which = "" if number is None else f" of micro-batch {number}"
    return f"in stage {goal} waited for '{name}'{which} from stage {source}, on rank {rank}"
