"""Stages of a plan: their layers, the order of micro-batches, and drawings of it."""
