"""Equal blocks of a model, captured once.

A model of n equal blocks has n times one block's calls, in a known order. Capturing has two parts,
and each runs for a few blocks only:

1. Dynamo runs the model's Python code. Code outside of the blocks runs as ever; a block's call is
   copied from an earlier block's if all state that its code can see is equal (`watch`).
2. Autograd traces the graph that dynamo made, forward and backward. A chain of equal blocks is
   shortened to its first and last two, and their trace is lengthened again (`lengthen`).

Blocks that do not fit are traced in full, with the reason logged at level INFO. The program is the
same either way.
"""

from __future__ import annotations

from shardweave.ir.capture.repeats.lengthen import joint_graph
from shardweave.ir.capture.repeats.watch import Repeats, repeats_of

__all__ = ["Repeats", "joint_graph", "repeats_of"]
