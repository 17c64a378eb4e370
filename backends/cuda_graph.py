"""Replaying a whole step as one CUDA graph, so that no launch waits for Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardweave.backends.emit import StepFunction
from shardweave.backends.programs import Key

WARM_UP_CALLS = 3
"""Calls before the capture: kernels are compiled and tuned, libraries take their workspace."""


class GraphedStep:
    """A step function that captures its first call on a GPU and replays it from then on.

    Inputs are copied into the memory that the graph reads, and results out of the memory that it
    writes. Parameters and buffers are read where they are: they may change in place; where one is
    given in other memory, the step is captured again. Raises ValueError off the GPU.
    """

    def __init__(self, run: StepFunction) -> None:
        self._run = run
        self._places: dict[Key, int] = {}
        self._given: dict[Key, Tensor] = {}
        self._results: dict[Key, Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, runtime: Any, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        if runtime.device.type != "cuda":
            raise ValueError(
                f"a CUDA graph cannot be captured on {runtime.device}; leave cuda_graph out, or "
                "make the step on a GPU (device='cuda')."
            )
        places = {key: tensor.data_ptr() for key, tensor in given.items() if _stays(key)}
        if self._graph is None or places != self._places:
            self._capture(runtime, given)
            self._places = places
        for key, tensor in given.items():
            if not _stays(key):
                self._given[key].copy_(tensor)
        assert self._graph is not None
        self._graph.replay()
        # The graph writes the same memory next time, and gradients are kept and added to.
        return {key: result.clone() for key, result in self._results.items()}

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


def _stays(key: Key) -> bool:
    """Whether an argument is in the same memory at each call."""
    return key[0] in ("param", "buffer")
