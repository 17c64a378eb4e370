"""Cases of `models.py`: Hugging Face types, tiny, with the head that they are trained with."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from shardweave.benchmarks.import_torchvision import import_torchvision
from shardweave.benchmarks.models_measure import NUM_STEPS, Example
from shardweave.driver.models.models import build_example

HF_TYPES = (
    # Encoders.
    "bert roberta distilbert albert electra deberta deberta-v2 camembert xlm-roberta mpnet "
    "mobilebert squeezebert convbert roformer funnel fnet nystromformer big_bird longformer ernie "
    "megatron-bert roc_bert layoutlm xlm modernbert esm data2vec-text ibert yoso rembert "
    # Decoders.
    "gpt2 gpt_neo gpt_neox gptj gpt_bigcode opt bloom llama mistral mixtral qwen2 qwen2_moe qwen3 "
    "gemma gemma2 gemma3_text phi phi3 falcon mpt codegen stablelm starcoder2 cohere cohere2 olmo "
    "olmo2 granite glm persimmon nemotron mamba mamba2 rwkv jamba ctrl openai-gpt biogpt "
    "deepseek_v2 deepseek_v3 gpt_oss llama4_text smollm3 exaone4 helium recurrent_gemma "
    # Encoders with decoders.
    "t5 mt5 umt5 bart mbart pegasus marian blenderbot m2m_100 plbart led prophetnet longt5 "
    "switch_transformers "
    # Images.
    "vit deit beit detr swin swinv2 convnext convnextv2 resnet regnet mobilenet_v1 mobilenet_v2 "
    "mobilevit mobilevitv2 poolformer pvt pvt_v2 segformer levit efficientnet focalnet bit cvt "
    "data2vec-vision dinov2 siglip vit_msn hiera "
    # Sound.
    "wav2vec2 hubert"
).split()


def hf_example(name: str) -> Example:
    """A tiny model of a type, and inputs as other seeds give them."""
    if find_spec("torchvision"):
        import_torchvision()  # transformers would, in its own way
    examples = [
        build_example(f"hf:{name}:tiny", dtype=torch.float64, seed=seed)
        for seed in range(NUM_STEPS)
    ]
    return Example(examples[0].module, [example.kwargs for example in examples])
