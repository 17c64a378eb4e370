# pyright: basic
# torch's graphs are only partly typed.
"""Find calls that compute each row independently, by running them on samples."""

from __future__ import annotations

import math
import operator
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from shardweave.ir.capture.observed.constant_numbers import Deterministic
from shardweave.ir.torch_private import disable_current_modes

_SAMPLE, _PART = 8, 5
"""The number of rows on which a call is tried, and of those tried without the rest."""


def tried_by_row(node: fx.Node, computed: set[fx.Node], num_dims: int) -> bool | None:
    """True if a call works only on rows along one dim, False if also on rows along `num_dims`
    dims; None if its result for a row depends on other rows.

    computed: the nodes with a first dim of selected rows, whose number is unknown. The call is
    tried on random rows, on some of them, and on rows folded into `num_dims` dims.
    """
    if node.op not in ("call_function", "call_method") or node.target is operator.setitem:
        return None
    generator = torch.Generator().manual_seed(0)
    samples: dict[fx.Node, Tensor] = {}
    for operand in node.all_input_nodes:
        value: Any = operand.meta.get("example_value")
        if not isinstance(value, Tensor):
            return None
        shape = value.shape[1:] if operand in computed else value.shape
        if not all(isinstance(size, int) for size in shape):
            return None
        lead = (
            (_SAMPLE, *[1] * (len(shape) - 1), *shape[-1:]) if operand in computed else shape[-1:]
        )
        sample = torch.rand(lead, generator=generator).mul(2).to(value.dtype)
        samples[operand] = (
            sample.expand(_SAMPLE, *shape) if operand in computed else sample.expand(shape)
        )

    def call(lead: tuple[int, ...], start: int = 0) -> Tensor:
        given = {
            n: s[start : start + math.prod(lead)].unflatten(0, lead) if n in computed else s
            for n, s in samples.items()
        }
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: given[n].clone())
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return cast("Any", node.target)(*args, **kwargs)

    with disable_current_modes(), torch.no_grad(), Deterministic():
        try:
            whole, first, last = call((_SAMPLE,)), call((_PART,)), call((_PART,), _SAMPLE - _PART)
            if not _are_equal(whole[:_PART], first) or not _are_equal(whole[-_PART:], last):
                return None
        except Exception:  # noqa: BLE001 - a call of numbers that it does not take is not by row
            return None
        try:
            folded = call((2,) * (num_dims - 1) + (_SAMPLE >> num_dims - 1,))
            return not _are_equal(folded.flatten(0, num_dims - 1), whole[: folded.numel()])
        except Exception:  # noqa: BLE001 - it takes rows along one dim alone
            return True


def _are_equal(some: Tensor, others: Tensor) -> bool:
    return some.shape == others.shape and torch.allclose(some, others, equal_nan=True)
