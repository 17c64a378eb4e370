"""The order of a step: interleaved sub-batches and list scheduling on the cost model."""
