"""Rendezvous of the processes of one start, within a timeout; an error names the missing ranks.

torchrun keeps one store for all its restarts (torch 2.11 to 2.14), which still holds the addresses
of processes that have ended; a rank that reads one waits in vain. So ranks first agree on a fresh
token as the prefix of their keys, and connect only after that.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from shardweave.backends.watch import watchdog
from shardweave.backends.watch.agreement import ranks_text
from shardweave.backends.watch.watch import LostRankError, first_line

T = TypeVar("T")

POLL_S = 0.01
LINGER_S = 3.0
"""Seconds that rank 0 keeps its store open after a failure, so that others can read the error."""


@dataclass(frozen=True)
class Start:
    """A rendezvous of processes. where: the common store, in words; host, port: its address; file:
    the store, if it is a file; timeout_s: how long to wait for other ranks."""

    rank: int
    size: int
    where: str
    timeout_s: float
    host: str = ""
    port: int = 0
    file: Path | None = None

    @property
    def has_agent(self) -> bool:
        """True if torchrun keeps the store, rather than rank 0."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def absence(self, missing: Iterable[int]) -> str:
        """Message that names the ranks that did not join, and what to check."""
        return (
            f"{ranks_text(missing)} of {self.size} did not join at {self.where} within "
            f"{self.timeout_s:.0f} s (timeout=.., or {watchdog.TIMEOUT}). Check that each process "
            f"was started, with a RANK of its own and WORLD_SIZE={self.size}; that its log shows "
            "no other error; and that its machine reaches this address"
        )


def initialise(backend: str, file: Path | None, timeout_s: float) -> None:
    """Join the processes that the environment names, as torchrun or a person has set it.

    file: a store that all ranks see, in place of an address. timeout_s: how long to wait; 0 for as
    long as torch does. Raises LostRankError, with the same text on every rank that joined, if a
    rank does not join. From then on the watchdog monitors all ranks.
    """
    start = _start(file, timeout_s)
    # A request to a store that was stopped never returns, so another thread makes it.
    store = _within(start, lambda: meet_in(_connected(start), start))
    store.set_timeout(default_pg_timeout)
    watchdog.start_before(store, start.rank, start.size, timeout_s, on_gpu=backend == "nccl")
    try:
        dist.init_process_group(backend, store=store, rank=start.rank, world_size=start.size)
    except RuntimeError as error:
        watchdog.explain(error)
        raise


def _start(file: Path | None, timeout_s: float) -> Start:
    """Read the environment variables. Raises ValueError if they name no rank or address."""
    waited_s = timeout_s if timeout_s > 0 else default_pg_timeout.total_seconds()
    rank, size = _number("RANK", 2**31), _number("WORLD_SIZE", 2**31)
    if rank >= size:
        raise ValueError(f"RANK={rank} is not below WORLD_SIZE={size}; number the ranks from 0 on.")
    if file is not None:
        return Start(rank, size, f"'{file}'", waited_s, file=file)
    host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 2**16)
    if not host:
        raise ValueError("MASTER_ADDR is not set; give the address of rank 0, or use torchrun.")
    where = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
    return Start(rank, size, where, waited_s, host, port)


def _number(name: str, limit: int) -> int:
    text = os.environ.get(name, "")
    if not (text.isdecimal() and int(text) < limit):
        raise ValueError(
            f"{name} is {text!r}, expected a whole number below {limit}; set it, or use torchrun."
        )
    return int(text)


def _connected(start: Start) -> Store:
    """Connect to the store of all ranks. Raises LostRankError if no process serves it."""
    if start.file is not None:
        return dist.FileStore(str(start.file), start.size)  # pyright: ignore[reportPrivateImportUsage]
    is_keeper = start.rank == 0 and not start.has_agent
    try:
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            start.host,
            start.port,
            None if start.has_agent else start.size,
            is_keeper,
            timedelta(seconds=start.timeout_s),
            wait_for_workers=False,
            multi_tenant=not start.has_agent,
        )
    except RuntimeError as error:
        if is_keeper:
            raise LostRankError(
                f"rank 0 cannot listen at {start.where}: {first_line(error)}. Check that no "
                "other program uses the port and that the address belongs to this machine; or "
                "set another MASTER_PORT on every rank."
            ) from error
        raise LostRankError(f"{_no_keeper(start)} ({first_line(error)}).") from error


def _no_keeper(start: Start) -> str:
    if start.has_agent:
        return f"torchrun's store did not answer at {start.where} in {start.timeout_s:.0f} s"
    return f"{start.absence([0])}, at which rank 0 listens, and no other program"


def _within(start: Start, make: Callable[[], T]) -> T:
    """Run `make` on another thread. Raises LostRankError if that takes too long."""
    made: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            errors.append(error)

    thread = threading.Thread(target=run, name="shardweave-start", daemon=True)
    thread.start()
    thread.join(start.timeout_s + LINGER_S + 1)
    if made:
        return made[0]
    error = errors[0] if errors else LostRankError(f"{_no_keeper(start)}.")
    if isinstance(error, LostRankError):
        watchdog.last_words(str(error))
    raise error


def meet_in(store: Store, start: Start) -> Store:
    """Return a store with a fresh prefix, which no earlier process has used. Collective.

    Every rank writes a unique name into the store. Rank 0 answers each name that it finds with a
    token, under a key made of that name. So no rank reads an answer to another process, and names
    of earlier processes do no harm. Then rank 0 waits until all ranks have signed.

    Raises LostRankError if a rank does not join, with the same text on all that joined.
    """
    deadline_s = time.monotonic() + start.timeout_s
    name = uuid.uuid4().hex
    if start.rank:
        store.set(f"name/{start.rank}", name)
        while not store.check([f"token/{name}"]):
            if time.monotonic() > deadline_s:
                raise LostRankError(f"{start.absence([0])}.")
            time.sleep(POLL_S)
        name = store.get(f"token/{name}").decode()
    fresh = PrefixStore(name, store)
    fresh.set(f"signed/{start.rank}", "")
    missing = {*range(1, start.size)} if start.rank == 0 else set[int]()
    while not fresh.check(["verdict"]):
        for other in sorted(missing):
            if store.check([f"name/{other}"]):
                store.set(f"token/{store.get(f'name/{other}').decode()}", name)
        missing = {other for other in missing if not fresh.check([f"signed/{other}"])}
        if start.rank == 0 and not missing:
            fresh.compare_set("verdict", "", "all")
        elif time.monotonic() > deadline_s:
            ranks = [n for n in range(start.size) if not fresh.check([f"signed/{n}"])]
            fresh.compare_set("verdict", "", f"{start.absence(ranks)}." if ranks else "all")
        time.sleep(POLL_S)
    verdict = fresh.get("verdict").decode()
    fresh.set(f"read/{start.rank}", "")
    if verdict != "all":
        _linger(fresh, start)
        raise LostRankError(verdict)
    return fresh


def _linger(fresh: Store, start: Start) -> None:
    """On rank 0, which serves the store: wait until the ranks that joined have read the error."""
    until_s = time.monotonic() + LINGER_S
    if start.rank or start.has_agent:
        return
    come = [n for n in range(start.size) if fresh.check([f"signed/{n}"])]
    while time.monotonic() < until_s and not fresh.check([f"read/{n}" for n in come]):
        time.sleep(POLL_S)
