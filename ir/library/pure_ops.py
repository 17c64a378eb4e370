"""The ops that a program may have: those that do nothing but compute tensors from tensors.

A program's text may come from anywhere. So no op in it opens a file, writes to memory that is not
its own, or hands out memory that nobody has written.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from shardweave.ir.torch_private import OpOverload, schema_of, schemas

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
"""Ops that return uninitialized memory."""

NOT_PURE = "does more than compute tensors from its operands, so that no program may have it"
"""Reason given for any other op."""

_OUTSIDE = ("Storage", "Stream", "Dimname", "QScheme")
"""Words in the types of arguments that no program can hold."""


@cache
def pure_ops() -> frozenset[str]:
    """The names, such as `aten.add.Tensor`, of the pure ATen ops of the installed torch."""
    return frozenset(
        f"aten.{_name(schema)}"
        for schema in schemas()
        if schema.name.startswith("aten::") and _is_pure(schema)
    )


_OF_TORCH = ("aten", "prim", "prims", "shardweave", "dist")
_OF_RUNTIME = ("c10d", "symm_mem", "rngprims", "inductor", "streams", "fsdp", "dtensor")
"""Prefixes of torch's namespaces for communication, runtime and generated code: no custom ops."""


def is_pure(name: str) -> bool:
    """True if a program may contain an op: a pure ATen op, or a custom op that is pure by its
    schema.

    A custom op is known once the code that registers it with `torch.library` is imported.
    """
    return name in pure_ops() or is_custom(name)


def is_custom(name: str) -> bool:
    """True if a pure custom op has this name, such as `mylib.scale`."""
    namespace, *rest = name.split(".")
    is_others = namespace not in _OF_TORCH and not namespace.strip("_").startswith(_OF_RUNTIME)
    if not is_others or not 1 <= len(rest) <= 2:
        return False
    return _is_pure_overload(namespace, rest[0], rest[1] if len(rest) > 1 else "default")


def _is_pure_overload(namespace: str, packet: str, overload: str) -> bool:
    try:
        op: Any = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        return False
    if type(op) is not OpOverload or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return _is_pure(schema_of(op))


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
