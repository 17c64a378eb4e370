"""A watchdog: ranks tell each other that they are alive, and stop when one of them is not.

A thread of each rank writes a record to the store by which torch.distributed was joined, once a
second, and reads those of the ranks after it. If one falls silent, or fails, those that wait for
it end with a message that says which rank it is, and in which collective, layer and line of the
model they waited. The thread reads the position of the main thread off its stack, so that running
a step costs nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar
from weakref import ref

import torch.distributed as dist

from shardweave.backends.watch.agreement import AgreementError, require_same
from shardweave.backends.watch.position import main_position
from shardweave.backends.watch.watch import LostRankError, Watch
from shardweave.ir.torch_private import default_store

TIMEOUT = "SHARDWEAVE_TIMEOUT"
"""Environment variable: seconds that a rank may wait for others; 0 for no watchdog."""

DEFAULT_TIMEOUT_S = 1500.0
"""A little less than torch's own time-out of gloo, whose message names no rank."""

_BROKEN = ("gloo/", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out")


class _Process:
    """The one watch of a process, and what else its last words report."""

    watch: Watch | None = None
    store: Any = None
    listeners: ClassVar[list[Callable[[str], None]]] = []


def timeout_of(timeout_s: float | None) -> float:
    """Seconds that a rank may wait: as given, else as the environment says, else 25 minutes."""
    return _seconds(os.environ.get(TIMEOUT)) if timeout_s is None else timeout_s


def start_before(store: Any, rank: int, size: int, timeout_s: float, *, on_gpu: bool) -> None:
    """Watch ranks that have this store, and will have a process group. Collective."""
    stop()
    if timeout_s > 0:
        _Process.watch = Watch(store, rank, size, timeout_s, last_words, on_gpu=on_gpu)
        _at_exit()


def start(timeout_s: float | None = None) -> Watch | None:
    """Watch the ranks of the default process group, if nobody does so far. Collective.

    timeout_s: how long a rank may wait in one collective; by default what the environment's
    SHARDWEAVE_TIMEOUT says, else 25 minutes. 0 starts no watch.
    """
    store = default_store()
    if _Process.store is store or (_Process.store is None and _Process.watch is not None):
        _Process.store = store
        if _Process.watch is not None and timeout_s is not None:
            _Process.watch.set_timeout(timeout_s)
        return _Process.watch
    on_gpu = "nccl" in dist.get_backend()
    seconds = timeout_of(timeout_s)
    start_before(store, dist.get_rank(), dist.get_world_size(), seconds, on_gpu=on_gpu)
    _Process.store = store
    return _Process.watch


def stop() -> None:
    """Tell the others that this rank leaves, and watch no more."""
    if _Process.watch is not None:
        _Process.watch.stop()
    _Process.watch = _Process.store = None


def enter(call: object) -> None:
    """A call of a step begins. call: says in words what it is called with.

    Raises AgreementError if ranks have run different programs so far.
    """
    watch = _Process.watch
    if watch is not None:
        if watch.problem:
            raise AgreementError(f"{watch.problem}; let every rank do the same.")
        watch.entered += 1
        watch.call = ref(call)  # a call holds its inputs


def approach(call: object) -> None:
    """Ranks begin to tell each other what they give to a call, before they enter it."""
    watch = _Process.watch
    if watch is not None:
        watch.call = ref(call)
        watch.started = watch.entered + 1


def meet(what: str, text: str, advice: str = "let every rank do the same") -> None:
    """Raises AgreementError on every rank unless all come here with the same text. Collective.

    what: the kind of thing that they are at. Under a watch ranks that are at different kinds, of
    which one is a call of a step, are told as well; their messages would cross otherwise.
    """
    if _Process.watch is None or not _is_watched():
        require_same(what, text, advice)
    else:
        _Process.watch.meet(what, text, advice)


def _is_watched() -> bool:
    """Whether the process group is still the one that the watch was started for."""
    if not dist.is_initialized():
        return False
    return _Process.store is default_store()


def asking() -> AbstractContextManager[None]:
    """Mark that the main thread asks torch's store: as long as a watch gets no answer either, this
    rank waits for others, and ends as if it were in a collective."""
    watch = _Process.watch
    return nullcontext() if watch is None else watch.asking(main_position().text)


def begin(program: int) -> None:
    """The program of the call that was entered begins to run; all ranks know it by its number."""
    watch = _Process.watch
    if watch is not None:
        watch.begin(program)


def explain(error: RuntimeError) -> None:
    """Raises LostRankError if an error is that of a connection, once it is known who broke it."""
    watch = _Process.watch
    if watch is not None and is_broken(error):
        raise watch.explain(error, _innermost(error.__traceback__)) from error


def is_broken(error: BaseException) -> bool:
    """Whether an error is that of a connection between ranks."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN)


def listen(listener: Callable[[str], None]) -> None:
    """Have a function called with the last words of this rank, before its process ends."""
    if listener not in _Process.listeners:
        _Process.listeners.append(listener)


def last_words(text: str) -> None:
    """Tell torchrun, and who else listens, why this rank ends."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
    for listener in _Process.listeners:
        listener(text)


def _seconds(text: str | None) -> float:
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{TIMEOUT} is {text!r}; give the seconds that a rank may wait for others, such as "
            "60, or 0 for no limit."
        ) from None


def _innermost(traceback: TracebackType | None) -> FrameType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return None if traceback is None else traceback.tb_frame


@cache
def _at_exit() -> None:
    """Tell the others how this process ends."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        watch = _Process.watch
        if watch is None or isinstance(error, LostRankError):
            return
        if is_broken(error):
            print(f"shardweave: {watch.explain(error, _innermost(trace))}", file=sys.stderr)
        else:
            watch.fail(error)

    sys.excepthook = hook
    atexit.register(stop)
