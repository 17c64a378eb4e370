"""Hugging Face models named by their type: `hf:TYPE` specs.

A type's config class gives the sizes, its training head the loss. Weights are random and
nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardweave.driver.models.hf_experts import check_given_experts, choose_experts
from shardweave.driver.models.hf_tasks import (
    CAUSAL,
    HEADS,
    OBJECTS,
    SEQ2SEQ,
    Head,
    InputSize,
    causal_lm_loss,
    detection_loss,
)
from shardweave.driver.models.hf_tiny import tiny_fields
from shardweave.ir.suggest import did_you_mean
from shardweave.ir.torch_private import FakeTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Fields = dict[str, Any]

DEFAULT_BATCH = 8
DEFAULT_SEQ = 32
TINY_BATCH = 4
TINY_SEQ = 16
DEFAULT_IMAGE_SIZE = 224

# Config fields that this module decides, or that say where a checkpoint came from.
RESERVED_FIELDS = frozenset(
    {"_name_or_path", "architectures", "dtype", "model_type", "return_dict", "transformers_version"}
)
# Arguments that every config takes without listing them.
COMMON_FIELDS = frozenset({"attn_implementation", "experts_implementation", "num_labels"})
# How experts take their tokens, which transformers does not know (see `mixture`).
EXPERT_OPTIONS = frozenset({"capacity", "groups"})
POSITION_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_source_positions",
    "max_target_positions",
)


def build_hf(
    model_type: str, options: Mapping[str, Any], dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Tensor], tuple[str, ...]]:
    """Build a model of `model_type` with its training head, one batch, and notes for the user.

    `options` are config fields by name, and `batch` and `seq` (`image_size` too, where the
    config has none). Random state is torch's global one. Unknown types and fields, and values
    that the config refuses, raise ValueError.
    """
    try:
        return _built(model_type, options, dtype)
    except Exception as error:  # transformers raises whatever an odd value leads to
        if isinstance(error, ValueError) and str(error).startswith("hf:"):
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"hf:{model_type} with {_blamed(model_type, options, dtype)} cannot be built; "
            f"transformers says: {said}."
        ) from error


def _blamed(model_type: str, options: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Name the option that makes the build fail; all options if no single one does."""
    given = {key: value for key, value in options.items() if key != "tiny"}
    for key, value in given.items():
        others = {other: options[other] for other in options if other != key}
        try:
            with torch.device("meta"):
                _built(model_type, others, dtype)
        except Exception:  # noqa: BLE001  then another option is to blame
            continue
        return f"{key}={value}"
    return ",".join(f"{key}={value}" for key, value in given.items()) or "its default sizes"


def _built(
    model_type: str, options: Mapping[str, Any], dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Tensor], tuple[str, ...]]:
    head, config, size, notes = _configured(model_type, options, dtype)
    module = _build_module(head, config, dtype)
    capacity, groups = _expert_options(model_type, options, size)
    if "experts_implementation" in options:
        check_given_experts(module, capacity)
    else:
        notes += choose_experts(module, capacity=capacity, groups=groups)
    if head.task == CAUSAL:
        notes += _choose_causal_loss(module, dtype)
    if head.task == OBJECTS:
        detector: Any = module
        detector.loss_function = detection_loss
        notes += ["query k is to find object k: matching them would depend on the data"]
    return module, head.make_inputs(config, size), tuple(notes)


def default_fields(model_type: str) -> Fields:
    """The config fields of a model type with their defaults. ValueError for an unknown type."""
    head_of_type(model_type)
    return _transformers().CONFIG_MAPPING[model_type]().to_dict()


def _configured(
    model_type: str, options: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Head, PreTrainedConfig, InputSize, list[str]]:
    """Return the head, config and input size for the options, and notes on defaults chosen."""
    head = head_of_type(model_type)
    defaults = _transformers().CONFIG_MAPPING[model_type]()
    fields, sizes = _split_options(model_type, _given(options, defaults), defaults)
    config, notes = _make_config(model_type, fields, defaults)
    size, size_notes = _input_size(sizes, config, dtype)
    if head.task == SEQ2SEQ:
        _give_decoder_a_start(config)
    return head, config, size, notes + size_notes


def head_of_type(model_type: str) -> Head:
    """Return the first task in HEADS for which the type has a model class; ValueError if none."""
    for head in HEADS:
        if model_type in _table(head):
            return head
    known = types_with_head()
    meant = did_you_mean(model_type, known, 3)
    raise ValueError(
        f"hf: model type '{model_type}' is unknown or has no training head; "
        f"{meant or 'use a name of Hugging Face, such as bert, gpt2, llama, t5 or vit. '}There "
        f"are {len(known)}."
    )


