"""Optimizers of sharded parameters: their own code, on shards or on full values."""
