"""Runs a function on several ranks, each a process, for tests of torch.distributed."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import inspect
import io
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardweave.tests.shared_traces import share_traces

PRELOADED = "shardweave.tests.preload"
"""What processes of tests import and do, all but the files of the tests."""


OTHER_SERVER = ForkServer()
"""Starts every second rank: strings have other hashes there, as in processes of torchrun. Ranks that
send messages in the order of a set would send them in two orders."""


def warm_context() -> ForkServerContext:
    """Starts processes, in milliseconds, as forks of a server that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def importable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a test file, as another process can import it: a clone may have any name."""
    name = function.__module__
    module = importlib.import_module(f"shardweave.{name[name.index('tests.') :]}")
    return getattr(module, function.__name__)


def run_ranks(
    worker: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    backend: str = "gloo",
) -> list[Any]:
    """`worker(*args)` on `world_size` processes joined in a process group; results by rank.

    `worker` is a function at the top level of a file; arguments and results must be picklable.
    Raises RankError with the traceback of the rank that failed first, and TimeoutError. No
    process is left when this returns or raises, nor if the calling process dies.
    """
    context = warm_context()
    source = inspect.getsourcefile(worker)
    assert source is not None
    processes: list[Any] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                group = {"backend": backend, "init_method": store, "world_size": world_size}
                target = (source, worker.__name__, _packed(args))
                process = context.Process(
                    target=_run_rank, args=(theirs, {**group, "rank": rank}, timeout_s, *target)
                )
                if rank % 2:
                    with mock.patch.object(forkserver, "connect_to_new_process", _from_other):
                        process.start()
                else:
                    process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _from_other(fds: list[int]) -> tuple[int, int]:
    OTHER_SERVER.set_forkserver_preload([PRELOADED])
    return OTHER_SERVER.connect_to_new_process(fds)


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise TimeoutError(f"ranks {missing} gave no result in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # pyright: ignore[reportArgumentType]
            try:
                is_ok, payload = pipes[rank].recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not is_ok:
                raise RankError(f"rank {rank} failed:\n{payload}")
            results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]


def _packed(value: Any) -> bytes:
    # As bytes: a pickled tensor would travel as a shared memory handle that dies with its owner.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _run_rank(
    pipe: Connection,
    group: dict[str, Any],
    timeout_s: float,
    source: str,
    name: str,
    packed: bytes,
) -> None:
    """The life of one rank."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        faulthandler.enable()  # a rank that dies in C++ prints its Python stacks
        torch.set_num_threads(1)
        torch.manual_seed(0)
        warnings.simplefilter("error", FutureWarning)
        share_traces()
        worker = getattr(_load(source), name)
        args = torch.load(io.BytesIO(packed), weights_only=False)
        dist.init_process_group(timeout=timedelta(seconds=timeout_s), **group)
        result = _packed(worker(*args))
        # No rank leaves while another still needs it.
        dist.barrier()
        dist.destroy_process_group()
        pipe.send((True, result))
    except BaseException:  # noqa: BLE001, RUF100 - whatever it is, the parent raises it
        pipe.send((False, traceback.format_exc()))
        os._exit(1)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _load(source: str) -> Any:
    """The module of a source file, which need not be importable by name."""
    name = f"rank_module_{Path(source).stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
