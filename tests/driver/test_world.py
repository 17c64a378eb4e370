"""Which processes run together, and on which devices."""

import pytest
import torch
import torch.distributed as dist

from shardweave.driver.processes import world
from shardweave.ir.mesh.mesh import Mesh

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "processes", "expected"),
    [(0, 1, "cpu"), (1, 1, "cuda:0"), (3, 4, "cpu"), (4, 4, "cuda:2"), (8, 4, "cuda:2")],
)
def test_rank_has_a_gpu_of_its_own_or_all_are_on_the_cpu(
    gpus: int, processes: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, gpus)
    if processes > 1:
        monkeypatch.setenv("LOCAL_RANK", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert world.local_device(processes) == torch.device(expected)


def test_ranks_of_other_machines_need_no_gpu_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert world.local_device(16) == torch.device("cuda:1")


def test_cuda_alone_is_the_gpu_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert world.with_index(torch.device("cuda")) == torch.device("cuda:3")
    assert world.with_index(torch.device("cuda:1")) == torch.device("cuda:1")
    assert world.with_index(CPU) == CPU


def test_one_device_needs_no_process_group() -> None:
    world.join(Mesh(), CPU)
    world.join(Mesh(data=1, tensor=1), CPU)
    assert not dist.is_initialized()
    assert (world.rank(), world.world_size()) == (0, 1)


def test_rank_and_size_are_those_that_torchrun_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (world.rank(), world.world_size()) == (5, 8)
    with pytest.raises(ValueError, match="mesh data=4 has 4 devices, but 8 processes run"):
        world.join(Mesh(data=4), CPU)


def test_value_of_rank_0_is_made_here_where_there_is_one_process() -> None:
    assert world.from_rank_0(lambda: 3) == 3
