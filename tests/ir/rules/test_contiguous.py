"""Ops whose kernels need dense operands: each gives on strided ones what it gives on dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.backends.emit.calls import prepared
from shardweave.ir.ops.registry import specs
from shardweave.tests.ir.rules.samples_compute import COMPUTE
from shardweave.tests.ir.rules.samples_layout import LAYOUT
from shardweave.tests.ir.rules.sharded_op import Sample, instance_of, sample
from shardweave.tests.ir.rules.tensors import normal

V, G = normal(4, 6), normal(4, 1)
ROWS, LABELS = normal(5, 4), torch.tensor([0, 1, 2, 2, 3, 0])
PLANES, VOLUMES = normal(2, 4, 6, 6), normal(2, 4, 6, 6, 6)
CLASSES = torch.randint(0, 3, (2, 4, 4))


def _fractional(dims: int) -> Sample:
    given = PLANES if dims == 2 else VOLUMES
    sizes = [2] * dims, [3] * dims
    forward = getattr(torch.ops.aten, f"fractional_max_pool{dims}d")
    y, indices = forward(given, *sizes, torch.rand(2, 4, dims, dtype=given.dtype))
    return sample(f"fractional_max_pool{dims}d_backward", y, given, *sizes, indices)


def _adaptive() -> Sample:
    y, indices = torch.ops.aten.adaptive_max_pool3d(VOLUMES, [2, 2, 2])
    return sample("adaptive_max_pool3d_backward", y, VOLUMES, indices)


def _bags() -> tuple[Sample, Sample]:
    bags = ROWS, LABELS, torch.tensor([0, 2, 4])
    _, *kept = torch.ops.aten._embedding_bag(*bags)
    rest = 5, False, 0, False, None
    backward = sample("_embedding_bag_backward", normal(3, 4), *bags[1:], *kept, *rest)
    return sample("_embedding_bag", *bags), backward


def _loss_of_planes() -> Sample:
    planes = normal(2, 3, 4, 4)
    total = torch.ops.aten.nll_loss2d_forward(planes, CLASSES, None, 1, -100)[1]
    grad = torch.ones((), dtype=planes.dtype)
    return sample("nll_loss2d_backward", grad, planes, CLASSES, None, 1, -100, total)


_NORM = torch.ops.aten._weight_norm_interface(V, G, 0)[1]
_PDIST = torch.ops.aten._pdist_forward(ROWS)

SAMPLES = (
    *COMPUTE,
    *LAYOUT,
    sample("_linalg_det", normal(3, 4, 4)),
    sample("_linalg_slogdet", normal(3, 4, 4)),
    sample("view.dtype", V, torch.int64),
    sample("_weight_norm_interface", V, G),
    sample("_weight_norm_interface_backward", V + 1, V, G, _NORM, 0),
    sample("_pdist_forward", ROWS),
    sample("_pdist_backward", _PDIST + 1, ROWS, 2.0, _PDIST),
    _loss_of_planes(),
    *_bags(),
    _adaptive(),
    _fractional(2),
    _fractional(3),
)
NAMES = sorted(spec.name for spec in specs() if spec.needs_contiguous)


def strided(tensor: Tensor) -> Tensor:
    """The tensor with its dims in memory in reverse, or with gaps if it has but one."""
    if tensor.dim() < 2:
        return tensor.repeat_interleave(2)[::2] if tensor.dim() else tensor
    dims = tuple(reversed(range(tensor.dim())))
    return tensor.permute(dims).contiguous().permute(dims)


@pytest.mark.parametrize("name", NAMES)
def test_strided_operands_give_what_dense_ones_give(name: str) -> None:
    samples = [given for given in SAMPLES if given.op == name]
    assert samples, f"give a sample of {name}"
    for given in samples:
        instance = instance_of(given)
        tensors: dict[SSAValue, Tensor] = dict(
            zip(instance.op.operands, map(strided, instance.operands), strict=True)
        )
        results = prepared(instance.op, tensors.__getitem__)()
        for got, wanted in zip(results, instance.results, strict=True):
            torch.testing.assert_close(got, wanted, equal_nan=True)
