"""Equal blocks whose graph has nodes of no module: those that torch.vmap leaves behind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardweave.tests.ir.capture.stacks import Block, Net, both_ways
from shardweave.tests.torch_versions import copied_blocks

pytestmark = copied_blocks()


class Mapped(Block):
    """A block that maps a function over its rows."""

    def change(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: nn.functional.gelu(self.a(row)))(x)


def test_blocks_that_map_a_function_are_captured_once() -> None:
    seen, text = both_ways(Net(block=Mapped))
    assert seen.copied
    assert "aten.gelu" in text
