"""Checks that replicas are equal on all ranks: of inputs in the first calls of a step, and with
SHARDWEAVE_CHECK=1 of inputs, state and scalar outputs in every call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardweave.backends.programs import Key
from shardweave.backends.watch import watchdog
from shardweave.backends.watch.agreement import (
    AgreementError,
    gathered_from_ranks,
    place_of_part,
    tensor_digest,
    who_has_what,
)
from shardweave.backends.watch.watch import CHECK

FIRST_CALLS = 3
"""Number of calls of a step whose inputs are compared, unless SHARDWEAVE_CHECK is set."""


class _Part(NamedTuple):
    """Digest of a rank's shard of a tensor. Shards of equal index `shard` must be equal."""

    name: str
    shard: tuple[int, ...]
    digest: str


def are_checked() -> bool:
    """True if SHARDWEAVE_CHECK asks to compare every call."""
    return os.environ.get(CHECK, "0") not in ("", "0")


def inputs_are_checked(num_calls: int) -> bool:
    """True if ranks compare a call's inputs by default. num_calls: earlier calls of the step."""
    return num_calls < FIRST_CALLS and os.environ.get(CHECK, "") == ""


ADVICE = (
    "give every rank the same global batch, or each its own rows: sw.compile(.., "
    'batch="local"), or step.local_batch(..) around the inputs'
)


def check_call(
    call: str, inputs: Mapping[str, Tensor], state: Mapping[Key, Tensor], advice: str = ADVICE
) -> None:
    """Raises AgreementError on every rank unless all make the same call, and replicas of inputs,
    parameters and buffers are equal. call: describes the call. advice: ends the message.
    Collective."""
    watchdog.meet("the call", call)
    check_replicas("input", inputs, advice)
    for kind in ("param", "buffer"):
        stored = {name: tensor for (own, name), tensor in state.items() if own == kind}
        check_replicas(kind, stored, "change parameters and buffers alike on every rank")


def check_gradients(gradients: Mapping[str, Tensor]) -> None:
    """Raises AgreementError on every rank unless gradients of outputs are equal. Collective."""
    advice = "compute the loss of the same global batch on every rank"
    check_replicas("the gradient of output", gradients, advice)


def check_outputs(outputs: Mapping[str, Tensor]) -> None:
    """Raises AgreementError on every rank unless ranks agree on scalar outputs. Collective."""
    scalars = {name: x for name, x in outputs.items() if x.ndim == 0}
    advice = "all ranks computed it from the same terms, so shardweave or a device has a defect"
    check_replicas("output", scalars, advice)


def check_replicas(kind: str, tensors: Mapping[str, Tensor], advice: str) -> None:
    """Raises AgreementError on every rank unless ranks with the same shard of a tensor have equal
    values. kind: word for the tensors, such as "input". advice: ends the message. Collective."""
    parts = [_Part(name, place_of_part(x), _digest(x)) for name, x in tensors.items()]
    everyone = gathered_from_ranks(parts)
    for number, (name, _, _) in enumerate(parts):
        held = [each[number] for each in everyone]
        for shard in {part.shard for part in held}:
            texts = {rank: p.digest[:8] for rank, p in enumerate(held) if p.shard == shard}
            if len({*texts.values()}) > 1:
                words = {rank: f"values of digest {digest}" for rank, digest in texts.items()}
                text = who_has_what(words)
                raise AgreementError(f"ranks differ in {kind} '{name}': {text}; {advice}.")


def _digest(tensor: Tensor) -> str:
    return tensor_digest(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
