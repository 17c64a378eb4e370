"""Two reference vision models: a diffusion U-Net (`unet:`) and a ResNet-like CNN (`cnn:`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_TIMESTEPS = 1000
BLOCKS_BY_DEPTH = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of a U-Net and of its batch of `size` x `size` images.

    Level i of `levels` has `channels` * 2**i channels, `blocks` residual blocks and images of size
    / 2**i; `groups`: groups of every GroupNorm. `heads`: heads of the attention in the middle.
    """

    channels: int = 32
    size: int = 32
    batch: int = 8
    levels: int = 3
    blocks: int = 1
    groups: int = 8
    heads: int = 4
    image_channels: int = 3

    def __post_init__(self) -> None:
        if self.channels % 2:
            raise ValueError(
                f"unet: channels={self.channels} is odd; the sines and cosines of the time "
                f"embedding need an even number."
            )
        for name in ("groups", "heads"):
            if self.channels % getattr(self, name):
                raise ValueError(
                    f"unet: {name}={getattr(self, name)} does not divide channels={self.channels}; "
                    f"change {name} or channels."
                )
        factor = 2 ** (self.levels - 1)
        if self.size % factor:
            raise ValueError(
                f"unet: size={self.size} cannot be halved {self.levels - 1} times for "
                f"levels={self.levels}; use a multiple of {factor}, or fewer levels."
            )


