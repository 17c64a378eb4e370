# pyright: basic
"""The traced graph of a model, forward and backward, from that of a shorter one where that fits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import fx

from shardweave.ir.capture.repeats.chain import chains_of, parameter_order, without_blocks
from shardweave.ir.capture.repeats.lengthen import Irregular, all_names, lengthened

Trace = Callable[[fx.GraphModule], fx.GraphModule]

logger = logging.getLogger(__name__)


def joint_graph(exported: fx.GraphModule, trace: Trace) -> tuple[fx.Graph, fx.GraphModule]:
    """Dynamo's graph and constants as `trace` makes them; chains of equal blocks by their ends."""
    chains = chains_of(exported.graph)
    if not chains:
        return _whole(exported, trace)
    with all_names() as names:
        short = trace(without_blocks(exported, chains))
    try:
        graph = lengthened(short.graph, names, chains, parameter_order(exported))
    except Irregular as reason:
        logger.info("all blocks are traced, since those of a chain came out unlike: %s", reason)
        return _whole(exported, trace)
    return graph, short


def _whole(exported: fx.GraphModule, trace: Trace) -> tuple[fx.Graph, fx.GraphModule]:
    joint = trace(exported)
    return joint.graph, joint
