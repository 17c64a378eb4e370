"""The models that the command line can name, each built with one batch of inputs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from shardweave.driver.commands.arguments import run_user_code
from shardweave.driver.model_size import ModelSize, check_option, check_size
from shardweave.driver.models.gpt import GPTConfig, build_gpt
from shardweave.driver.models.hf import build_hf
from shardweave.driver.models.vision import CNNConfig, UNetConfig, build_cnn, build_unet
from shardweave.ir.suggest import did_you_mean
from shardweave.ir.torch_private import FakeTensorMode

LARGE = 300_000_000
"""Number of parameters above which initialising the weights takes tens of seconds."""

Option = int | float | bool | str | None


@dataclass(frozen=True)
class Example:
    """A model with one batch of inputs: `module(**kwargs)` gives the scalar training loss.

    The result may also be an object with the loss as its `.loss`. `notes` says what was decided
    for the user, such as "dropout fields set to 0: attn_pdrop, embd_pdrop".
    """

    module: nn.Module
    kwargs: dict[str, Tensor]
    notes: tuple[str, ...] = ()


FAMILIES: dict[str, tuple[type[Any], Callable[[Any], tuple[nn.Module, dict[str, Tensor]]]]] = {
    "gpt": (GPTConfig, build_gpt),
    "unet": (UNetConfig, build_unet),
    "cnn": (CNNConfig, build_cnn),
}
"""Models of our own: their sizes, with defaults, and how to build one."""


def build_example(spec: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Example:
    """Build the model that `spec` names, in train mode, with weights and inputs of `dtype`.

    `spec` is one of
      gpt:layers=2,hidden=64,...      a plain GPT (GPTConfig lists the keys and defaults)
      unet:channels=32,size=32,...    a diffusion U-Net (UNetConfig)
      cnn:depth=18,channels=16,...    a ResNet-like CNN (CNNConfig)
      hf:TYPE[:field=value,...]       a Hugging Face model with random weights; `tiny` among
                                      the fields gives small sizes to those that are left out
      package.module:factory          factory() -> Example or (module, inputs): a dict of tensors
                                      by argument name, or as many as forward's first arguments

    The same spec, dtype and seed give the same weights and inputs; torch's global random state
    is left as it was. Under FakeTensorMode nothing is allocated. ValueError says what is wrong
    with a spec and what exists.
    """
    scheme, colon, rest = spec.partition(":")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if scheme == "hf":
            example = _hf_example(rest, dtype)
        elif scheme in FAMILIES:
            example = _family_example(scheme, rest, dtype)
        elif colon and all(part.isidentifier() for part in scheme.split(".")):
            example = _factory_example(scheme, rest, dtype)
        else:
            raise ValueError(f"model '{spec}' is unknown; {_what_exists(scheme)}")
    example.module.train()
    return example


def example_to_trace(spec: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Example:
    """Build the model that `spec` names for capture only: as `build_example`, but the weights of a
    large model have no values and take no memory."""
    size = size_of(spec, dtype, is_held=False)
    is_large = size is not None and size.parameters >= LARGE
    with FakeTensorMode() if is_large else nullcontext():
        return build_example(spec, dtype=dtype, seed=seed)


def announce(spec: str, dtype: torch.dtype) -> None:
    """Print the size of a model that takes long to make, on standard error. ValueError as
    `size_of`."""
    size = size_of(spec, dtype)
    if size is not None and size.parameters >= LARGE:
        gib = size.parameters * dtype.itemsize / 2**30
        print(
            f"{spec} has {size.parameters:,} parameters ({gib:.1f} GiB), which take a while to "
            f"make; for a small model give its sizes, as in {_smaller(spec)}",
            file=sys.stderr,
            flush=True,
        )


def size_of(spec: str, dtype: torch.dtype, *, is_held: bool = True) -> ModelSize | None:
    """Return the size of the model that `spec` names; None for a factory, which is not called.
    is_held: as for `check_size`. Raises ValueError as `build_example` does, and for a model that is
    too large for this machine."""
    scheme, _, rest = spec.partition(":")
    if scheme in FAMILIES:
        config_class, build = FAMILIES[scheme]
        config = read_config(scheme, config_class, parse_options(rest))
        return check_size(spec, partial(build, config), dtype, is_held=is_held)
    if scheme == "hf" and rest:
        model_type, options = _hf_options(rest)
        build = partial(build_hf, model_type, options, dtype)
        return check_size(spec, lambda: build()[:2], dtype, is_held=is_held)
    return None


def _smaller(spec: str) -> str:
    scheme = spec.partition(":")[0]
    if scheme != "hf":
        return f"{scheme}:layers=2,hidden=64,..." if scheme == "gpt" else f"{scheme}:channels=8,..."
    comma = "," if spec.count(":") > 1 else ":"
    return f"{spec}{comma}num_hidden_layers=2,hidden_size=64,..."


def parse_options(text: str) -> dict[str, Option]:
    """Parse `key=value,...`; values are integers, floats, true, false, none, or else text."""
    options: dict[str, Option] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if item.strip() == "tiny":
            equals, value = "=", "true"
        if not (key and equals and value):
            raise ValueError(f"option '{item}' in '{text}' is not of the form key=value.")
        if key in options:
            raise ValueError(f"option '{key}' is given twice in '{text}'; keep one of them.")
        options[key] = parse_value(value)
    return options


def parse_value(text: str) -> Option:
    """Convert text to the bool, None, int or float that it spells; return other text unchanged."""
    words: dict[str, Option] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _what_exists(word: str) -> str:
    """List the models that exist, for a user who wrote `word` for one."""
    return (
        f"{did_you_mean(word, [*FAMILIES, 'hf'])}"
        f"a model is {', '.join(f'{name}:key=value,...' for name in FAMILIES)}, "
        f"hf:TYPE:field=value,... or package.module:factory."
    )


def _family_example(name: str, text: str, dtype: torch.dtype) -> Example:
    config_class, build = FAMILIES[name]
    config = read_config(name, config_class, parse_options(text))
    with _default_dtype(dtype):
        return Example(*build(config))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which new tensors have `dtype`: converting a module later fails on fake
    tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def read_config(name: str, config_class: type[Any], options: Mapping[str, Option]) -> Any:
    """Make a config dataclass from options, checking each key and type; ValueError if wrong."""
    types = get_type_hints(config_class)
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    options = {
        key: float(value) if type(value) is int and types.get(key) is float else value
        for key, value in options.items()
    }
    for key, value in options.items():
        if key not in defaults:
            keys = ", ".join(f"{known}={default}" for known, default in defaults.items())
            raise ValueError(
                f"{name}: unknown key '{key}'; {did_you_mean(key, defaults)}the keys, with their "
                f"defaults, are {keys.lower()}."
            )
        if type(value) is not types[key]:
            kinds = {int: "an integer", bool: "true or false", float: "a number"}
            expected = kinds[types[key]]
            raise ValueError(f"{name}: {key}={value} must be {expected}.")
        check_option(name, key, value)
        # Zero stands for "not given" where it is the default.
        if type(value) is int and value < (0 if defaults[key] == 0 else 1):
            raise ValueError(f"{name}: {key}={value} must be positive.")
    return config_class(**options)


def _hf_example(text: str, dtype: torch.dtype) -> Example:
    model_type, options = _hf_options(text)
    module, inputs, notes = build_hf(model_type, options, dtype)
    return Example(module, inputs, notes)


def _hf_options(text: str) -> tuple[str, dict[str, Option]]:
    model_type, _, words = text.partition(":")
    if not model_type:
        raise ValueError("hf: is given without a model type; write hf:TYPE, for example hf:gpt2.")
    options = parse_options(words)
    for key, value in options.items():
        check_option(f"hf:{model_type}", key, value)
    return model_type, options


def _factory_example(module_name: str, attribute: str, dtype: torch.dtype) -> Example:
    factory = _import_factory(module_name, attribute)
    where = f"factory {module_name}:{attribute}"
    made = run_user_code(where, factory)
    if isinstance(made, tuple) and len(made) == 2:
        module, batch = made
        made = Example(module, _by_name(where, module, batch))
    if not isinstance(made, Example):
        raise ValueError(
            f"{where} returned {type(made).__name__}; "
            f"it should return (module, inputs), the inputs as a dict of tensors by argument name, "
            f"or in the order of forward's arguments."
        )
    _check_example(where, made)
    if all(p.dtype == dtype for p in made.module.parameters() if p.is_floating_point()):
        return made
    note = f"parameters and inputs of {where} converted to {dtype}"
    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in made.kwargs.items()
    }
    return Example(made.module.to(dtype), inputs, (*made.notes, note))


def _by_name(where: str, module: Any, batch: Any) -> Any:
    """Convert a batch of positional arguments to a dict by forward's names; leave a dict as is."""
    if isinstance(batch, Tensor):
        batch = (batch,)
    if not isinstance(module, nn.Module) or not isinstance(batch, (tuple, list)):
        return batch
    signature = inspect.signature(module.forward)
    names = ", ".join(signature.parameters) or "nothing"
    try:
        given = signature.bind_partial(*batch).arguments
    except TypeError as error:
        raise ValueError(
            f"{where} returned {len(batch)} inputs, but the model's forward takes {names}: {error}."
        ) from None
    if any(signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL for name in given):
        raise ValueError(
            f"{where} returned its inputs by position, but the model's forward takes {names}; "
            "return them as a dict by argument name."
        )
    return given


