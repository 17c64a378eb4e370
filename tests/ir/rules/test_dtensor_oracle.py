"""Our rules against the sharding strategies of torch's DTensor.

Every choice of one axis of two devices that DTensor can say is given to it: the operands as our
rule wants them. Where DTensor takes them without communication and gives the results the
placements that our rule gives them, the shards of both ranks must make up what torch computes
on one device; where it does not, the op stands in `WEAKER` with the reason.

A process group without communication is enough: collectives are what must not happen.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardweave.ir.dialects.aten import OWN_OPS
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding, is_contiguous
from shardweave.ir.mesh.shards import assemble, take_shard
from shardweave.tests.ir.rules.cuts import single_cuts
from shardweave.tests.ir.rules.sharded_op import Instance, Sample, kernel_of
from shardweave.tests.ir.rules.test_property import OPS, SAMPLES, instances
from shardweave.tests.marks import slow_where

NUM_RANKS = 2

NO_STRATEGY = "no strategy"
REDISTRIBUTES = "makes an operand whole"
KEEPS_WHOLE = "computes on whole operands what could be cut"

WEAKER = {
    "_adaptive_avg_pool3d_backward": NO_STRATEGY,
    "_cdist_backward": NO_STRATEGY,
    "_cdist_forward": NO_STRATEGY,
    "_conj_physical": NO_STRATEGY,
    "_linalg_eigh": REDISTRIBUTES,
    "_linalg_svd": REDISTRIBUTES,
    "_neg_view": NO_STRATEGY,
    "_prelu_kernel_backward": NO_STRATEGY,
    "adaptive_max_pool2d_backward": NO_STRATEGY,
    "avg_pool2d_backward": NO_STRATEGY,
    "avg_pool3d_backward": NO_STRATEGY,
    "col2im": NO_STRATEGY,
    "complex": NO_STRATEGY,
    "conj_physical": NO_STRATEGY,
    "convolution": "cuts the batch only; groups that are cut fail in the local op",
    "convolution_backward": "tensor-parallel convolutions want the image cut, and fail otherwise",
    "copy": NO_STRATEGY,
    "diag_embed": REDISTRIBUTES,
    "diagonal_backward": REDISTRIBUTES,
    "diagonal_copy": REDISTRIBUTES,
    "embedding": "a table cut by rows gives a masked partial placement, which is not public",
    "embedding_dense_backward": KEEPS_WHOLE,
    "expand": KEEPS_WHOLE,
    "fill.Tensor": NO_STRATEGY,
    "gather": "as embedding; an index wider than 1 makes the table whole",
    "grid_sampler_2d": REDISTRIBUTES,
    "grid_sampler_2d_backward": REDISTRIBUTES,
    "grid_sampler_3d": REDISTRIBUTES,
    "grid_sampler_3d_backward": REDISTRIBUTES,
    "hardsigmoid_backward": NO_STRATEGY,
    "hardswish_backward": NO_STRATEGY,
    "hardtanh_backward": NO_STRATEGY,
    "im2col": NO_STRATEGY,
    "index_select_backward": REDISTRIBUTES,
    "linalg_cross": REDISTRIBUTES,
    "linalg_qr": REDISTRIBUTES,
    "max_pool3d_with_indices_backward": NO_STRATEGY,
    "native_group_norm": REDISTRIBUTES,
    "native_group_norm_backward": "passes global sizes to the local op, which fails",
    "polar": NO_STRATEGY,
    "reflection_pad1d": NO_STRATEGY,
    "reflection_pad1d_backward": NO_STRATEGY,
    "reflection_pad2d": NO_STRATEGY,
    "reflection_pad2d_backward": NO_STRATEGY,
    "replication_pad1d": NO_STRATEGY,
    "replication_pad1d_backward": NO_STRATEGY,
    "replication_pad2d": NO_STRATEGY,
    "replication_pad2d_backward": NO_STRATEGY,
    "scatter.src": REDISTRIBUTES,
    "scatter.value": REDISTRIBUTES,
    "scatter_add": REDISTRIBUTES,
    "slice.Tensor": "a dim that is sliced is made whole, even where equal blocks are taken",
    "slice_backward": "as slice",
    "tril": "makes batches whole",
    "triu": "makes batches whole",
    "unfold_backward": NO_STRATEGY,
    "unfold_copy": NO_STRATEGY,
}
"""Ops of which DTensor of torch 2.13 refuses or redistributes some choice that our rule takes."""

HANGS = {
    f"aten._scaled_dot_product_flash_attention_for_cpu{suffix}" for suffix in ("", "_backward")
}
"""Ops without a strategy that DTensor decomposes without end."""

AGREES_EVERYWHERE = """
    mm bmm add.Tensor mul.Tensor relu gelu where.self sum.dim_IntList _softmax _log_softmax
    native_layer_norm permute view