def types_with_head() -> list[str]:
    """Model types that have a training head here."""
    configs = _transformers().CONFIG_MAPPING
    return sorted({name for head in HEADS for name in _table(head) if name in configs})


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "hf: models need the package transformers, which is not installed; "
            "install it with: pip install 'shardweave[hf]'"
        ) from error
    return transformers


def _table(head: Head) -> Mapping[str, Any]:
    _transformers()
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, f"MODEL_FOR_{head.table}_MAPPING_NAMES")


def _given(options: Mapping[str, Any], defaults: PreTrainedConfig) -> Fields:
    """Expand options: `tiny` to small sizes, and options of sub-configs to dicts of their own."""
    fields: Fields = {}
    if options.get("tiny"):
        fields = tiny_fields(defaults.to_dict(), defaults.attribute_map)
        fields = {"batch": TINY_BATCH, "seq": TINY_SEQ, **fields}
    for key, value in options.items():
        *parts, name = key.split(".")
        inner = fields
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[name] = value
    fields.pop("tiny", None)
    return fields


def _split_options(
    model_type: str, options: Mapping[str, Any], defaults: PreTrainedConfig
) -> tuple[Fields, dict[str, int]]:
    """Separate config fields from input sizes; ValueError lists the fields if one is unknown."""
    known = set(defaults.to_dict()) | set(defaults.attribute_map) | COMMON_FIELDS
    known -= RESERVED_FIELDS
    sizes = {"batch", "seq", "image_size"} - known
    unknown = sorted(set(options) - known - sizes - EXPERT_OPTIONS)
    if unknown:
        raise ValueError(
            f"hf:{model_type} has no option {', '.join(unknown)}; its options are the config's "
            f"fields {', '.join(sorted(known))}, for the inputs {', '.join(sorted(sizes))}, and "
            f"for experts {', '.join(sorted(EXPERT_OPTIONS))}."
        )
    size_options = {key: value for key, value in options.items() if key in sizes}
    for key, value in size_options.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"hf:{model_type}: {key}={value} is not a positive integer.")
    return {key: value for key, value in options.items() if key in known}, size_options


def _expert_options(
    model_type: str, options: Mapping[str, Any], size: InputSize
) -> tuple[float | None, int]:
    """Return the experts' capacity (None: every expert computes every token), and the number of
    groups of tokens that it applies to: by default, one for each sequence."""
    capacity, groups = options.get("capacity"), options.get("groups", size.batch)
    if capacity is not None and not (type(capacity) in (int, float) and capacity > 0):
        raise ValueError(f"hf:{model_type}: capacity={capacity} should be a positive number.")
    if type(groups) is not int or groups < 1:
        raise ValueError(f"hf:{model_type}: groups={groups} is not a positive integer.")
    if capacity is None and "groups" in options:
        raise ValueError(
            f"hf:{model_type}: groups={groups} has no effect without a capacity; give both."
        )
    return (None if capacity is None else float(capacity)), groups


def _make_config(
    model_type: str, fields: Fields, defaults: PreTrainedConfig
) -> tuple[PreTrainedConfig, list[str]]:
    """Make the config of a training step without dropout and cache, and say what was decided."""
    from huggingface_hub.errors import StrictDataclassError

    given = {defaults.attribute_map.get(key, key) for key in fields}
    made = _transformers().CONFIG_MAPPING[model_type]
    decided = _token_ids_in_range(fields, defaults.to_dict(), given)
    try:
        config = made(**(fields | decided))
    except (StrictDataclassError, TypeError):
        try:  # some types need the ends of text, too
            config = made(**(fields | _without_none(decided)))
        except (StrictDataclassError, TypeError) as error:
            reason = " ".join(str(error).split())
            refused = f"hf:{model_type}: the config refuses these fields: {reason}"
            raise ValueError(refused) from error

    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ValueError(
            f"hf:{model_type}: num_key_value_heads={kv_heads} does not divide "
            f"num_attention_heads={heads}; set num_key_value_heads to a divisor."
        )
    return config, _train_without_dropout(config, given)


