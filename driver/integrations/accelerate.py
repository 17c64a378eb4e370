# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Hugging Face's accelerate: every rank is its only worker, and sees the global batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from shardweave.backends.state.state import state_of
from shardweave.backends.state.whole_state import whole_optimizer_states, whole_state_dicts

_T = TypeVar("_T", bound=type)


@functools.cache
def accelerator(kind: _T) -> _T:
    """Subclass `kind`, an `accelerate.Accelerator`, for compiled models.

    Each rank takes all rows of a batch, so that batch sizes, losses and metrics are those of one
    process; the model is not wrapped. `save_state` and `save_model` gather, and rank 0 writes:
    all ranks call them, as they do in accelerate.
    """
    return type(kind.__name__, (_Sharded, kind), {"__module__": kind.__module__})  # pyright: ignore[reportReturnType]


class _Sharded:
    """Parts of an accelerator that differ for a compiled model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        see_one_worker(cpu=bool(kwargs.get("cpu", False)))
        super().__init__(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with model.no_sync() if state_of(model) is not None else nullcontext():  # pyright: ignore[reportCallIssue]
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        if state_of(model) is None:
            return super().get_state_dict(model, unwrap)
        # `save_state` asks with unwrap=False, for the state to go on from.
        with whole_state_dicts([model], random=not unwrap):
            return model.state_dict()

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        with whole_optimizer_states([each.optimizer for each in self._optimizers]):
            saved = super().save_state(*args, **kwargs)
        self.wait_for_everyone()
        return saved

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        # safetensors looks for tied tensors by their memory, which a DTensor does not have.
        with whole_state_dicts(self._models):
            return super().load_state(*args, **kwargs)


def see_one_worker(*, cpu: bool = False) -> None:
    """Make accelerate treat this process as the only worker, with the rank's device index."""
    from accelerate import DistributedType, PartialState

    state = PartialState(cpu=cpu)
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    if dist.is_initialized():
        state.process_index = dist.get_rank()