""".split()
"""Ops on which every supported torch agrees with us."""


@dataclass(frozen=True, eq=False)
class Case:
    """One op and the shardings that one choice gives its operands and results."""

    sample: Sample
    instance: Instance
    operands: list[Sharding]
    results: list[Sharding]


Outcome = tuple[list[Any], list[Tensor]] | str
"""Placements and local parts of the results on one rank, or why there are none."""


def cases_of(op: str) -> Iterator[Case]:
    """The choices of one axis that give plain shards, which DTensor can say."""
    samples = [sample for sample in SAMPLES if sample.op == op]
    for sample, instance in zip(samples, instances(op), strict=True):
        tensors = [*instance.operands, *instance.results]
        for mesh, cut in single_cuts(instance.rule):
            if mesh.num_devices != NUM_RANKS or not cut.is_possible(instance.rule):
                continue
            operands = cut.operand_shardings(instance.rule)
            results = cut.result_shardings(instance.rule, mesh)
            pairs = zip([*operands, *results], tensors, strict=True)
            if operands and all(_is_plain(sharding, tensor) for sharding, tensor in pairs):
                yield Case(sample, instance, operands, results)


def _is_plain(sharding: Sharding, tensor: Tensor) -> bool:
    return all(map(is_contiguous, sharding.dims, tensor.shape))


def placement_of(sharding: Sharding) -> Any:
    """What DTensor calls a sharding over one axis."""
    for dim, placements in enumerate(sharding.dims):
        if placements:
            return Shard(dim)
    return Partial(sharding.reduction) if sharding.unreduced else Replicate()


@contextmanager
def rank_alone(rank: int) -> Iterator[DeviceMesh]:
    """A mesh, and the process group of one of its ranks, in which nobody else is."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    try:
        with warnings.catch_warnings():
            # What it warns of differs from version to version.
            warnings.simplefilter("ignore")
            yield init_device_mesh("cpu", (NUM_RANKS,))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # Making a device mesh replaces it.


def outcomes_of(cases: Sequence[Case]) -> list[list[Outcome]]:
    """What DTensor makes of each case, rank by rank, up to the first that refuses it."""
    found: list[list[Outcome]] = [[] for _ in cases]
    for rank in range(NUM_RANKS):
        with rank_alone(rank) as mesh:
            for case, outcomes in zip(cases, found, strict=True):
                if not any(isinstance(outcome, str) for outcome in outcomes):
                    outcomes.append(_run(case, rank, mesh))
    return found


def _run(case: Case, rank: int, mesh: DeviceMesh) -> Outcome:
    shardings = iter(case.operands)

    def distributed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [distributed(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        sharding = next(shardings)
        shard = take_shard(value, sharding, {"a": rank})
        return DTensor.from_local(shard, mesh, [placement_of(sharding)], run_check=False)

    args = [distributed(value) for value in case.sample.arguments]
    kwargs = {name: distributed(value) for name, value in case.sample.keywords.items()}
    counted = CommDebugMode()
    try:
        with counted:
            returned: Any = kernel_of(case.sample.op)(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if counted.get_total_counts():
        return f"communicates: {dict(counted.get_comm_counts())}"
    parts = returned if isinstance(returned, tuple | list) else (returned,)
    results = [part for part in parts if isinstance(part, DTensor)]
    return [one.placements[0] for one in results], [one.to_local() for one in results]


def problem_of(case: Case, by_rank: Sequence[Outcome]) -> str | None:
    """Why DTensor does not make of a case what our rule makes of it; None if it does."""
    for outcome in by_rank:
        if isinstance(outcome, str):
            return outcome
        expected = [placement_of(sharding) for sharding in case.results]
        if outcome[0] != expected:
            return f"gives {outcome[0]}, not {expected}"
    return None


def assert_shards_make_up_the_results(case: Case, by_rank: Sequence[Outcome]) -> None:
    """The parts that DTensor computed, put together by our sharding, are what torch gives."""
    for index, (sharding, expected) in enumerate(
        zip(case.results, case.instance.results, strict=True)
    ):
        parts = [outcome[1][index] for outcome in by_rank if not isinstance(outcome, str)]
        whole = assemble(lambda at, parts=parts: parts[at["a"]], sharding, Mesh(a=NUM_RANKS))
        torch.testing.assert_close(whole, expected, equal_nan=True)


def is_rare(op: str) -> bool:
    return op.removeprefix("aten.") not in AGREES_EVERYWHERE


# Every rule is proved by execution (`test_property.py`); this second opinion is fast for a few ops.
@pytest.mark.parametrize(
    "op", slow_where(is_rare, [op for op in OPS if op not in HANGS and op not in OWN_OPS])
)
def test_dtensor_computes_the_same_shards(op: str) -> None:
    problems: list[str] = []
    cases = list(cases_of(op))
    for case, by_rank in zip(cases, outcomes_of(cases), strict=True):
        problem = problem_of(case, by_rank)
        if problem is None:
            assert_shards_make_up_the_results(case, by_rank)
        else:
            problems.append(f"{list(map(placement_of, case.operands))}: {problem}")
    name = op.removeprefix("aten.")
    if torch.__version__.startswith("2.13.") or name in AGREES_EVERYWHERE:
        assert bool(problems) is (name in WEAKER), problems


def test_ops_said_to_be_weaker_are_in_the_table_of_samples() -> None:
    assert {f"aten.{name}" for name in WEAKER} | HANGS <= set(OPS)
