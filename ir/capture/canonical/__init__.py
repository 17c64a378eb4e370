"""Canonical forms: how a traced ATen call enters the program.

Few ops with one meaning each: views instead of ten ways to write them, and every mean,
normalised loss and batch statistic as explicit sums over the global batch, so that the
program stays exact under every sharding and batch split.
"""

from __future__ import annotations

from shardweave.ir.capture.canonical.base import Call, CanonicalError, lookup

__all__ = ["Call", "CanonicalError", "lookup"]
