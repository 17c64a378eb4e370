"""Models on the meta device: filled by their own functions, or read from files, shard by shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardweave as sw
from shardweave.tests.spawn import run_ranks


class Net(nn.Module):
    """Embeddings with padding, tied to an output; truncated and orthogonal weights; statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(12, 8, padding_idx=1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm, self.square = nn.BatchNorm1d(4), nn.Linear(8, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.ids.weight
        if not self.ids.weight.is_meta:
            self.init_weights()

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.layer.linear1.weight, std=0.02)
        nn.init.orthogonal_(self.square.weight)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.out(self.square(self.norm(self.layer(self.ids(ids)))))
        return F.cross_entropy(out.flatten(0, 1), ids.flatten())


IDS = torch.arange(32).reshape(8, 4) % 12


def on_meta(kind: type[nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return kind()


def state_of_seed(seed: int) -> dict[str, Tensor]:
    with sw.seeded(seed):
        return Net().state_dict()


def assert_state(model: Any, expected: dict[str, Tensor]) -> None:
    state = sw.Step.of(model).full_state_dict()
    assert {*state} - {"random_state"} == {*expected}
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def start(mesh: str, zero: int, folder: Path, backend: str = "distributed") -> None:
    options: dict[str, Any] = {"mesh": mesh, "zero": zero, "backend": backend}
    model = sw.compile(on_meta(), (IDS,), seed=3, **options)
    assert_state(model, state_of_seed(3))
    if mesh and backend == "distributed":
        assert isinstance(model.get_parameter("square.weight"), DTensor)
    model(IDS).backward()
    for path in (folder / "model.safetensors", folder / "checkpoint", folder / "nested"):
        read = sw.compile(on_meta(), (IDS,), weights=path, **options)
        assert_state(read, state_of_seed(5))


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    from safetensors.torch import save_model

    with sw.seeded(5):
        model = Net()
    save_model(model, str(tmp_path / "model.safetensors"))
    for name, state in (
        ("checkpoint", model.state_dict()),
        ("nested", {"model": model.state_dict()}),
    ):
        with pytest.warns(UserWarning, match="single process"):
            save(state, checkpoint_id=tmp_path / name)
    return tmp_path


def test_models_on_the_meta_device_start_on_one_process_and_on_the_reference_backend(
    folder: Path,
) -> None:
    start("", 0, folder)
    start("data=2,tensor=2", 3, folder, "reference")


def test_models_on_the_meta_device_start_with_the_same_numbers_on_every_mesh(folder: Path) -> None:
    run_ranks(start, 2, "data=2", 3, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2,tensor=2", 3), ("tensor=4", 0)])
def test_models_on_the_meta_device_start_on_larger_meshes(
    mesh: str, zero: int, folder: Path
) -> None:
    run_ranks(start, 4, mesh, zero, folder)


class Unfilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_tensors_that_nothing_fills_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'scale' is on the meta device.*reset_parameters\(\)"):
        sw.compile(on_meta(Unfilled), (torch.ones(2, 4),))
    with pytest.raises(ValueError, match=r"has no tensor 'scale'; it has \d+ tensors"):
        sw.compile(on_meta(Unfilled), (torch.ones(2, 4),), weights=folder / "model.safetensors")
    with pytest.raises(ValueError, match="must be a safetensors file"):
        sw.compile(on_meta(Unfilled), (torch.ones(2, 4),), weights=folder / "nothing")


class Rotary(nn.Module):
    """A table that is made anew, as torchtitan's models make theirs, in place of the one there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", self.made(), persistent=False)

    def made(self) -> Tensor:
        return torch.arange(4.0)

    def init_weights(self) -> None:
        with torch.device("cpu"):
            self.table = self.made()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


@pytest.mark.parametrize("mesh", ["", "data=2"])
def test_buffers_that_a_function_replaces_have_its_values(mesh: str) -> None:
    model = sw.compile(on_meta(Rotary), (torch.ones(2, 4),), mesh=mesh or None, backend="reference")
    assert torch.equal(sw.full_tensor(model(torch.ones(2, 4))), torch.arange(4.0).expand(2, 4))
