"""Support for strided shards in torch.distributed.checkpoint, and safe reading of metadata.

A checkpoint describes each rank's shard of a tensor as boxes. Torch gives every DTensor one box.
A strided shard is not one box, but one for each run of consecutive indices: a rank's heads of three
fused projections, for example, are three boxes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from shardweave.backends.optimizers.exchange import layout_of
from shardweave.ir.torch_private import StridedShard, local_part

_T = TypeVar("_T")


def checkpointable(state: _T) -> _T:
    """Make strided shards in a nested state saveable, in place; returns the state.

    A compiled model's `state_dict` is saveable already. For an optimizer whose parameters are
    strided shards, call this before `torch.distributed.checkpoint` saves or loads its state:
    `dcp.save({"optimizer": checkpointable(optimizer.state_dict())})`.
    """
    if isinstance(state, DTensor):
        if any(isinstance(placement, StridedShard) for placement in state.placements):
            _attach(state)
    elif isinstance(state, Mapping):
        for value in state.values():
            checkpointable(value)
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes):
        for value in state:
            checkpointable(value)
    return state


class _Run(NamedTuple):
    """Consecutive indices of one dim: offset in the whole tensor, start in the shard, length."""

    offset: int
    start: int
    length: int


@dataclass(frozen=True)
class _Boxes:
    """The boxes of one local tensor, with the methods of torch's checkpoint protocol."""

    local: Tensor
    shape: torch.Size
    runs: tuple[tuple[_Run, ...], ...]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                offsets=torch.Size(run.offset for run in box),
                sizes=torch.Size(run.length for run in box),
            )
            for box in product(*self.runs)
        ]

    def write_items(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.chunks()
        ]

    def shard(self, index: MetadataIndex) -> Tensor:
        """Return the part of the local tensor at `index.offset`, as a view; ValueError if none."""
        for box in product(*self.runs):
            if index.offset == torch.Size(run.offset for run in box):
                return self.local[tuple(slice(r.start, r.start + r.length) for r in box)]
        raise ValueError(f"'{index.fqn}' has no shard at offset {index.offset} on this rank.")


def _attach(tensor: DTensor) -> None:
    # DTensor forwards these calls to a local tensor that has these attributes.
    local: Any = local_part(tensor)
    index = layout_of(tensor).shards[dist.get_rank()]
    boxes = _Boxes(local.detach(), tensor.shape, tuple(map(_runs, index)))
    local.__create_write_items__ = boxes.write_items
    local.__create_chunk_list__ = boxes.chunks
    local.__get_tensor_shard__ = boxes.shard


def _runs(held: Sequence[int]) -> tuple[_Run, ...]:
    """Return the runs of consecutive numbers among the indices of a dim that this rank holds."""
    breaks = [
        at for at, (before, after) in enumerate(pairwise(held), start=1) if after != before + 1
    ]
    bounds = pairwise([0, *breaks, len(held)])
    return tuple(_Run(held[start], start, stop - start) for start, stop in bounds if stop > start)


class DataReader(FileSystemReader):
    """Reads a checkpoint. Torch's own reader unpickles the metadata, and would run code that a file
    hides there; this one does not."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`, once. Raises UnpicklingError if it is damaged or names a class that
        metadata does not need."""
        del args, kwargs
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        saved = _Unpickler(io.BytesIO((self.path / ".metadata").read_bytes())).load()  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
        entries = getattr(saved, "state_dict_metadata", None)
        if not isinstance(entries, dict):
            raise pickle.UnpicklingError("its metadata is damaged")
        for name, entry in cast("dict[str, Any]", entries).items():
            if isinstance(entry, TensorStorageMetadata) and not _is_whole(entry):
                raise pickle.UnpicklingError(f"the metadata of its tensor '{name}' is damaged")
        return saved


def _is_whole(entry: Any) -> bool:
    """True if the metadata of a tensor has a shape, a dtype, and chunks with as many dims as the
    shape."""
    if not {"properties", "size", "chunks"} <= vars(entry).keys():
        return False
    boxes = [(getattr(c, "offsets", None), getattr(c, "sizes", None)) for c in entry.chunks]
    sizes = [entry.size, *(size for box in boxes for size in box)]
    is_shaped = all(isinstance(size, torch.Size) for size in sizes)
    dtype = getattr(entry.properties, "dtype", None)
    return is_shaped and isinstance(dtype, torch.dtype) and len({len(s) for s in sizes}) == 1


_RECORDS = {
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
"""Names that a checkpoint's metadata may refer to, by module; dtypes are allowed too."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Python 3.13 writes where its paths are defined, which other versions do not have.
        module = "pathlib" if module == "pathlib._local" else module
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a checkpoint's metadata may not refer to {module}.{name}")