def _train_without_dropout(config: PreTrainedConfig, given: set[str]) -> list[str]:
    """Set dropout fields to 0 and use_cache to false unless given; say which dropouts it set."""
    dropouts = sorted({name for part in _parts(config) for name in _dropout_fields(part) - given})
    for part in _parts(config):
        for name in _dropout_fields(part) - given:
            setattr(part, name, type(getattr(part, name))(0))  # mpt has integers
        if "use_cache" not in given and getattr(part, "use_cache", False):
            part.use_cache = False
    return [f"dropout fields set to 0: {', '.join(dropouts)}"] if dropouts else []


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)


def _dropout_fields(config: PreTrainedConfig) -> set[str]:
    """Name the probabilities of dropping something: *_pdrop, *dropout*, drop_path_rate, ..."""
    return {
        name
        for name, value in config.to_dict().items()
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _without_none(fields: Fields) -> Fields:
    """Replace None by 0 in fields, also of sub-configs."""
    return {
        name: _without_none(value) if isinstance(value, dict) else 0 if value is None else value
        for name, value in fields.items()
    }


def _token_ids_in_range(
    fields: Mapping[str, Any], defaults: Mapping[str, Any], given: set[str]
) -> Fields:
    """Move the ids of special tokens that exceed the vocabulary into it. End-of-text tokens are
    dropped (training does not use them); others, such as padding and the decoder's start, are
    needed by some models and become token 0. Sub-configs are returned with all their fields."""
    decided: Fields = {}
    for name, value in fields.items():
        part = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(part, Mapping):
            inner: Mapping[str, Any] = value
            decided[name] = {**inner, **_token_ids_in_range(inner, part, set(inner))}
    vocab = fields.get("vocab_size")
    if not isinstance(vocab, int):
        return decided
    for name, value in defaults.items():
        ids = value if isinstance(value, list) else [value]
        too_large = any(isinstance(token, int) and token >= vocab for token in ids)
        if name.endswith("_token_id") and name not in given and too_large:
            decided[name] = None if name in ("bos_token_id", "eos_token_id") else 0
    return decided


def _input_size(
    options: dict[str, int], config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[InputSize, list[str]]:
    """Choose the sizes of inputs; sequences are no longer than the model's number of positions."""
    seq, notes = options.get("seq", DEFAULT_SEQ), list[str]()
    limits = {name: getattr(config, name, None) for name in POSITION_FIELDS}
    for name, limit in limits.items():
        if isinstance(limit, int) and 0 < limit < seq:
            field = config.attribute_map.get(name, name)
            notes = [f"seq {seq} cut to {limit}, the model's {field}"]
            seq = limit
    pictured = getattr(config, "vision_config", config)
    image_size = options.get("image_size") or getattr(pictured, "image_size", DEFAULT_IMAGE_SIZE)
    if isinstance(image_size, list | tuple) and len(set(image_size)) == 1:
        image_size = image_size[0]  # the two sides of a square
    if not isinstance(image_size, int):
        raise ValueError(
            f"hf:{config.model_type}: the config's image_size is {image_size}, but only square "
            "images are supported; set one integer, as image_size=224."
        )
    return InputSize(options.get("batch", DEFAULT_BATCH), seq, image_size, dtype), notes


def _build_module(head: Head, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    from transformers.initialization import no_init_weights

    is_fake = isinstance(torch.empty(0), FakeTensor)
    classes = _table(head)[config.model_type]
    if not isinstance(classes, str):
        config.architectures = [classes[0]]  # of several (DeiT), the one without a teacher
    auto_class = getattr(_transformers(), head.auto_class)
    try:
        # Some initialisers look at the values that they drew, which fake tensors do not have.
        with no_init_weights() if is_fake else nullcontext():
            module = auto_class.from_config(config, dtype=dtype)
        if is_fake:
            module.tie_weights()  # otherwise the last step of the initialisation
    except ValueError as error:
        raise ValueError(f"hf:{config.model_type}: {error}") from error
    return module


def _give_decoder_a_start(config: PreTrainedConfig) -> None:
    """Set the tokens that shifted labels need: padding, and a start that is the padding (as T5)."""
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def _choose_causal_loss(module: Any, dtype: torch.dtype) -> list[str]:
    """Set `loss_type` if it is missing, since Hugging Face would warn; replace a float64 model's
    causal loss by ours, since theirs rounds logits to float32. Returns notes."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    if getattr(module, "loss_type", None) is None:
        # Left out, it means the same but warns (GPT-2).
        module.loss_type = "ForCausalLM"
    if dtype != torch.float64 or module.loss_function is not LOSS_MAPPING["ForCausalLM"]:
        return []
    module.loss_function = causal_lm_loss
    return ["loss computed in float64 (Hugging Face would round the logits to float32)"]
