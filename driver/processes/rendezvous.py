"""How processes that torchrun starts, and starts anew, find each other.

torchrun keeps one store for all its restarts (torch 2.11 to 2.13), in which the addresses of
processes that are gone are left. Who reads one of these waits for nobody.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

POLL_S = 0.01


def initialise(backend: str) -> None:
    """Join the processes that the environment names, as torchrun or a person has set it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    store, rank, world_size = next(iter(rendezvous("env://")))
    fresh = PrefixStore(agreed_token(store, rank, world_size), store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=world_size)


def agreed_token(
    store: Store, rank: int, world_size: int, timeout: timedelta = default_pg_timeout
) -> str:
    """A text that all ranks have, and that no process before them had. Collective.

    Every rank leaves a name of its own in the store. Rank 0 answers each name that it finds under
    that name, with the token, until all ranks have signed for this token. So an answer is never
    that to another process, and names that processes before have left do no harm.

    Raises TimeoutError if a rank does not come.
    """
    name = uuid.uuid4().hex
    store.set(f"name/{rank}", name)
    if rank:
        store.wait([f"token/{name}"], timeout)
        token = store.get(f"token/{name}").decode()
        store.set(f"signed/{token}/{rank}", "1")
        return token
    deadline_s = time.monotonic() + timeout.total_seconds()
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"name/{other}"]):
                store.set(f"token/{store.get(f'name/{other}').decode()}", name)
        missing = {other for other in missing if not store.check([f"signed/{name}/{other}"])}
        if missing and time.monotonic() > deadline_s:
            raise TimeoutError(
                f"ranks {sorted(missing)} of {world_size} did not come within "
                f"{timeout.total_seconds():.0f} s."
            )
        time.sleep(POLL_S)
    return name
