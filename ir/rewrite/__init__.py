"""Programs rewritten, without a cost model: recomputation, sub-batches, messages, cleaning."""
