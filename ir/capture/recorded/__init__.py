"""Optimizers: what the update of a parameter reads."""