def _check_example(where: str, example: Example) -> None:
    """Check the result of a user's factory; ValueError says what is wrong with it."""
    if not isinstance(example.module, nn.Module):
        raise ValueError(
            f"{where} returned {type(example.module).__name__} as its module; "
            f"it should be a torch.nn.Module."
        )
    if not isinstance(example.kwargs, Mapping):
        raise ValueError(
            f"{where} returned {type(example.kwargs).__name__} as its inputs; "
            f"they should be a dict of tensors by argument name."
        )
    for name, value in example.kwargs.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{where} returned {type(value).__name__} as input '{name}'; it should be a tensor."
            )


def _import_factory(module_name: str, attribute: str) -> Callable[[], Any]:
    """Import `module_name`, from the current directory too, and return its callable."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        # A console script's path starts at the script, but people name modules from where they are.
        sys.path.append(os.getcwd())
    try:
        module = run_user_code(
            f"importing {module_name}", lambda: importlib.import_module(module_name)
        )
    except ValueError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError):
            raise
        if missing.name is None or not (module_name + ".").startswith(missing.name + "."):
            raise ValueError(
                f"importing {module_name} failed: it needs {missing.name}, which is not installed."
            ) from missing
        raise ValueError(
            f"model '{module_name}:{attribute}': no module '{missing.name}' found from "
            f"{os.getcwd()}; {_what_exists(module_name)}"
        ) from missing
    factory = getattr(module, attribute, None)
    if not callable(factory):
        problem = "is not callable" if hasattr(module, attribute) else "does not exist"
        functions = inspect.getmembers(module, inspect.isfunction)
        own = [name for name, value in functions if value.__module__ == module.__name__]
        raise ValueError(
            f"factory '{attribute}' {problem} in module {module_name}; "
            f"its functions are {', '.join(own) or 'none'}."
        )
    return factory
