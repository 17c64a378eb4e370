"""Equal blocks of a model, captured once.

A model of n equal blocks has n times the calls of one, in a known order. Capturing has two parts,
and each is done for few blocks:

1. Dynamo runs the model's Python code. All code outside of the blocks runs as ever; a block's call
   is copied from that of a block before it if all that its code can see is alike (`watch`).
2. Autograd traces the graph that dynamo made, forward and backward. A chain of equal blocks is cut
   to its first and last two, and their trace is lengthened again (`lengthen`).

What does not fit is traced whole: the program is the same either way. Why is logged at level INFO.
"""

from __future__ import annotations

from shardweave.ir.capture.repeats.lengthen import joint_graph
from shardweave.ir.capture.repeats.watch import Repeats, repeats_of

__all__ = ["Repeats", "joint_graph", "repeats_of"]
