"""Capture and replay of a whole step as one CUDA graph, so that no launch waits for Python."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardweave.backends.emit.emit import StepFunction
from shardweave.backends.programs import Key
from shardweave.ir.dialects.dist import HostCopyOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.torch_private import num_users

WARM_UP_CALLS = 3
"""Calls before the capture: kernels are compiled and tuned, libraries take their workspace."""


def check_graph(program: Program, mesh: Mesh, *, is_joint: bool) -> None:
    """Raises ValueError if a step communicates between ranks, or copies values to the host."""
    if is_joint:
        raise ValueError(
            f"cuda_graph=True: on mesh {mesh} the step communicates, and CUDA graphs with "
            "collectives are not supported; leave cuda_graph out, or use a mesh of one device."
        )
    if any(isinstance(op, HostCopyOp) for op in program.ops):
        raise ValueError(
            "cuda_graph=True: the plan offloads activations to the host, which a CUDA graph does "
            "not support; leave out cuda_graph, or the plan's 'offload'."
        )


class GraphedStep:
    """A step function that captures its first call on a GPU and replays it from then on.

    Inputs are copied into the memory that the graph reads. Parameters and buffers are not copied:
    they may change in place, but if one has moved to other memory, the step is captured again.
    Gradients are returned in the memory that the graph writes; those still in use at the next
    replay are moved to memory of their own first, so gradients set to None between steps are never
    copied. Other results are always copied. Raises ValueError if not on a GPU.
    """

    def __init__(self, run: StepFunction) -> None:
        self._run = run
        self._places: dict[Key, int] = {}
        self._given: dict[Key, Tensor] = {}
        self._results: dict[Key, Tensor] = {}
        self._users: dict[Key, int] = {}
        """Reference count of each result's memory when the result was returned."""
        self._handed: dict[Key, weakref.ref[Tensor]] = {}
        self._copied: set[Key] = set()
        """Results to copy at each call: they share memory, or had views in use at a replay."""
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, runtime: Any, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        if runtime.device.type != "cuda":
            raise ValueError(
                f"cuda_graph=True needs a GPU, but the step runs on {runtime.device}; leave "
                "cuda_graph out, or compile with device='cuda'."
            )
        places = {key: tensor.data_ptr() for key, tensor in given.items() if _stays(key)}
        if self._graph is None or places != self._places or not self._is_free():
            self._capture(runtime, given)
            self._places = places
        for key, tensor in given.items():
            if not _stays(key):
                self._given[key].copy_(tensor)
        assert self._graph is not None
        self._graph.replay()
        return {key: self._hand_out(key) for key in self._results}

    def _hand_out(self, key: Key) -> Tensor:
        result = self._results[key]
        if key in self._copied or key[0] != "grad":
            return result.clone()
        handed = result.detach()
        self._handed[key] = weakref.ref(handed)
        return handed

    def _is_free(self) -> bool:
        """Move gradients still in use out of the graph's memory; returns whether all could move."""
        stuck: set[Key] = set()
        for key, reference in self._handed.items():
            num_others = num_users(self._results[key]) - self._users[key]
            handed = reference()
            if num_others == 1 and handed is not None:
                handed.set_(handed.clone())  # pyright: ignore[reportArgumentType]
            elif num_others:
                stuck.add(key)
        self._handed.clear()
        self._copied |= stuck
        return not stuck

    def _capture(self, runtime: Any, given: Mapping[Key, Tensor]) -> None:
        self._given = {key: t if _stays(key) else t.clone() for key, t in given.items()}
        stream = torch.cuda.Stream(runtime.device)
        stream.wait_stream(torch.cuda.current_stream(runtime.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                self._run(runtime, self._given)
        torch.cuda.current_stream(runtime.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = self._run(runtime, self._given)
        held = {t.untyped_storage().data_ptr() for t in self._given.values()}
        shared = Counter(t.untyped_storage().data_ptr() for t in self._results.values())
        for key, result in self._results.items():
            place = result.untyped_storage().data_ptr()
            if place in held or shared[place] > 1:
                self._copied.add(key)
        self._users = {key: num_users(result) for key, result in self._results.items()}
        self._handed.clear()


def _stays(key: Key) -> bool:
    """True if an argument stays in the same memory from call to call, so it is not copied."""
    return key[0] in ("param", "buffer")
