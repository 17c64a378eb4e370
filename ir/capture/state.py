"""Python state that a step changes: buffers that it assigns become results, the rest is refused.

A program is made once and runs for every step. What forward writes to a module, a list or a global
is gone by then, unless it is a tensor that the program returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from shardweave.ir.capture.observe import ABSENT, UNKNOWN, Write
from shardweave.ir.capture.site import CaptureError

_REGISTERED = re.compile(
    r"(?:(.*?)\.)?(?:_(buffers|parameters)|__dict__\['_(buffers|parameters)'\])\['(.*)'\]$"
)


def assigned_buffers(model: nn.Module, writes: Iterable[Write]) -> list[str]:
    """The qualified names of buffers that forward gives another tensor.

    Raises CaptureError for other state that it changes and that a step would read again.
    """
    names: list[str] = []
    for write in writes:
        if write.place.endswith("_non_persistent_buffers_set"):
            continue  # torch's own; a buffer that is assigned passes through it
        registered = _REGISTERED.match(write.place)
        if registered is None:
            _check_python_state(write)
        elif "parameters" in registered.groups():
            raise CaptureError(
                f"{write.site}: forward assigns parameter '{registered[4]}', which the optimizer "
                "would not see; make it a buffer, or compute it without assigning it."
            )
        else:
            path, name = registered[1], registered[4]
            names.append(f"{path}.{name}" if path else name)
            _check_buffer(model, names[-1], write)
    return names


def _check_python_state(write: Write) -> None:
    is_same = type(write.before) is type(write.after) and write.before == write.after
    if not write.is_read or (is_same and write.after is not UNKNOWN):
        return
    name = write.place.rpartition(".")[2]
    name = name if name.isidentifier() and not name.startswith("__") else "name"
    raise CaptureError(
        f"{write.site}: forward changes `{write.place}`, Python state that the next step would "
        "read, but a program keeps what the first step had; hold it in a buffer "
        f'(self.register_buffer("{name}", torch.tensor(..)) in __init__), or pass it as an input. '
        "What forward sets anew each time needs a value in __init__."
    )


def _check_buffer(model: nn.Module, name: str, write: Write) -> None:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    own = buffers.get(name)
    if own is None or write.after is ABSENT or (write.after is not UNKNOWN):
        done = "removes" if own is not None else "creates"
        raise CaptureError(
            f"{write.site}: forward {done} buffer '{name}'; register it in __init__, in its final "
            "shape, and only change its value in forward."
        )
    others = [other for other, buffer in buffers.items() if buffer is own and other != name]
    if others:
        raise CaptureError(
            f"{write.site}: forward assigns buffer '{name}', which is also '{others[0]}', so that "
            "the two come apart; change it in place (copy_)."
        )
