"""Python state that a step changes: buffers that it assigns become results, the rest is refused.

A program is captured once and runs for every step. It does not repeat forward's writes to modules,
lists or globals; it can only return tensors, as the new values of buffers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardweave.ir.capture.observed.observe import ABSENT, UNKNOWN, Write
from shardweave.ir.capture.site import CaptureError, Site

_REGISTERED = re.compile(
    r"(?:(.*?)\.)?(?:_(buffers|parameters)|__dict__\['_(buffers|parameters)'\])\['(.*)'\]$"
)


def assigned_buffers(model: nn.Module, writes: Iterable[Write]) -> dict[str, Site]:
    """Map each buffer that forward assigns to the line that assigns it. Raises CaptureError if
    forward assigns a parameter, or creates, removes or splits a buffer."""
    names: dict[str, Site] = {}
    for write in writes:
        registered = _REGISTERED.match(write.place)
        if registered is None:
            continue
        if "parameters" in registered.groups():
            raise CaptureError(
                f"{write.site}: forward assigns a new tensor to parameter '{registered[4]}', "
                "which the optimizer would not see; make it a buffer, or use a local variable."
            )
        path, name = registered[1], registered[4]
        qualified = f"{path}.{name}" if path else name
        names[qualified] = write.site
        _check_buffer(model, qualified, write)
    return names


def python_state(writes: Iterable[Write]) -> list[Write]:
    """Return the writes to Python state, except buffers, that would change the next step."""
    return [
        write
        for write in writes
        if not _REGISTERED.match(write.place)
        and not write.place.endswith("_non_persistent_buffers_set")  # torch's own, of buffers
        and write.is_read
        and (write.after is UNKNOWN or not _same(write.before, write.after))
    ]


def check_settles(
    writes: Sequence[Write], code: Callable[[], str], trace: Callable[[], tuple[Any, str]]
) -> None:
    """Raises CaptureError unless a second step, after the first one's writes, has the same graph
    and changes no more state: many models fill in a setting at their first call.

    code: returns the code of the first graph. trace: traces again; returns the writes of that trace
    and the code of its graph.
    """
    refused = next((write for write in writes if not _can_be_set(write)), None)
    if refused is None and writes:
        with _set_to_after(writes):
            again, new_code = trace()
        refused = None if new_code == code() else writes[0]
        refused = next(iter(python_state(again)), refused)
    if refused is not None:
        raise CaptureError(_refusal(refused))


def _can_be_set(write: Write) -> bool:
    return write.owner is not None and write.after is not UNKNOWN and write.after is not ABSENT


@contextmanager
def _set_to_after(writes: Sequence[Write]) -> Generator[None]:
    for write in writes:
        _set(write, write.after)
    try:
        yield
    finally:
        for write in writes:
            _set(write, write.before)


def _set(write: Write, value: Any) -> None:
    is_item = type(write.owner) is dict
    if value is ABSENT:
        (operator.delitem if is_item else delattr)(write.owner, write.name)
    else:
        (operator.setitem if is_item else setattr)(write.owner, write.name, value)


def _same(before: Any, after: Any) -> bool:
    return type(before) is type(after) and before == after


def _refusal(write: Write) -> str:
    name = write.place.rpartition(".")[2]
    name = name if name.isidentifier() and not name.startswith("__") else "name"
    return (
        f"{write.site}: forward changes `{write.place}`, Python state that the next step would "
        "read, but a program keeps what the first step had; hold it in a buffer "
        f'(self.register_buffer("{name}", torch.tensor(..)) in __init__), or pass it as an input. '
        "An attribute that each forward sets needs a value in __init__."
    )


def _check_buffer(model: nn.Module, name: str, write: Write) -> None:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    own = buffers.get(name)
    if own is None or write.after is ABSENT or (write.after is not UNKNOWN):
        done = "removes" if own is not None else "creates"
        raise CaptureError(
            f"{write.site}: forward {done} buffer '{name}'; register it in __init__, in its "
            "final shape, and let forward change only its values."
        )
    others = [other for other, buffer in buffers.items() if buffer is own and other != name]
    if others:
        raise CaptureError(
            f"{write.site}: forward assigns a new tensor to buffer '{name}', which is also "
            f"registered as '{others[0]}'; the two names would then hold different tensors. "
            f"Change the buffer in place: {name}.copy_(..)."
        )
