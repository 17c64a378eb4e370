"""Costs of a step: clusters, their links, seconds of ops, memory by liveness."""
