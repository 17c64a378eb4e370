# pyright: reportMissingImports=false
# The packages are extras of the benchmark alone.
"""Cases of `models.py`: models of torchvision, timm, diffusers and x-transformers, made small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.benchmarks.import_torchvision import import_torchvision
from shardweave.benchmarks.models_measure import NUM_STEPS, Example

F64 = torch.float64
BATCH = 4


class Loss(nn.Module):
    """A model that returns outputs, with a loss of them."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.loss(self.model, **inputs)


def _example(
    model: nn.Module, loss: Callable[..., Tensor], batch: Callable[[], dict[str, Tensor]]
) -> Example:
    return Example(Loss(model.to(F64).train(), loss), [batch() for _ in range(NUM_STEPS)])


def _images(size: int) -> dict[str, Tensor]:
    pixels = torch.randn(BATCH, 3, size, size, dtype=F64)
    return {"pixels": pixels, "labels": torch.randint(0, 8, (BATCH,))}


def _classify(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    output = model(pixels)
    logits = output[0] if isinstance(output, (tuple, list)) else output
    return F.cross_entropy(logits, labels)


def vision(make: Callable[[Any], nn.Module], size: int = 32) -> Callable[[], Example]:
    """A model that `make` makes of torchvision.models."""

    def build() -> Example:
        made = make(import_torchvision())
        without_dropout(made)
        return _example(made, _classify, lambda: _images(size))

    return build


def without_dropout(model: nn.Module) -> None:
    """Random draws are not what is tried here."""
    for module in model.modules():
        for field in ("p", "drop_prob", "drop_rate", "dropout", "attn_drop", "dropout_rate"):
            if type(getattr(module, field, None)) is float:
                setattr(module, field, 0.0)


def timm_model(name: str, size: int = 64, **options: Any) -> Callable[[], Example]:
    """A model of timm."""

    def build() -> Example:
        import_torchvision()
        import timm

        made = timm.create_model(name, num_classes=8, **options)
        without_dropout(made)
        return _example(made, _classify, lambda: _images(size))

    return build


def timm_made(make: Callable[[Any], nn.Module]) -> Callable[[], Example]:
    """A model that `make` makes of timm.models, for images of 32 x 32."""

    def build() -> Example:
        import_torchvision()
        import timm

        return _example(make(timm.models), _classify, lambda: _images(32))

    return build


def _denoise(model: nn.Module, **inputs: Tensor) -> Tensor:
    inputs = dict(inputs)
    noise = inputs.pop("noise")
    output = model(**inputs, return_dict=False)[0]
    return F.mse_loss(output, noise)


def diffusers_model(name: str, inputs: dict[str, Any], **options: Any) -> Callable[[], Example]:
    """A model of diffusers. inputs: shapes, or an int for times below it."""

    def batch() -> dict[str, Tensor]:
        made = {
            key: torch.randint(0, shape, (BATCH,))
            if isinstance(shape, int)
            else torch.randn(*shape, dtype=F64)
            for key, shape in inputs.items()
        }
        return made

    def build() -> Example:
        import diffusers

        return _example(getattr(diffusers, name)(**options), _denoise, batch)

    return build


def _tokens() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 32, (BATCH, 17))}


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def x_transformer(layers: str = "Decoder", **options: Any) -> Callable[[], Example]:
    """A model of x-transformers, with options of its layers."""

    def build() -> Example:
        import x_transformers

        inner = getattr(x_transformers, layers)(
            dim=32, depth=2, heads=4, attn_dim_head=8, **options
        )
        made = x_transformers.TransformerWrapper(num_tokens=32, max_seq_len=32, attn_layers=inner)
        return _example(made, _next_token, _tokens)

    return build


