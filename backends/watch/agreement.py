"""Checks that ranks hold the same values, and error messages that say where they differ."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.ir.dialects.types import form_of

T = TypeVar("T")


class AgreementError(ValueError):
    """Raised on every rank, naming ranks, if they differ in a value that must be equal on all."""


def is_alone() -> bool:
    """True if there are no other ranks to agree with."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def gathered_from_ranks(here: T) -> list[T]:
    """Return the values of all ranks, by rank. Values must be picklable. Collective."""
    if is_alone():
        return [here]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, here)
    return values


def require_same(what: str, text: str, advice: str) -> None:
    """Raises AgreementError on every rank unless all have the same text. Collective.

    Ranks exchange digests, and texts only if these differ. what: names the text in the error, which
    shows the first line that differs.
    """
    if is_alone() or len({*gathered_from_ranks(digest_of(text.encode()))}) == 1:
        return
    difference = first_difference(gathered_from_ranks(text.splitlines()))
    raise AgreementError(f"ranks differ in {what}: {difference}; {advice}.")


def first_difference(texts: Sequence[Sequence[str]]) -> str:
    """Describe the first line in which texts differ, rank by rank. texts: lines by rank."""
    rows = zip_longest(*texts, fillvalue="nothing")
    row = next((row for row in rows if len({*row}) > 1), tuple("" for _ in texts))
    return who_has_what(dict(enumerate(row)))


def who_has_what(lines: Mapping[int, str]) -> str:
    """Describe texts by rank, such as `rank 0 has a, ranks 1-3 have b`."""
    by_line: dict[str, list[int]] = {}
    for rank, line in sorted(lines.items()):
        by_line.setdefault(line, []).append(rank)
    return ", ".join(
        f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} {line.strip()}"
        for line, ranks in by_line.items()
    )


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ranks, such as `rank 3`, or `ranks 0-2, 5`."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(ranges_of(numbers))}"


def ranges_of(numbers: Iterable[int]) -> list[str]:
    """Format the ranges of sorted numbers: `0-2` and `5` of 0, 1, 2 and 5."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """Compute the SHA-256 digest of a tensor's bytes, in the order of its elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


SAMPLED = 256


def place_of_part(tensor: Tensor) -> tuple[int, ...]:
    """Return this rank's coordinates on the mesh dims that do not replicate the tensor, which
    identify its shard; `()` for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    pairs = zip(coordinate, tensor.placements, strict=True)
    return tuple(place for place, placement in pairs if not placement.is_replicate())


def sample_numbers(tensors: Mapping[str, Tensor], *, of_gpus: bool) -> dict[str, int]:
    """Digest some elements of the tensors to one number for each index of this rank's shards. Ranks
    with the same index must get the same number.

    of_gpus: include tensors on a GPU, for which the rank waits.
    """
    digests: dict[str, list[str]] = {}
    for _, tensor in sorted(tensors.items()):
        place, part = place_of_part(tensor), tensor.detach()
        flat = (part.to_local() if isinstance(part, DTensor) else part).reshape(-1)
        if of_gpus or flat.device.type == "cpu":
            sampled = flat[:: max(1, flat.numel() // SAMPLED)]
            digests.setdefault(str(place), []).append(tensor_digest(sampled))
    return {place: int(digest_of(" ".join(d).encode())[:15], 16) for place, d in digests.items()}


# Models


def describe_model(model: nn.Module) -> str:
    """Describe a model's modules, parameters and buffers, in a line each."""
    lines = [
        f"module '{path}': {type(module).__name__}({module.extra_repr()})"
        f"{'' if module.training else ' in evaluation mode'}"
        for path, module in model.named_modules()
    ]
    lines += [
        f"param '{name}' {form_of(p)}{'' if p.requires_grad else ', frozen'}"
        f"{' on the meta device' if p.is_meta else ''}"
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    buffers = model.named_buffers(remove_duplicate=False)
    lines += [f"buffer '{name}' {form_of(buffer)}" for name, buffer in buffers]
    return without_addresses("\n".join(lines))


def without_addresses(text: str) -> str:
    """Remove memory addresses, which differ between processes, from a text."""
    return re.sub(r"\bat 0x[0-9a-f]+", "", text)


def require_same_values(tensors: Mapping[str, Tensor]) -> None:
    """Raises AgreementError on every rank unless tensors, by name, are equal. Collective."""
    if is_alone():
        return
    digests = [f"{name} with digest {tensor_digest(t)[:8]}" for name, t in tensors.items()]
    advice = "start from the same seed or checkpoint, or leave sync=False out: rank 0's are used"
    require_same("the model's values", "\n".join(digests), advice)


def broadcast_from_rank_0(tensors: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield rank 0's values of the tensors, one by one, in this rank's memory format. Collective.
    On rank 0 they are the tensors themselves. Callers must exhaust the iterator."""
    is_first = dist.get_rank() == 0
    for tensor in tensors:
        own = tensor.detach()
        message = torch.empty(own.shape, dtype=own.dtype, device=device)
        if is_first:
            message.copy_(own)
        if own.numel():
            dist.broadcast(message.view(-1).view(torch.uint8), src=0)
        yield tensor if is_first else torch.empty_like(own, device=device).copy_(message)
