"""Mesh axes, placements and shards: the vocabulary of sharding."""
