"""The ATen ops that a program may have: those that do nothing but compute tensors from tensors.

A program's text may come from anywhere. So no op in it opens a file, writes to memory that is not
its own, or hands out memory that nobody has written.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from shardweave.ir.torch_private import schemas

CREATES = frozenset(
    """
    arange arange.start arange.start_step eye eye.m full linspace logspace ones range range.step
    scalar_tensor tril_indices triu_indices zeros fft_fftfreq fft_rfftfreq
    bartlett_window bartlett_window.periodic blackman_window blackman_window.periodic
    hamming_window hamming_window.periodic hamming_window.periodic_alpha
    hamming_window.periodic_alpha_beta hann_window hann_window.periodic kaiser_window
    kaiser_window.periodic kaiser_window.beta
    """.split()
)
"""Ops without operands whose results follow from their arguments."""

UNWRITTEN = frozenset(
    """
    empty.memory_format empty_like empty_permuted empty_strided new_empty new_empty_strided
    """.split()
)
"""Ops that give memory as it is."""

NOT_PURE = "does more than compute tensors from its operands, so that no program may have it"
"""What is said of any other op."""

_OUTSIDE = ("Storage", "Stream", "Dimname", "QScheme")
"""Types of arguments that no program has."""


@cache
def pure_ops() -> frozenset[str]:
    """Their names, such as `aten.add.Tensor`, in the installed torch."""
    return frozenset(
        f"aten.{_name(schema)}"
        for schema in schemas()
        if schema.name.startswith("aten::") and _is_pure(schema)
    )


def _name(schema: Any) -> str:
    base = schema.name.removeprefix("aten::")
    return f"{base}.{schema.overload_name}" if schema.overload_name else base


def _is_pure(schema: Any) -> bool:
    if schema.is_mutable or any(argument.is_out for argument in schema.arguments):
        return False
    kinds = [str(argument.type) for argument in schema.arguments]
    if any(part in kind for kind in kinds for part in _OUTSIDE):
        return False
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return False
    name = _name(schema)
    return name not in UNWRITTEN and (name in CREATES or any("Tensor" in kind for kind in kinds))
