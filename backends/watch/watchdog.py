"""A watchdog: ranks tell each other that they are alive, and stop when one of them is not.

Once a second, a thread of each rank writes a record to the store of torch.distributed, and reads
the records of the ranks after it. If a rank falls silent, or fails, the ranks that wait for it end
with a message that names it, and the collective, layer and line of the model where they waited.
The thread reads the position of the main thread from its stack, so that running a step costs
nothing.
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
"""A little less than torch's own timeout for gloo, whose message names no rank."""

LONGEST_S = 1e8
"""Three years; torch's waits take no number of seconds that is much larger."""

_BROKEN = ("gloo/", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out")


class _Process:
    """The one watch of this process, its store, and listeners to its last words."""

    watch: Watch | None = None
    store: Any = None
    listeners: ClassVar[list[Callable[[str], None]]] = []


def timeout_of(timeout_s: float | None) -> float:
    """Return the longest wait in seconds: `timeout_s`, else SHARDWEAVE_TIMEOUT, else 25 minutes.
    Raises ValueError for a number of seconds that cannot be waited."""
    given = os.environ.get(TIMEOUT, DEFAULT_TIMEOUT_S) if timeout_s is None else timeout_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_S:
        name = TIMEOUT if timeout_s is None else "timeout"
        raise ValueError(
            f"{name} is {given!r}, expected the number of seconds that a rank waits for others, "
            f"such as 60, at most {LONGEST_S:.0e}, or 0 for no limit."
        )
    return seconds


def start_before(store: Any, rank: int, size: int, timeout_s: float, *, on_gpu: bool) -> None:
    """Watch the ranks that share `store`, before there is a process group. Collective."""
    stop()
    if timeout_s > 0:
        _Process.watch = Watch(store, rank, size, timeout_s, last_words, on_gpu=on_gpu)
        _at_exit()


def start(timeout_s: float | None = None) -> Watch | None:
    """Watch the ranks of the default process group, unless a watch does already. Collective.

    timeout_s: longest wait in one collective; by default the environment variable
    SHARDWEAVE_TIMEOUT, else 25 minutes. 0 starts no watch.
    """
    store = default_store()
    if _Process.store is store or (_Process.store is None and _Process.watch is not None):
        _Process.store = store
        if _Process.watch is not None and timeout_s is not None:
            _Process.watch.set_timeout(timeout_of(timeout_s))
        return _Process.watch
    on_gpu = "nccl" in dist.get_backend()
    seconds = timeout_of(timeout_s)
    start_before(store, dist.get_rank(), dist.get_world_size(), seconds, on_gpu=on_gpu)
    _Process.store = store
    return _Process.watch


def stop() -> None:
    """Tell the other ranks that this rank leaves, and stop watching."""
    if _Process.watch is not None:
        _Process.watch.stop()
    _Process.watch = _Process.store = None


def enter(call: object) -> None:
    """Record that a call of a step begins. call: a `StepCall`, whose str describes it. Raises
    AgreementError if ranks have run different programs so far."""
    watch = _Process.watch
    if watch is not None:
        if watch.problem:
            raise AgreementError(f"{watch.problem}; let every rank do the same.")
        watch.entered += 1
        watch.call = ref(call)  # a call holds its inputs


def approach(call: object) -> None:
    """Record that ranks begin to exchange the row counts of a call, before they enter it."""
    watch = _Process.watch
    if watch is not None:
        watch.call = ref(call)
        watch.started = watch.entered + 1


def meet(what: str, text: str, advice: str = "let every rank do the same") -> None:
    """Raises AgreementError on every rank unless all ranks come here with the same text.
    Collective.

    what: names the operation. Under a watch it raises too if ranks are in different operations,
    such as a call of a step; without a watch their messages would be mixed up.
    """
    if _Process.watch is None or not _is_watched():
        require_same(what, text, advice)
    else:
        _Process.watch.meet(what, text, advice)


def _is_watched() -> bool:
    """True if the process group is still the one that the watch was started for."""
    if not dist.is_initialized():
        return False
    return _Process.store is default_store()


def asking() -> AbstractContextManager[None]:
    """Context in which the main thread makes requests to torch's store: if the store does not
    answer the watch either, this rank ends as if it waited in a collective."""
    watch = _Process.watch
    return nullcontext() if watch is None else watch.asking(main_position().text)


def begin(program: int) -> None:
    """Record that the entered call's program begins. program: its number, equal on all ranks."""
    watch = _Process.watch
    if watch is not None:
        watch.begin(program)


def explain(error: RuntimeError) -> None:
    """Raises LostRankError, which names the rank at fault, if `error` is a broken connection."""
    watch = _Process.watch
    if watch is not None and is_broken(error):
        raise watch.explain(error, _innermost(error.__traceback__)) from error


def is_broken(error: BaseException) -> bool:
    """True if an error comes from a broken connection between ranks."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN)


def listen(listener: Callable[[str], None]) -> None:
    """Register a function to call with the reason when this rank ends."""
    if listener not in _Process.listeners:
        _Process.listeners.append(listener)


def last_words(text: str) -> None:
    """Report to torchrun, and to all listeners, why this rank ends."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
    for listener in _Process.listeners:
        listener(text)


def _innermost(traceback: TracebackType | None) -> FrameType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return None if traceback is None else traceback.tb_frame


@cache
def _at_exit() -> None:
    """Install hooks, once, that tell the other ranks how this process ends."""
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
