"""The position of the main thread, which the watchdog reads from another thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.backends.watch.position import main_position, position_of, waits_since_marked
from shardweave.ir.capture import trace
from shardweave.ir.capture.outputs import Kind
from shardweave.ir.tracing import is_tracing, tracing


class Local:
    """An object that only a local variable holds."""


def seen_by_another_thread(look: Callable[[], Any]) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(look()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_thread_that_looks_on_keeps_no_local_variable_of_the_main_thread_alive() -> None:
    seen: list[Any] = []

    def works() -> weakref.ref[Local]:
        local = Local()
        seen.append(seen_by_another_thread(main_position))
        return weakref.ref(local)

    assert works()() is None
    assert any(place.file == __file__ and place.function == "works" for place in seen[0].stack)


def test_a_thread_that_looks_on_reads_no_frames_while_torch_traces() -> None:
    with tracing():
        position = seen_by_another_thread(main_position)
    assert position.text == "the capture of a program"
    assert not position.is_waiting
    assert not position.stack
    assert seen_by_another_thread(main_position).stack


def test_a_capture_is_marked_as_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    traced = trace._trace

    def looking(*args: Any) -> Any:
        seen.append(is_tracing())
        return traced(*args)

    monkeypatch.setattr(trace, "_trace", looking)
    trace.trace(nn.Linear(2, 2), (torch.ones(3, 2),), {}, Kind(grad=False))
    assert seen == [True]
    assert not is_tracing()


def test_a_marked_frame_is_known_again_and_that_of_another_call_is_not() -> None:
    seen: list[bool] = []

    def waits(times: int) -> weakref.ref[Local]:
        local = Local()
        start, end = threading.Event(), threading.Event()

        def look() -> None:
            start.wait()
            seen.extend(waits_since_marked(mark=True) for _ in range(times))
            end.set()

        thread = threading.Thread(target=look)
        thread.start()
        start.set()
        end.wait()
        thread.join()
        return weakref.ref(local)

    assert waits(2)() is None
    assert waits(1)() is None
    assert seen == [False, True, False]


def test_a_frame_of_this_thread_has_the_position_of_its_innermost_line_outside_of_the_package() -> (
    None
):
    try:
        sw.Mesh.parse("data=two")
    except ValueError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        assert trace is not None
        position = position_of(trace.tb_frame)
        assert position.text.startswith(f"{__file__}:")
        assert not position.is_waiting
    else:
        raise AssertionError("the mesh was parsed")
