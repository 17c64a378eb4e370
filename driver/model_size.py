"""Check of a model's size before its memory is allocated: builds it on the meta device and
compares it with this machine's memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardweave.planners.cost.quantity import bytes_text

MOST_ELEMENTS = 2**40
"""Most elements of parameters, buffers and inputs: some hundred times those of large models."""

MOST_MODULES = 100_000
"""Most modules of a model; Python takes half a minute to make these."""

MOST_LAYERS = 10_000
LARGEST = 10**8
"""Largest value of any other size option; a list of so many entries takes a gigabyte."""

LAYERS = ("layer", "depth", "levels", "blocks", "num_hidden_groups")
"""Words in the names of options that say how often something is repeated."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model. elements: number in its parameters, buffers and inputs."""

    parameters: int
    modules: int
    elements: int


Built = tuple[nn.Module, Mapping[str, Tensor]]


def check_option(where: str, key: str, value: object) -> None:
    """Raise ValueError if an option's value is larger than any model's size can be."""
    most = MOST_LAYERS if any(word in key for word in LAYERS) else LARGEST
    if isinstance(value, int) and abs(value) > most:
        given = str(value) if abs(value) < 10**18 else "a larger number"
        raise ValueError(f"{where}: option {key}={given} is too large; use at most {most:,}.")


def check_size(
    spec: str, build: Callable[[], Built], dtype: torch.dtype, *, is_held: bool = True
) -> ModelSize:
    """Build a model on the meta device and return its size. is_held: whether its weights will be
    allocated; ValueError if this machine's memory is then too small for weights and inputs. Also
    raises ValueError for more than `MOST_ELEMENTS` or `MOST_MODULES`."""
    num_modules = 0

    def count(*_: object) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > MOST_MODULES:
            raise ValueError(
                f"{spec} has more than {MOST_MODULES:,} modules, too many to build; use fewer "
                "layers."
            )

    handle = register_module_module_registration_hook(count)
    try:
        with torch.device("meta"):
            module, inputs = build()
    except (RuntimeError, TypeError, OverflowError) as error:
        text = str(error)
        if "overflow" not in text.lower() and "must be tuple of ints" not in text:
            raise
        raise ValueError(
            f"{spec} has a tensor that is larger than any memory; {_ADVICE}."
        ) from error
    finally:
        handle.remove()
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    others = sum(x.numel() for x in chain(module.buffers(), inputs.values()))
    _check_room(spec, num_parameters + others, dtype.itemsize if is_held else 0)
    return ModelSize(num_parameters, num_modules, num_parameters + others)


_ADVICE = "give smaller sizes, or a smaller batch"


def _check_room(spec: str, num_elements: int, itemsize: int) -> None:
    if num_elements > MOST_ELEMENTS:
        raise ValueError(
            f"{spec} has {num_elements:,} elements of parameters and inputs, more than the limit "
            f"of {MOST_ELEMENTS:,}; {_ADVICE}."
        )
    size, memory = num_elements * itemsize, memory_bytes()
    if size > memory:
        raise ValueError(
            f"{spec} needs {bytes_text(size)} for parameters and inputs, but this machine has "
            f"only {bytes_text(memory)} of memory; {_ADVICE}."
        )


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
