"""torchtitan's trainer with a compiled model, beside the same script on one process."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardweave as sw
from shardweave.benchmarks.moe_cases import attention_by_hand
from shardweave.tests.integrations.frameworks import (
    as_launched,
    check_same,
    example,
    needs,
    weights,
)
from shardweave.tests.spawn import run_ranks


def on_cpus() -> Any:
    """The example, with a torchtitan that takes the CPU for its device."""
    import torchtitan.tools.utils as tools  # pyright: ignore[reportMissingImports]

    def nothing(*_: Any) -> None:
        return None

    properties = SimpleNamespace(total_memory=2**34)
    module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in ("synchronize", "set_device")},
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda *_: "CPU",
        get_device_properties=lambda *_: properties,
        memory_stats=lambda *_: {},
        reset_peak_memory_stats=nothing,
        empty_cache=nothing,
    )
    tools.device_type, tools.device_module = "cpu", module
    if not hasattr(dist, "set_timeout"):  # torch before 2.14
        dist.set_timeout = nothing  # type: ignore[attr-defined]
    import torchtitan.models.common.attention as attention  # pyright: ignore[reportMissingImports]

    attention.FlexAttention._compiled_flex_attn = staticmethod(attention_by_hand)
    return example("torchtitan_trainer")


def trains_as_on_one_process(root: str, mesh: str, zero: int, ports: tuple[int, int]) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()  # the trainer makes its own
    torchtitan = on_cpus()
    alone, folder = Path(root) / "alone", Path(root) / "sharded"
    theirs: Any = None
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    if rank == 0:
        with as_launched(1):
            model, numbers = torchtitan.train(None, 0, alone, steps=4)
        theirs = numbers[2:], {n: sw.full_tensor(x) for n, x in weights(model).items()}
        dist.destroy_process_group()
        shutil.copytree(alone / "checkpoint" / "step-2", folder / "checkpoint" / "step-2")
    os.environ["MASTER_PORT"] = str(ports[1])
    with as_launched(2, rank):
        model, numbers = torchtitan.train(mesh, zero, folder, steps=4)
    own = weights(model)
    if rank == 0:
        check_same([[*pair] for pair in numbers], [[*pair] for pair in theirs[0]], mesh)
        check_same(own, theirs[1], mesh)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tp": 1}, "tensor_parallel_degree=1: set it to 2"),
        ({"spmd_backend": "spmd_types"}, 'set "partial_dtensor"'),
        ({"ac_config": object()}, "activation_checkpoint: set it to None"),
        ({"enable": True}, 'compile.enable: leave it out.*backend="inductor"'),
        ({"enable_cpu_offload": True}, "enable_cpu_offload: leave it out"),
    ],
)
def test_settings_that_the_plan_decides_are_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"tp": 2, "spmd_backend": "partial_dtensor", "ac_config": None}
    given |= {"enable": False, "enable_cpu_offload": False, "world_size": 2, **changed}
    settings = SimpleNamespace(**given)
    parallelize_fn = sw.integrations.torchtitan.parallelize("data=2")
    with pytest.raises(ValueError, match=message):
        parallelize_fn(
            torch.nn.Linear(2, 2),
            parallel_dims=settings,
            training=settings,
            parallelism=settings,
            compile_config=settings,
            ac_config=settings.ac_config,
        )


@needs("torchtitan", "torchdata")
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2", 3), ("tensor=2", 0)])
def test_torchtitans_trainer_goes_on_from_its_own_checkpoint_as_on_one_process(
    tmp_path: Path, mesh: str, zero: int
) -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], second.getsockname()[1]
    run_ranks(trains_as_on_one_process, 2, str(tmp_path), mesh, zero, ports, timeout_s=400.0)
