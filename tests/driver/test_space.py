"""Images and videos whose height is sharded over an axis `space`, against eager PyTorch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardweave as sw
from shardweave.ir.dialects.dist import CollectiveOp, sent_bytes
from shardweave.ir.dialects.dist_ring import NeighboursOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.lowering.lower import local_program


def block(c_in: int, c_out: int, norm: str, **options: Any) -> nn.Module:
    norms = {"batch": nn.BatchNorm2d(c_out), "group": nn.GroupNorm(2, c_out)}
    conv = nn.Conv3d if options.pop("video", False) else nn.Conv2d
    return nn.Sequential(conv(c_in, c_out, 3, padding=1, **options), norms[norm], nn.ReLU())


class ResNet(nn.Module):
    """A stem with an overlapping max pool, a block, and a strided block with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1)
        self.block, self.down = block(4, 4, "batch"), block(4, 8, "batch", stride=2)
        self.shortcut, self.head = nn.Conv2d(4, 8, 1, 2), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(x))))
        x = x + self.block(x)
        x = self.down(x) + self.shortcut(x)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


class UNet(nn.Module):
    """Transposed convolutions, interpolation and skip connections; labels by pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = block(3, 4, "group"), block(4, 8, "group")
        self.up, self.c = nn.ConvTranspose2d(8, 4, 4, 2, 1), block(8, 4, "group")
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        b = b + F.interpolate(F.avg_pool2d(b, 2), scale_factor=2, mode="bilinear")
        return F.cross_entropy(self.head(self.c(torch.cat([self.up(b), a], 1))), labels)


class ConvNeXt(nn.Module):
    """A patchifying stem and a block with a depthwise 7 x 7 convolution and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 4, 7, padding=3, groups=4)
        self.norm, self.wide, self.narrow = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        x = x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Video(nn.Module):
    """A U-Net of one level over frames, height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = block(3, 4, "group", video=True), block(4, 4, "group", video=True)
        self.up, self.head = nn.ConvTranspose3d(4, 4, 2, 2), nn.Conv3d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.up(self.b(F.max_pool3d(a, 2)))
        return F.mse_loss(self.head(torch.cat([a, b], 1)), x)


def case(kind: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in float64 and its batch."""
    torch.manual_seed(0)
    model = kind().double()
    if kind is Video:
        return model, (torch.randn(2, 3, 2, 8, 4, dtype=torch.float64),)
    labels = torch.randint(3, (2, 16, 16) if kind is UNet else (2,))
    size = 16 if kind is UNet else 32
    return model, (torch.randn(2, 3, size, size, dtype=torch.float64), labels)


@pytest.mark.parametrize(
    ("kind", "mesh", "halos", "gathers"),
    [
        (ResNet, "data=2,space=2", (4, 3), 0),
        (UNet, "space=2", (6, 3), 0),
        (ConvNeXt, "space=2", (1, 1), 0),
        (Video, "data=2,space=2", (3, 2), 0),
    ],
)
def test_models_are_exact_and_send_halos(
    kind: type[nn.Module], mesh: str, halos: tuple[int, int], gathers: int
) -> None:
    model, batch = case(kind)
    program = sw.capture(copy.deepcopy(model), batch)
    local = local_program(program, sw.plan(program, mesh))
    kinds = Counter(op.kind() for op in local.ops if isinstance(op, CollectiveOp))
    assert (kinds["halo"], kinds["halo_add"]) == halos
    assert kinds["all_gather"] == gathers
    step = sw.compile(copy.deepcopy(model), batch, mesh=mesh, backend="reference")
    loss, wanted = step(*batch), model(*batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-9)
    loss.backward()
    wanted.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            step.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-9
        )
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(step.get_buffer(name), buffer, rtol=1e-9, atol=1e-9)


def test_bytes_of_a_step_are_the_halos() -> None:
    model, batch = case(ConvNeXt)
    program = sw.capture(model, batch)
    local = local_program(program, sw.plan(program, "space=2"))
    sent = [sent_bytes(op, Mesh(space=2)) for op in local.ops if isinstance(op, NeighboursOp)]
    # Three rows of 8 pixels with 4 channels, in 2 images, forward and backward.
    assert sum(sent) == 2 * 3 * 8 * 4 * 2 * 8
    assert sw.prove(local, against=program).num_results == len(local.results)


def test_what_reaches_beyond_a_neighbour_is_gathered() -> None:
    model = nn.Conv2d(3, 3, 7, padding=3).double()
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    step = sw.compile(copy.deepcopy(model), (x,), mesh="space=4", backend="reference")
    torch.testing.assert_close(step(x), model(x), rtol=1e-9, atol=1e-9)


def test_planner_says_what_it_cannot_shard() -> None:
    class Loss(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sum()

    program = sw.capture(Loss(nn.Conv2d(1, 1, 3)), (torch.randn(1, 1, 7, 8),))
    (note,) = sw.plan(program, "space=2").notes
    assert note == "images of [7, 8] stay whole: their height is no multiple of space=2"
    (note,) = sw.plan(sw.capture(Loss(nn.Linear(4, 4)), (torch.randn(2, 4),)), "space=2").notes
    assert note.startswith("axis 'space' of the mesh is idle: no images were found")
