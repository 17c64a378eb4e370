"""Models of equal blocks, and their capture with and without copies of blocks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.ir.capture import trace
from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.ir.capture.repeats import lengthen, watch


class Block(nn.Module):
    """y = x + b(gelu(a(norm(x)))), with `index`, which it does not read."""

    def __init__(self, index: int = 0, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.index = index
        self.shared: Any = None

    def change(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.gelu(self.a(self.norm(x))))

    def forward(self, x: Tensor) -> Any:
        return x + self.change(x)


class Holder(Block):
    """Has its index in a list, an object and a closure as well."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.list = [index]
        self.object = SimpleNamespace(index=index)
        self.closure = lambda: index


class State:
    """Python state that a model writes while it runs."""

    def __init__(self) -> None:
        self.factor = 1


class Net(nn.Module):
    """Blocks in a row between two linear maps; `body` says how they are called."""

    def __init__(self, body: Any = None, num_blocks: int = 6, block: Any = Block) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(block(index) for index in range(num_blocks))
        self.body = body or in_a_row
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, self.first(x))).square().mean()


def in_a_row(net: Any, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


def text_of(model: nn.Module, args: Any, kwargs: Any, train: bool) -> str:
    try:
        program = capture(model, args, kwargs, train=train)
    except CaptureError as error:
        return str(error)
    lines = [f"{op.name} {op.location} {op.attributes}" for op in program.ops]
    return re.sub("0x[0-9a-f]+", "", "\n".join([str(program), *lines]))


def both_ways(
    model: nn.Module, args: Any = None, kwargs: Any = None, train: bool = True
) -> tuple[Any, str]:
    """Capture a model both ways, and compare: what was copied, lengths of chains, notes; the text."""
    args = [torch.randn(2, 4, 8)] if args is None else args
    seen: Any = SimpleNamespace(copied=[], chains=[], notes=[])
    with pytest.MonkeyPatch.context() as patch:
        # Not one that the tests share: both ways are to be gone.
        patch.setattr("shardweave.ir.capture.capture.trace", trace.trace)
        make, find = watch.Repeats, lengthen.chains_of

        def making(*given: Any, **named: Any) -> Any:
            seen.repeats = make(*given, **named)
            return seen.repeats

        def finding(graph: Any) -> Any:
            chains = find(graph)
            seen.chains += [len(chain.paths) for chain in chains]
            return chains

        patch.setattr(watch, "Repeats", making)
        patch.setattr(lengthen, "chains_of", finding)
        text = text_of(model, args, kwargs, train)
        seen.copied, seen.notes = list(seen.repeats.copied), list(seen.repeats.notes)
        patch.setattr(trace, "block_paths", lambda model: [])
        plain = text_of(model, args, kwargs, train)
    assert text == plain
    return seen, text


def subclass(**methods: Any) -> type[Block]:
    return type("Own", (Block,), methods)
