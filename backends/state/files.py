"""First values of a model from files: safetensors, or a checkpoint. Each rank reads its shards."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from shardweave.backends.state.checkpoint import DataReader
from shardweave.backends.state.initial import Source
from shardweave.backends.state.places import places_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.mesh.shards import take_shard
from shardweave.ir.suggest import did_you_mean

PREFIXES = ("", "model.")
"""Prefixes of names in files, such as in a checkpoint of {"model": model.state_dict()}."""


class _InFile(Source):
    """A tensor's values in the file `path`, under `name`."""

    def __init__(self, tensor: Tensor, path: Path, name: str) -> None:
        super().__init__(tensor)
        self.path, self.name = path, name

    @abstractmethod
    def box(self, spans: tuple[slice, ...]) -> Tensor:
        """Read the box of elements that a slice of each dim selects."""

    def part(
        self, sharding: Sharding, coordinates: Mapping[str, int], device: torch.device
    ) -> Tensor:
        held = [
            take_shard(torch.arange(size), Sharding((dim,)), dict(coordinates))
            for size, dim in zip(self.shape, sharding.dims, strict=True)
        ]
        if not all(len(indices) for indices in held):
            sizes = [len(indices) for indices in held]
            return torch.empty(sizes, dtype=self.dtype, device=device)
        spans = tuple(slice(int(indices[0]), int(indices[-1]) + 1) for indices in held)
        part = self.box(spans)
        for dim, (indices, span) in enumerate(zip(held, spans, strict=True)):
            if len(indices) < span.stop - span.start:
                part = part.index_select(dim, indices - span.start)
        return part.to(device, self.dtype, copy=True)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the shape in the file is not the model's."""
        if shape != tuple(self.shape):
            raise ValueError(
                f"'{self.name}' has shape {shape} in {self.path}, but {tuple(self.shape)} in the "
                "model; use the model from which the file was saved."
            )


class _InSafetensors(_InFile):
    def box(self, spans: tuple[slice, ...]) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            stored = file.get_slice(self.name)
            self.check_shape(tuple(stored.get_shape()))
            return stored[spans] if spans else file.get_tensor(self.name)


class _InCheckpoint(_InFile):
    def __init__(self, reader: DataReader, tensor: Tensor, path: Path, name: str) -> None:
        super().__init__(tensor, path, name)
        self._reader = reader

    def box(self, spans: tuple[slice, ...]) -> Tensor:
        made = torch.empty([span.stop - span.start for span in spans], dtype=self.dtype)
        entry = self._reader.read_metadata().state_dict_metadata[self.name]
        assert isinstance(entry, TensorStorageMetadata)
        self.check_shape(tuple(entry.size))
        offsets = torch.Size([span.start for span in spans])
        items = create_read_items_for_chunk_list(
            self.name, entry, [ChunkStorageMetadata(offsets, made.shape)]
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process", category=UserWarning)
            load(
                {self.name: made},
                storage_reader=self._reader,
                planner=_BoxPlanner(made, items),
                no_dist=True,
            )
        return made


class _BoxPlanner(DefaultLoadPlanner):
    """Plans the reads that fill one tensor, a box of a larger saved one."""

    def __init__(self, box: Tensor, items: list[ReadItem]) -> None:
        super().__init__(flatten_state_dict=False)
        self._box, self._items = box, items

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._box[tuple(slice(start, start + length) for start, length in spans)]


def values_in_files(model: nn.Module, path: Path) -> dict[int, Source]:
    """Find the model's tensors in files; return sources of their values by tensor id. path: a
    safetensors file, a folder of such files, or the folder of a checkpoint. Raises ValueError for
    another path, and if files lack a parameter or persistent buffer."""
    known, kind = _known_tensors(path)
    sources: dict[int, Source] = {}
    missing: dict[int, str] = {}
    for place in places_of(model, remove_duplicate=False):
        names = [prefix + place.path for prefix in PREFIXES]
        entry = next((name for name in names if name in known), None)
        if entry is not None:
            sources[id(place.tensor)] = kind(place.tensor, known[entry], entry)
        elif place.name not in place.module._non_persistent_buffers_set:
            missing.setdefault(id(place.tensor), place.path)
    lacking = [name for key, name in missing.items() if key not in sources]
    if lacking:
        raise ValueError(
            f"{path} has no tensor '{lacking[0]}'; {did_you_mean(lacking[0], known)}it has "
            f"{len(known)} tensors. Give files that hold all parameters of the model under its "
            "names."
        )
    return sources


def _known_tensors(
    path: Path,
) -> tuple[Mapping[str, Path], Callable[[Tensor, Path, str], Source]]:
    """Return the file of each tensor under a path, by name, and a function that makes the source of
    a tensor from its file and name."""
    if (path / ".metadata").is_file():
        reader = DataReader(path)
        saved = reader.read_metadata().state_dict_metadata.items()
        names = [name for name, entry in saved if isinstance(entry, TensorStorageMetadata)]
        return dict.fromkeys(names, path), partial(_InCheckpoint, reader)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() and file.suffix == ".safetensors" for file in files):
        raise ValueError(
            f"weights={str(path)!r} must be a safetensors file, a folder of safetensors files, "
            "or a torch.distributed.checkpoint folder."
        )
    from safetensors import safe_open

    known: dict[str, Path] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            known |= dict.fromkeys(opened.keys(), file)
    return known, _InSafetensors