MIXER = {"num_classes": 8, "img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
UNET = {
    "sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1,
    "block_out_channels": (16, 32), "norm_num_groups": 4,
}  # fmt: skip
NOISED = {"sample": (BATCH, 3, 16, 16), "timestep": 1000, "noise": (BATCH, 3, 16, 16)}
LATENT = {"hidden_states": (BATCH, 4, 8, 8), "timestep": 1000, "noise": (BATCH, 4, 8, 8)}
TEXT = (BATCH, 6, 32)

PACKAGES: dict[str, Callable[[], Example]] = {
    "torchvision/resnet": vision(
        lambda tv: tv.resnet.ResNet(tv.resnet.BasicBlock, [1, 1, 1, 1], 8)
    ),
    "torchvision/resnext": vision(
        lambda tv: tv.resnet.ResNet(
            tv.resnet.Bottleneck, [1, 1, 1, 1], 8, groups=4, width_per_group=4
        )
    ),
    "torchvision/densenet": vision(lambda tv: tv.DenseNet(8, (2, 2), 16, num_classes=8)),
    "torchvision/mobilenet_v2": vision(
        lambda tv: tv.MobileNetV2(8, 0.25, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]])
    ),
    "torchvision/mobilenet_v3": vision(lambda tv: tv.mobilenet_v3_small(width_mult=0.25)),
    "torchvision/shufflenet": vision(
        lambda tv: tv.ShuffleNetV2([1, 2, 1], [24, 16, 32, 64, 128], 8)
    ),
    "torchvision/squeezenet": vision(lambda tv: tv.squeezenet1_1(num_classes=8), 64),
    "torchvision/mnasnet": vision(lambda tv: tv.MNASNet(0.1, 8)),
    "torchvision/vgg": vision(
        lambda tv: nn.Sequential(
            tv.vgg.make_layers([8, "M", 16, "M"], batch_norm=True),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 8),
        )
    ),
    "torchvision/efficientnet": vision(
        lambda tv: tv.EfficientNet(
            [tv.efficientnet.MBConvConfig(2, 3, 2, 16, 16, 2)], 0.0, 0.0, 8, last_channel=32
        )
    ),
    "torchvision/convnext": vision(
        lambda tv: tv.ConvNeXt(
            [tv.convnext.CNBlockConfig(16, 32, 1), tv.convnext.CNBlockConfig(32, None, 1)], 0.0,
            num_classes=8,
        )
    ),
    "torchvision/swin": vision(
        lambda tv: tv.SwinTransformer(
            [4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=8
        )
    ),
    "torchvision/swin_v2": vision(
        lambda tv: tv.SwinTransformer(
            [4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=8,
            block=tv.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=tv.swin_transformer.PatchMergingV2,
        )
    ),
    "torchvision/vit": vision(
        lambda tv: tv.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=8)
    ),
    "torchvision/maxvit": vision(
        lambda tv: tv.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=8), 64
    ),
    "torchvision/regnet": vision(lambda tv: tv.RegNet(
        tv.regnet.BlockParams([1, 1], [16, 32], [8, 8], [1.0, 1.0], [2, 2], 0.25), 8
    )),
    "timm/test_vit": timm_model("test_vit", 160),
    "timm/test_resnet": timm_model("test_resnet"),
    "timm/test_convnext": timm_model("test_convnext"),
    "timm/test_efficientnet": timm_model("test_efficientnet"),
    "timm/test_byobnet": timm_model("test_byobnet"),
    "timm/test_mambaout": timm_model("test_mambaout"),
    "timm/test_nfnet": timm_model("test_nfnet"),
    "timm/mixer": timm_made(lambda models: models.mlp_mixer.MlpMixer(**MIXER)),
    "timm/resmlp": timm_made(
        lambda models: models.mlp_mixer.MlpMixer(
            **MIXER, mlp_ratio=4, block_layer=models.mlp_mixer.ResBlock,
            norm_layer=models.mlp_mixer.Affine,
        )
    ),
    "timm/gmlp": timm_made(
        lambda models: models.mlp_mixer.MlpMixer(
            **MIXER, mlp_ratio=4, block_layer=models.mlp_mixer.SpatialGatingBlock,
            mlp_layer=models.mlp_mixer.GatedMlp
        )
    ),
    "timm/convmixer": timm_made(
        lambda models: models.convmixer.ConvMixer(32, 2, 3, 4, num_classes=8)
    ),
    "timm/cait": timm_model(
        "cait_xxs24_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4
    ),
    "timm/xcit": timm_model(
        "xcit_nano_12_p16_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4
    ),
    "timm/poolformer": timm_made(
        lambda models: models.metaformer.MetaFormer(
            depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), num_classes=8,
            token_mixers=models.metaformer.Pooling,
        )
    ),
    "timm/eva": timm_model(
        "eva02_tiny_patch14_224", 28, img_size=28, depth=2, embed_dim=32, num_heads=4
    ),
    "timm/beit": timm_model(
        "beit_base_patch16_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4
    ),
    "timm/swin": timm_model(
        "swin_tiny_patch4_window7_224", 56, img_size=56, depths=(1, 1), embed_dim=16,
        num_heads=(2, 4),
    ),
    "diffusers/UNet2D": diffusers_model(
        "UNet2DModel", NOISED, **UNET, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "diffusers/UNet2DCondition": diffusers_model(
        "UNet2DConditionModel", NOISED | {"encoder_hidden_states": TEXT}, **UNET,
        attention_head_dim=4, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "diffusers/DiT": diffusers_model(
        "DiTTransformer2DModel", LATENT | {"class_labels": 10}, num_attention_heads=4,
        attention_head_dim=8, in_channels=4, num_layers=2, norm_num_groups=4, sample_size=8,
        num_embeds_ada_norm=10,
    ),
    "diffusers/PixArt": diffusers_model(
        "PixArtTransformer2DModel", LATENT | {"encoder_hidden_states": TEXT},
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        norm_num_groups=4, sample_size=8, caption_channels=32, cross_attention_dim=32,
        use_additional_conditions=False,
    ),
    "diffusers/SD3": diffusers_model(
        "SD3Transformer2DModel",
        LATENT | {"encoder_hidden_states": TEXT, "pooled_projections": (BATCH, 32)},
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=32, out_channels=4, pos_embed_max_size=16,
    ),
    "diffusers/Sana": diffusers_model(
        "SanaTransformer2DModel", LATENT | {"encoder_hidden_states": TEXT}, in_channels=4,
        out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=2,
        num_cross_attention_heads=4, cross_attention_head_dim=8, cross_attention_dim=32,
        caption_channels=32, sample_size=8, patch_size=1,
    ),
    "diffusers/Prior": diffusers_model(
        "PriorTransformer",
        {"hidden_states": (BATCH, 32), "timestep": 1000, "proj_embedding": (BATCH, 32),
         "encoder_hidden_states": TEXT, "noise": (BATCH, 32)},
        num_attention_heads=4, attention_head_dim=8, num_layers=2, embedding_dim=32,
        num_embeddings=6,
    ),
    "diffusers/VQ": diffusers_model(
        "VQModel", {"sample": (BATCH, 3, 16, 16), "noise": (BATCH, 3, 16, 16)},
        block_out_channels=(16,), norm_num_groups=4, num_vq_embeddings=16, latent_channels=4,
    ),
    "x-transformers/decoder": x_transformer(),
    "x-transformers/rotary": x_transformer(rotary_pos_emb=True),
    "x-transformers/alibi": x_transformer(alibi_pos_bias=True, alibi_num_heads=2),
    "x-transformers/t5-bias": x_transformer(rel_pos_bias=True),
    "x-transformers/glu": x_transformer(ff_glu=True, ff_swish=True),
    "x-transformers/rms": x_transformer(use_rmsnorm=True, sandwich_norm=True),
    "x-transformers/flash": x_transformer(attn_flash=True),
    "x-transformers/grouped": x_transformer(attn_kv_heads=2),
    "x-transformers/talking-heads": x_transformer(attn_pre_talking_heads=True),
    "x-transformers/qk-norm": x_transformer(attn_qk_norm=True),
    "x-transformers/gated": x_transformer(gate_residual=True, shift_tokens=1),
    "x-transformers/memory": x_transformer(attn_num_mem_kv=4),
    "x-transformers/encoder": x_transformer("Encoder"),
    "x-transformers/macaron": x_transformer(macaron=True),
}  # fmt: skip
