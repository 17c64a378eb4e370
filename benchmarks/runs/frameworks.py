"""What frameworks of measured runs do that their rows do not say, read off their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardweave.benchmarks.runs.architectures import Head
from shardweave.benchmarks.runs.spec import Loss


@dataclass(frozen=True)
class Framework:
    """precision, vocab: of a run that does not say it; vocab 0: as its model has it. pads_vocab: to
    a multiple of the tensor degree; else each rank has its share, rounded down. drops_hidden:
    whether what a block adds to the residual stream has a bias and is dropped. drops_scores,
    scales_scores: whether stored scores are dropped, and scaled by an op of their own. masks_view:
    whether they are masked in place where their product wrote them, as a view of it.
    waits_for_sends: whether a stage stands still until what it hands on is there. heads: by model,
    where the head is not that of its architecture. held_bytes: of a device, beside all tensors: its
    context, kernels and buffers of messages.

    is_gated: it trains models of Llama's kind alone. is_fused: attention stores no scores where a
    row does not say. flash: which FlashAttention it has. joins, fuses_gate, fuses_norms, loss: as
    in `DecoderSpec`, without `torch.compile`, which fuses. reported_bytes: that memory moves for
    each logit behind a micro-batch, for what it reports. regathers: of what
    sequence parallelism gathers it keeps shards. selective: the policy of its selective
    recomputation. gradient_bytes: that a parameter's gradient takes in training in 16 bits, with
    where it is added up. sends_float: gradients are sent in 32 bits where they are bf16. overlaps:
    they are sent beside the backward pass, whatever ZeRO's stage. zero, sequence_parallel: of a run
    that does not say it.
    """

    precision: str = "fp16"
    vocab: int = 0
    pads_vocab: bool = True
    drops_hidden: bool = True
    drops_scores: bool = True
    scales_scores: bool = True
    masks_view: bool = False
    waits_for_sends: bool = True
    heads: Mapping[str, Head] = field(default_factory=dict[str, Head])
    held_bytes: float = 0.0
    is_gated: bool = False
    is_fused: bool = False
    flash: int = 1
    joins: bool = True
    fuses_gate: bool = True
    fuses_norms: bool = True
    loss: Loss = "sharded"
    reported_bytes: float = 0.0
    regathers: bool = True
    selective: str = "stored-scores"
    gradient_bytes: float = 2.0
    sends_float: bool = False
    overlaps: bool = False
    zero: int = 0
    sequence_parallel: bool = False


SAILOR = Framework(
    precision="tf32",
    drops_hidden=False,
    drops_scores=False,
    scales_scores=False,
    masks_view=True,
    heads={"OPT-350M": "own", "GPT-Neo-2.7B": "none"},
    held_bytes=5.06e9,
)
"""Sailor's Megatron-DeepSpeed (github.com/eth-easl/sailor, MIT). Its scripts set no precision of 16
bits, and NVIDIA's container, in which it runs, allows TF32. `opt_model.py` and `gpt_neo_model.py`
drop and scale no scores, mask those that `baddbmm` wrote through a view of them, and add what a
block gives without its bias; the one ends in a projection of its own, the other in a norm. Memory
is what `nvidia-smi` says, for which its simulator (`runtime_simulator.py`) counts 4.76 GB and
300 MB beside tensors."""

COMPOSER = Framework(drops_hidden=False, loss="fused", reported_bytes=28.0, zero=3)
"""llm-foundry's MPT (github.com/mosaicml/llm-foundry, Apache-2.0): no biases, no dropout.
`ComposerMPTCausalLM` has `fused_crossentropy`, FlashAttention's, as its loss. `use_train_metrics`
reports the cross entropy and the perplexity (`composer/metrics/nlp.py`), each of which casts the
logits to 32 bits and takes their `log_softmax`, behind the backward pass, when activations are
gone: 2 x (2 + 4 + 4 + 4) bytes."""

ONEFLOW = Framework(waits_for_sends=False)
"""OneFlow (Yuan et al. 2021, arXiv:2110.15032, Sec. 4): an actor works while what it gave is on its
way."""

VTRAIN = Framework(vocab=50257, pads_vocab=False)
"""vTrain's GPT (github.com/VIA-Research/vTrain, MIT): `src/model/gpt_model.py` has GPT-2's 50,257
words, and each rank has `vocab_size // world_size` of them."""

MEGATRON_CORE = Framework(
    precision="bf16",
    is_fused=True,
    flash=3,
    drops_hidden=False,
    drops_scores=False,
    gradient_bytes=4.0,
    sends_float=True,
)
"""Megatron-Core (docs.nvidia.com/megatron-core, "Distributed Optimizer"): 18 bytes of a parameter,
of which 12 are divided: its gradient is added up, and sent, in 32 bits. Transformer Engine's
attention stores no scores: cuDNN's on Hopper (NVIDIA/NeMo#9188), as fast as FlashAttention 3
(Shah et al. 2024), and before it the second. Published runs of it have no dropout."""

MEGATRON_LM = Framework(gradient_bytes=4.0, sends_float=True)
"""Megatron-LM: as before it was called Megatron-Core, with dropout. In fp16 gradients are fp16."""

NANOTRON = Framework(
    precision="bf16",
    is_gated=True,
    is_fused=True,
    flash=2,
    fuses_gate=False,
    gradient_bytes=6.0,
    sends_float=True,
    overlaps=True,
)
"""nanotron (github.com/huggingface/nanotron, Apache-2.0). `models/llama.py`: FlashAttention 2
(`flash_attn_varlen_func`), its rotary kernel and `TritonRMSNorm`, joint projections, a gate of two
ops. `FP32GradientAccumulator` adds gradients of 16 bits up in a buffer
of 32 for all parameters, whatever ZeRO's stage, and a hook sends that during the last backward
pass. `tp_recompute_allgather` keeps shards."""

TORCHTITAN = Framework(
    precision="bf16",
    is_gated=True,
    is_fused=True,
    flash=2,
    joins=False,
    fuses_gate=False,
    fuses_norms=False,
    loss="torch",
    regathers=False,
    selective="every-second-product",
    sends_float=True,
    overlaps=True,
    zero=3,
    sequence_parallel=True,
)
"""torchtitan (github.com/pytorch/torchtitan, BSD): `parallelize_llama` reduces gradients in 32 bits
(`mixed_precision_reduce`), linear maps are one by one, and selective checkpoints of ops keep every
second product (`_apply_ac_to_transformer_block`). Norms and rotary positions are PyTorch's ops, the
loss is `F.cross_entropy` of `pred.float()` (`components/loss.py`). Attention is PyTorch's, since
version 2.2 FlashAttention 2."""

MAXTEXT = Framework(
    precision="bf16",
    is_gated=True,
    is_fused=True,
    flash=2,
    joins=False,
    regathers=False,
    selective="after-products",
    overlaps=True,
    zero=3,
)
"""MaxText (github.com/AI-Hypercomputer/maxtext, Apache-2.0): XLA fuses the gate and overlaps; its
policies `minimal` and `save_dot_except_mlp` keep what products give, or some of it."""

DEEPSPEED = Framework(
    fuses_gate=False, fuses_norms=False, loss="torch", joins=False, regathers=False
)
"""DeepSpeed on models of Hugging Face's, whose norms, rotary positions and loss are PyTorch's ops
(`modeling_llama.py`): 16 bytes of a parameter (Rajbhandari et al. 2020)."""

PADDLE = Framework(fuses_gate=False, fuses_norms=False, joins=False, regathers=False)
"""PaddleNLP (github.com/PaddlePaddle/PaddleNLP, Apache-2.0): joint maps and kernels of norms and of
rotary positions are options (`fuse_attention_qkv`, `use_fused_rms_norm`, `use_fused_rope`); the
loss is `ParallelCrossEntropy`."""

MEGATRON_DEEPSPEED = Framework(gradient_bytes=6.0)
"""In bf16 DeepSpeed's `BF16_Optimizer` adds gradients up in 32 bits for all parameters, whatever
ZeRO's stage (github.com/bigscience-workshop/bigscience, tr11-176B-ml/chronicles-prequel.md)."""

