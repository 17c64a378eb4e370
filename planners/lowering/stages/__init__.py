"""Stages of a plan: balance, order of micro-batches, pictures."""
