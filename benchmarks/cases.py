"""The cases of `models.py` by group and name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from shardweave.benchmarks.cases_ops import OpModel, op_batch, op_cases
from shardweave.benchmarks.cases_packages import PACKAGES
from shardweave.benchmarks.cases_strangers import STRANGERS
from shardweave.benchmarks.cases_structures import structure_cases
from shardweave.benchmarks.cases_types import HF_TYPES, hf_example
from shardweave.benchmarks.models_measure import NUM_STEPS, Example

Build = Callable[[], Example]


@cache
def cases() -> dict[str, dict[str, Build]]:
    """How to build each case, by group and name."""
    ops = op_cases()
    return {
        "hf": {name: (lambda name=name: hf_example(name)) for name in HF_TYPES},
        "packages": dict(PACKAGES),
        "ops": {name: (lambda op=op: _op(op)) for name, op in ops.items()},
        "structures": structure_cases(),
        "strangers": dict(STRANGERS),
    }


def _op(op: Callable[..., torch.Tensor]) -> Example:
    return Example(OpModel(op), [op_batch() for _ in range(NUM_STEPS)])


def build(group: str, name: str) -> Example:
    """The model and the inputs of a case, the same in each run."""
    torch.manual_seed(0)
    if group == "types":
        return hf_example(name)
    return cases()[group][name]()