USUAL = Framework()
"""Of all others: a parameter takes 16 bytes in mixed precision (Rajbhandari et al. 2020), and
nothing is held beside tensors, for the memory that a data sheet gives is less than a device has by
about as much: an 80 GB card has 85.0e9 bytes, and Sailor counts 5.06e9 beside tensors."""

FSDP = replace(DEEPSPEED, precision="bf16", flash=2, zero=3)
"""PyTorch's fully sharded data parallelism (Zhao et al. 2023), on models of Hugging Face's."""

FRAMEWORKS: Mapping[str, Framework] = {
    "sailor": SAILOR,
    "composer": COMPOSER,
    "oneflow": ONEFLOW,
    "nanotron": NANOTRON,
    "torchtitan": TORCHTITAN,
    "maxtext": MAXTEXT,
    "megatron-core": MEGATRON_CORE,
    "megatron core": MEGATRON_CORE,
    "mcore": MEGATRON_CORE,
    "nemo": MEGATRON_CORE,
    "megatron-bridge": MEGATRON_CORE,
}
"""By what its name has; the first that fits."""

SOURCES: Mapping[str, Framework] = {"vtrain": VTRAIN}
"""By the first word of a source whose runs' framework is known by another name."""

LATER: Mapping[str, Framework] = {
    "megatron-lm": MEGATRON_LM,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "deepspeed": DEEPSPEED,
    "paddle": PADDLE,
    "fsdp": FSDP,
}
"""By what its name has, of sources that are not known."""


def framework_of(name: str, source: str = "") -> Framework:
    """What is known of a framework by its name, or by the source of the runs."""
    low, word = name.lower(), source.partition("_")[0]
    tables = (FRAMEWORKS, {low: SOURCES[word]} if word in SOURCES else {}, LATER)
    return next((one for table in tables for key, one in table.items() if key in low), USUAL)
