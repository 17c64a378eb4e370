# pyright: basic
# The packages are untyped, and extras of the benchmark alone.
"""Cases of `models.py`: models and losses of packages that know nothing of this project.

Those of vit-pytorch, monai, segmentation-models-pytorch, denoising-diffusion-pytorch,
open-clip-torch, performer-pytorch, local-attention, torch-geometric, rtdl_revisiting_models and
peft, which are installed by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.benchmarks.cases_packages import BATCH, F64, Loss, without_dropout
from shardweave.benchmarks.import_torchvision import import_torchvision
from shardweave.benchmarks.models_measure import NUM_STEPS, Example

Inputs = Callable[[], dict[str, Tensor]]


def images(*shape: int, classes: int = 8) -> Inputs:
    return lambda: {
        "pixels": torch.randn(BATCH, *shape, dtype=F64),
        "labels": torch.randint(0, classes, (BATCH,)),
    }


def _classes(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pixels), labels)


def masks(*shape: int, classes: int = 2) -> Inputs:
    return lambda: {
        "pixels": torch.randn(BATCH, *shape, dtype=F64),
        "labels": torch.randint(0, classes, (BATCH, *shape[1:])),
    }


def tokens(size: int = 64, length: int = 16) -> Inputs:
    return lambda: {"tokens": torch.randint(0, size, (BATCH, length + 1))}


def _next(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def case(
    make: Callable[[], nn.Module], loss: Callable[..., Tensor], inputs: Inputs
) -> Callable[[], Example]:
    def build() -> Example:
        import_torchvision()
        model = make().to(F64).train()
        without_dropout(model)
        return Example(Loss(model, loss), [inputs() for _ in range(NUM_STEPS)])

    return build


def of(name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """A model by its class, `vit_pytorch.cait.CaiT`, which is imported when it is built."""
    module, _, cls = name.rpartition(".")
    return lambda: getattr(import_module(module), cls)(*args, **options)


VIT = {
    "image_size": 32, "patch_size": 8, "num_classes": 8, "dim": 32, "depth": 2, "heads": 4,
    "mlp_dim": 64,
}  # fmt: skip


def vit(name: str, **options: Any) -> Callable[[], Example]:
    return case(of(f"vit_pytorch.{name}", **options), _classes, images(3, 32, 32))


class Judged(nn.Module):
    """A model and a criterion of its package."""

    def __init__(self, model: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(self.model(pixels), labels[:, None])


def judged(
    model: Callable[[], nn.Module], criterion: Callable[[], nn.Module], inputs: Inputs
) -> Callable[[], Example]:
    return case(
        lambda: Judged(model(), criterion()),
        lambda model, pixels, labels: model(pixels, labels),
        inputs,
    )


def _diffusion() -> nn.Module:
    package = import_module("denoising_diffusion_pytorch")
    unet = package.Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
    return package.GaussianDiffusion(unet, image_size=16, timesteps=20)


def _contrast(model: nn.Module, pixels: Tensor, tokens: Tensor) -> Tensor:
    one, other, scale = model(pixels, tokens)
    logits = scale * one @ other.t()
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def _clip() -> nn.Module:
    vision = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
    text = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2}
    return import_module("open_clip.model").CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)


def _pairs() -> dict[str, Tensor]:
    pixels = torch.randn(BATCH, 3, 32, 32, dtype=F64)
    return {"pixels": pixels, "tokens": torch.randint(0, 64, (BATCH, 12))}


class Graphs(nn.Module):
    """Two layers on edges, and a mean over nodes."""

    def __init__(self, layer: str, **options: Any) -> None:
        super().__init__()
        kind = getattr(import_module("torch_geometric.nn"), layer)
        self.first, self.second = kind(8, 16, **options), kind(16, 4, **options)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(nodes, edges).relu(), edges).square().mean()


def _graph() -> dict[str, Tensor]:
    return {"nodes": torch.randn(12, 8, dtype=F64), "edges": torch.randint(0, 12, (2, 30))}


def _on_graph(model: nn.Module, nodes: Tensor, edges: Tensor) -> Tensor:
    return model(nodes, edges)


def _dense() -> dict[str, Tensor]:
    edges = torch.randint(0, 2, (BATCH, 6, 6)).to(F64)
    return {"nodes": torch.randn(BATCH, 6, 8, dtype=F64), "edges": edges}


def graph(layer: str, inputs: Inputs = _graph, **options: Any) -> Callable[[], Example]:
    return case(lambda: Graphs(layer, **options), _on_graph, inputs)


def adapted(kind: str, **options: Any) -> Callable[[], Example]:
    """A tiny Llama with an adapter of PEFT."""

    def make() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        peft = import_module("peft")
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        adapter = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(LlamaForCausalLM(config), adapter)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens[:, :-1]).logits[:, 1 - tokens.shape[1] :]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return case(make, loss, tokens())


def _columns() -> dict[str, Tensor]:
    return {"numbers": torch.randn(BATCH, 6, dtype=F64), "kinds": torch.randint(0, 3, (BATCH, 2))}


def _table(model: nn.Module, numbers: Tensor, kinds: Tensor) -> Tensor:
    return model(numbers, kinds).square().mean()


SEGMENT = {"encoder_name": "resnet18", "encoder_weights": None, "in_channels": 3, "classes": 1}
SMP = "segmentation_models_pytorch"
FLAT = "monai.networks.nets"

STRANGERS: dict[str, Callable[[], Example]] = {
    "vit/ViT": vit("ViT", **VIT),
    "vit/SimpleViT": vit("SimpleViT", **VIT),
    "vit/CaiT": vit("cait.CaiT", **VIT, cls_depth=1),
    "vit/DeepViT": vit("deepvit.DeepViT", **VIT),
    "vit/PiT": vit("pit.PiT", **VIT | {"depth": (1, 1)}),
    "vit/ParallelViT": vit("parallel_vit.ViT", **VIT),
    "vit/ViTForSmallDataset": vit("vit_for_small_dataset.ViT", **VIT),
    "vit/RegisterTokens": vit("simple_vit_with_register_tokens.SimpleViT", **VIT),
    "vit/QKNorm": vit("simple_vit_with_qk_norm.SimpleViT", **VIT),
    "vit/CCT": vit(
        "cct.CCT", img_size=32, embedding_dim=32, n_conv_layers=1, kernel_size=3, stride=2,
        padding=1, num_layers=2, num_heads=4, mlp_ratio=2.0, num_classes=8,
    ),
    "vit/CvT": vit(
        "cvt.CvT", num_classes=8, s1_emb_dim=16, s1_depth=1, s2_emb_dim=16, s2_heads=2, s2_depth=1,
        s3_emb_dim=32, s3_heads=2, s3_depth=1,
    ),
    "vit/LeViT": vit(
        "levit.LeViT", image_size=32, num_classes=8, stages=2, dim=(16, 32), depth=1, heads=(2, 4),
        mlp_mult=2,
    ),
    "vit/NesT": vit(
        "nest.NesT", image_size=32, patch_size=4, dim=16, heads=2, num_hierarchies=2,
        block_repeats=(1, 1), num_classes=8,
    ),
    "vit/CrossViT": vit(
        "cross_vit.CrossViT", image_size=32, num_classes=8, depth=1, sm_dim=16, sm_patch_size=8,
        sm_enc_depth=1, sm_enc_heads=2, sm_enc_mlp_dim=32, lg_dim=32, lg_patch_size=16,
        lg_enc_depth=1, lg_enc_heads=2, lg_enc_mlp_dim=32, cross_attn_depth=1, cross_attn_heads=2,
    ),
    "vit/T2T": vit(
        "t2t.T2TViT", dim=32, image_size=32, depth=2, heads=4, mlp_dim=64, num_classes=8,
        t2t_layers=((7, 4), (3, 2)),
    ),
    "vit/XCiT": vit("xcit.XCiT", **VIT, cls_depth=1, local_patch_kernel_size=3),
    "vit/TwinsSVT": vit(
        "twins_svt.TwinsSVT", num_classes=8, s1_emb_dim=16, s1_patch_size=4, s1_local_patch_size=4,
        s1_global_k=4, s1_depth=1, s2_emb_dim=16, s2_patch_size=2, s2_local_patch_size=4,
        s2_global_k=4, s2_depth=1, s3_emb_dim=16, s3_patch_size=2, s3_local_patch_size=2,
        s3_global_k=2, s3_depth=1, s4_emb_dim=16, s4_patch_size=2, s4_local_patch_size=1,
        s4_global_k=1, s4_depth=1,
    ),
    "monai/UNet": judged(
        of(f"{FLAT}.UNet", spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16),
           strides=(2,), num_res_units=1),
        of("monai.losses.DiceLoss", sigmoid=True), masks(1, 16, 16),
    ),
    "monai/UNet3d": judged(
        of(f"{FLAT}.UNet", spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16),
           strides=(2,)),
        of("monai.losses.DiceCELoss", softmax=True, to_onehot_y=True), masks(1, 8, 8, 8),
    ),
    "monai/AttentionUnet": judged(
        of(f"{FLAT}.AttentionUnet", spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16),
           strides=(2,)),
        of("monai.losses.TverskyLoss", sigmoid=True), masks(1, 16, 16),
    ),
    "monai/UNETR": judged(
        of(f"{FLAT}.UNETR", in_channels=1, out_channels=1, img_size=16, feature_size=4,
           hidden_size=24, mlp_dim=48, num_heads=4, spatial_dims=2),
        of("monai.losses.FocalLoss"), masks(1, 16, 16),
    ),
    "monai/VNet": judged(
        of(f"{FLAT}.VNet", spatial_dims=2, in_channels=1, out_channels=1, dropout_prob_down=0.0,
           dropout_prob_up=(0.0, 0.0)),
        of("monai.losses.GeneralizedDiceLoss", sigmoid=True), masks(1, 16, 16),
    ),
    "segmentation/Unet": judged(
        of(f"{SMP}.Unet", **SEGMENT), of(f"{SMP}.losses.DiceLoss", mode="binary"),
        masks(3, 32, 32),
    ),
    "segmentation/FPN": judged(
        of(f"{SMP}.FPN", **SEGMENT), of(f"{SMP}.losses.JaccardLoss", mode="binary"),
        masks(3, 32, 32),
    ),
    "segmentation/DeepLabV3Plus": judged(
        of(f"{SMP}.DeepLabV3Plus", **SEGMENT), of(f"{SMP}.losses.FocalLoss", mode="binary"),
        masks(3, 64, 64),
    ),
    "diffusion/GaussianDiffusion": case(
        _diffusion, lambda model, pixels: model(pixels),
        lambda: {"pixels": torch.rand(BATCH, 3, 16, 16, dtype=F64)},
    ),
    "open_clip/CLIP": case(_clip, _contrast, _pairs),
    "performer/LM": case(
        of("performer_pytorch.PerformerLM", num_tokens=64, max_seq_len=16, dim=32, depth=2, heads=4,
           causal=False, nb_features=8, feature_redraw_interval=None),
        _next, tokens(),
    ),
    "local_attention/Transformer": case(
        of("local_attention.LocalTransformer", num_tokens=64, dim=32, depth=2, max_seq_len=16,
           local_attn_window_size=8, causal=True),
        _next, tokens(),
    ),
    "geometric/GCNConv": graph("GCNConv"),
    "geometric/SAGEConv": graph("SAGEConv"),
    "geometric/GATConv": graph("GATConv"),
    "geometric/GraphConv": graph("GraphConv"),
    "geometric/DenseGCNConv": graph("DenseGCNConv", _dense),
    "tables/FTTransformer": case(
        of("rtdl_revisiting_models.FTTransformer", n_cont_features=6, cat_cardinalities=[3, 3],
           d_out=2, n_blocks=2, d_block=32, attention_n_heads=4, attention_dropout=0.0,
           ffn_d_hidden_multiplier=1.5, ffn_dropout=0.0, residual_dropout=0.0),
        _table, _columns,
    ),
    "peft/LoRA": adapted("LoraConfig", r=4, target_modules=["q_proj", "v_proj"]),
    "peft/DoRA": adapted("LoraConfig", r=4, use_dora=True, target_modules=["q_proj", "up_proj"]),
    "peft/prefix": adapted("PrefixTuningConfig", num_virtual_tokens=4),
    "peft/prompt": adapted("PromptTuningConfig", num_virtual_tokens=4),
    "peft/p-tuning": adapted("PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16),
    "peft/IA3": adapted(
        "IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "peft/VeRA": adapted("VeraConfig", r=4, target_modules=["q_proj"]),
    "peft/OFT": adapted("OFTConfig", r=0, oft_block_size=4, target_modules=["q_proj"]),
}  # fmt: skip
"""By name; a package that is not installed makes its cases `not built`."""
