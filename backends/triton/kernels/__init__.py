"""Kinds of generated kernels: loops, reductions, products, lookups."""