class TimeEmbedding(nn.Module):
    """Sinusoids of the time step and an MLP. Shapes: batch (int64) -> batch x 4*channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        # In float32 whatever the weights: bfloat16 cannot tell time steps apart.
        frequencies = torch.exp(-math.log(10_000.0) / half * torch.arange(half).float())
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.fc_in = nn.Linear(2 * half, 4 * channels)
        self.fc_out = nn.Linear(4 * channels, 4 * channels)

    def forward(self, timesteps: Tensor) -> Tensor:
        angles = timesteps[:, None] * self.get_buffer("frequencies")
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.fc_in.weight.dtype)
        return self.fc_out(F.silu(self.fc_in(waves)))


class ResidualBlock(nn.Module):
    """Two convolutions, with the time added between.

    Shapes: batch x c_in x h x w, batch x time -> batch x c_out x h x w.
    """

    def __init__(self, c_in: int, c_out: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(groups, c_in)
        self.conv_1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.time = nn.Linear(time, c_out)
        self.norm_2 = nn.GroupNorm(groups, c_out)
        self.conv_2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.shortcut = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_1(F.silu(self.norm_1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.conv_2(F.silu(self.norm_2(y)))
        return self.shortcut(x) + y


class PixelAttention(nn.Module):
    """Self-attention over the pixels. Shapes: batch x channels x h x w -> the same."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.q, self.k, self.v, self.proj = (nn.Linear(channels, channels) for _ in range(4))

    def split_heads(self, x: Tensor) -> Tensor:
        """Shapes: batch x pixels x channels -> batch x heads x pixels x channels/heads."""
        batch, pixels, channels = x.shape
        return x.view(batch, pixels, self.heads, channels // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (self.split_heads(project(pixels)) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        y = self.proj(y.transpose(1, 2).reshape(pixels.shape))
        return x + y.transpose(1, 2).reshape(x.shape)


class Upsample(nn.Module):
    """Double the image by nearest neighbour. Shapes: batch x c x h x w -> batch x c x 2h x 2w."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class UNet(nn.Module):
    """A denoising U-Net with its loss: the mean squared error of the predicted noise.

    Shapes: noisy and noise are batch x image_channels x size x size, timesteps is batch
    (int64 in [0, 1000)); the result is a scalar.
    """

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        widths = [config.channels * 2**level for level in range(config.levels)]
        time, groups = 4 * config.channels, config.groups
        self.time_embedding = TimeEmbedding(config.channels)
        self.conv_in = nn.Conv2d(config.image_channels, widths[0], 3, padding=1)

        self.down = nn.ModuleList()
        skips = [widths[0]]  # channels of each kept activation, in the order they are made
        channels = widths[0]
        for level, width in enumerate(widths):
            for _ in range(config.blocks):
                self.down.append(ResidualBlock(channels, width, time, groups))
                channels = width
                skips.append(channels)
            if level < config.levels - 1:
                self.down.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
                skips.append(channels)

        self.mid_1 = ResidualBlock(channels, channels, time, groups)
        self.mid_attn = PixelAttention(channels, config.heads, groups)
        self.mid_2 = ResidualBlock(channels, channels, time, groups)

        self.up = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(config.blocks + 1):
                self.up.append(ResidualBlock(channels + skips.pop(), width, time, groups))
                channels = width
            if level > 0:
                self.up.append(Upsample(channels))

        self.norm_out = nn.GroupNorm(groups, channels)
        self.conv_out = nn.Conv2d(channels, config.image_channels, 3, padding=1)

    def predict_noise(self, noisy: Tensor, timesteps: Tensor) -> Tensor:
        """Shapes: batch x image_channels x size x size, batch -> the shape of `noisy`."""
        time = self.time_embedding(timesteps)
        x = self.conv_in(noisy)
        skips = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, ResidualBlock) else layer(x)
            skips.append(x)
        x = self.mid_2(self.mid_attn(self.mid_1(x, time)), time)
        for layer in self.up:
            if isinstance(layer, ResidualBlock):
                x = layer(torch.cat([x, skips.pop()], dim=1), time)
            else:
                x = layer(x)
        return self.conv_out(F.silu(self.norm_out(x)))

    def forward(self, noisy: Tensor, timesteps: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.predict_noise(noisy, timesteps), noise)


def build_unet(config: UNetConfig) -> tuple[UNet, dict[str, Tensor]]:
    """Build the model and one batch of noise, from torch's global random state."""
    module = UNet(config)
    shape = (config.batch, config.image_channels, config.size, config.size)
    inputs = {
        "noisy": torch.randn(shape),
        "timesteps": torch.randint(0, NUM_TIMESTEPS, (config.batch,)),
        "noise": torch.randn(shape),
    }
    return module, inputs


@dataclass(frozen=True)
class CNNConfig:
    """Sizes of a ResNet-like CNN and of its batch of `size` x `size` images.

    `depth` counts the layers as ResNets do (18: two basic blocks in each of four stages); the
    stages have `channels` * 1, 2, 4 and 8 channels. `pool` adds ResNet's max pool to the stem.
    """

    depth: int = 18
    channels: int = 16
    size: int = 32
    classes: int = 10
    batch: int = 8
    pool: bool = False
    image_channels: int = 3

    def __post_init__(self) -> None:
        """Check that the depth is one that ResNets of basic blocks have."""
        if self.depth not in BLOCKS_BY_DEPTH:
            raise ValueError(
                f"cnn: depth={self.depth} is unknown; use one of {list(BLOCKS_BY_DEPTH)}."
            )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut.

    Shapes: batch x c_in x h x w -> batch x c_out x h/stride x w/stride (rounded up).
    """

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        self.bn_1 = nn.BatchNorm2d(c_out)
        self.conv_2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn_2 = nn.BatchNorm2d(c_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or c_in != c_out:
            self.shortcut.append(nn.Conv2d(c_in, c_out, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn_1(self.conv_1(x)))
        return F.relu(self.bn_2(self.conv_2(y)) + self.shortcut(x))


class CNN(nn.Module):
    """A ResNet-like classifier with its loss: the mean cross entropy of the classes.

    Shapes: images is batch x image_channels x size x size, labels is batch (int64 in
    [0, classes)); the result is a scalar. Batch norm uses and updates its running statistics.
    """

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(config.image_channels, config.channels, 3, padding=1, bias=False)
        self.bn_in = nn.BatchNorm2d(config.channels)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if config.pool else nn.Identity()
        self.stages = nn.ModuleList(nn.Sequential(*blocks) for blocks in _blocks_by_stage(config))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * config.channels, config.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn_in(self.conv_in(images))))
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.fc(self.avgpool(x).flatten(1)), labels)


def _blocks_by_stage(config: CNNConfig) -> Iterator[list[BasicBlock]]:
    c_in = config.channels
    for stage, num_blocks in enumerate(BLOCKS_BY_DEPTH[config.depth]):
        c_out = config.channels * 2**stage
        blocks: list[BasicBlock] = []
        for block in range(num_blocks):
            blocks.append(BasicBlock(c_in, c_out, stride=2 if stage > 0 and block == 0 else 1))
            c_in = c_out
        yield blocks


def build_cnn(config: CNNConfig) -> tuple[CNN, dict[str, Tensor]]:
    """Build the model and one batch of images, from torch's global random state."""
    module = CNN(config)
    shape = (config.batch, config.image_channels, config.size, config.size)
    labels = torch.randint(0, config.classes, (config.batch,))
    return module, {"images": torch.randn(shape), "labels": labels}
